"""Programs of several threads: each is recorded as if it ran alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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

    recorder._observer._optimizers._parameter_names = names
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


def test_backward_raises_while_another_goes_on(tmp_path: Path) -> None:
    gate = Gate()

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            gate.come()
            raise ValueError("bad")

    def fails() -> None:
        with pytest.raises(ValueError, match="bad"):
            backward_of(lambda x: Bad.apply(x.cos()).tanh())()

    goes_on = backward_of(lambda x: x.sin().exp())
    capture = record(tmp_path, lambda: beside(fails, gate, goes_on), level="mix")
    assert [call.name for call in capture.calls if call.status != "complete"] == [
        "Module.Calls.backward.0",
        "Function.Bad.0.backward",
    ]
    assert {call.thread for call in capture.calls if call.status == "raised"} == {"first"}


def test_backward_raises_while_another_is_inside_a_call(tmp_path: Path) -> None:
    gate = Gate()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            gate.come()
            return grad * 2

    goes_on = backward_of(lambda x: Slow.apply(x.cos()).tanh())
    thread = threading.Thread(target=goes_on, name="first")

    def bad_hook(grad: torch.Tensor) -> None:
        thread.start()
        gate.wait()
        raise ValueError("bad")

    def with_hook(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(bad_hook)
        return y.exp()

    def program() -> None:
        with pytest.raises(ValueError, match="bad"):
            backward_of(with_hook)()
        gate.open()
        thread.join()

    capture = record(tmp_path, program, level="mix")
    assert {call.status for call in capture.calls if call.thread == "first"} == {"complete"}
    assert [call.name for call in capture.calls if call.status == "raised"] == []


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_in_the_backward_of_another_thread(tmp_path: Path) -> None:
    gates = [Gate(), Gate()]

    def work() -> None:
        with Passing():
            backward_of(held_at(gates[0]))()

    def overlapping() -> None:
        """The one that began first ends first."""
        first = threading.Thread(target=work)
        first.start()
        gates[0].wait()
        second = threading.Thread(target=backward_of(held_at(gates[1])))
        second.start()
        gates[1].wait()
        gates[0].open()
        first.join()
        gates[1].open()
        second.join()
        backward_of(lambda x: x.sin().exp())()

    capture = record(tmp_path, overlapping, level="L1")
    names = [call.name for call in capture.calls]
    for kind in ("sin", "exp"):
        for number in range(3):
            assert f"Tensor.{kind}.{number}.forward" in names
            assert f"Tensor.{kind}.{number}.backward" in names


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


def test_half_of_the_gradients_where_no_thread_made_the_graph(tmp_path: Path) -> None:
    gate = Gate()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def program() -> None:
        losses = [model(torch.ones(2, 2)).sum() for model in (first, second)]
        for parameter in second.parameters():  # whichever comes first
            parameter.register_post_accumulate_grad_hook(gate.come)
        beside(losses[1].backward, gate, losses[0].backward)

    capture = record(tmp_path, program, level="L0")
    grads = [call for call in capture.calls if "parameters_grad" in call.name]
    assert [call.name for call in grads] == [
        "Module.Linear.parameters_grad.0",
        "Module.Linear_1.Linear.parameters_grad.0",
    ]
    assert [len(call.tensors) for call in grads] == [2, 2]


class Boxed(nn.Module):
    """Returns an object that the recorder does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(x=x * self.weight)


def test_gradients_of_a_module_that_another_thread_has_called(tmp_path: Path) -> None:
    """Backward is not seen to come by it."""
    model = Boxed()
    results: list[Any] = []

    def program() -> None:
        in_thread(lambda: results.append(model(torch.ones(2, 2)).x))
        results[0].sum().backward()

    capture = record(tmp_path, program, level="L0")
    assert [call.name for call in capture.calls if "parameters_grad" in call.name] == [
        "Module.Boxed.parameters_grad.0"
    ]


