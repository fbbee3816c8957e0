"""Errors far below a rounding: found in one call of a program, and in none of a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import planting
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from tensorprobe.comparing.evidence import OwnError, own_error
from tensorprobe.comparing.scene import make_node
from tensorprobe.comparing.suspects import score

Alter = Callable[[torch.Tensor, torch.dtype], torch.Tensor]  # the exact result, and its dtype


class Kernel(TorchDispatchMode):
    """The `nth` call of one kernel computes in float64 and rounds as it likes."""

    def __init__(self, op: str, nth: int, alter: Alter | None) -> None:
        super().__init__()
        self.op, self.nth, self.alter, self.count = op, nth, alter, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] != self.op:
            return result
        self.count += 1
        if self.count - 1 != self.nth or self.alter is None:
            return result
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        exact = wide[0] if self.op == "_to_copy" else func(*wide, **(kwargs or {}))
        return planting.layout_like(self.alter(exact, result.dtype), result)


def spacing(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of the dtype at each number."""
    return torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps), torch.frexp(exact)[1] - 1)


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    unit = spacing(exact, dtype)
    return (torch.round(exact / unit) * unit).to(dtype)


def scaled(factor: float) -> Alter:
    return lambda exact, dtype: nearest(exact * factor, dtype)


def shifted(part: float) -> Alter:
    return lambda exact, dtype: nearest(exact + part * spacing(exact, dtype), dtype)


