"""Torch calls recorded in C++, from the mode to their lines, and what stands in their way."""

from __future__ import annotations

import gc
import json
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_same_both_ways import both_ways, needs_module
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.record.tape import Tape
from tensorprobe.tensors.summarizer import Summarizer

pytestmark = needs_module


def as_call(body: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function of the program's own: modes see its calls, and nothing inside of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(tuple(a for a in args if isinstance(a, Tensor))):
            return handle_torch_function(call, args, *args, **kwargs)
        return body(*args, **kwargs)

    call.__name__ = call.__qualname__ = body.__name__
    return call


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.rglob("calls.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += [line for line in lines if line["type"] == kind]
    return found


def test_plain_calls_come_by_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("begin", "end"):
        own = getattr(Tape, name)

        def ask(tape: Tape, *args: Any, own: Any = own, name: str = name, **named: Any) -> Any:
            asked.append(name)
            return own(tape, *args, **named)

        monkeypatch.setattr(Tape, name, ask)
    with tp.Recorder(tmp_path / "a", level="L1", keep="stats"):
        x = torch.ones(4, 4, requires_grad=True)  # opens the step
        w = torch.ones(4, 4, requires_grad=True)
        asked.clear()
        y = F.linear(x, w).relu() * 2.0
        y = torch.cat([y, y.detach()], dim=0)[1:, ..., None].to(torch.float32)
        loss = y.clone().add_(1).sum()
        assert asked == []
        loss.backward()
        assert loss.item() > 0
        assert asked == []
    assert len(lines_of(tmp_path, "call")) > 12
    assert lines_of(tmp_path, "gap") == []


def arguments() -> None:
    """Every kind of argument and result that is written without asking, and some that are not."""
    x = torch.arange(16.0).view(4, 4)
    for number in (0.1, 1e-5, 1e16, 1e22, 1.5e300, 5e-324, -0.0, 3.0, 123456789.125, 2**53 + 1.0):
        x.mul(number)
    for bound in (float("inf"), float("-inf"), float("nan"), 2**40, -1, True):
        x.clamp(min=bound)
    torch.full((2,), 2**62)
    x.sum(())
    x.sum((0, 1), keepdim=True, dtype=torch.float64)
    x.sum(dim=[0, -1])
    x[1:, ..., None, ::2]
    x[[0, 2], [1, 1]]
    x[(torch.tensor([0, 1]), slice(None, 2))]
    x[x > 2] = 0.5
    x.view(torch.Size([2, 8])).expand(3, *(2, 8)).permute((2, 0, 1))
    torch.cat(tensors=[x, x], dim=0)
    torch.stack([x, x.T, x])
    torch.addmm(x, x, mat2=x, beta=0.5)
    x.to("cpu", torch.float64, memory_format=torch.preserve_format)
    torch.zeros_like(x, device=torch.device("cpu"), layout=torch.strided)
    F.pad(x, (1, 1), "constant", 0.25)
    F.interpolate(x[None, None], scale_factor=(2.0, 2.0), mode="bilinear")
    torch.einsum("ij,jk->ik", x, x)
    torch.tensor_split(x, [1, 3])
    torch.block_diag(*[x] * 3)
    torch.broadcast_tensors(x, x[0])
    torch.max(x, dim=0)
    torch.equal(x, x)
    torch.is_nonzero(x[0, 0])
    bool(x.any())
    x.sum().item()
    x.long()[3, 3].item()
    x.tolist()
    x.add(1 + 2j)
    torch.add(x, x, out=torch.zeros(4, 4))
    torch.nn.utils.rnn.pad_sequence([x[0], x[1, :2]])
    x.contiguous().detach().numpy()


def own_functions() -> None:
    """Names that JSON has to write in another way, results and errors of any kind."""
    x = torch.ones(3, requires_grad=True)

    def returns(value: Any) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            return value

        return body

    for name in ('quo"ted', "back\\slash", "new\nline", "non-ascii é", "del\x7f", "lone\udcff"):
        body = returns(None)
        body.__name__ = name
        as_call(body)(x)
    for value in (None, True, 7, 2**70, 1.5, float("inf"), "text", [x, x], {"a": x}, (x, 1), ...):
        body = returns(value)
        as_call(body)(x, value, key=value)
    as_call(returns(x))(x, **{'odd"key': x, "other": 'te"xt', "surrogate": "\udcff"})
    around: list[Any] = [x]
    around.append(around)
    as_call(returns(None))(x, around, [[[[[[x]]]]]], list(range(100)), slice(0, x))

    def writes(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            a.add_(1)
        return b

    as_call(writes)(torch.ones(3), x)

    def fails(x: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        as_call(fails)(x)


def with_autocast() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = (x @ x).relu()
    y.float().sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", ["structure", "stats", "digest"])
@pytest.mark.parametrize("program", [arguments, own_functions, with_autocast])
def test_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], None], keep: str
) -> None:
    both_ways(tmp_path, monkeypatch, program, level="L1", keep=keep)


class Named(nn.Module):
    """Children with names that JSON has to escape."""

    def __init__(self) -> None:
        super().__init__()
        for name in ('quo"ted', "back\\slash", "tab\t", "é", "plain"):
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x).relu()
        return x


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_odd_names_of_modules_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    model = Named()

    def program() -> None:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for name in ('a "name"', "ünicode", "MainThread"):
            thread = threading.Thread(
                target=lambda: model(torch.ones(2, 3)).sum().backward(), name="".join(list(name))
            )
            thread.start()
            thread.join()

    both_ways(tmp_path, monkeypatch, program, level=level, keep="stats")


