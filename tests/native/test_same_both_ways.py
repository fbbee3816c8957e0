"""The parts of the recorder in C++ write what those in Python write, byte for byte.

But for the numbers of stacks at L0: in Python a mode is on then, and frames of torch, which are not
shown, tell some stacks apart.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.store.lines import CallLine, EndLine
from tensorprobe.store.writer import CaptureWriter
from tiny_models import MODELS

needs_module = pytest.mark.skipif(
    native.MODULE is None, reason="not built: python -m tensorprobe.native.build"
)


def logs(folder: Path, program: Callable[[], Any], **options: Any) -> list[list[bytes]]:
    """The lines of two steps, the same program in both: those of calls as they come, and then those
    of values, some of which come through another thread."""
    with tp.Recorder(folder, **options) as rec:
        for _ in range(2):
            torch.manual_seed(0)
            program()
            rec.step()
    files = sorted(folder.rglob("calls.jsonl"))
    logs = [_renumbered(path.read_bytes()).splitlines() for path in files]
    value = b'{"type":"value"'
    return [
        [line for line in log if not line.startswith(value)]
        + sorted(line for line in log if line.startswith(value))
        for log in logs
    ]


def _renumbered(log: bytes) -> bytes:
    """The log with stacks numbered as they come."""
    numbers: dict[bytes, int] = {}

    def number(found: re.Match[bytes]) -> bytes:
        return b"%s%d" % (found[1], numbers.setdefault(found[2], len(numbers)))

    return re.sub(rb'("type":"stack","id":|"stack":)(\d+)', number, log)


def both_ways(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any], **options: Any
) -> None:
    """Record by C++ and by Python; both wrote something, and the same."""
    program()  # what is made once, and lives on, is there in both
    found = []
    for name, module in (("swift", native.MODULE), ("plain", None)):  # from one line: stacks
        with monkeypatch.context() as patch:
            patch.setattr(native, "MODULE", module)
            found.append(logs(folder / name, program, **options))
    swift, plain = found
    assert len(plain) == 2
    for ours, theirs in zip(swift, plain, strict=True):
        assert len(theirs) > 5
        assert ours == theirs


def _training(name: str) -> Callable[[], None]:
    model, loss = MODELS[name]()

    def run() -> None:
        model.zero_grad()
        loss(model).backward()

    return run


@needs_module
@pytest.mark.parametrize("keep", ["structure", "stats", "digest", "tensors"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, keep: str) -> None:
    both_ways(tmp_path, monkeypatch, _training("llama"), level=level, keep=keep)


@needs_module
@pytest.mark.slow
@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, level: str
) -> None:
    # mixtral asks for memory and records it before it is written to
    keep = "structure" if (name, level) == ("mixtral", "mix") else "stats"
    both_ways(tmp_path, monkeypatch, _training(name), level=level, keep=keep)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Own(Tensor):
    """A subclass that changes nothing."""


class Split(nn.Module):
    """Several results, of which one is used inside, and an input that is handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.inner(x)
        return first, first * 2 + self.inner(first), mask


SPLIT = Split()


def _memory_of_numpy() -> Callable[[], None]:
    """What numpy has, or is given, and writes to; also through a tensor that is not plain."""
    layer = nn.Linear(4, 4)

    def run() -> None:
        array = np.ones((2, 4), np.float32)
        given, own = torch.from_numpy(array), torch.ones(2, 4)
        of_own = own.as_subclass(Own).numpy()
        weight = layer.weight.detach().numpy()
        layer.zero_grad()
        for value in (1, 2, 2, 3):
            array[...] = of_own[...] = weight[...] = value
            layer(given + own).sum().backward()
            own.data.mul_(2)
            given[1:].t().neg().add(own[1:].t().as_subclass(Own))

    return run


def graphs() -> None:
    """Ways through the graph: one node and many, inputs twice, results that are views of inputs."""
    SPLIT.zero_grad()
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    y = F.linear(x, w) + F.linear(x.unsqueeze(0), w, w[0])[0]
    y = torch.addcmul(y, y, w) * y
    y = torch.cat([y, x, y]).view(3, 4, 4).unbind()[1] + torch.stack([x, w]).sum(0)
    y = Square.apply(y).clone()
    y[1:] *= 2
    y[0].mul_(3)
    values, _ = y.sort()
    first, second, mask = SPLIT(values, values > 0)
    z = torch.where(mask, first, second)
    z.register_hook(lambda grad: grad * 2)
    loss = z.square().mean() + checkpoint(lambda v: v.sin().sum(), z, use_reentrant=False)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.sum().backward(retain_graph=True)
    loss.backward()


