"""Builds the library of tally.c: python -m tensorprobe.tensors.build_tally. It needs Python only.

`hatch_build.py` runs it when the package is built or installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("tally.c")
TARGET = Path(__file__).with_name("libtally.so")
OPTIONS = [
    "-std=gnu11",
    "-O3",
    # No float operation is watched by anybody: only so do comparisons become vectors. NaN,
    # infinities, the order of sums and the sign of zero are as written (never -ffast-math).
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # a product and a sum stay two roundings, as on every other processor
    "-fPIC",
    "-shared",
    "-pthread",
]


def build(target: Path = TARGET) -> str | None:
    """Compile the library; what is missing, in one line, where that cannot be."""
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        # Beside it first: a library that a process has loaded must not change under it.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [*compiler, *OPTIONS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            made.replace(target)
    except subprocess.CalledProcessError as error:
        reason: str = error.stderr.strip() or f"exit code {error.returncode}"
        return f"{compiler[0]}: {reason.splitlines()[0]}"
    except OSError as error:
        return f"{error.filename or target}: {error.strerror}"
    except ValueError as error:
        return f"CC={os.environ.get('CC', '')}: {error}"
    return None


if __name__ == "__main__":
    failure = build()
    sys.exit(None if failure is None else f"statistics of CPU tensors stay with numpy: {failure}")
