"""Options: their former names, and how an argument of a Python function is spelled as one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

# In texts that Python callers read too, an argument is `jobs` or `jobs=2`, or begins the text.
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`\n]*))?`|\A(\w+)=('[^'\n]*'|[^\s:]*)")


def former_name(parser: argparse._ActionsContainer, option: str, dest: str, **more: Any) -> None:
    """Take an option by its former name too, without a word about it."""
    parser.add_argument(
        option, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more
    )


def option_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The option for each argument of a verb: {"jobs": "--jobs", "imports": "--import"}."""
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    return {each.dest: max(each.option_strings, key=len) for each in shown if each.option_strings}


def as_options(text: str, names: Mapping[str, str]) -> str:
    """A text with the arguments in it as one types them: `jobs=2` is --jobs 2."""

    def spelled(found: re.Match[str]) -> str:
        option = names.get(found[1] or found[3])
        value = found[2] if found[1] else found[4]
        if option is None:
            return found[0]
        if value in (None, "", "True", "False", "None"):
            return option
        return f"{option} {value.strip(chr(39))}"

    return _ARGUMENT.sub(spelled, text)
