"""Errors in forward and backward are named by the call behind them, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import tensorprobe as tp
from record.test_transparency import PROGRAMS, observe, same
from tensorprobe.errors import GuardStopped
from tensorprobe.guarding.findings import Finding
from tiny_models import MODELS

Said = list[str]


def guarded(
    folder: Path, program: Callable[[], Any], said: Said | None = None, **options: Any
) -> tuple[tuple[Finding, ...], BaseException | None]:
    """What a guard finds in `program()`, and what the program leaves by; calls are not tried alone
    unless a time is given."""
    log = (said if said is not None else []).append
    options = {"timeout": 0, **options}
    left_by = None
    guard = tp.Guard(folder, watch="errors", log=log, **options)
    try:
        with guard:
            program()
    except Exception as error:  # noqa: BLE001 whatever the program leaves by
        left_by = error
    return guard.findings, left_by


def only(findings: tuple[Finding, ...]) -> Finding:
    assert len(findings) == 1, [finding.name for finding in findings]
    return findings[0]


class Net(nn.Module):
    """One linear layer, then whatever it is given."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.first(x))


def run(then: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: Net(then)(torch.ones(2, 4))


# Forward


def test_a_shape_error_names_call_module_line_and_arguments(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    inputs: list[Tensor] = []

    def program() -> None:
        inputs.append(torch.randn(2, 4))
        model = nn.Sequential(nn.Identity(), inner)
        model(inputs[0])  # this line

    said: Said = []
    findings, error = guarded(tmp_path, program, said)
    finding = only(findings)
    assert (finding.name, finding.kind, finding.direction, finding.module, finding.op) == (
        "Functional.linear.0.forward",
        "error",
        "forward",
        "1.1",
        "torch.nn.functional.linear",
    )
    assert finding.reason == f"RuntimeError: {error}"
    lines = [frame for frame in finding.stack if frame.endswith("program")]
    number = int(lines[0].rpartition(" in ")[0].rpartition(":")[2])
    assert Path(__file__).read_text().splitlines()[number - 1].endswith("# this line")
    assert finding.metrics["call"] == (
        "torch.nn.functional.linear(float32[2, 4], float32[2, 3], float32[2])"
    )
    call = tp.load(finding.inputs).call("Functional.linear.0.forward")
    assert (call.status, call.error) == ("raised", f"RuntimeError: {error}")
    assert call.tensor("input.0").load().equal(inputs[0].relu())
    assert call.tensor("input.1").load().equal(inner[1].weight)
    assert said[0].splitlines()[0] == (
        f"Functional.linear.0.forward failed (step 0, rank 0): RuntimeError: {error}"
    )
    written = json.loads((tmp_path / "findings.json").read_text())
    assert written["findings"][0]["repro"] == str(
        tmp_path / "repro" / "step0" / "Functional.linear.0"
    )


def test_the_exception_is_the_same_object_with_its_traceback(tmp_path: Path) -> None:
    error = IndexError("mine")

    class Odd(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any) -> Any:
            if func is torch.sin:
                raise error
            return super().__torch_function__(func, *rest)

    def program() -> None:
        torch.sin(torch.ones(2).as_subclass(Odd))

    findings, left_by = guarded(tmp_path, program)
    assert left_by is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert not hasattr(error, "__notes__")
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-1] == "__torch_function__"
    assert "program" in names
    assert only(findings).name == "Torch.sin.0.forward"


def test_an_index_out_of_range_is_reproduced_alone(tmp_path: Path) -> None:
    table = nn.Embedding(5, 3)
    said: Said = []
    findings, error = guarded(tmp_path, lambda: table(torch.tensor([1, 7])), said, timeout=100)
    finding = only(findings)
    assert isinstance(error, IndexError)
    assert finding.name == "Functional.embedding.0.forward"
    assert finding.metrics["alone"] == "reproduced"
    folder = tmp_path / "repro" / "step0" / "Functional.embedding.0"
    assert finding.repro == str(folder)
    assert said[1].splitlines() == [
        "Functional.embedding.0.forward: the call alone, on cpu, raises the same error",
        f"  to see it: python {folder}/repro.py --device cpu",
    ]


def test_calls_too_small_to_record_are_named_too(tmp_path: Path) -> None:
    findings, _ = guarded(tmp_path, run(lambda y: y.size(7)))
    assert only(findings).metrics["call"] == "torch.Tensor.size(float32[2, 4], 7)"


def test_in_place_calls_are_saved_as_they_were(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def program() -> None:
        x.add_(1)
        x.add_(torch.ones(5))

    findings, _ = guarded(tmp_path, program)
    finding = only(findings)
    call = tp.load(finding.inputs).call("Tensor.add_.1.forward")
    assert call.tensor("input.0").load().equal(torch.arange(6.0).reshape(2, 3) + 1)


# Backward


def r_of(y: Tensor) -> Tensor:
    """A call whose backward raises: torch has no derivative of R alone."""
    _, r = torch.linalg.qr(y, mode="r")
    return r


def test_a_backward_error_names_the_forward_call(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def program() -> None:
        def then(y: Tensor) -> Tensor:
            seen.append(y.detach().clone())
            return r_of(y).sum()

        Net(then)(torch.ones(2, 4)).mul(3).backward()

    said: Said = []
    findings, error = guarded(tmp_path, program, said, timeout=100)
    finding = only(findings)
    assert (finding.name, finding.direction, finding.op) == (
        "Torch.linalg.qr.0.backward",
        "backward",
        "torch.linalg.qr",
    )
    assert finding.metrics["node"] == "LinalgQrBackward0"
    assert finding.stack[0].endswith("in r_of")
    assert finding.metrics["call"] == "torch.linalg.qr(float32[2, 4], mode='r')"
    capture = tp.load(finding.inputs)
    forward, backward = capture.calls
    assert forward.tensor("input.0").load().equal(seen[0])
    assert (backward.name, backward.status) == (finding.name, "raised")
    assert backward.tensor("input.1").load().equal(torch.full((2, 4), 3.0))
    assert backward.error == f"RuntimeError: {error}"
    assert finding.metrics["alone"] == "reproduced"
    assert "backward was in LinalgQrBackward0" in said[0]


def test_the_users_anomaly_mode_changes_nothing(tmp_path: Path) -> None:
    def program() -> None:
        with torch.autograd.detect_anomaly():
            run(lambda y: r_of(y).sum().backward())()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        findings, _ = guarded(tmp_path, program)
    assert only(findings).name == "Torch.linalg.qr.0.backward"
    assert any("in r_of" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant: bool, tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(lambda y: r_of(y.sin()).sum(), x, use_reentrant=use_reentrant).backward()

    findings, _ = guarded(tmp_path, program)
    finding = only(findings)
    # without reentrancy it is the graph of the first pass that backward goes through
    assert finding.name == f"Torch.linalg.qr.{int(use_reentrant)}.backward"
    forward = tp.load(finding.inputs).calls[0]
    assert forward.tensor("input.0").load().equal(torch.ones(2, 4).sin())


def test_an_error_of_the_recomputation(tmp_path: Path) -> None:
    def program(second: Callable[[], Tensor]) -> Callable[[], None]:
        passes: list[int] = []

        def part(x: Tensor) -> Tensor:
            passes.append(1)
            weight = torch.ones(4, 2) if len(passes) == 1 else second()
            return x.sin().exp() @ weight

        def run_it() -> None:
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(part, x, use_reentrant=False).sum().backward()

        return run_it

    fails = program(lambda: torch.ones(2) @ torch.ones(3))
    findings, _ = guarded(tmp_path / "a", fails)
    assert only(findings).name == "Tensor.matmul.1.forward"
    differs = program(lambda: torch.ones(5, 2))  # torch finds it, where backward needs the tensor
    findings, error = guarded(tmp_path / "b", differs)
    assert type(error).__name__ == "CheckpointError"
    assert only(findings).name == "Tensor.matmul.0.backward"


def test_a_second_backward_and_a_write_in_between(tmp_path: Path) -> None:
    def twice(y: Tensor) -> None:
        loss = y.exp().sum()
        loss.backward()
        loss.backward()

    findings, _ = guarded(tmp_path / "twice", run(twice))
    assert only(findings).name == "Tensor.exp.0.backward"

    def overwritten(y: Tensor) -> None:
        z = y.sigmoid()
        product = z * z
        z.add_(1)
        product.sum().backward()

    findings, _ = guarded(tmp_path / "written", run(overwritten))
    finding = only(findings)
    assert finding.name == "Tensor.mul.0.backward"
    assert finding.metrics["missing"] == [
        "Tensor.mul.0.forward.input.0: it was written to after the call"
    ]
    (note,) = finding.metrics["notes"]
    assert note.startswith("what it had saved was overwritten by Tensor.add_.0.forward, ")
    assert "test_errors.py:" in note


def _in_place(z: Tensor) -> None:
    z.add_(1)


def _by_operator(z: Tensor) -> None:
    z += 1


def _by_item(z: Tensor) -> None:
    z[0] = 1


def _through_a_view(z: Tensor) -> None:
    z[0].mul_(2)


def _without_grad(z: Tensor) -> None:
    with torch.no_grad():
        z.mul_(2)


def _by_out(z: Tensor) -> None:
    with torch.no_grad():
        torch.mul(z, 2, out=z)


def _by_function(z: Tensor) -> None:
    F.relu(z, inplace=True)


@pytest.mark.parametrize(
    ("write", "writer"),
    [
        (_in_place, "Tensor.add_.1.forward"),
        (_by_operator, "Tensor.add_.1.forward"),
        (_by_item, "Tensor.__setitem__.0.forward"),
        (_through_a_view, "Tensor.mul_.0.forward"),
        (_without_grad, "Tensor.mul_.0.forward"),
        (_by_out, "Torch.mul.0.forward"),
        (_by_function, "Functional.relu.0.forward"),
    ],
)
def test_who_wrote_over_what_backward_needs(
    write: Callable[[Tensor], None], writer: str, tmp_path: Path
) -> None:
    def program(y: Tensor) -> None:
        z = y.sigmoid()
        other = torch.ones(3).add_(1)  # of no concern
        product = z.square() + other.sum()
        write(z)
        product.sum().backward()

    said: Said = []
    findings, error = guarded(tmp_path, run(program), said)
    assert "modified by an inplace operation" in str(error)
    (note,) = only(findings).metrics["notes"]
    writers = note.removeprefix("what it had saved was overwritten by ")
    assert [part.partition(",")[0] for part in writers.split(" and ")] == [writer]
    assert f"  {note}" in said[0].splitlines()


@pytest.mark.parametrize(
    ("sizes", "writer"),
    [((4, 5, 2), "Tensor.add_."), ((4,) * 7, "one of 6 calls at ")],
    ids=["a weight of its own shape", "many alike"],
)
def test_an_optimizer_that_steps_before_backward(
    tmp_path: Path, sizes: tuple[int, ...], writer: str
) -> None:
    def program() -> None:
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        first, second = (model(torch.ones(3, 4)).sum() for _ in range(2))
        first.backward()
        optimizer.step()
        second.backward()

    findings, _ = guarded(tmp_path, program)
    (note,) = only(findings).metrics["notes"]
    assert note.startswith(f"what it had saved was overwritten by {writer}")
    assert "test_errors.py:" in note  # optimizer.step(), not a line of torch


def test_writers_that_cannot_be_told_apart_are_both_named(tmp_path: Path) -> None:
    def program(y: Tensor) -> None:
        x = y * 1
        z = x.exp()
        x.add_(1)  # harmless: exp needs its result, which is like this
        z.mul_(2)
        z.sum().backward()

    findings, _ = guarded(tmp_path, run(program))
    (note,) = only(findings).metrics["notes"]
    assert note.startswith("what it had saved was overwritten by one of these: ")
    assert {"Tensor.add_.0.forward", "Tensor.mul_.0.forward"} <= set(note.replace(",", " ").split())


def test_a_write_that_is_over_is_not_blamed(tmp_path: Path) -> None:
    """What was written to before the call saved it, and memory that is another tensor's now."""

    def program(y: Tensor) -> None:
        z = y.sigmoid()
        z.mul_(2)
        product = z * z
        torch.ones(2, 4).mul_(3)
        z.add_(1)
        product.sum().backward()

    findings, _ = guarded(tmp_path, run(program))
    (note,) = only(findings).metrics["notes"]
    assert "Tensor.add_.0.forward" in note
    assert "mul_" not in note


def test_a_node_that_backward_made_belongs_to_the_same_call(tmp_path: Path) -> None:
    def program() -> None:
        q = torch.randn(1, 1, 4, 8, requires_grad=True)
        result = F.scaled_dot_product_attention(q, q, q)
        (grad,) = torch.autograd.grad(result.exp().sum(), q, create_graph=True)
        grad.sum().backward()

    findings, _ = guarded(tmp_path, program)
    assert only(findings).name == "Functional.scaled_dot_product_attention.0.backward"


def test_a_retained_graph_that_fails_the_second_time(tmp_path: Path) -> None:
    class Tired(torch.autograd.Function):
        passes = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Tired.passes += 1
            if Tired.passes == 2:
                raise RuntimeError("tired")
            return grad

    def then(y: Tensor) -> None:
        loss = Tired.apply(y).sum()
        loss.backward(retain_graph=True)
        loss.mul(2).backward()

    findings, _ = guarded(tmp_path, run(then))
    finding = only(findings)
    assert finding.name == "Function.Tired.0.backward"
    backward = tp.load(finding.inputs).call(finding.name)
    assert backward.tensor("input.0").load().equal(torch.full((2, 4), 2.0))


def test_backward_that_does_not_begin(tmp_path: Path) -> None:
    findings, _ = guarded(tmp_path / "a", run(lambda y: y.backward()))
    assert only(findings).name == "Tensor.backward.0.backward"
    one = torch.ones(())
    findings, _ = guarded(tmp_path / "b", lambda: torch.autograd.grad(one, one))
    assert only(findings).name == "Torch.autograd.grad.0.backward"


# Custom functions


class Raises(torch.autograd.Function):
    """Raises in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            raise ValueError("bad forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ValueError("bad backward")


@pytest.mark.parametrize("in_module", [True, False])
def test_a_custom_function_that_raises_in_forward(in_module: bool, tmp_path: Path) -> None:
    x = torch.arange(8.0).reshape(2, 4)
    seen: list[Tensor] = []

    def then(y: Tensor) -> Tensor:
        seen.append(y.detach())
        return Raises.apply(y, "forward")

    program = (lambda: Net(then)(x)) if in_module else (lambda: then(x))
    findings, error = guarded(tmp_path, program)
    finding = only(findings)
    assert (finding.name, finding.reason) == (
        "Function.Raises.0.forward",
        "ValueError: bad forward",
    )
    assert finding.stack[0].endswith("in Raises.forward")
    assert finding.metrics["call"].endswith("Raises(float32[2, 4], 'forward')")
    call = tp.load(finding.inputs).call(finding.name)
    assert call.tensor("input.0").load().equal(seen[0])
    assert isinstance(error, ValueError)
    assert finding.metrics["alone"] == "not possible"


def test_a_custom_function_that_raises_in_backward(tmp_path: Path) -> None:
    program = run(lambda y: Raises.apply(Raises.apply(y, "backward"), "backward").sum().backward())
    findings, error = guarded(tmp_path, program)
    finding = only(findings)
    assert (finding.name, finding.reason) == (
        "Function.Raises.1.backward",
        "ValueError: bad backward",
    )
    assert finding.metrics["node"] == "RaisesBackward"
    saved = tp.load(finding.inputs).call(finding.name).tensor("input.0")
    assert saved.load().equal(torch.ones(2, 4))
    assert isinstance(error, ValueError)


def test_a_torch_call_inside_a_custom_backward_is_the_one_named(tmp_path: Path) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.mm(grad, torch.ones(9, 9))

    findings, _ = guarded(tmp_path, run(lambda y: Wrong.apply(y).sum().backward()))
    assert only(findings).name == "Torch.mm.0.forward"


# What the program does with its errors


def test_errors_that_the_program_catches_are_reported_once_each(tmp_path: Path) -> None:
    ended: list[bool] = []

    def program() -> None:
        for _ in range(5):
            with contextlib.suppress(RuntimeError):
                torch.ones(2, 3) @ torch.ones(2, 3)
        with contextlib.suppress(RuntimeError):
            run(lambda y: r_of(y).sum().backward())()
        ended.append(True)

    said: Said = []
    findings, error = guarded(tmp_path, program, said)
    assert (ended, error) == ([True], None)
    assert [finding.name for finding in findings] == [
        "Tensor.matmul.0.forward",
        "Torch.linalg.qr.0.backward",
    ]
    assert all("caught" in finding.metrics for finding in findings)
    assert said[-2] == "4 more errors were of the same kind, or beyond 20"


def test_an_error_wrapped_in_another_is_reported_once(tmp_path: Path) -> None:
    def program() -> None:
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise KeyError("wrapped") from error

    findings, error = guarded(tmp_path, run(lambda y: program()))
    assert isinstance(error, KeyError)
    assert "caught" not in only(findings).metrics


def test_the_programs_own_errors_are_no_findings(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("mine")

    def hooked(y: Tensor) -> None:
        z = y.exp()
        z.register_hook(fails)
        z.sum().backward()

    for number, program in enumerate((run(fails), run(hooked), fails)):
        said: Said = []
        findings, error = guarded(tmp_path / str(number), program, said)
        assert findings == ()
        assert str(error) == "mine"
        assert len(said) == 1


def test_interrupts_are_no_findings(tmp_path: Path) -> None:
    class Interrupting(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise KeyboardInterrupt

    guard = tp.Guard(tmp_path, watch="errors", log=lambda text: None)
    with pytest.raises(KeyboardInterrupt), guard:
        torch.sin(torch.ones(1).as_subclass(Interrupting))
    assert guard.findings == ()


# Places where a call is not simply a call


def test_inside_torch_func(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    findings, _ = guarded(
        tmp_path / "grad", lambda: torch.func.grad(lambda a: (a @ torch.ones(9, 9)).sum())(x)
    )
    finding = only(findings)
    assert finding.name == "Tensor.matmul.0.forward"
    assert tp.load(finding.inputs).calls[0].tensor("input.0").load().equal(x)

    said: Said = []
    batched = torch.func.vmap(lambda a: torch.mm(a, a))
    findings, _ = guarded(tmp_path / "vmap", lambda: batched(x), said)
    finding = only(findings)
    assert finding.name == "Torch.mm.0.forward"
    assert finding.metrics["missing"][0].endswith(
        "it is batched by torch.func.vmap, and has no content of its own"
    )
    assert finding.next == ""

    findings, _ = guarded(tmp_path / "back", lambda: torch.func.grad(lambda a: r_of(a).sum())(x))
    assert only(findings).name == "Torch.linalg.qr.0.backward"


def test_inside_a_compiled_part(tmp_path: Path) -> None:
    def part(table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table.sin()).cos()

    compiled = torch.compile(part, backend="eager")
    findings, error = guarded(tmp_path, lambda: compiled(torch.ones(3, 2), torch.tensor([5])))
    finding = only(findings)
    assert isinstance(error, IndexError)
    assert finding.name == "Compiled.test_inside_a_compiled_part.part.0.forward"
    assert finding.stack[0].endswith("in test_inside_a_compiled_part.<locals>.part")
    assert tp.load(finding.inputs).calls[0].tensor("input.1").load().equal(torch.tensor([5]))
    assert finding.metrics["notes"] == [
        "compiled: the calls inside are not visible. To have the one that failed named, run once "
        "more with TORCHDYNAMO_DISABLE=1"
    ]


@pytest.mark.slow
def test_where_a_part_is_compiled_or_runs_backward(tmp_path: Path) -> None:
    def refuses(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no")

    part = torch.compile(lambda x: x.sin(), backend=refuses)
    findings, error = guarded(tmp_path / "making", lambda: part(torch.ones(2)))
    assert type(error).__name__ == "BackendCompilerFailed"
    assert only(findings).name.startswith("Compiled.")

    other = torch.compile(lambda x: failing_backward(x.sin()).sum(), backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    findings, error = guarded(tmp_path / "backward", lambda: other(x).backward())
    finding = only(findings)
    assert (finding.name, str(error)) == ("Function.CompiledFunction.0.backward", "no kernel")
    assert finding.metrics["notes"][0].startswith("compiled: ")
    assert finding.metrics["alone"] == "not possible"


if hasattr(torch.library, "custom_op"):  # from torch 2.4 on
    # 2.4 does not read annotations that are text
    @torch.library.custom_op(
        "guard::failing_backward", mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    def failing_backward(x: Tensor) -> Tensor:
        return x.clone()

    @torch.library.custom_op("guard::no_kernel", mutates_args=(), schema="(Tensor grad) -> Tensor")
    def no_kernel(grad: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    failing_backward.register_fake(lambda x: torch.empty_like(x))
    no_kernel.register_fake(lambda grad: torch.empty_like(grad))
    failing_backward.register_autograd(lambda ctx, grad: no_kernel(grad))


def test_inside_torchscript(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(lambda x: x @ x, torch.ones(2, 2))
    said: Said = []
    findings, _ = guarded(tmp_path, lambda: script(torch.ones(2, 3)), said)
    assert findings == ()
    assert said[0].startswith("the error is inside TorchScript, whose calls are not visible.")


class Faulty(Dataset[Tensor]):
    """Its third item is out of range."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3)[torch.tensor([index])]


def test_in_a_worker_of_a_data_loader(tmp_path: Path) -> None:
    said: Said = []

    def program() -> None:
        for batch in DataLoader(Faulty(), num_workers=1):
            batch.sum()

    findings, error = guarded(tmp_path, program, said)
    assert isinstance(error, IndexError)
    assert findings == ()
    assert len(said) == 2
    assert said[0].startswith("IndexError was raised in DataLoader worker process 0, at ")
    assert "__getitem__: not in a torch call of this process" in said[0]


# With recorders, steps and budgets


@pytest.mark.parametrize("recorder_outside", [True, False])
def test_with_a_recorder(recorder_outside: bool, tmp_path: Path) -> None:
    recorder = tp.Recorder(tmp_path / "recording", keep="stats", log=lambda text: None)
    guard = tp.Guard(tmp_path / "guard", watch="errors", log=lambda text: None, timeout=0)
    first, second = (recorder, guard) if recorder_outside else (guard, recorder)
    with pytest.raises(RuntimeError), first, second:
        run(lambda y: r_of(y).sum().backward())()
    assert only(guard.findings).name == "Torch.linalg.qr.0.backward"
    recorded = tp.load(tmp_path / "recording")
    assert [call.name for call in recorded.calls(direction="forward", op="torch.linalg.qr")] == [
        "Torch.linalg.qr.0.forward"
    ]
    assert recorded.gaps == ()


def test_steps_are_counted_as_in_a_recording(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            y = model(torch.ones(2, 4)).sin()
            (r_of(y) if step == 2 else y).sum().backward()
            optimizer.step()

    findings, _ = guarded(tmp_path, program)
    finding = only(findings)
    assert (finding.name, finding.step) == ("Torch.linalg.qr.0.backward", 2)
    assert tp.load(finding.inputs).steps == (2,)


def test_what_the_budget_dropped_is_held_in_a_second_run(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(64, 64, requires_grad=True)
        y = r_of(x.sin())
        for _ in range(5):
            y = y.exp()
        y.sum().backward()

    findings, _ = guarded(tmp_path / "a", program, inputs_budget=40_000, rerun="train.py --lr 1")
    finding = only(findings)
    assert finding.repro is None
    assert finding.metrics["missing"][0].endswith(
        "it was let go of: what came after it filled the budget for inputs"
    )
    assert finding.next == (
        "tensorprobe run --guard errors --calls Torch.linalg.qr.0 --steps 0 --keep tensors "
        "train.py --lr 1"
    )
    findings, _ = guarded(
        tmp_path / "b", program, inputs_budget=0, calls=["Torch.linalg.qr.0"], steps=[0]
    )
    finding = only(findings)
    assert "missing" not in finding.metrics
    call = tp.load(finding.inputs).call("Torch.linalg.qr.0.forward")
    assert call.tensor("input.0").load().equal(torch.ones(64, 64).sin())
    assert finding.repro is not None


def test_ranks_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        findings, _ = guarded(tmp_path, run(lambda y: y @ y))
        finding = only(findings)
        assert finding.rank == int(rank)
        assert finding.repro == str(tmp_path / f"rank{rank}/repro/step0/Tensor.matmul.0")
        assert (tmp_path / f"rank{rank}" / "findings.json").exists()
    assert tp.load(tmp_path / "inputs").ranks == (0, 1)


def test_scatters_that_fail_half_way_are_saved_as_they_were(tmp_path: Path) -> None:
    table = torch.zeros(4)

    def program() -> None:
        with torch.no_grad():
            table.index_put_((torch.tensor([0, 1, 9]),), torch.ones(3))

    findings, _ = guarded(tmp_path, program)
    call = tp.load(only(findings).inputs).call("Tensor.index_put_.0.forward")
    assert call.tensor("input.0").load().equal(torch.zeros(4))


def test_late_errors_of_a_device_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise RuntimeError("EZ9999: Inner Error, error code is 507015")

    def program() -> None:
        torch.sin(torch.ones(1).as_subclass(Device))

    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "0")
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", "/log")
    findings, _ = guarded(tmp_path / "a", program)
    late, log, command = only(findings).metrics["notes"]
    assert late.startswith("errors of npu surface late, so an earlier call may be the guilty one.")
    assert log == "the log of the device is in /log (ASCEND_PROCESS_LOG_PATH says where)"
    assert command == (
        f"to read it: tensorprobe ascend incident --log /log -o {tmp_path / 'a' / 'incident'}"
    )
    monkeypatch.delenv("ASCEND_LAUNCH_BLOCKING")
    findings, _ = guarded(tmp_path / "b", program)  # the guard sets it
    assert only(findings).metrics["notes"][0].startswith("the log of the device is in /log")
    monkeypatch.delenv("ASCEND_PROCESS_LOG_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    findings, _ = guarded(tmp_path / "c", program)
    assert "notes" not in only(findings).metrics  # there is no log where the driver puts it


# Nothing else changes

HEAVY = {name for name in PROGRAMS if name in MODELS and name != "gpt2"} | {
    name for name in PROGRAMS if name.endswith("aot_eager")
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in PROGRAMS],
)
def test_same_bits(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    expected = observe(program)
    guard = tp.Guard(tmp_path, watch="errors", log=lambda text: None, timeout=0)
    with guard:
        actual = observe(program, guard.step)
    same(actual, expected)
    assert guard.findings == ()


def test_graphs_die_when_they_would(tmp_path: Path) -> None:
    with tp.Guard(tmp_path, watch="errors", log=lambda text: None) as guard:
        model = Net(torch.sin)
        activation = model(torch.ones(2, 4))
        node = activation.grad_fn
        freed = weakref.ref(activation)
        activation.sum().backward()
        del activation, node
        guard.step()
        gc.collect()
        assert freed() is None
        weight = weakref.ref(model.first.weight)
        del model
        gc.collect()
        assert weight() is None


def test_beside_the_watch_for_overflow(tmp_path: Path) -> None:
    """What ends a program that overflows is no error of torch's; an error is no overflow."""

    def guard(name: str) -> tp.Guard:
        both = ("overflow", "errors")
        return tp.Guard(tmp_path / name, both, log=lambda text: None, timeout=0)

    with guard("error") as first, contextlib.suppress(RuntimeError):
        run(lambda y: r_of(y).sum().backward())()
    assert [finding.kind for finding in first.findings] == ["error"]
    second = guard("overflow")
    with pytest.raises(GuardStopped), second:
        run(lambda y: (y * 1e38 * 1e38).sum().backward())()
    assert [finding.kind for finding in second.findings] == ["nonfinite"]


def test_where_nothing_can_be_written_the_programs_error_stays(tmp_path: Path) -> None:
    (tmp_path / "inputs").write_text("a file")  # where the capture is to be
    said: Said = []
    findings, error = guarded(tmp_path, run(lambda y: y @ y), said)
    assert isinstance(error, RuntimeError)
    assert "the disk refused: " in only(findings).metrics["missing"][0]


def test_in_a_thread_of_the_program(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run(lambda y: y @ y)()
        except RuntimeError as error:
            failed.append(error)

    def program() -> None:
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()

    findings, _ = guarded(tmp_path, program)
    finding = only(findings)
    assert len(failed) == 1
    assert finding.name == "Tensor.matmul.0.forward"
    assert tp.load(finding.inputs).calls[0].thread == "worker"
