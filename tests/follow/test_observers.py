"""An observer is told what a program does; several are told in one pass what each is told alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp
from tensorprobe.failures.watch import ErrorWatch
from tensorprobe.follow.follower import Follower
from tensorprobe.follow.module_hooks import ModuleCall
from tensorprobe.follow.naming import ApiName
from tensorprobe.follow.observer import Observer, Several
from tensorprobe.follow.place import Place
from tensorprobe.guarding.findings import Finding
from tensorprobe.overflow.watch import OverflowWatch


class Log(Observer):
    """Writes down all that it is told."""

    on = True
    sees_small_calls = True
    surrounds_backward = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(
        self, api: ApiName, func: Any, args: Any, kwargs: Any, frame: FrameType | None
    ) -> str:
        assert frame is not None
        self.lines.append(f"begin {api.stem} in {frame.f_code.co_name}")
        return api.stem

    def end(self, call: str, result: Any) -> None:
        self.lines.append(f"end {call}")

    def raised(self, call: str, error: BaseException) -> None:
        self.lines.append(f"raised {call}: {type(error).__name__}")

    def small_call_raised(
        self, api: ApiName, args: Any, kwargs: Any, error: Exception, frame: FrameType | None
    ) -> None:
        self.lines.append(f"small {api.stem}: {type(error).__name__}")

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> str:
        self.lines.append(f"enter {entry.path!r}")
        return entry.path

    def leave(self, entry: ModuleCall, call: str, result: Any, error: BaseException | None) -> None:
        self.lines.append(f"leave {call!r}")

    def around_backward(self, run: Any, args: tuple[Any, ...]) -> Any:
        self.lines.append("backward")
        return run()

    def backward_begins(self, roots: Any) -> None:
        self.lines.append(f"backward of {len(roots)}")

    def backward_raised(self, error: BaseException, alone: bool) -> None:
        self.lines.append(f"backward raised {type(error).__name__}")

    def backward_ended(self, last: bool) -> None:
        self.lines.append("backward ended")

    def optimizer_begins(self, optimizer: Any, frame: FrameType, has_closure: bool) -> str:
        self.lines.append(f"step of {type(optimizer).__name__} in {frame.f_code.co_name}")
        return type(optimizer).__name__

    def optimizer_ended(self, optimizer: Any, call: str) -> None:
        self.lines.append(f"{call} stepped")

    def step_ended(self) -> None:
        self.lines.append("step ended")


@contextmanager
def followed(observer: Observer, place: Place | None = None) -> Iterator[None]:
    follower = Follower(observer, place or Place(), step_on="auto")
    follower.install()
    try:
        yield
    finally:
        follower.remove()


def train() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


EXPECTED = """\
enter ''
enter '0'
begin Functional.linear in forward
end Functional.linear
leave '0'
enter '1'
begin Functional.relu in handle_torch_function
end Functional.relu
leave '1'
leave ''
begin Tensor.sum in train
end Tensor.sum
backward
backward of 1
backward ended
step of SGD in train
begin Tensor.add_ in _single_tensor_sgd
end Tensor.add_
begin Tensor.add_ in _single_tensor_sgd
end Tensor.add_
SGD stepped
step ended"""


def told_by(observer: Log, *beside: Observer) -> str:
    with followed(Several([observer, *beside]) if beside else observer):
        train()
    lines = observer.lines
    return "\n".join(lines[lines.index("enter ''") :])  # without what makes the model


def test_an_observer_is_told_what_a_program_does() -> None:
    assert told_by(Log()) == EXPECTED


def test_several_are_told_what_each_is_told_alone() -> None:
    other = Log()
    assert told_by(Log(), Observer(), other) == EXPECTED
    assert "\n".join(other.lines).endswith(EXPECTED)


def test_failures_are_told() -> None:
    log = Log()
    with followed(log):
        with pytest.raises(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        with pytest.raises(RuntimeError):
            torch.ones(2, dtype=torch.int64).requires_grad_()
        with pytest.raises(RuntimeError):
            torch.ones(2, requires_grad=True).exp().backward()
    assert "raised Tensor.matmul: RuntimeError" in log.lines
    assert "small Tensor.requires_grad_: RuntimeError" in log.lines
    assert log.lines[-1] == "small Tensor.backward: RuntimeError"


def test_one_observer_makes_calls() -> None:
    class Doubling(Log):
        makes_calls = True

        def make(self, call: str, func: Any, args: Any, kwargs: Any, make: Any) -> Any:
            result = make(func, args, kwargs)
            return result * 2 if call == "Torch.exp" else result

    log = Log()
    with followed(Several([log, Doubling()])):
        assert torch.exp(torch.zeros(1)).item() == 2.0
    assert log.lines.count("end Torch.exp") == 1
    with pytest.raises(ValueError, match="not two"):
        Several([Doubling(), Doubling()])


def test_recorder_watches_and_reroute_in_one_pass(tmp_path: Path) -> None:
    """What each of the four finds of a program that overflows and fails, all told by one mode."""
    found: list[Finding] = []

    def report(finding: Finding, *, tell: bool = True) -> None:
        found.append(finding)

    recorder = tp.Recorder(tmp_path / "recorded", level="mix", log=lambda text: None)
    assert recorder._build()
    overflow = OverflowWatch(
        tmp_path / "overflow", report, lambda *note: None, overflow_nums=-1, log=lambda text: None
    )
    overflow._build()
    errors = ErrorWatch(
        tmp_path / "errors", tmp_path / "errors", report, timeout_s=0, log=lambda text: None
    )
    reroute = tp.Reroute({"F.softplus": "float64"}, log=lambda text: None)
    tape = recorder._tape
    assert tape is not None
    errors._calls.place = reroute._calls.place = tape.place
    tape.begin_step(0, True)
    errors._calls.begin_step(0)
    overflow._on = overflow._observer.state.on = True
    overflow._begin_step()
    everyone = [recorder._observer, overflow._observer, errors._calls, reroute._calls]
    model = nn.Sequential(nn.Linear(2, 2), nn.Softplus())
    with followed(Several(everyone), tape.place):
        model(torch.ones(1, 2)).sum().backward()
        torch.full((2,), 3e38) * 10.0
        with pytest.raises(RuntimeError) as failed:
            F.linear(torch.ones(1, 3), model[0].weight)
    overflow._report_news()
    overflow._tape.writer.close()
    errors._kept.release()
    errors._failures.conclude(failed.value)
    recorder.close()

    assert reroute.calls == ["Functional.softplus.0"]
    assert {finding.name for finding in found} == {
        "Tensor.mul.0.forward",
        "Functional.linear.1.forward",
    }
    capture = tp.load(tmp_path / "recorded")
    names = {call.name: call.status for call in capture.calls}
    assert names["Functional.linear.1.forward"] == "raised"
    assert (
        names["Module.0.Linear.forward.0"] == names["Functional.softplus.0.backward"] == "complete"
    )
    assert capture.call("Functional.linear.0.forward").module == "0"
