"""What a call is declared to write is read again after it, whatever torch's versions say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.records import Call, Capture


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    return str(request.param)


def record(folder: Path, program: Callable[[], object], **options: Any) -> Capture:
    with tp.Recorder(folder, log=lambda text: None, **options):
        program()
    return tp.load(folder)


class PassingMode(TorchDispatchMode):
    """What a program may have on, FlopCounterMode for one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def maximum(call: Call, name: str) -> float | None:
    summary = call.tensor(name).summary
    assert summary is not None
    return summary.max  # type: ignore[return-value]


def adamw(x: torch.Tensor) -> None:
    torch._fused_adamw_(
        [x], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], [], [torch.tensor(1.0)],
        lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def unscale(x: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([x], torch.zeros(1), torch.full((1,), 0.125))


def observe(x: torch.Tensor) -> None:
    torch.fused_moving_avg_obs_fake_quant(
        torch.full((3,), 9.0), torch.ones(1).int(), torch.ones(1).int(), torch.zeros(1), x,
        torch.ones(1), torch.zeros(1).int(), 0.5, 0, 255, 0,
    )  # fmt: skip


def writes(write: Callable[[torch.Tensor], object]) -> bool:
    """Whether this torch has a kernel for it on the CPU: 2.1 has no fused ones."""
    try:
        write(torch.ones(3))
    except NotImplementedError:
        return False
    return True


# What it does to three ones; the name of the call, and of the result in it, at L1.
WRITES: dict[str, tuple[Callable[[torch.Tensor], object], str, str, float]] = {
    "foreach": (lambda x: torch._foreach_add_([x], 1.0), "Torch._foreach_add_", "", 2.0),
    "foreach by name": (
        lambda x: torch._foreach_add_(self=[x], scalar=1.0),
        "Torch._foreach_add_",
        "",
        2.0,
    ),
    "operator": (
        lambda x: torch.ops.aten._foreach_mul_.Scalar([x], 3.0),
        "Aten._foreach_mul_",
        "0.0",
        3.0,
    ),
    "fused": (adamw, "Torch._fused_adamw_", "0.0", 0.5),
    "unscale": (
        unscale,
        "Torch._amp_foreach_non_finite_check_and_unscale_",
        "0.0",
        0.125,
    ),
    "in place": (lambda x: x.add_(1), "Tensor.add_", "", 2.0),
    "out": (lambda x: torch.add(x, 1, out=x), "Torch.add", "", 2.0),
    "item": (lambda x: x.__setitem__(slice(None), 4.0), "Tensor.__setitem__", "0", 4.0),
}
WRITES = {name: row for name, row in WRITES.items() if writes(row[0])}


@pytest.mark.parametrize("keep", ["stats", "digest", "tensors"])
@pytest.mark.parametrize("mode", ["bare", "mode"])
@pytest.mark.parametrize("written", WRITES)
def test_what_a_call_writes_is_its_result(
    written: str, mode: str, keep: str, tmp_path: Path
) -> None:
    write, name, path, expected = WRITES[written]
    x = torch.ones(3)

    def program() -> None:
        x.neg()
        if mode == "bare":
            write(x)
        else:
            with PassingMode():
                write(x)
        x.neg()

    capture = record(tmp_path, program, level="L1", keep=keep)
    call = capture.call(f"{name}.0.forward")
    [before] = [t for t in call.tensors if t.role == "input" and t.shape == (3,)][:1]
    assert before.summary is not None
    assert before.summary.max == 1.0
    results = [t.name for t in call.tensors if t.role == "output"]
    result = f"output.{path}" if path else "output.0"
    if written.startswith("foreach") and result not in results:
        [result] = results  # 2.1 gives back the lists that it has written to
    assert maximum(call, result) == pytest.approx(expected)
    assert maximum(capture.call("Tensor.neg.1.forward"), "input.0") == pytest.approx(expected)


@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
@pytest.mark.parametrize(
    "written", [name for name in ("foreach", "fused", "unscale", "out") if name in WRITES]
)
def test_what_is_read_later_is_what_was_written(written: str, level: str, tmp_path: Path) -> None:
    write, _, _, expected = WRITES[written]
    layer = nn.Threshold(0.0, 0.0)
    x = torch.ones(3)

    def program() -> None:
        layer(x)
        with PassingMode():
            write(x)
        layer(x)

    capture = record(tmp_path, program, level=level)
    name = {
        "L0": "Module.Threshold.forward.1",
        "L1": "Functional.threshold.1.forward",
        "mix": "Module.Threshold.forward.1",
        "L2": "Aten.threshold.1.forward",
    }[level]
    assert maximum(capture.call(name), "input.0") == pytest.approx(expected)


def test_an_argument_that_is_written_beside_the_result(tmp_path: Path) -> None:
    x = torch.ones(1)
    capture = record(tmp_path, lambda: observe(x), level="L1")
    call = capture.call("Torch.fused_moving_avg_obs_fake_quant.0.forward")
    assert maximum(call, "buffers.input.4") == pytest.approx(5.0)


def double_into(x: torch.Tensor, into: torch.Tensor) -> None:
    """A kernel that writes and tells nobody, as those of devices do."""
    into.data.copy_(x * 2)


# for the whole process: 2.1 has none that go away
_LIBRARY = torch.library.Library("declared", "DEF")
_LIBRARY.define("double_into(Tensor x, Tensor(a!) into) -> ()")
_LIBRARY.impl("double_into", double_into, "CPU")


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_an_operator_of_ones_own(level: str, tmp_path: Path) -> None:
    x, into = torch.ones(1), torch.zeros(1)

    def program() -> None:
        into.neg()
        torch.ops.declared.double_into(x, into)
        into.neg()

    capture = record(tmp_path, program, level=level)
    call = capture.call("Ops.declared.double_into.0.forward")
    assert maximum(call, "output.1") == 2.0
    neg = {"L1": "Tensor.neg.1.forward", "L2": "Aten.neg.1.forward"}[level]
    assert maximum(capture.call(neg), "input.0") == 2.0


@pytest.mark.skipif("unscale" not in WRITES, reason="this torch scales no gradients on the CPU")
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
def test_gradients_after_unscaling(level: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []

    def program() -> None:
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.linalg.vector_norm(model.weight.grad)))
        scaler.step(optimizer)
        scaler.update()

    capture = record(tmp_path, program, level=level)
    step = capture.call("Optimizer.SGD.step.0").tensor("parameters_grad.weight").summary
    assert step is not None
    assert step.norm == pytest.approx(norms[0])
    if level in ("L1", "mix"):
        norm = capture.call("Torch.linalg.vector_norm.0.forward").tensor("input.0").summary
        assert norm is not None
        assert norm.norm == pytest.approx(norms[0])
