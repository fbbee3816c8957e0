"""Tables of parts that go by a name, each in a module that is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from tensorprobe.errors import BadUsage, MissingDependency
from tensorprobe.keywords import did_you_mean


class NamedParts:
    """Modules by name, of which some may not be installed.

    COLUMNS = NamedParts("columns", {"native": "tensorprobe.report.native_columns"})
    COLUMNS.register("mine", "my_package.my_columns")
    COLUMNS.module("mine")
    """

    def __init__(self, what: str, modules: Mapping[str, str]) -> None:
        self._what = what
        self._modules = dict(modules)

    def register(self, name: str, module: str) -> None:
        """Add a part: its name, and the module that has it."""
        if self._modules.setdefault(name, module) != module:
            raise BadUsage(
                f"{self._what} {name!r} is {self._modules[name]} already: "
                f"give {module} another name"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def module(self, name: str) -> ModuleType:
        """The module of a part; an error says if there is no such part, or if it is missing."""
        if name not in self._modules:
            raise BadUsage(
                f"{self._what}={name!r}: expected one of {', '.join(self._modules)}"
                f"{did_you_mean(name, self._modules)}"
            )
        path = self._modules[name]
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != path and not path.startswith(f"{missing}."):
                raise  # the module is there, and misses something itself
            raise MissingDependency(missing, f"{self._what}={name!r}") from None
