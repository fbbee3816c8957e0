"""Libraries in the place of CUDA's, for a torch that was built for CUDA and will use the CPU only.

The index has no CPU build of old versions for this machine, and CUDA's libraries are 4 GB. torch
loads them and calls nothing of them where there is no driver. Whoever does call one is told so, and
ends.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static void absent(const char* name) {
  fprintf(stderr, "%s: CUDA's libraries are not in this environment\\n", name);
  abort();
}
int cudaGetDeviceCount(int* count) { *count = 0; return 100; }  // no device
int cudaGetLastError(void) { return 0; }
int cudaDriverGetVersion(int* version) { *version = 0; return 0; }
"""
_ANSWERED = {"cudaGetDeviceCount", "cudaGetLastError", "cudaDriverGetVersion"}


def _read(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return done.stdout.decode(errors="replace")


def _names(file: Path, which: str) -> set[str]:
    lines = _read("nm", "-D", which, file).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def _versioned(file: Path) -> set[str]:
    """Names that a file wants of a library that gives its names versions."""
    lines = _read("nm", "-D", "--undefined-only", file).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if "@lib" in line}


def _function(name: str) -> str:
    if name.startswith("__cuda"):  # every file with kernels registers them when it is loaded
        return f"void* {name}(void) {{ static void* handle; return &handle; }}"
    return f'void {name}(void) {{ absent("{name}"); }}'


def build(torch: Path, out: Path) -> list[str]:
    """Make the libraries that those in torch/lib miss; their names. A build for the CPU: none."""
    files = [*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")]
    needed = set()
    for file in files:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _read("readelf", "-d", file)))
    pattern = r"lib(cu|nv|nccl|triton).*"
    missing = sorted(
        name for name in needed - {file.name for file in files} if re.match(pattern, name)
    )
    if not missing:
        return []
    out.mkdir(parents=True, exist_ok=True)
    wanted = set().union(*(_names(file, "--undefined-only") for file in files))
    wanted |= set().union(*(_versioned(file) for file in files))
    there = set().union(*(_names(file, "--defined-only") for file in files))
    pattern = r"(cu[A-Z]|cu(da|blas|dnn|fft|rand|solver|sparse|file|pti)|__cuda|nccl|nv|cusparseLt)"
    names = sorted(name for name in wanted - there if re.match(pattern, name))
    source = out / "without_cuda.c"
    lines = [_function(name) for name in names if name not in _ANSWERED]
    source.write_text(_SOURCE + "\n".join(lines) + "\n")
    first = missing[0]
    base = ["gcc", "-w", "-shared", "-fPIC"]
    _read(*base, "-o", out / first, f"-Wl,-soname,{first}", source)
    for name in missing[1:]:
        empty = ["-Wl,--no-as-needed", out / first]
        _read(
            *base,
            "-o",
            out / name,
            f"-Wl,-soname,{name}",
            "-x",
            "c",
            "/dev/null",
            "-x",
            "none",
            *empty,
        )
    return missing