def truncated(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    unit = spacing(exact, dtype)
    return (torch.trunc(exact / unit) * unit).to(dtype)


def one_row(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    changed = exact.clone()
    changed[5] *= 1.002
    return nearest(changed, dtype)


def record(
    folder: Path, dtype: torch.dtype, op: str = "addmm", alter: Alter | None = None, nth: int = 1
) -> Path:
    """Three layers with a norm and an activation, forward and backward."""
    torch.manual_seed(0)
    weights = [(torch.randn(96, 96) / 9).to(dtype).requires_grad_() for _ in range(3)]
    bias = torch.randn(96).to(dtype)
    x = torch.randn(48, 96).to(dtype)
    kernel = Kernel(op, nth, alter)
    with planting.one_thread(), kernel, tp.Recorder(folder, keep="tensors"):
        for weight in weights:
            x = F.gelu(F.linear(F.layer_norm(x, (96,)), weight, bias))
        x.float().square().mean().backward()
    assert kernel.count > nth or alter is None
    return folder


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FAULTS = {
    "bf16-factor": (BF16, scaled(1.0001), "rounded to nearest"),
    "bf16-offset": (BF16, shifted(0.05), "rounded to nearest"),  # a tenth of a rounding
    "bf16-truncated": (BF16, truncated, "rounded to nearest"),
    "bf16-row": (BF16, one_row, "rounded to nearest"),
    "fp16-factor": (F16, scaled(1.0005), "rounded to nearest"),
    "fp16-truncated": (F16, truncated, "rounded to nearest"),
    "fp32-three-roundings": (F32, scaled(1 + 3 * 2.0**-24), "scaled by at least"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    known: dict[torch.dtype, Path] = {}

    def of(dtype: torch.dtype) -> Path:
        if dtype not in known:
            known[dtype] = record(tmp_path_factory.mktemp("healthy") / "run", dtype)
        return known[dtype]

    return of


@pytest.mark.parametrize("name", FAULTS)
def test_one_faulty_linear_is_named(
    name: str, healthy: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    dtype, alter, text = FAULTS[name]
    actual = record(tmp_path / "run", dtype, "addmm", alter)
    verdict = tp.compare(actual, healthy(dtype)).verdict
    culprit = verdict.culprits[0]
    assert (culprit.name, culprit.side) == ("Functional.linear.1.forward", "actual")
    assert text in culprit.reason
    assert len(verdict.culprits) == 1


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("native", ["onednn", "aten"])
def test_healthy_calls_obey_their_laws(dtype: torch.dtype, native: str, tmp_path: Path) -> None:
    with torch.backends.mkldnn.flags(enabled=native == "onednn"):
        calls = tp.load(record(tmp_path / "run", dtype)).calls
    errors = [e for c in calls(direction="forward") for e in own_error(c).errors.values()]
    assert [error.breach.text for error in errors if error.breach is not None] == []
    laws = {error.name: error.law for error in own_error(calls(op="*linear")[0]).errors.values()}
    assert laws == {"output.0": "often" if dtype is F32 else "once"}


def test_a_side_whose_kernels_all_round_otherwise_is_not_accused(
    healthy: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    """Two neighbours up or down on every product, as an unknown library may have it."""
    torch.manual_seed(0)
    with planting.Device(noise=True):
        actual = record(tmp_path / "run", BF16)
    assert tp.compare(actual, healthy(BF16)).verdict.culprits == []


NARROW = [BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_cast_that_truncates_is_named_as_that(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(name: str, alter: Alter | None) -> Path:
        torch.manual_seed(0)
        x = torch.randn(16, 32)
        with Kernel("_to_copy", 0, alter), tp.Recorder(tmp_path / name, keep="tensors"):
            _ = x.to(dtype).float() * 2
        return tmp_path / name

    assert tp.compare(run("a", None), run("b", None)).verdict.culprits == []
    culprit = tp.compare(run("c", truncated), run("d", None)).verdict.culprits[0]
    assert culprit.name == "Tensor.to.0.forward"
    assert "is cut off and not rounded to nearest" in culprit.reason


def test_an_unknown_kernel_has_no_law(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "run", keep="tensors"):
        torch.special.i0e(torch.randn(64).to(BF16))
    (error,) = own_error(tp.load(tmp_path / "run").calls[0]).errors.values()
    assert error.law is None
    assert error.breach is None


def test_a_fine_side_is_not_blamed_for_a_coarse_difference(tmp_path: Path) -> None:
    """Attention in float32 is off by some ten roundings on a GPU: nothing beside bfloat16's."""
    fine = OwnError("output.0", 9.0, 9.0, -5.0, 0.01, 1e-6, unit=2.0**-24)
    coarse = msgspec.structs.replace(fine, unit=2.0**-8)
    right = record(tmp_path / "right", torch.float32)
    for dtype, is_beside_coarse in ((torch.bfloat16, True), (torch.float32, False)):
        actual = record(tmp_path / str(dtype), dtype)
        pairs = tp.compare(actual, right).pairs
        pair = next(p for p in pairs if p.call.name == "Functional.linear.1.forward")
        node = make_node(0, pair, container=False)
        assert (score(node, fine) < 0.001) is is_beside_coarse
        assert score(node, coarse) > 4


def test_a_suspect_for_which_no_time_is_left_is_judged_without_replay(tmp_path: Path) -> None:
    """A short `timeout` acquits nobody: on a loaded machine it would make a false match."""
    torch.manual_seed(0)
    weight, data = torch.randn(16, 16), torch.randn(4, 16)
    for name, factor in (("good", 1.0), ("again", 1.0), ("bad", 1.01)):
        device = planting.Device(
            True, planting.Fault("gelu", 0, planting.gain(factor)), seed=len(name)
        )
        with device, tp.Recorder(tmp_path / name, level="L1", keep="tensors", log=print):
            y = data @ weight
            (F.gelu(y) @ weight).sum()
    bad = tp.compare(tmp_path / "bad", tmp_path / "good", timeout=1e-9).verdict
    assert [culprit.name for culprit in bad.culprits] == ["Functional.gelu.0.forward"], str(bad)
    assert any("for lack of time" in note for note in bad.notes)
    again = tp.compare(tmp_path / "again", tmp_path / "good", timeout=1e-9).verdict
    assert again.verdict == "match", str(again)
