"""How fast captures are written and read: python benchmarks/store.py [--calls N] [--mib N]."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from tensorprobe.records import TensorSummary
from tensorprobe.store.claim import run_identity
from tensorprobe.store.lines import CallLine, EndLine, StackLine, TensorLine
from tensorprobe.store.loading import load
from tensorprobe.store.writer import CaptureWriter


class Ready:
    """A summary that is there at once, as on a CPU."""

    ready = True
    summary = TensorSummary(-3.1234567, 2.7654321, 0.00123, 45.678, 0, 0, 17)
    digest = "0123456789abcdef"
    error = None


def writer(root: Path) -> CaptureWriter:
    return CaptureWriter(root, 0, run_identity(os.environ), {}, {})


def record_calls(root: Path, n: int) -> None:
    """Calls as an API level has them: two inputs (one made by the call before), one output."""
    out = writer(root)
    out.begin_step(0)
    out.stack(StackLine(0, [f"/home/someone/model/layers.py:{i} in forward" for i in range(12)]))
    began = time.perf_counter()
    for i in range(n):
        tensor = TensorLine("bfloat16", (2, 4096, 2048), device="cuda:0", grad=True, value=2 * i)
        weight = TensorLine("bfloat16", (2048, 2048), device="cuda:0", grad=True, value=2 * i + 1)
        name = f"Functional.linear.{i}.forward"
        module = "model.layers.11.self_attn.q_proj"
        args = [{"tensor": tensor}, {"tensor": weight}, None]
        out.call(CallLine(id=i, name=name, op="torch.nn.functional.linear", module=module, stack=0,
                          args=args))  # fmt: skip
        out.value(2 * i, Ready())
        out.value(2 * i + 1, Ready())
        out.end(EndLine(id=i, outputs={"tensor": tensor}))
    queued = time.perf_counter()
    out.close()
    closed = time.perf_counter()
    print(f"write  {(queued - began) / n * 1e6:8.1f} us a call in the program, {n} calls")
    print(f"       {(closed - began) / n * 1e6:8.1f} us a call until all is in the file")


def read_calls(root: Path) -> None:
    began = time.perf_counter()
    capture = load(root)
    elapsed = time.perf_counter() - began
    size = (root / "rank0/step0/calls.jsonl").stat().st_size
    print(
        f"read   {elapsed:8.2f} s for {len(capture.calls)} calls, {size / 2**20:.0f} MiB of lines"
    )


def record_tensors(root: Path, nbytes: int, each: int) -> None:
    count = nbytes // each
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, each, np.uint8) for _ in range(min(count, 64))]
    out = writer(root)
    out.begin_step(0)
    began = time.perf_counter()
    for i in range(count):
        content = data[i % len(data)]
        content[:4] = np.frombuffer(np.uint32(i).tobytes(), np.uint8)
        out.tensor(i, f"t{i}", "uint8", (each,), content.copy())
        out.value(i, Ready())
    out.close()
    elapsed = time.perf_counter() - began
    print(f"tensors of {each:>9} bytes: {count * each / elapsed / 1e6:8.0f} MB/s, "
          f"{elapsed / count * 1e6:8.1f} us each, waited {out.waited_s:.2f} s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--mib", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "calls"
        record_calls(root, args.calls)
        read_calls(root)
        for each in (4 << 10, 1 << 20, 32 << 20):
            root = Path(folder) / f"tensors{each}"
            record_tensors(root, (args.mib << 20) // (16 if each < 1 << 16 else 1), each)
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
