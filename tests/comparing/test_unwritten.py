"""Calls on memory that nobody has written to are not judged; all others are."""

import math
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.moments import _spread
from tensorprobe.records import TensorRecord, TensorSummary


class Dirty(TorchDispatchMode):
    """Within it `empty` gives memory with these numbers in it."""

    def __init__(self, garbage: float) -> None:
        super().__init__()
        self.garbage = garbage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("empty"):
            numbers = torch.arange(float(result.numel())).reshape(result.shape)
            result.copy_(torch.sin(numbers * self.garbage) * self.garbage)
        return result


def record(folder: Path, garbage: float, factor: float = 1.0) -> Path:
    """A program that computes on `empty` memory, which holds some garbage, and on its data."""
    torch.manual_seed(0)
    weight, data = torch.randn(16, 16), torch.randn(4, 16)
    with Dirty(garbage), tp.Recorder(folder, keep="stats", level="L1", log=lambda text: None):
        memory = torch.empty(4, 16)
        torch.tanh(memory) - data
        fresh = torch.nn.functional.layer_norm(memory, (16,), torch.ones(16), torch.zeros(16))
        torch.tanh(fresh)
        y = torch.tanh(data @ weight)
        torch.exp(y * factor)
    return folder


def test_arbitrary_numbers_are_no_difference(tmp_path: Path) -> None:
    for garbage in (3.0, 1e20):
        record(tmp_path / str(garbage), garbage)
    verdict = tp.compare(tmp_path / "3.0", tmp_path / "1e+20").verdict
    assert verdict.verdict == "match", str(verdict)
    verdict = tp.compare(record(tmp_path / "bad", 3.0, 1.01), tmp_path / "3.0").verdict
    assert [culprit.name for culprit in verdict.culprits] == ["Tensor.mul.0.forward"]


def test_garbage_beyond_any_norm_is_no_error(tmp_path: Path) -> None:
    """Its squares are infinite, and so is the largest number of some."""
    row = TensorPair("output.0", _garbage(), _garbage())
    assert _spread(row) == math.inf


def _garbage() -> TensorRecord:
    summary = TensorSummary(
        min=-math.inf, max=1.0, mean=0.0, norm=1.0, nan_count=0, inf_count=1, zero_count=0
    )
    return TensorRecord("x.output.0", "output", "float32", (4096,), summary=summary)
