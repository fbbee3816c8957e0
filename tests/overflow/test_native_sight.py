"""The guard's part in C++ does what Python does where a program is not plain, or goes wrong."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tensorprobe as tp
from guard_notes import Kernels, noted, stand_in_for_kernels
from tensorprobe import native
from tensorprobe.overflow.device_calls import DeviceCalls
from tensorprobe.overflow.every_call import OverflowObserver
from tensorprobe.overflow.pending_calls import PendingCalls
from tensorprobe.tensors import finiteness

pytestmark = pytest.mark.skipif(
    native.MODULE is None, reason="not built: python -m tensorprobe.native.build"
)


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    return str(request.param)


def guarding(folder: Path, **options: Any) -> tp.Guard:
    return tp.Guard(folder, **{"look_every": 10**6, "log": lambda text: None, **options})


def watch_of(guard: tp.Guard) -> Any:
    return guard._watches[0]


def begin() -> None:
    torch.ones(2) * 1  # from here on the guard knows that it looks later


def both_ways(folder: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], object]) -> None:
    found = []
    for name, module in (("native", native.MODULE), ("python", None)):  # from one line: stacks
        with monkeypatch.context() as patch:
            patch.setattr(native, "MODULE", module)
            torch.manual_seed(0)
            found.append(noted(folder / name, program, in_backward=False)[0].events)
    assert len(found[0]) > 3
    assert found[0] == found[1]


@pytest.mark.usefixtures("way")
def test_what_is_found_late(tmp_path: Path) -> None:
    guard = guarding(tmp_path, overflow_nums=-1)
    with guard:
        begin()
        x = torch.full((3, 4), 1e30, requires_grad=True)
        y = F.silu(x * 1) * x
        (y.t() * 1e-30).sum().backward()
        guard.step()
        x = torch.full((2,), 1e-30, requires_grad=True)
        (x.sqrt() * 1e20 * 1e10).square().sum().backward()
    found = [(each.name, each.step, each.reason) for each in guard.findings]
    assert found == [
        (
            "Tensor.mul.2.forward", 0,
            "its inputs are finite (up to 1e+30), output.0 (float32) holds inf",
        ),
        (
            "Tensor.mul.0.backward", 1,
            "the gradients before it are finite, output.0 (float32) holds inf",
        ),
    ]  # fmt: skip


@pytest.mark.usefixtures("way")
def test_errors_of_the_program_pass_unchanged(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    class Odd:
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise Stop("odd")

    with guarding(tmp_path) as guard:
        begin()
        with pytest.raises(RuntimeError, match="size of tensor a"):
            torch.ones(2).add(torch.ones(3))
        with pytest.raises(TypeError, match="unexpected keyword"):
            torch.ones(2).add(1, oddly=2)
        with pytest.raises(Stop, match="odd"):
            torch.add(torch.ones(2), Odd())
        assert torch.ones(2).__add__("text") is NotImplemented
    assert guard.findings == ()


def test_other_modes_see_the_calls_of_the_program_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    class Names(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[-1].append(func.__name__)
            return func(*args, **(kwargs or {}))

    def program() -> None:
        x = torch.ones(6, 6, requires_grad=True)
        y = torch.cat([x[::2, ::3] * 2, x[:3, :2]]).t().exp()
        (y[1:] * torch.tensor(2.0)).sum().backward()

    for kernels in (False, True):
        for name, module in (("native", native.MODULE), ("python", None)):
            with monkeypatch.context() as patch:
                patch.setattr(native, "MODULE", module)
                if kernels:
                    stand_in_for_kernels(patch)
                seen.append([])
                with guarding(tmp_path / f"{name}{kernels}"), Names():
                    begin()
                    program()
    seen.append([])
    with Names():
        begin()
        program()
    assert all(names == seen[-1] for names in seen)


@pytest.mark.usefixtures("way")
def test_what_goes_wrong_in_noting_becomes_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = finiteness.TorchFlags.submit

    def fail(self: Any, tensor: Tensor) -> int:
        if tensor.numel() == 3 or torch._C._current_graph_task_id() != -1:
            raise LookupError("nowhere to be found")
        return submit(self, tensor)

    monkeypatch.setattr(finiteness.TorchFlags, "submit", fail)
    x = torch.randn(3, requires_grad=True)
    with guarding(tmp_path) as guard:
        begin()
        y = torch.ones(2) @ torch.ones(2, 3)
        (y * x)[1:].mul(2).sum().backward()
    gaps = [(gap["name"], gap["reason"]) for gap in watch_of(guard)._gaps]
    reason = "LookupError: nowhere to be found"
    names = ["Tensor.matmul", "Tensor.mul", "Tensor.sum.0.backward", "Tensor.mul.2.backward"]
    assert gaps == [(name, reason) for name in (*names, "Tensor.__getitem__.0.backward")]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 4, 4]


@pytest.mark.usefixtures("way")
def test_an_interrupt_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, requires_grad=True)
    with guarding(tmp_path):
        begin()
        y = x * 2

        def interrupt(self: Any, *args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(finiteness.TorchFlags, "submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                x * 3
            with pytest.raises(KeyboardInterrupt):
                y.sum().backward()
        (x * 2).sum().backward()


@pytest.mark.parametrize("kernels", [False, True])
def test_a_graph_outlives_its_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    if kernels:
        stand_in_for_kernels(monkeypatch)
    x = torch.randn(2, 3, 4, requires_grad=True)
    with guarding(tmp_path) as guard:
        begin()
        for _ in range(3):  # at first the hooks are of Python, and hold the guard
            y = F.linear(x * 2, torch.ones(4, 4), torch.ones(4)).exp()
        sight = weakref.ref(watch_of(guard)._observer)
    del guard
    gc.collect()
    assert sight() is None
    y.sum().backward()
    assert x.grad is not None


def test_it_is_called_by_others(tmp_path: Path) -> None:
    with guarding(tmp_path) as guard:
        begin()
        mode = watch_of(guard)._follower.mode
    part: Any = mode.swift.__self__
    assert part.call(mode, torch.mul, (torch.ones(2), 2), None) is mode  # not met before
    assert part.call(mode, Tensor.mul, (torch.ones(2), 2), None).tolist() == [2, 2]
    with pytest.raises(TypeError, match="takes 4 to 4"):
        part.call(mode, torch.mul)
    with pytest.raises(TypeError):
        type(part)(mode, watch_of(guard)._observer, [], mode.stand_ins, {})
    with pytest.raises(RuntimeError, match="no constant is called"):
        type(part)(mode, watch_of(guard)._observer, {}, mode.stand_ins, {})


def test_hooks_of_the_program_on_the_same_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda sent, given: (sent[0] * 3, *sent[1:]))
        z = y.mul(x)
        z.register_hook(lambda grad: grad * 5)
        z.retain_grad()
        z.sum().backward()

    for kernels in (False, True):
        with monkeypatch.context() as patch:
            if kernels:
                stand_in_for_kernels(patch)
            both_ways(tmp_path / str(kernels), patch, program)


def test_a_second_guard_and_a_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def program() -> None:
        with guarding(tmp_path / "inner"), tp.Recorder(tmp_path / "capture"):
            begin()
            model(torch.randn(2, 3, 4)).sum().backward()

    both_ways(tmp_path, monkeypatch, program)


def test_more_tensors_than_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finiteness, "SLOTS", 8)
    stand_in_for_kernels(monkeypatch)

    def program() -> None:
        x = torch.randn(3, requires_grad=True)
        for _ in range(9):
            x = x * 2 + 1
        x.sum().backward()

    both_ways(tmp_path, monkeypatch, program)


def test_on_a_stream_that_is_captured_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Captured(Kernels):
        @property
        def parts(self) -> tuple[Any, ...]:
            def stream(index: int) -> int:
                asked.append("stream")
                return 5

            return self, 3, lambda: 3, stream, lambda: True, self._flags_at, 528

        def flag(self, *given: Any) -> None:
            asked.append("flag")
            if len(asked) < 2:
                super().flag(*given)

    flags = lambda device: finiteness.KernelFlags(Captured())  # type: ignore[arg-type] # noqa: E731
    monkeypatch.setitem(finiteness._CHOICES, "cpu", flags)
    with guarding(tmp_path):
        begin()
        asked.clear()
        torch.ones(3) * 2
    assert asked[:2] == ["stream", "flag"]  # Python is asked, and decides


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_kernels(monkeypatch)
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    trouble = []

    def train() -> None:
        for _ in range(20):
            layers(torch.randn(2, 3, 4)).sum().backward()

    with guarding(tmp_path, overflow_nums=-1) as guard:
        begin()
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            train()
            guard.step()
        for thread in threads:
            thread.join()
        trouble = watch_of(guard)._gaps
    assert trouble == []
    assert guard.findings == ()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("way")
def test_under_torch_compile(tmp_path: Path, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[int] = []

    @functools.partial(torch.compile, backend=backend)
    def part(x: Tensor) -> Tensor:
        return (x * 2).exp() + 1

    try:
        with guarding(tmp_path, overflow_nums=-1) as guard:
            begin()
            x = torch.randn(3, requires_grad=True)
            for _ in range(3):
                (part(x) * 2).sum().backward()
            counters = torch._dynamo.utils.counters
            assert not counters["graph_break"]
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs == [1]
        assert watch_of(guard)._gaps == []
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.usefixtures("way")
def test_compiled_autograd(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    try:
        with guarding(tmp_path, overflow_nums=-1):
            begin()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                (x * 2).exp().sum().backward()
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    assert torch.equal(x.grad, 2 * (x * 2).exp())


def test_what_python_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls of a training step are noted without it."""
    stand_in_for_kernels(monkeypatch)
    asked: list[str] = []
    for kind, name in (
        (OverflowObserver, "begin"), (OverflowObserver, "made_later"), (OverflowObserver, "passed"),
        (DeviceCalls, "new_route"),
        (PendingCalls, "inputs"), (PendingCalls, "hold_piecemeal"),
    ):  # fmt: skip
        method = getattr(kind, name)

        def counted(self: Any, *args: Any, name: str = name, method: Any = method) -> Any:
            asked.append(name)
            return method(self, *args)

        monkeypatch.setattr(kind, name, counted)
    linear = nn.Linear(4, 4)
    with guarding(tmp_path) as guard:
        begin()
        for _ in range(3):
            asked.clear()
            x = linear(torch.randn(2, 3, 4).float())
            x = F.dropout(F.silu(x), 0.1).view(6, 4).t() * 2
            x[:, None].float().sum(0).mean().backward()
            guard.step()
    assert asked == ["inputs"]  # of what backward starts from


@pytest.mark.usefixtures("way")
def test_backward_begins_where_its_loss_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("out of order")

    x = torch.ones(3, requires_grad=True)
    with guarding(tmp_path) as guard:
        begin()
        loss = (x * 2).sum()
        monkeypatch.setattr(PendingCalls, "inputs", broken)
        loss.backward()
        gaps = watch_of(guard)._gaps
    assert x.grad is not None
    assert ["loss" in gap["name"] for gap in gaps] == [True]