def recorded_both_ways(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[tp.Recorder], Any]
) -> list[bytes]:
    """The lines of a program that has the recorder in its hands, by C++; by Python they are the
    same."""
    found = []
    for name, module in (("swift", native.MODULE), ("plain", None)):
        with monkeypatch.context() as patch:
            patch.setattr(native, "MODULE", module)
            with tp.Recorder(folder / name, level="L1", keep="stats") as rec:
                torch.manual_seed(0)
                program(rec)
            logs = sorted((folder / name).rglob("calls.jsonl"))
            found.append([line for log in logs for line in log.read_bytes().splitlines()])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("what", ["stop", "pause", "step", "stop and start", "only"])
def test_the_recorder_changes_inside_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def program(rec: tp.Recorder) -> None:
        def change(x: Tensor) -> Tensor:
            for name in what.split(" and "):
                if name == "only":
                    rec.only(nn.Linear(1, 1))
                else:
                    getattr(rec, name)()
            return x * 2

        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        y = as_call(change)(x * 3)
        (y + 1).sum().backward()

    assert len(recorded_both_ways(tmp_path, monkeypatch, program)) > 5


def test_backward_in_another_step_and_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rec: tp.Recorder) -> None:
        x = torch.ones(3, requires_grad=True)
        first, second = (x * 2).sin().sum(), (x.exp() @ x).cos()
        first.backward(retain_graph=True)
        first.backward(retain_graph=True)
        rec.step()
        (x * 5).sum().backward()
        first.backward()
        second.backward()
        third = (x * 7).sum()
        rec.stop()
        third.backward(retain_graph=True)
        rec.start()
        third.backward()

    text = b"\n".join(recorded_both_ways(tmp_path, monkeypatch, program))
    assert b"backward pass 2 through the same graph" in text
    assert b"its forward ran in step 0" in text


def test_hooks_of_the_program_that_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(grad: Tensor) -> None:
        raise ValueError("planted")

    def program(rec: tp.Recorder) -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(raises)
        with pytest.raises(ValueError, match="planted"):
            y.sin().sum().backward()
        (x * 3).sum().backward()

    recorded_both_ways(tmp_path, monkeypatch, program)


@pytest.mark.parametrize("size", [3, 4])
def test_what_fails_in_recording_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """On the way in, or on the way out, of forward and of backward."""
    submit = Summarizer.submit

    def fails(self: Summarizer, tensor: Tensor, *form: Any) -> Any:
        if tensor.numel() == size:
            raise RuntimeError("planted")
        return submit(self, tensor, *form)

    monkeypatch.setattr(Summarizer, "submit", fails)

    def program(rec: tp.Recorder) -> None:
        x = torch.ones(2, requires_grad=True)
        y = torch.cat([x, x.detach()[:1]])
        z = F.pad(y, (0, 1))
        assert z.tolist() == [1, 1, 1, 0]
        z.exp().sum().backward()
        assert x.grad is not None

    text = b"\n".join(recorded_both_ways(tmp_path, monkeypatch, program))
    assert text.count(b'"reason":"RuntimeError: planted"') >= 2


def test_a_signal_while_a_call_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler makes calls of its own, with the mode off and on, and may raise."""
    submit = Summarizer.submit
    model = nn.Linear(2, 2)
    due = []

    def signals(self: Summarizer, tensor: Tensor, *form: Any) -> Any:
        if due and tensor.numel() == 5:
            signal.raise_signal(signal.SIGUSR1)
        return submit(self, tensor, *form)

    def handle(number: int, frame: Any) -> None:
        model(torch.ones(1, 2)).sum().backward()
        if due.pop():
            raise KeyboardInterrupt

    monkeypatch.setattr(Summarizer, "submit", signals)

    def program(rec: tp.Recorder) -> None:
        x = torch.ones(5, requires_grad=True)
        due.extend([True, False, False])  # from the last
        y = (x * 2).cos()
        with pytest.raises(KeyboardInterrupt):
            y.sin()
        assert not due
        y.sum().backward()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        recorded_both_ways(tmp_path, monkeypatch, program)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_threads_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(30):
            model(torch.ones(2, 4) * 1).sum().backward()

    with tp.Recorder(tmp_path / "a", level="L1", keep="stats"):
        model(torch.ones(2, 4))
        threads = [threading.Thread(target=work, name=f"t{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls, ends = lines_of(tmp_path, "call"), lines_of(tmp_path, "end")
    assert lines_of(tmp_path, "gap") == []
    assert len(calls) > 4 * 30 * 6
    assert len({call["name"] for call in calls}) == len(calls)
    assert sorted(call["id"] for call in calls) == sorted(end["id"] for end in ends)


def test_a_mode_goes_with_its_recorder(tmp_path: Path) -> None:
    """And with the graphs that it listened to."""
    x = torch.ones(3, requires_grad=True)

    def run() -> tuple[Any, ...]:
        with tp.Recorder(tmp_path / "a", level="L1", keep="stats") as rec:
            loss = (x * 2).sin().sum()
            kept = (x * 4).sum()
            loss.backward()
        return weakref.ref(rec._mode), weakref.ref(rec._tape), kept

    mode, tape, kept = run()
    kept.backward()  # nobody writes it down
    del kept
    gc.collect()
    assert mode() is None
    assert tape() is None


def test_what_is_missing_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="by name"):
        native.MODULE.Calls()
    with pytest.raises(TypeError, match="lines is missing"):
        native.MODULE.Calls(tape=1, lines=2)
