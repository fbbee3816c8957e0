"""Programs of several threads: each is recorded as if it ran alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from recorded import record
from tensorprobe.records import Capture

LEVELS = ["L0", "L1", "mix", "L2"]


class Gate:
    """A place where one thread waits until another lets it go on."""

    def __init__(self) -> None:
        self._came, self._open = threading.Event(), threading.Event()

    def come(self, *args: Any) -> None:
        self._came.set()
        assert self._open.wait(60)

    def wait(self) -> None:
        assert self._came.wait(60)

    def open(self) -> None:
        self._open.set()


def beside(work: Callable[[], Any], gate: Gate, meanwhile: Callable[[], Any]) -> None:
    """Do something else, in another thread than this, while `work` waits at the gate."""
    first = threading.Thread(target=work, name="first")
    first.start()
    gate.wait()
    in_thread(meanwhile, "second")
    gate.open()
    first.join()


def in_thread(work: Callable[[], Any], name: str = "other") -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def ones() -> torch.Tensor:
    return torch.ones(2, 2, requires_grad=True)


class Calls(nn.Module):
    """Makes calls by a function of the test's."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def backward_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Goes through the function and back, in a module: modules take the modes along."""
    model = Calls(lambda x: function(x).sum())
    return lambda: model(ones()).backward()


def held_at(gate: Gate) -> Callable[[torch.Tensor], torch.Tensor]:
    """A call whose backward waits at the gate before it begins."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(gate.come)
        return y.exp()

    return function


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_step_at_once(tmp_path: Path, level: str) -> None:
    gate = Gate()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gate.come()
            super().step(closure)

    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        model(torch.ones(2, 2)).sum().backward()
    slow, other = Slow(models[0].parameters()), torch.optim.Adam(models[1].parameters())
    capture = record(tmp_path, lambda: beside(slow.step, gate, other.step), level=level)
    steps = [call for call in capture.calls if call.name.startswith("Optimizer.")]
    assert [(call.name, call.status) for call in steps] == [
        ("Optimizer.Slow.step.0", "complete"),
        ("Optimizer.Adam.step.0", "complete"),
    ]
    for call in steps:
        roles = [tensor.role for tensor in call.tensors]
        assert [roles.count(r) for r in ("parameter", "parameter_grad", "output")] == [2, 2, 2]


def test_stopped_while_another_thread_is_in_an_optimizers_hook(tmp_path: Path) -> None:
    """Torch is going through the hooks then: taking ours away would raise in the program."""
    gate = Gate()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    recorder = tp.Recorder(tmp_path, level="L0")
    recorder.start()
    model(torch.ones(2, 2)).sum().backward()

    def names() -> dict[int, str]:
        gate.come()
        return {}

    recorder._optimizers._parameter_names = names
    handle = register_optimizer_step_pre_hook(lambda *args: None)  # one that comes after ours
    raised: list[BaseException] = []

    def work() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            raised.append(error)

    beside(work, gate, recorder.stop)
    recorder.close()
    handle.remove()
    assert not raised


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def parents(capture: Capture, op: str) -> list[str | None]:
    return [c.parent for c in capture.calls if c.name.startswith(op) and c.direction == "backward"]


def test_operators_of_backward_name_the_call_of_their_own_thread(tmp_path: Path) -> None:
    """Nodes of the graph are numbered by each thread for itself."""
    gate = Gate()

    def held(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh().sigmoid()
        gate.come()
        return y

    def program() -> None:
        beside(backward_of(held), gate, backward_of(lambda x: x.exp().sin()))

    capture = record(tmp_path, program, level="L2")
    assert parents(capture, "Aten.cos.") == ["Aten.sin.0.forward"]
    assert parents(capture, "Aten.sigmoid_backward.") == ["Aten.sigmoid.0.forward"]
    assert parents(capture, "Aten.tanh_backward.") == ["Aten.tanh.0.forward"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Treble(Double):
    pass


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_functions_of_other_threads(tmp_path: Path, level: str) -> None:
    """Their nodes have the same numbers, and are met in a thread that has not made them."""
    made: dict[str, torch.Tensor] = {}

    def program() -> None:
        x = ones()
        for kind in (Double, Treble):
            in_thread(lambda kind=kind: made.update({kind.__name__: kind.apply(x)}))
        sine = Calls(torch.sin)
        in_thread(lambda: made.update(sine=sine(made["Double"])))
        (made["Double"].cos() + made["Treble"].tan() + made["sine"]).sum().backward()

    capture = record(tmp_path, program, level=level)
    names = [call.name for call in capture.calls if call.name.startswith("Function.")]
    assert sorted(names) == [
        "Function.Double.0.backward",
        "Function.Double.0.forward",
        "Function.Treble.0.backward",
        "Function.Treble.0.forward",
    ]
