"""`tensorprobe doctor`: what makes recording quick here, what is missing, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tensorprobe import native
from tensorprobe._version import __version__
from tensorprobe.errors import UnsupportedTorch, why_no_torch
from tensorprobe.native import background, build, builder
from tensorprobe.terminal import say, warn

# What make test-versions found with each version of torch; docs/versions.md is made from it.
TRIED = Path(__file__).parents[1] / "tried_versions.json"


class Part(NamedTuple):
    """One thing that recording can do without."""

    name: str
    state: str  # active, missing, off (the user's choice) or unused (nothing here would use it)
    why: str  # where it is, or why it is not
    brings: str = ""  # as measured in docs/performance.md and benchmarks/NOTES.md
    remedy: str = ""  # what to type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fix", action="store_true", help="build what is missing and can be built")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.epilog = "Exit status: 0 nothing is missing, 3 something is, 1 --fix could not build it."


def run(args: argparse.Namespace) -> int:
    broken = _import_torch()
    failed = _fix(broken) if args.fix else []
    parts = [each(broken) for each in _PARTS]
    if args.json:
        told = {"format": 1, "version": __version__, "parts": [part._asdict() for part in parts]}
        say(*json.dumps(told, indent=2).splitlines())
    else:
        say(*_table(parts))
    warn(*(f"tensorprobe doctor: {failure}" for failure in failed))
    if failed:
        return 1
    return 3 if any(part.state == "missing" for part in parts) else 0


def describe_native() -> str:
    """Whether the C++ parts are active, in a few words, without importing torch."""
    if os.environ.get(native.SWITCH) == "0":
        return f"C++ parts off: {native.SWITCH}=0"
    if native.find_torch() is None:
        return "no torch"
    if any(map(native.is_there, native.places())):
        return "C++ parts active"
    return "C++ parts not built: see tensorprobe doctor"


def _import_torch() -> str:
    """Why torch cannot be imported; nothing where it can."""
    try:
        import torch  # noqa: F401

        import tensorprobe.torch_versions  # noqa: F401  it refuses one that is too old
    except UnsupportedTorch as error:
        return str(error)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        lines = (why_no_torch(error) or str(error)).splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


def _fix(broken: str) -> list[str]:
    """Build what is missing; what could not be built, and why."""
    from tensorprobe.tensors import build_tally as library

    failed = []
    if _library(broken).state == "missing":
        reason = library.build()
        if reason is not None:
            failed.append(f"the C library could not be built: {reason}")
    if not broken and _native(broken).state == "missing":
        warn("tensorprobe doctor: building the C++ parts, which takes half a minute or more")
        try:
            build.build()
        except builder.Failed as error:
            failed.append(f"the C++ parts could not be built: {error}")
    return failed


# The parts. Each is told why torch cannot be imported, or nothing.


def _torch(broken: str) -> Part:
    found = native.find_torch()
    if found is None or broken:
        reason = broken if found is not None else "not installed"
        return Part(
            "torch", "missing", reason, "recording; captures are read, shown and compared without",
            "install the torch of your vendor, or: pip install 'tensorprobe[torch]'",
        )  # fmt: skip
    return Part("torch", "active", f"{found.version} ({_was_tried(found.version)})")


def _was_tried(version: str) -> str:
    """What the compatibility tests said of this minor version of torch."""
    rows = [row for row in json.loads(TRIED.read_text())["rows"] if "passed" in row]
    same = [row for row in rows if _minor(row["torch"]) == _minor(version)]
    if not same:
        tried = dict.fromkeys(_minor(row["torch"]) for row in rows)
        return f"not tried: {', '.join(tried)} were, see docs/versions.md"
    failed = sum(len(row["failed"]) for row in same)
    return "tried" if not failed else f"tried: {failed} tests failed, see docs/versions.md"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _native(broken: str) -> Part:
    brings = "L1 on an H200 takes 1.19x to 1.41x of a step, not 1.82x to 2.39x"
    if os.environ.get(native.SWITCH) == "0":
        return Part("C++ parts", "off", f"{native.SWITCH}=0 is set", brings)
    if broken:
        return Part("C++ parts", "missing", "they are built for one torch: there is none", brings)
    if native.MODULE is None:
        native.MODULE = native.load()  # built since, maybe
    if native.MODULE is not None:
        return Part("C++ parts", "active", str(native.MODULE.__file__), brings)
    return Part("C++ parts", "missing", _why_not_native(), brings, "tensorprobe doctor --fix")


def _why_not_native() -> str:
    """Why no module is loaded: the first of many reasons."""
    places = native.places()
    for path in filter(native.is_there, places):
        return f"cannot be loaded: {_why_not_loaded(path)}"
    for path in filter(os.path.exists, places):
        return f"not loaded: {native.distrust(path)}"
    try:
        build.plan()
    except builder.Failed as error:
        return str(error)
    if not build.targets():
        return build.why_nowhere()
    lock = builder.take_lock()
    if lock is None:
        return "a build is going on on this machine"
    lock.close()
    failure = background.read_failure()
    if failure is not None and not failure.missing:
        return f"the build failed: {failure.reason}"
    if os.environ.get(background.SWITCH) == "0":
        return f"not built, and recordings do not start the build: {background.SWITCH}=0 is set"
    return "not built yet; the next recording starts the build"


def _why_not_loaded(path: Path) -> str:
    try:
        native.load_from(path)
    except (ImportError, OSError) as error:
        return str(error)
    return "it can now"


def _compiler(broken: str) -> Part:
    return _needed("C++ compiler", build.compiler, broken, "apt install g++, or set CXX")


def _headers(broken: str) -> Part:
    return _needed("Python headers", build.python_headers, broken, "apt install python3-dev, say")


def _needed(name: str, find: Callable[[], object], broken: str, remedy: str) -> Part:
    """What the build needs; of no use any more once the parts are built."""
    brings = "the build of the C++ parts"
    try:
        found = find()
    except builder.Failed as error:
        state = "missing" if _native(broken).state == "missing" else "unused"
        return Part(name, state, str(error), brings, remedy)
    return Part(name, "active", found[0] if isinstance(found, list) else str(found), brings)


def _cache(broken: str) -> Part:
    name, brings = (
        "cache folder",
        "a place for the C++ parts where the package cannot be written to",
    )
    folder = native.cache_folder()
    if folder is None:
        return Part(name, "unused", "this user has no home; XDG_CACHE_HOME would name one", brings)
    return Part(name, "active" if folder.exists() else "unused", str(folder), brings)


def _library(broken: str) -> Part:
    from tensorprobe.tensors import tally

    brings = "statistics of CPU tensors at 9.1 GB/s a thread, not 2.3"
    if tally.load() is not None:
        return Part("C library", "active", str(tally.PATH), brings)
    why = "of another version, or for another machine" if tally.PATH.exists() else "not built"
    return Part("C library", "missing", why, brings, "tensorprobe doctor --fix")


def _triton(broken: str) -> Part:
    brings = "statistics and digests on a GPU in one pass over its memory"
    if importlib.util.find_spec("triton") is not None:
        version = importlib.metadata.version("triton")
        return Part("Triton", "active", version, brings)
    if broken or not _has_cuda():
        return Part("Triton", "unused", "not installed; there is no GPU that would use it", brings)
    return Part("Triton", "missing", "not installed", brings, "pip install triton")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


_PARTS = (_torch, _native, _compiler, _headers, _cache, _library, _triton)


def _table(parts: list[Part]) -> list[str]:
    lines = [f"tensorprobe {__version__}, Python {platform.python_version()}"]
    wide = max(len(part.name) for part in parts)
    for part in parts:
        lines.append(f"{part.state:7}  {part.name:{wide}}  {part.why}")
        if part.state == "missing":
            indent = " " * (wide + 11)
            lines += [f"{indent}would bring: {part.brings}"] * bool(part.brings)
            lines += [f"{indent}next: {part.remedy}"] * bool(part.remedy)
    missing = sum(part.state == "missing" for part in parts)
    lines.append("nothing is missing" if not missing else f"missing: {missing} of {len(parts)}")
    return lines
