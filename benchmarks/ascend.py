"""How fast dumps are converted, graphs and logs read: python benchmarks/ascend.py --gigabytes 2.

The rate of `cp` on the same files stands beside it: no conversion can be faster than a copy.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tensorprobe.ascend.abnormal_values import analyse
from tensorprobe.ascend.dump_conversion import ConversionPlan, convert
from tensorprobe.ascend.graph import read_graph
from tensorprobe.ascend.log import read_logs


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def chunk(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def write_dump(path: Path, raw: bytes, dtype: int, shape: tuple[int, ...]) -> None:
    dims = chunk(1, b"".join(varint(dim) for dim in shape))
    entry = varint(1 << 3) + varint(dtype) + b"\x10\x02" + chunk(3, dims)
    entry += varint(5 << 3) + varint(len(raw))
    header = chunk(1, b"2.0") + chunk(4, entry)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(raw)


def dumps(folder: Path, gigabytes: float, dtype: int, itemsize: int, each: int = 1 << 26) -> int:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, each, dtype=np.uint8).tobytes()
    count = max(2, int(gigabytes * 1e9 / each))
    folder.mkdir()
    for n in range(count):
        write_dump(folder / f"Add.Add_{n}.{n}.0.{n}", raw, dtype, (each // itemsize // 1024, 1024))
    return count * each


def graph_text() -> str:
    attributes = "".join(
        f'    attr {{\n      key: "_k{i}"\n      value {{\n        i: {i}\n      }}\n    }}\n'
        for i in range(60)
    )
    ops = (f'  op {{\n    name: "op{n}"\n    type: "Add"\n{attributes}  }}\n' for n in range(820))
    return "graph {\n" + "".join(ops) + "}\n"


def best(name: str, nbytes: int, work: Callable[[], object], after: Callable[[], None]) -> None:
    """The fastest of five: other work on the machine only ever makes it slower."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
        after()
    print(f"{name:<40} {nbytes / min(times) / 1e9:7.2f} GB/s  (best of 5, {min(times):.2f} s)")


def nothing() -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--in", dest="folder", type=Path, default=None)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    out = work / "out"
    clear = functools.partial(shutil.rmtree, out)
    try:
        for name, dtype, itemsize, part in (
            ("float32", 1, 4, 1.0), ("bfloat16", 27, 2, 0.5), ("hifloat8", 33, 1, 0.25)
        ):  # fmt: skip
            source = work / name
            nbytes = dumps(source, args.gigabytes * part, dtype, itemsize)
            convert_it = functools.partial(convert, [source], out)
            if name == "float32":
                copy = functools.partial(shutil.copytree, source, out)
                best("copy of the same files", nbytes, copy, clear)
            best(f"{name} to npy, 1 process", nbytes, functools.partial(convert_it, jobs=1), clear)
            best(
                f"{name} to npy, 2 processes", nbytes, functools.partial(convert_it, jobs=2), clear
            )
            if name == "float32":
                tensors = functools.partial(convert_it, ConversionPlan("safetensors"), jobs=1)
                best("float32 to safetensors, 1 process", nbytes, tensors, clear)
            shutil.rmtree(source)
        array = np.random.default_rng(0).normal(size=1 << 26).astype(np.float32)
        best("inspect float32", array.nbytes, functools.partial(analyse, array), nothing)
        graph = work / "graph.txt"
        graph.write_text(graph_text())
        read = functools.partial(read_graph, graph)
        best(f"graph of {graph.stat().st_size / 1e6:.1f} MB", graph.stat().st_size, read, nothing)
        log = work / "plog.log"
        line = "[INFO] GE(1,py):2023-07-13-07:42:40.5.1 [x.cc:1]1 Func:nothing of interest here\n"
        log.write_text(line * 500_000)
        best("log", log.stat().st_size, functools.partial(read_logs, [log]), nothing)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":  # processes are spawned: they import this file
    main()