def test_gradients_of_a_module_that_is_recomputed_on_a_device(tmp_path: Path) -> None:
    """In the thread of the device, which does not begin a backward of its own."""
    code = (
        "import sys; from types import SimpleNamespace; import torch; from torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "import tensorprobe as tp; from tensorprobe.devices import sim_npu; sim_npu.install()\n"
        "class Boxed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x): return SimpleNamespace(x=x * self.weight)\n"
        "model = Boxed().npu()\n"
        "with tp.Recorder(sys.argv[1], level='L0'):\n"
        "    x = torch.ones(2, 2, device='npu', requires_grad=True)\n"
        "    checkpoint(lambda x: model(x).x, x, use_reentrant=True).sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls if "parameters_grad" in call.name] == [
        "Module.Boxed.parameters_grad.0"
    ]


def test_gradients_that_another_thread_has_changed(tmp_path: Path) -> None:
    """They are its own: those that it made are written down, not what it does with them."""
    gate = Gate()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def clips() -> None:
        first(torch.ones(2, 2)).sum().backward()
        nn.utils.clip_grad_norm_(first.parameters(), 0.1)
        gate.come()

    def program() -> None:
        beside(clips, gate, lambda: second(torch.ones(2, 2)).sum().backward())

    capture = record(tmp_path, program, level="L0")
    assert [call.name for call in capture.calls if "parameters_grad" in call.name] == [
        "Module.Linear.parameters_grad.0",
        "Module.Linear_1.Linear.parameters_grad.0",
    ]


def test_values_of_two_steps_share_no_number(tmp_path: Path) -> None:
    """A thread may write one down in the step after that it was given the number in."""
    with tp.Recorder(tmp_path, level="L1") as recorder:
        for _ in range(2):
            torch.ones(2).sin()
            recorder.step()
    numbers = []
    for log in sorted(tmp_path.glob("rank0/step*/calls.jsonl")):
        lines = map(json.loads, log.read_text().splitlines())
        numbers.append({line["id"] for line in lines if line["type"] == "value"})
    assert len(numbers) == 2
    assert numbers[0]
    assert numbers[1]
    assert numbers[0].isdisjoint(numbers[1])


@pytest.mark.parametrize("level", LEVELS)
def test_stopped_by_another_thread(tmp_path: Path, level: str) -> None:
    """Its modes stay where they are, and are not there twice after the next start."""
    model = nn.Linear(2, 2)

    def work() -> None:
        model.zero_grad()
        model(torch.ones(2, 2)).tanh().sum().backward()

    with tp.Recorder(tmp_path / "once", level=level):
        work()
    once = tp.load(tmp_path / "once")
    with tp.Recorder(tmp_path / "again", level=level) as recorder:
        work()
        in_thread(recorder.stop)
        work()
        recorder.start()
        recorder.step()
        work()
    again = tp.load(tmp_path / "again")
    names = [call.name for call in once.calls]
    for step in (0, 1):
        assert [call.name for call in again.calls(step=step)] == names


@pytest.mark.parametrize("method", ["stop", "pause"])
@pytest.mark.parametrize("level", LEVELS)
def test_stopped_in_backward(tmp_path: Path, level: str, method: str) -> None:
    """Torch puts back afterwards what modes were on: they are not there twice then."""
    model = nn.Linear(2, 2)

    def work() -> None:
        model.zero_grad()
        model(torch.ones(2, 2)).tanh().sum().backward()

    with tp.Recorder(tmp_path / "once", level=level):
        work()
    once = tp.load(tmp_path / "once")
    with tp.Recorder(tmp_path / "again", level=level) as recorder:
        y = ones().sin()
        y.register_hook(lambda grad: getattr(recorder, method)())
        y.sum().backward()
        recorder.start()
        recorder.step()
        work()
    again = tp.load(tmp_path / "again")
    assert [call.name for call in again.calls(step=1)] == [call.name for call in once.calls]