def odd_tensors() -> None:
    """Tensors that are not plain memory, and values that are no tensors."""
    x = torch.randn(4, 4)
    c = torch.complex(x, x).conj()
    with torch.inference_mode():
        torch.relu(x).add_(1)
    c.imag.sin()  # negated, and conjugated
    torch.abs(c)
    torch.relu(torch.empty(3, device="meta"))
    torch.mm(x.to_sparse(), x)
    torch.relu(x.as_subclass(Own)).sum()
    torch.vmap(torch.sin)(x)
    torch.func.grad(lambda v: v.sin().sum())(x)
    x.data.mul_(2)
    torch.relu(x)
    torch.full((2,), float("inf")).clamp(min=-1, max=float("nan"))
    torch.add(x, x, alpha=3)
    x[1:, None, ...].expand(3, 3, 4).sum((0, 1), keepdim=True, dtype=torch.float64)
    torch.einsum("ij,jk->ik", x, x.T)
    x.to(torch.bfloat16).float().masked_fill(x > 0, 2**62).topk(2)


def in_threads() -> None:
    """Backward in another thread, and the graph freed there."""
    x = torch.randn(4, 4, requires_grad=True)
    loss = [(x * 2).sin().sum()]
    thread = threading.Thread(target=lambda: loss.pop().backward(), name="beside")
    thread.start()
    thread.join()


@needs_module
@pytest.mark.parametrize("keep", ["stats", "digest", "tensors"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
def test_memory_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, keep: str
) -> None:
    program = _memory_of_numpy()
    both_ways(tmp_path, monkeypatch, program, level=level, keep=keep, stacks=level != "L0")


@needs_module
@pytest.mark.filterwarnings("ignore:.*(lazy|sparse|Sparse)")
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
@pytest.mark.parametrize("program", [graphs, odd_tensors, in_threads])
def test_what_is_not_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], None], level: str
) -> None:
    if level == "L0" and program is not graphs:
        pytest.skip("no module")
    keep = "structure" if level == "L2" else "stats"  # it has what is in memory nobody wrote to
    both_ways(tmp_path, monkeypatch, program, level=level, keep=keep)


@needs_module
@pytest.mark.parametrize(
    "options",
    [
        {"directions": ["backward"]},
        {"sides": ["output"]},
        {"apis": ["*linear*", "*cat*"]},
        {"flush": "call"},
        {"keep": "tensors", "digests": "crc32"},
    ],
    ids=lambda options: "-".join(options),
)
def test_of_a_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    both_ways(tmp_path, monkeypatch, graphs, **{"level": "mix", "keep": "stats", **options})


@needs_module
def test_an_error_in_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("planted")

    def program() -> None:
        x = torch.randn(4, 4, requires_grad=True)
        with pytest.raises(RuntimeError):
            torch.mm(x, torch.randn(3, 3))
        with pytest.raises(ValueError, match="planted"):
            (Fails.apply(x * 2) * 3).sum().backward()

    both_ways(tmp_path, monkeypatch, program, level="L1", keep="stats")


@needs_module
def test_an_error_of_torch_while_a_call_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap has torch's words for it, without where in C++ it was raised."""

    def program() -> None:
        base = torch.randn(4, 4, requires_grad=True) * 1
        first, _ = base.split(2)
        base.add_(1)
        with pytest.raises(RuntimeError, match="multiple views"):
            torch.add(first, 1)
        torch.randn(2) + 1

    both_ways(tmp_path, monkeypatch, program, level="L1", keep="structure")
    assert b"multiple views" in b"".join(
        path.read_bytes() for path in (tmp_path / "swift").rglob("calls.jsonl")
    )


