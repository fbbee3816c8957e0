"""Builds the parts of the recorder in C++: python -m tensorprobe.native.build.

It takes half a minute, a compiler of C++20 (CXX, or c++) and the headers of Python; torch has its
own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from tensorprobe.native import FOLDER, SWITCH, load, places

SOURCE = FOLDER / "module.cpp"
_TORCH = Path(torch.__file__).parent
OPTIONS = [
    "-std=c++20",  # as torch itself
    "-O2",
    "-DNDEBUG",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-isystem{_TORCH / 'include'}",
    f"-isystem{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
    f"-isystem{sysconfig.get_paths()['include']}",
]
LIBRARIES = [f"-L{_TORCH / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def build() -> Path | str:
    """Compile the module; where it lies, or what is missing, in one line."""
    if not sys.platform.startswith("linux"):
        return f"there is none for {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "there is none for a Python without its lock"
    reason = ""
    for target in places():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                made = Path(folder) / target.name
                reason = _compile(made)
                if reason:
                    return reason
                made.replace(target)  # whole: another process may load it
            if target.parent == FOLDER:  # a cache is shared with other versions of this package
                _remove_others(target)
            return target
        except OSError as error:
            reason = f"{error.filename or target}: {error.strerror}"
    return reason


def _remove_others(target: Path) -> None:
    """What was built for the same torch and Python of sources that are no more."""
    name, version, rest = target.name.split("-", 2)
    tag = rest.partition(".")[2]
    for old in target.parent.glob(f"{name}-*.{tag}"):
        if old != target and old.name.startswith(f"{name}-{version}-"):
            old.unlink(missing_ok=True)


def _compile(target: Path) -> str:
    """What is missing, in one line; nothing where all is well."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        return f"CXX={os.environ.get('CXX', '')}: {error}"
    command = [*compiler, *OPTIONS, str(SOURCE), "-o", str(target), *LIBRARIES]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return f"{compiler[0]}: no such compiler"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line.lower()]
        return f"{compiler[0]}: {lines[0] if lines else f'exit code {error.returncode}'}"
    return ""


def main() -> str | None:
    """Build, and say what came of it; the text is an error."""
    made = build()
    if isinstance(made, str):
        return f"the recorder stays in Python: {made}"
    if os.environ.get(SWITCH) != "0" and load() is None:
        return f"the recorder stays in Python: {made} cannot be loaded"
    sys.stdout.write(f"built for torch {torch.__version__}: {made}\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
