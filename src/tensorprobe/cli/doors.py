"""`run --as NAME`: the compatibility doors under the names of the packages they stand for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from tensorprobe.errors import BadUsage

DOORS = {"ptdbg_ascend": "tensorprobe.ptdbg_ascend", "msprobe": "tensorprobe.msprobe"}


def read_names(text: str | None) -> tuple[str, ...]:
    """The doors in "ptdbg_ascend,msprobe"."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in DOORS:
            raise BadUsage(f"--as {name}: expected {' or '.join(DOORS)}, or both with a comma")
    return names


def open_doors(names: Sequence[str]) -> None:
    """Let `import NAME` find the door, whatever else of that name is installed or lies about."""
    for name in names:
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded]
        sys.meta_path.insert(0, _Door(name, DOORS[name]))


class _Door(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one package and all that is in it at another place; it is asked before Python's own."""

    def __init__(self, name: str, home: str) -> None:
        self._name = name
        self._home = home
        self._told = False
        self._own: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name and not fullname.startswith(f"{self._name}."):
            return None
        if not self._told:
            self._told = True
            self._tell()
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == self._name)

    def _tell(self) -> None:
        other = importlib.machinery.PathFinder.find_spec(self._name)
        place = None
        if other is not None:
            place = other.origin or next(iter(other.submodule_search_locations or ()), None)
        replaced = f", instead of {place}" if place else ""
        sys.stderr.write(f"tensorprobe run: {self._name} is {self._home}{replaced}\n")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self._home + spec.name.removeprefix(self._name))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(self._home):
                raise
            raise ModuleNotFoundError(self._why_not(spec.name), name=spec.name) from None
        self._own[spec.name] = module.__spec__
        return module

    def _why_not(self, name: str) -> str:
        """What to say of a module that the door has not."""
        inside = name.removeprefix(f"{self._name}.")
        others = getattr(importlib.import_module(self._home), "NOT_HERE", {})
        for package, instead in others.items():
            if f"{inside}.".startswith(f"{package}."):
                return f"{name} is not supported; use {instead}"
        return (
            f"No module named '{name}': tensorprobe offers the names that the guide of "
            f"{self._name} describes, in '{self._name}'"
        )

    def exec_module(self, module: ModuleType) -> None:
        # It has been run under its own name; the import machinery has put our spec on it.
        if module.__spec__ is not None:
            module.__spec__ = self._own[module.__spec__.name]
