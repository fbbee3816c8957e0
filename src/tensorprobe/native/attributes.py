"""Compares the table of what C++ reads of Python's objects (attributes.h) with their classes."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any


def check(native: Any, done: set[str]) -> None:
    """Raise AttributeError for a name in the module's table that its class does not have.

    Looks only at classes whose file is imported: C++ has met no others. `done` has the names of
    those that were looked at before, and gets the rest.
    """
    table: Mapping[str, Sequence[str]] = native.ATTRIBUTES
    modules = {**sys.modules, native.__name__: native}
    for name, attributes in table.items():
        owner = None if name in done else _find(name, modules)
        if owner is None:
            continue
        missing = {*attributes} - names_of(owner)
        if missing:
            raise AttributeError(
                f"native/attributes.h: C++ reads {', '.join(sorted(missing))} of {name}, "
                "which has no such attribute. Rename it there as well, and build again: "
                "python -m tensorprobe.native.build"
            )
        done.add(name)


def _find(name: str, modules: Mapping[str, ModuleType]) -> Any:
    """The module or class of this name; None where its file is not imported."""
    if name in modules:
        return modules[name]
    home, _, of = name.rpartition(".")
    module = modules.get(home)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    if not hasattr(module, of):
        raise AttributeError(f"native/attributes.h names {name}, and {home} has no {of}")
    return getattr(module, of)


def names_of(owner: Any) -> set[str]:
    """The attributes of a module, or of a class and its objects: those that its body and its
    `__init__` set. The keys of a dict."""
    if isinstance(owner, dict):
        return {*owner}
    if not isinstance(owner, type):
        return {*dir(owner)}
    return {*dir(owner), *(name for base in owner.__mro__ for name in _set_by(base))}


def _set_by(owner: type) -> Iterator[str]:
    yield from inspect.get_annotations(owner)
    init = owner.__dict__.get("__init__")
    if isinstance(init, FunctionType):
        for line in dis.get_instructions(init):
            if line.opname == "STORE_ATTR":
                yield line.argval
