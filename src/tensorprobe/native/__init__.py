"""Parts of the recorder in C++, against the insides of torch: built on the machine that uses them.

The first recording starts their build (`background`); `tensorprobe doctor --fix` and `python -m
tensorprobe.native.build` build them at once. MODULE is None if they were not built for this torch,
this Python and these sources, or if the variable TENSORPROBE_NATIVE is 0; the classes in Python
that each part stands in for do the work then, with the same lines in the capture.

Importing this file does not import torch: `tensorprobe --version` looks for the module, too.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorprobe.native import attributes

if TYPE_CHECKING:
    MODULE: Any

NAME = "tensorprobe_native"
FOLDER = Path(__file__).absolute().parent
SWITCH = "TENSORPROBE_NATIVE"


class Torch(NamedTuple):
    """What a build of torch calls itself."""

    version: str
    git_version: str


def find_torch() -> Torch | None:
    """The torch of this process, or the one that it would import."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return Torch(str(torch.__version__), str(getattr(torch.version, "git_version", "")))
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            said = _assigned(Path(folder, "version.py").read_text())
        except (OSError, ValueError, SyntaxError):
            continue
        if "__version__" in said:
            return Torch(str(said["__version__"]), str(said.get("git_version", "")))
    return None


def _assigned(source: str) -> dict[str, Any]:
    """The names that a file assigns plain values to, with these values."""
    found: dict[str, Any] = {}
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            found |= {name.id: line.value.value for name in targets if isinstance(name, ast.Name)}
    return found


def places() -> list[Path]:
    """Where the built module may lie: with the package, or where that cannot be written to."""
    torch = find_torch()
    if torch is None:
        return []
    folders = [FOLDER, cache_folder()]
    return [folder / _file_name(torch) for folder in folders if folder is not None]


@functools.cache
def _file_name(found: Torch) -> str:
    """The name of the file that is built from these sources for this torch and Python."""
    digest = hashlib.sha256()
    for source in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        digest.update(source.read_bytes())
    digest.update(f"{found.version} {found.git_version}".encode())
    soabi = sysconfig.get_config_var("SOABI")
    return f"{NAME}-{found.version}-{digest.hexdigest()[:12]}.{soabi}.so"


def cache_folder() -> Path | None:
    """The user's own place for it; None for a user who has no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # to be ignored, as its specification says
        home = os.path.expanduser("~")
        if not (os.path.isabs(home) and os.path.isdir(home)):
            return None
        cache = os.path.join(home, ".cache")
    return Path(cache, "tensorprobe")


def distrust(path: Path) -> str | None:
    """Why a module must not be loaded: another user could have put it there. Else None."""
    real = Path(os.path.realpath(path))
    return _why_foreign(path.parent, real.parent, real)


def distrust_folder(folder: Path) -> str | None:
    """Why nothing that is built in a folder would be loaded from it. Else None."""
    return _why_foreign(folder)


def _why_foreign(*paths: Path) -> str | None:
    for each in dict.fromkeys(paths):
        try:
            state = os.stat(each)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each}: {error.strerror}"
        if state.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to user {state.st_uid}, neither to you nor to root"
        if state.st_mode & 0o022:
            return f"{each} can be written to by others: chmod go-w {each}"
    return None


def is_there(path: Path) -> bool:
    """Whether there is a module that may be loaded."""
    return (
        os.path.exists(path) and distrust(path) is None
    )  # Path.exists raises where it may not look


def load_from(path: Path) -> Any:
    """The module in a file; ImportError or OSError where it does not go with this torch."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def load() -> Any:
    """The module, where it was built from these sources for this torch and Python; or None.

    Raises AttributeError if C++ would read an attribute that its class in Python does not have.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    import torch  # noqa: F401  its libraries have to be there first

    for path in filter(is_there, places()):
        try:
            module = load_from(path)
        except (ImportError, OSError):  # of a compiler or a C library that do not go with torch's
            continue
        attributes.check(module, _checked)
        return module
    return None


def check() -> None:
    """Compare the names that C++ reads with the classes that were imported since the last time."""
    attributes.check(sys.modules[__name__].MODULE, _checked)


_checked: set[str] = set()  # classes that have what C++ reads of them


def __getattr__(name: str) -> Any:
    if name != "MODULE":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return globals().setdefault("MODULE", load())
