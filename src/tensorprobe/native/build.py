"""Builds the parts of the recorder in C++: python -m tensorprobe.native.build.

It takes half a minute, a compiler of C++20 (CXX, or c++) and the headers of Python; torch has its
own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from tensorprobe.native import FOLDER, NAME, distrust_folder, places
from tensorprobe.native.builder import (
    Failed,
    Plan,
    make,
    remember,
    remove_leftovers,
    take_lock,
)

SOURCE = FOLDER / "module.cpp"
GRACE_S = 1.0  # a program that is over by then never starts a compiler
# No torch_npu and the like: the module is linked to torch alone.
_TRIAL = f"""\
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.path[:0] = [sys.argv[1]]
import torch
from importlib import machinery, util
loader = machinery.ExtensionFileLoader("{NAME}", sys.argv[2])
loader.exec_module(util.module_from_spec(util.spec_from_loader("{NAME}", loader)))
"""


def compiler() -> list[str]:
    """The command that the user, or the machine, compiles C++ by; Failed if there is none."""
    try:
        words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise Failed(f"CXX={os.environ.get('CXX', '')}: {error}") from error
    found = shutil.which(words[0])
    if found is None:
        raise Failed(f"{words[0]}: no such compiler")
    return [os.path.abspath(found), *words[1:]]


def python_headers() -> str:
    """The folder of Python's headers; Failed if they are not there."""
    folder = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(folder, "Python.h")):
        raise Failed(f"the headers of Python are missing: no Python.h in {folder}")
    return folder


def check_possible() -> None:
    """Failed where there can be no module, whatever is installed."""
    if not sys.platform.startswith("linux"):
        raise Failed(f"there is none for {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Failed("there is none for a Python without its lock")
    if "python" not in os.path.basename(sys.executable or ""):  # a program that embeds it
        raise Failed("it is not known which program runs Python here")


def targets() -> list[Path]:
    """The places that can be written to, and that a module is loaded from."""
    return [path for path in places() if why_not_there(path) is None]


def why_not_there(path: Path) -> str | None:
    """Why a module cannot be built at a place, or would not be loaded from it."""
    folder = path.parent
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{path.parent} cannot be written to"
    return distrust_folder(path.parent)


def why_nowhere() -> str:
    """Why a module can be built at none of the places."""
    reasons = "; ".join(filter(None, map(why_not_there, places())))
    return f"{reasons}. Let XDG_CACHE_HOME name a folder that is yours alone"


def plan() -> Plan:
    """What a builder needs to be told; Failed where something is missing."""
    check_possible()
    import torch

    root = Path(torch.__file__).absolute().parent
    options = [
        "-std=c++20",  # as torch itself
        "-O2",
        "-DNDEBUG",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{root / 'include'}",
        f"-isystem{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-isystem{python_headers()}",
    ]
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    name = places()[0].name
    return Plan(
        [str(path) for path in targets()],
        [*compiler(), *options, str(SOURCE), *libraries],
        [sys.executable, "-c", _TRIAL, str(root.parent)],
        superseded(name),
        GRACE_S,
    )


def superseded(name: str) -> str:
    """A pattern for what was built for the same torch and Python, from any sources."""
    start, version, rest = name.split("-", 2)
    tag = rest.partition(".")[2].removesuffix(".so")
    return f"{start}-{version}-*.{tag}.*"


def build() -> str:
    """Build at once, in this process; where it lies. Failed says what is missing."""
    check_possible()
    try:
        wanted = plan()
    except Failed as error:
        for target in targets()[:1]:
            remember(str(target), str(error), missing=True)
        raise
    if not wanted.targets:
        raise Failed(why_nowhere())
    lock = take_lock()
    try:
        if lock is not None:
            remove_leftovers(wanted)
        return make(wanted)  # although another builds: somebody waits for this one
    finally:
        if lock is not None:
            lock.close()


def main() -> str | None:
    """Build, and say what came of it; the text is an error."""
    try:
        made = build()
    except (Failed, ModuleNotFoundError) as error:
        return f"the recorder stays in Python: {error}"
    sys.stdout.write(f"built: {made}\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
