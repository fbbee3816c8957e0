"""Content that is written without moving a version, and names that must not move with the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp
from tensorprobe.errors import NothingRecorded
from tensorprobe.records import Capture


def record(folder: Path, program: Callable[[tp.Recorder], None], **options: Any) -> Capture:
    with tp.Recorder(folder, log=lambda text: None, **options) as recorder:
        program(recorder)
    return tp.load(folder)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_write_through_data_between_module_calls(level: str, tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)

    def program(recorder: tp.Recorder) -> None:
        layer(torch.ones(1, 2))
        layer.weight.data.mul_(10)
        layer(torch.ones(1, 2))

    capture = record(tmp_path, program, level=level, keep="tensors")
    second = capture.call("Module.Linear.forward.1").tensor("parameters.weight")
    assert torch.equal(second.load(), layer.weight.detach())


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_a_write_through_data_in_a_call_that_is_not_selected(level: str, tmp_path: Path) -> None:
    weight = torch.randn(2, 2)
    api, name = {"L1": ("matmul", "Tensor.matmul"), "L2": ("aten.mm", "Aten.mm")}[level]

    def program(recorder: tp.Recorder) -> None:
        torch.ones(2, 2) @ weight
        weight.data.mul_(10)
        torch.ones(2, 2) @ weight

    capture = record(tmp_path, program, level=level, keep="tensors", apis=api)
    second = capture.call(f"{name}.1.forward").tensor("input.1")
    assert torch.equal(second.load(), weight)


@pytest.fixture
def undeclared() -> Iterator[Any]:
    """Operators that write to what they are given, of which their schemas say nothing."""
    with torch.library._scoped_library("undeclared", "DEF") as library:
        library.define("double_(Tensor x) -> Tensor")
        library.impl("double_", lambda x: x.data.mul_(2).clone(), "CPU")
        library.define("double(Tensor x, *, Tensor out) -> Tensor")
        library.impl("double", lambda x, out: out.data.copy_(x * 2).clone(), "CPU")
        yield torch.ops.undeclared


@pytest.mark.parametrize("apis", [None, "aten.neg"])
@pytest.mark.parametrize("writes", ["in place", "out"])
def test_an_operator_that_does_not_say_what_it_writes_to(
    undeclared: Any, writes: str, apis: str | None, tmp_path: Path
) -> None:
    x = torch.ones(2)

    def program(recorder: tp.Recorder) -> None:
        x.neg()
        if writes == "out":
            undeclared.double(x, out=x)
        else:
            undeclared.double_(x)
        x.neg()

    capture = record(tmp_path, program, level="L2", keep="tensors", apis=apis)
    assert capture.call("Aten.neg.1.forward").tensor("input.0").load().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("norm", ["torch", "functional", "native"])
def test_running_statistics_wherever_they_stand_in_the_arguments(norm: str, tmp_path: Path) -> None:
    mean, variance, x = torch.zeros(2), torch.ones(2), torch.randn(4, 2)
    call = {
        "torch": lambda: torch.batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False),
        "functional": lambda: F.batch_norm(x, mean, variance, None, None, True),
        "native": lambda: torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5),
    }[norm]

    def program(recorder: tp.Recorder) -> None:
        for _ in range(2):
            call()
        mean.clone()

    capture = record(tmp_path, program, level="L1", keep="tensors")
    assert torch.equal(capture.call("Tensor.clone.0.forward").tensor("input.0").load(), mean)


def test_a_loss_made_anew_in_every_step_keeps_its_name(tmp_path: Path) -> None:
    model, target = nn.Linear(2, 2), torch.zeros(4, dtype=torch.long)

    def program(recorder: tp.Recorder) -> None:
        for _ in range(3):
            nn.CrossEntropyLoss()(model(torch.randn(4, 2)), target).backward()
            recorder.step()

    capture = record(tmp_path, program, level="L0")
    names = [c.name for c in capture.calls(op="*CrossEntropyLoss", direction="forward")]
    assert names == ["Module.CrossEntropyLoss.forward.0"] * 3


class Tried(nn.Module):
    """Calls a part of itself while it is made, as weight normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        with torch.no_grad():
            for _ in range(3):
                self.layer(torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_model_that_tries_its_parts_while_it_is_made(tmp_path: Path) -> None:
    def program(recorder: tp.Recorder) -> None:
        model = Tried()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    capture = record(tmp_path, program, level="L0", step_on="auto")
    first = capture.calls(step=0, direction="forward")
    assert [call.name for call in first][:2] == [
        "Module.Tried.forward.0",
        "Module.layer.Linear.forward.0",
    ]


def test_gradients_of_parameters_when_backward_runs_in_several_threads(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def work(model: nn.Module) -> None:
        for _ in range(4):
            loss = model(torch.ones(4, 2)).sum()
            together.wait()
            loss.backward()

    def program(recorder: tp.Recorder) -> None:
        models = [nn.Linear(2, 2) for _ in range(3)]
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    capture = record(tmp_path, program, level="L0")
    assert sum("parameters_grad" in call.name for call in capture.calls) == 12


def test_half_of_the_gradients_of_another_threads_backward(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    half_way, go_on = threading.Event(), threading.Event()

    def pause(parameter: torch.Tensor) -> None:
        half_way.set()
        assert go_on.wait(60)

    def work() -> None:
        loss = second(torch.ones(4, 2)).sum()
        for parameter in second.parameters():  # whichever comes first
            parameter.register_post_accumulate_grad_hook(pause)
        loss.backward()

    def program(recorder: tp.Recorder) -> None:
        thread = threading.Thread(target=work)
        loss = first(torch.ones(4, 2)).sum()
        thread.start()
        assert half_way.wait(60)
        loss.backward()
        go_on.set()
        thread.join()

    capture = record(tmp_path, program, level="L0")
    grads = [call for call in capture.calls if "parameters_grad" in call.name]
    assert [call.name for call in grads] == [
        "Module.Linear.parameters_grad.0",
        "Module.Linear_1.Linear.parameters_grad.0",
    ]
    assert [len(call.tensors) for call in grads] == [2, 2]


def test_backward_in_another_thread_than_forward(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def program(recorder: tp.Recorder) -> None:
        model(torch.ones(4, 2)).sum().backward()
        thread = threading.Thread(target=model(torch.ones(4, 2)).sum().backward)
        thread.start()
        thread.join()

    capture = record(tmp_path, program, level="L0")
    grads = [call for call in capture.calls if "parameters_grad" in call.name]
    assert [len(call.tensors) for call in grads] == [2, 2]


def test_stopped_inside_a_module(tmp_path: Path) -> None:
    class Stops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorder.stop()
            return x

    recorder = tp.Recorder(tmp_path, level="mix", log=lambda text: None)
    recorder.start()
    nn.Sequential(nn.Identity(), Stops())(torch.ones(2))
    recorder.start()
    torch.ones(2).sin()
    recorder.close()
    sine = tp.load(tmp_path).call("Tensor.sin.0.forward")
    assert (sine.module, sine.parent) == ("", None)


def test_a_rank_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NothingRecorded, match="ranks 3 were asked for, this is rank 0"):
        record(tmp_path, lambda recorder: None, ranks=3, strict=True)


@pytest.mark.parametrize(("keep", "contents"), [("stats", 5), ("digest", 6), ("tensors", 6)])
def test_one_content_seen_in_other_shapes(keep: str, contents: int, tmp_path: Path) -> None:
    x = torch.arange(24.0).reshape(4, 6)

    def program(recorder: tp.Recorder) -> None:
        torch.relu(x).view(6, 4).t().reshape(24)  # the last one copies
        x[1:3].abs()  # part of it: another content

    capture = record(tmp_path, program, level="L1", keep=keep)
    log = (tmp_path / "rank0" / "step0" / "calls.jsonl").read_text()
    # x; its relu, with views of it; the transposed one, where order counts; a copy of that; the
    # part, and its abs
    assert log.count('"type":"value"') == contents
    for name, expected in {
        "Tensor.view.0.forward": x.view(6, 4),
        "Tensor.t.0.forward": x.view(6, 4).t(),
        "Tensor.reshape.0.forward": x.view(6, 4).t().reshape(24),
        "Tensor.__getitem__.0.forward": x[1:3],
    }.items():
        tensor = capture.call(name).tensor("output.0")
        assert tensor.shape == tuple(expected.shape)
        assert tensor.summary is not None
        assert tensor.summary.max == float(expected.max())
        assert tensor.summary.norm == pytest.approx(float(expected.norm()))
        if keep == "tensors":
            assert torch.equal(tensor.load(), expected)


def test_what_was_compiled_before_is_no_gap(tmp_path: Path) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    recorder = tp.Recorder(tmp_path, steps=[3], log=lambda text: None)
    with recorder:
        torch.ones(2).relu()  # step 0, which is not wanted
    assert isinstance(recorder.failed, NothingRecorded)
    assert not tmp_path.joinpath("rank0").exists()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_are_not_taken_for_plain_ones(tmp_path: Path) -> None:
    """Parts of one share its memory, and as many numbers lie otherwise in it."""
    with tp.Recorder(tmp_path / "run", keep="stats", log=lambda text: None):
        torch.ones(10).relu()
        nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.ones(3, 4)])
        nested.unbind()
        nested.chunk(2, -1)
    [chunk] = [call for call in tp.load(tmp_path / "run").calls if ".chunk." in call.name]
    assert all(tensor.summary is None for tensor in chunk.tensors)
