"""Builds the library of tensors/tally.c into wheels and editable installs; never fails over it."""

from __future__ import annotations

import contextlib
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TENSORS = Path("src", "tensorprobe", "tensors")


class LibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    """Without a compiler the wheel is pure Python, and numpy does the library's work."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        library = Path(self.root, TENSORS, "libtally.so")
        failure = runpy.run_path(str(library.with_name("build_tally.py")))["build"](library)
        if failure is not None:
            with contextlib.suppress(OSError):
                library.unlink()  # of another version, maybe
            self.app.display_warning(f"statistics of CPU tensors stay with numpy: {failure}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        if version != "editable":
            build_data["force_include"][str(library)] = f"tensorprobe/tensors/{library.name}"