def halved(x: Tensor) -> Tensor:
    """A function of the program's that other tools see; there is no gradient of what is inside."""
    if torch._C._len_torch_function_stack():
        result: Tensor = handle_torch_function(halved, (x,), x)
        return result
    return (x // 2) * x


@needs_module
def test_a_node_without_a_backward_inside_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        halved(torch.randn(4, requires_grad=True))
        torch.randn(4) + 1

    both_ways(tmp_path, monkeypatch, program, level="L1", keep="structure")
    assert not tp.load(tmp_path / "plain").gaps


class Normed(nn.Module):
    """Its last node is that of a call whose inputs are not in the order of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x.relu())


class Hooked(nn.Module):
    """Registers a hook of its own on the node of its result."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.grad_fn.register_prehook(lambda grads: None)  # type: ignore[union-attr]
        return y


NORMED, HOOKED = Normed(), Hooked()


def beside_hooks_of_python() -> None:
    NORMED.zero_grad()
    x = torch.ones(2, 4, requires_grad=True)
    y = HOOKED(NORMED(x * 1))
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    y.sum().backward()


@needs_module
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_hooks_come_in_the_order_in_which_they_were_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    both_ways(tmp_path, monkeypatch, beside_hooks_of_python, level=level, keep="stats")


class Changing(nn.Module):
    """What is told of it changes from call to call: attributes, parameters, buffers, children."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.scale = 1.0
        self.own = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_parameter("none", None)
        self.tables = [1, 2]  # such a module is noted anew at every call

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        self.seen += 1  # type: ignore[has-type]
        y: Tensor = self.up(x) * self.scale * self.own
        for part in self.parts:
            y = part(y)
        return y if mask is None else y * mask


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Changing()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.plain = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        inner, plain = self.inner, self.plain
        inner.scale, inner.up.training = 1.0, True
        y = plain(inner(self.norm(x), mask=mask))
        inner.scale = 2.0
        inner.parts[0].bias = None
        plain.extra = True  # type: ignore[assignment]
        y = y + plain(self.inner(x)) + self.drop(x)
        del plain.extra
        inner.parts.append(nn.ReLU())
        inner.up.eval()
        y = y + plain(inner(x=x)) + self.attention(x[None], x[None], x[None])[0][0]
        plain.weight = nn.Parameter(plain.weight.detach() * 2)
        made = copy.deepcopy(plain)  # of a name of its own
        y = made(plain(y)) + made(y)
        with torch.no_grad():
            y = y + plain(y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y + plain(y).float()
        y = y + torch.vmap(plain)(y) + checkpoint(plain, y, use_reentrant=False)
        return y


AROUND = Around()


def changing_modules() -> None:
    copy.deepcopy(AROUND)(torch.randn(3, 4, requires_grad=True)).sum().backward()


class Results(nn.Module):
    """Hands back what it is asked for."""

    def forward(self, kind: str, x: Tensor) -> Any:
        if kind == "raises":
            raise ValueError("planted")
        results: dict[str, Callable[[], Any]] = {
            "nothing": lambda: None,
            "same": lambda: x,
            "list": lambda: [x * 2, {"a": x.sin(), "n": 3}],
            "one": lambda: (x * 2,),
            "twice": lambda: (y := x * 2, y),
            "written": lambda: x.add_(1),
            "view": lambda: x[1:].mul_(2),
            "inner": lambda: x.exp() * x.exp() + x,
            "detached": lambda: x.detach(),
            "subclass": lambda: (x * 1).as_subclass(Own),
        }
        return results[kind]()


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.results = Results()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        ask = self.results
        with pytest.raises(ValueError, match="planted"):
            ask("raises", x)
        ask("nothing", x)
        y = ask("same", x * 1)
        first, more = ask("list", y)
        y = first + more["a"] + ask("one", y)[0] + sum(ask("twice", y))
        y = ask("written", y * 1) + ask("inner", y) + ask("detached", y)
        whole = y * 1
        ask("view", whole)
        ask("view", whole[1:])
        y = self.identity(whole) + ask("subclass", y).as_subclass(Tensor)
        return Square.apply(y)


def results_of_modules() -> None:
    Asking()(torch.randn(4, 4, requires_grad=True)).sum().backward()


class Left(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


SMALL = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def modules_in_threads() -> None:
    """One model in several threads; and one that is left by an exception that runs no hook."""
    model, left = SMALL, nn.Sequential(nn.Identity(), Left())
    model.zero_grad()
    for name in ("first", "second"):
        thread = threading.Thread(
            target=lambda: model(torch.ones(1, 4, requires_grad=True)).sum().backward(), name=name
        )
        thread.start()
        thread.join()
    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(left)(torch.ones(2))
    nn.Sequential(model)(torch.ones(1, 4))


@needs_module
@pytest.mark.parametrize("keep", ["structure", "stats", "tensors"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("program", [changing_modules, results_of_modules, modules_in_threads])
def test_modules(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[], None],
    level: str,
    keep: str,
) -> None:
    both_ways(tmp_path, monkeypatch, program, level=level, keep=keep)


@needs_module
@pytest.mark.parametrize(
    "options",
    [
        {"directions": ["backward"]},
        {"directions": ["forward"]},
        {"sides": ["output"]},
        {"modules": ["inner*"]},
        {"names": ["plain"]},
        {"keep_tensors": ["plain"]},
        {"stacks": False},
        {"flush": "call"},
        {"dtypes": "float"},
    ],
    ids=lambda options: "-".join(options),
)
def test_modules_of_a_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {"level": "L0", "keep": "stats", **options}
    both_ways(tmp_path, monkeypatch, changing_modules, **options)


@needs_module
def test_trouble_with_a_module_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the recorder's own, in C++ as in Python; the program goes on."""

    class Unknowable(dict[str, Any]):
        def items(self) -> Any:
            raise ValueError("planted")

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    odd = Odd()
    odd.__dict__["_parameters"] = Unknowable(a=nn.Parameter(torch.ones(1)))
    model = nn.Sequential(nn.Linear(2, 2), odd, nn.Linear(2, 2))

    def program() -> None:
        assert model(torch.ones(1, 2)).shape == (1, 2)

    with tp.Recorder(tmp_path / "a", level="L0", keep="stats") as rec:
        program()
        rec.stop()
        capture = tp.load(tmp_path / "a")
    assert [gap.name for gap in capture.gaps] == ["Module.Odd"]
    assert len(capture.calls) == 3
    both_ways(tmp_path, monkeypatch, program, level="L0", keep="stats")


@needs_module
def test_a_disk_that_fails_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised while a module's line is written is a gap too, and Ctrl-C goes on."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for planted in (ValueError("planted"), KeyboardInterrupt()):
        recorder = tp.Recorder(tmp_path / type(planted).__name__, level="L0", keep="stats")
        with recorder:
            model(torch.ones(1, 2))
            tape = recorder._tape
            assert tape is not None
            with monkeypatch.context() as patch:
                patch.setattr(tape.lines, "arguments", mock.Mock(side_effect=planted))
                if isinstance(planted, KeyboardInterrupt):
                    with pytest.raises(KeyboardInterrupt):
                        model(torch.ones(1, 2))
                else:
                    model(torch.ones(1, 2))
            model(torch.ones(1, 2))
            gaps = recorder._writer.n_gaps if recorder._writer else 0
        assert gaps == (3 if isinstance(planted, ValueError) else 0)


@needs_module
def test_what_is_known_of_a_module_goes_with_it(tmp_path: Path) -> None:
    """A module that takes the place of another in memory is not taken for it."""

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for size in (3, 4, 5):
                for _ in range(3):
                    x = nn.Linear(x.shape[-1], size)(x)
            return x

    outer = Outer()
    with tp.Recorder(tmp_path / "a", level="L0", keep="structure") as rec:
        outer(torch.ones(1, 2))
        rec.stop()
        calls = tp.load(tmp_path / "a").calls
    made = [note for call in calls for note in call.notes if note.startswith("made as")]
    sizes = [2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert made == [
        f"made as Linear(in_features={a}, out_features={b}, bias=True)"
        for a, b in itertools.pairwise(sizes)
    ]


@needs_module
def test_a_recorder_goes_with_the_classes_of_its_modules(tmp_path: Path) -> None:
    """What C++ knows of a module holds its class, and that may hold the recorder."""

    def use() -> weakref.ref[tp.Recorder]:
        recorder = tp.Recorder(tmp_path / "a", level="L0", keep="stats")

        class Holds(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                assert recorder.current_step == 0
                return x * 2

        model = nn.Sequential(Holds(), nn.Linear(2, 2))
        with recorder:
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
        return weakref.ref(recorder)

    reference = use()
    gc.collect()
    assert reference() is None


class Stops(nn.Module):
    """Has the recording stop, or start, while it runs."""

    recorder: tp.Recorder

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.does = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.does:
            getattr(self.recorder, self.does)()
        y: Tensor = self.inner(x)
        return y


@needs_module
def test_a_recording_that_ends_inside_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    stops = Stops()
    model = nn.Sequential(nn.Identity(), stops, nn.Identity())
    for name, module in (("swift", native.MODULE), ("plain", None)):
        monkeypatch.setattr(native, "MODULE", module)
        recorder = Stops.recorder = tp.Recorder(tmp_path / name, level="L0", keep="structure")
        with recorder:
            for stops.does in ("", "stop", "start", "", "step", "pause", "start", ""):
                model(torch.ones(1, 2)).sum().backward()
        calls = tp.load(tmp_path / name).calls
        found.append([(call.step, call.name, call.status, call.notes) for call in calls])
    assert found[0] == found[1]
    assert len(found[0]) > 30


@needs_module
def test_hooks_that_are_taken_apart() -> None:
    with pytest.raises(TypeError, match="hooks is missing"):
        native.MODULE.Hooks(tape=None)
    with pytest.raises(TypeError):
        native.MODULE.Hooks()


COMPILED = """
import sys, torch
from torch._dynamo import compiled_autograd
import tensorprobe as tp
model = torch.nn.Linear(4, 3)
with tp.Recorder(sys.argv[1], level="L1", keep="structure"):
    loss = model(torch.randn(2, 4, requires_grad=True)).sum().sin()
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()
assert model.weight.grad is not None
"""


@needs_module
def test_compiled_autograd_takes_the_hooks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path / "a")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


COLLECTED = """
import gc, sys, torch
from torch import nn
import tensorprobe as tp
small = nn.Linear(2, 2)
class Finalized:
    def __init__(self): self.itself = self
    def __del__(self): small(torch.ones(1, 2))
class Long(nn.Module):
    def forward(self, a, b):
        c = a * b
        for _ in range(50): c = c * a + b
        Finalized(); gc.enable()
        return c
model = Long()
with tp.Recorder(sys.argv[1], level="L0", keep="structure"):
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for threshold in range(20, 400, 4):
        gc.collect(); gc.disable(); gc.set_threshold(threshold)
        model(x * 1, y * 1).sum().backward()
"""


@needs_module
def test_a_finalizer_that_calls_a_module_while_a_graph_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED, str(tmp_path / "a")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_module
def test_a_step_that_is_closed_while_a_call_waits_for_the_log(tmp_path: Path) -> None:
    """Its file's number may be that of a file of the program's by then."""
    writer = CaptureWriter(tmp_path / "a", 0, "run", {}, {})
    writer.write_by(native.MODULE)
    writer.begin_step(0)
    step = writer._step
    assert step is not None
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    thread = threading.Thread(target=lambda: writer.call(CallLine(id=0, name="a", op="b")))
    with writer._log_lock:
        thread.start()
        while not step.lines:
            time.sleep(0.01)
        time.sleep(0.1)  # it waits for the lock now
        step.closed = True
        log, step.log_fd = step.log_fd, own
    thread.join()
    assert os.fstat(own).st_size == 0
    assert writer.error is None
    step.log_fd, step.closed = log, False
    os.close(own)
    writer.close()


@needs_module
def test_what_only_passes_for_a_tensor(tmp_path: Path) -> None:
    fake = mock.Mock(spec=Tensor)
    assert isinstance(fake, Tensor)
    assert native.MODULE.versions([(fake, ("0",)), (torch.ones(2), ("1",))]) == [-1, 0]
    edges = native.MODULE.Edges([(fake, ("0",))])
    assert edges.exits_of(fake) is None
    assert edges.notes()[1] == []


@needs_module
def test_wrong_arguments_are_errors_of_python() -> None:
    module = native.MODULE
    for wrong in (None, [1], [(1, 2)], [(torch.ones(1), "0")]):
        with pytest.raises(TypeError):
            module.Edges(wrong)
        with pytest.raises(TypeError):
            module.versions(wrong)
    with pytest.raises(TypeError):
        module.Contents(1)
    with pytest.raises(RuntimeError, match="nothing was found"):
        module.Edges([]).listen(lambda *grads: None)
    with pytest.raises(RuntimeError, match="not a node"):
        module.Regions().walk(module.Edges([]), [1], None, True)


def contents_by(make: Callable[..., int]) -> Any:
    """Contents that have their numbers from `make`, plain or not."""
    return native.MODULE.Contents(make, lambda tensor: None, make, None, None, {}, make)


@needs_module
def test_memory_given_out_again_is_another_content() -> None:
    """An allocator that hands the same memory out must not bring old numbers back."""
    made = iter(range(1, 10_000))
    contents = contents_by(lambda *content: next(made))
    numbers, addresses = [], []
    for _ in range(100):
        tensor = torch.ones(1000)
        addresses.append(tensor.data_ptr())
        numbers.append(contents.of(tensor, 7, None, "input", "0", "stats"))
        assert contents.of(tensor, 7, None, "input", "0", "stats") == numbers[-1]
        del tensor
    assert len(set(addresses)) < 100
    assert len(set(numbers)) == 100


@needs_module
def test_what_changes_a_content() -> None:
    made = iter(range(1, 100))
    contents = contents_by(lambda *content: next(made))

    def number(tensor: Tensor, form: int = 7) -> int:
        found: int = contents.of(tensor, form, None, "input", "0", "stats")
        return found

    x = torch.ones(4, 4)
    first = number(x)
    assert number(x.view(4, 4)) == first
    assert number(x.detach()) == first
    assert number(x, form=8) != first
    assert number(x[1:]) != first
    assert number(torch._neg_view(x)) not in (first, number(torch._neg_view(x)))
    x.add_(1)
    second = number(x)
    assert second != first
    contents.forget(x)
    assert number(x) not in (first, second)
    contents.forget(torch.ones(2).to_sparse())  # has no storage: never known
    with torch.inference_mode():
        y = torch.ones(2)
        assert number(y) != number(y)  # it has no version


@needs_module
def test_a_recorder_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither objects, nor memory that no collector sees: hooks, edges, contents."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def steps(count: int) -> None:
        with tp.Recorder(tmp_path / "a", level="mix", keep="stats") as rec:
            for _ in range(count):
                model(torch.randn(4, 8)).sum().backward()
                rec.step()
        gc.collect()

    def alive() -> int:
        return sum(type(o).__module__ == native.NAME for o in gc.get_objects())

    steps(100)
    steps(200)
    before, objects, natives = resident(), len(gc.get_objects()), alive()
    steps(600)
    assert resident() - before < 12 << 20
    assert len(gc.get_objects()) - objects < 2000
    assert alive() <= natives  # those of the last recorder


@needs_module
def test_a_full_disk_ends_the_log_and_not_the_program(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a", 0, "run", {}, {})
    writer.write_by(native.MODULE)
    writer.begin_step(0)
    assert writer._step is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._step.log_fd)
    os.close(full)
    writer.call(CallLine(id=0, name="a", op="b"))
    assert isinstance(writer.error, OSError)
    writer.call(CallLine(id=1, name="a", op="b"))
    writer.end(EndLine(id=1))
    writer.close()


@needs_module
def test_text_that_is_not_for_utf8(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a", 0, "run", {}, {})
    writer.write_by(native.MODULE)
    writer.call(CallLine(id=0, name="before a step", op="b"))
    writer.begin_step(0)
    writer.call(CallLine(id=0, name="a\udcff", op="b"))
    writer.end(EndLine(id=0, outputs=object()))  # msgspec cannot write it
    assert (writer.n_calls, writer.n_gaps) == (1, 1)
    writer.close()
    (log,) = tmp_path.rglob("calls.jsonl")
    first, gap, *_ = log.read_text().splitlines()
    assert r'"name":"a\\udcff"' in first
    assert "end of call 0" in gap


@needs_module
def test_ctrl_c_while_a_line_is_written(tmp_path: Path) -> None:
    """It comes after the line, which is whole."""
    writer = CaptureWriter(tmp_path / "a", 0, "run", {}, {})
    writer.write_by(native.MODULE)
    writer.begin_step(0)
    assert writer._step is not None
    read_end, write_end = os.pipe()
    os.dup2(write_end, writer._step.log_fd)
    got: list[bytes] = []

    def interrupt() -> None:
        while select.select([], [write_end], [], 0)[1]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)  # the pipe is full: the line is being written
        time.sleep(0.2)
        got.append(os.read(read_end, 1 << 22))
        while not got[-1].endswith(b"\n"):
            got.append(os.read(read_end, 1 << 22))

    def write() -> None:
        writer.call(CallLine(id=0, name="x" * (1 << 20), op="b"))
        time.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert b"".join(got).count(b"x") >= 1 << 20
    assert not writer._log_lock._is_owned()  # type: ignore[attr-defined]
    os.close(write_end)
    os.close(read_end)
    writer.close()
