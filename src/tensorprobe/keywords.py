"""Keyword arguments of public functions: their former names, and what is near a misspelt one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from tensorprobe.errors import BadUsage

_F = TypeVar("_F", bound=Callable[..., Any])


def keywords(**former: str | Callable[[Any], dict[str, Any]]) -> Callable[[_F], _F]:
    """Let a function take keywords by their former names, and explain those it does not know.

        @keywords(processes="jobs")  # compare(a, b, processes=2) is compare(a, b, jobs=2)
        def compare(actual, expected, *, jobs=None): ...

    Where values have changed too, a function gives the new keywords for the old value. The
    signature stays as it is: former names are not shown anywhere.
    """

    def decorate(function: _F) -> _F:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            for name in [name for name in kwargs if name not in known]:
                if name not in former:
                    raise unknown_name("argument", name, known)
                new, value = former[name], kwargs.pop(name)
                for each, given in ({new: value} if isinstance(new, str) else new(value)).items():
                    if each in kwargs:
                        raise BadUsage(f"{name}= is the former name of {each}=: give one")
                    kwargs[each] = given
            return function(*args, **kwargs)

        return cast(_F, called)

    return decorate


def unknown_name(kind: str, name: str, allowed: Iterable[str], where: str = "") -> BadUsage:
    """What to raise for a name that is none of the allowed ones."""
    allowed = list(allowed)
    hint = did_you_mean(name, allowed) or "."
    return BadUsage(f"unknown {kind} '{name}'{where}{hint} Allowed: {', '.join(allowed)}")


def did_you_mean(value: object, allowed: Iterable[str]) -> str:
    """The end of an error's sentence: the allowed name that is nearest, if one is near."""
    near = difflib.get_close_matches(str(value), list(allowed), n=1)
    return f". Did you mean '{near[0]}'?" if near else ""
