"""Small captures for the tests of the store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.records import TensorSummary
from tensorprobe.store.claim import run_identity
from tensorprobe.store.lines import CallLine, EndLine, TensorLine
from tensorprobe.store.writer import CaptureWriter

SUMMARY = TensorSummary(-1.5, 2.5, 0.25, 3.75, 0, 0, 1)


class Ready:
    """A result that is there at once."""

    ready = True
    error: str | None = None

    def __init__(
        self, summary: TensorSummary | None = SUMMARY, digest: str | None = "0123456789abcdef"
    ) -> None:
        self.summary = summary
        self.digest = digest


def open_writer(root: Path, rank: int = 0, run: str | None = None, **options: Any) -> CaptureWriter:
    run = run or run_identity(os.environ)
    return CaptureWriter(root, rank, run, {"note": "facts"}, {"device": "cpu"}, **options)


def tensor(value: int | None, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Any:
    return {"tensor": TensorLine(dtype, shape, value=value)}


def write_bytes(out: CaptureWriter, value: int, key: str, data: np.ndarray[Any, Any]) -> None:
    """An array as the content of a value, with a summary."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    out.tensor(value, key, str(data.dtype), data.shape, flat)
    out.value(value, Ready())


def write_relu(out: CaptureWriter, n: int, data: np.ndarray[Any, Any] | None = None) -> None:
    """One whole call; with data, its input and its output are that."""
    shape = data.shape if data is not None else (4,)
    name = f"Torch.relu.{n}.forward"
    out.call(CallLine(id=n, name=name, op="torch.relu", args=[tensor(n, shape)]))
    if data is None:
        out.value(n, Ready())
    else:
        write_bytes(out, n, f"{name}.input.0", data)
    out.end(EndLine(id=n, outputs=tensor(n, shape)))


def write_capture(root: Path, n_calls: int = 3, **options: Any) -> Path:
    """One step of relu calls with their tensors."""
    out = open_writer(root, **options)
    out.begin_step(0)
    for n in range(n_calls):
        write_relu(out, n, np.arange(4 + n, dtype=np.float32))
    out.close()
    assert out.error is None
    return root
