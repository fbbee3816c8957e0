"""Wherever a recorder is stopped or started, the mode stacks are afterwards as they should be.

Nothing of ours is left: `nothing_left_installed` looks, after every test.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from tensorprobe import native

LEVELS = ("L0", "L1", "mix", "L2")
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "method": torch.Tensor.backward,
    "backward": torch.autograd.backward,
    "grad": lambda loss: torch.autograd.grad(loss, [leaf(loss.grad_fn)]),
}


@pytest.fixture(autouse=True, params=["C++", "Python"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("the parts in C++ are not built")


@pytest.fixture(autouse=True)
def torch_knows_of_no_mode() -> Iterator[None]:
    """What torch.compile asks, and stacks do not tell."""
    yield
    assert not _python_dispatch._is_in_torch_dispatch_mode


def leaf(node: Any) -> torch.Tensor:
    while not hasattr(node, "variable"):
        node = next(each for each, _ in node.next_functions if each is not None)
    found: torch.Tensor = node.variable
    return found


def modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


class Does(torch.autograd.Function):
    """Does something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, do: Callable[[], object]) -> torch.Tensor:
        ctx.do = do
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.do()
        return grad * 2, None


def in_hook(x: torch.Tensor, do: Callable[[], object]) -> torch.Tensor:
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        do()

    y.register_hook(hook)
    return y


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def a_loss(
    model: nn.Module, do: Callable[[], object], place: Callable[..., Any] = Does.apply
) -> torch.Tensor:
    """Whose backward does something in its midst."""
    return model(place(model(torch.ones(2, 3)), do)).sum()


def recorder(folder: Path, level: str, **options: Any) -> tp.Recorder:
    return tp.Recorder(folder, level=level, log=lambda text: None, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [in_hook, Does.apply], ids=["hook", "function"])
@pytest.mark.parametrize("verb", ["stop", "pause", "close"])
@pytest.mark.parametrize("level", LEVELS)
def test_ended_inside_of_backward(
    tmp_path: Path, level: str, verb: str, place: Callable[..., Any], way: str
) -> None:
    rec = recorder(tmp_path, level).start()
    WAYS[way](a_loss(net(), getattr(rec, verb), place))
    assert modes() == []
    rec.close()


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_recorded_after_it_was_paused_inside_of_backward(
    tmp_path: Path, level: str
) -> None:
    after: list[int] = []
    rec = recorder(tmp_path, level).start()
    model = net()
    a_loss(model, rec.pause).backward()
    rec.drain()
    (lines,) = tmp_path.glob("rank0/step0/calls.jsonl")
    after.append(lines.stat().st_size)
    model(torch.ones(2, 3)).sum()
    rec.drain()
    after.append(lines.stat().st_size)
    assert after[0] == after[1]
    rec.close()
    if level == "L2":  # where the mode sees backward too
        calls = tp.load(tmp_path).calls(direction="backward")
        assert calls[-1].parent != "AccumulateGrad"
        assert not any(call.parent.startswith("Aten.addmm.0.") for call in calls if call.parent)


@pytest.mark.parametrize("level", LEVELS)
def test_stopped_and_left_by_an_exception(tmp_path: Path, level: str) -> None:
    rec = recorder(tmp_path, level).start()

    def do() -> None:
        rec.stop()
        raise KeyError("of the program")

    with contextlib.suppress(KeyError):  # pytest.raises would keep the frames
        a_loss(net(), do).backward()
    assert modes() == []
    rec.close()


@pytest.mark.parametrize("level", LEVELS)
def test_left_by_an_exception_out_of_backward(tmp_path: Path, level: str) -> None:
    def do() -> None:
        raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"), recorder(tmp_path, level):
        a_loss(net(), do).backward()
    assert modes() == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_inside_of_backward(tmp_path: Path, level: str) -> None:
    model = net()

    def do() -> None:
        with recorder(tmp_path, level):
            model(torch.ones(1, 3))
            raise KeyError("of the program")

    with pytest.raises(KeyError):
        a_loss(model, do).backward()
    assert modes() == []
    assert len(tp.load(tmp_path).calls) > 0


@pytest.mark.parametrize("level", LEVELS)
def test_started_inside_of_backward(tmp_path: Path, level: str) -> None:
    model = net()
    rec = recorder(tmp_path, level)
    a_loss(model, rec.start).backward()
    n_modes = len(modes())
    model(torch.ones(2, 3)).sum()
    rec.step()
    model(torch.ones(2, 3)).sum()
    assert len(modes()) == n_modes == (level != "L0" or native.MODULE is None)
    rec.close()
    name = {"L0": "Module.0.Linear.forward.0", "L2": "Aten.addmm.0.forward"}.get(
        level, "Functional.linear.0.forward"
    )
    first, second = (
        [call.name for call in tp.load(tmp_path).calls(step=step, direction="forward")]
        for step in (0, 1)
    )
    assert name in first
    assert name in second


@pytest.mark.parametrize("level", LEVELS)
def test_stopped_and_started_inside_of_one_backward(tmp_path: Path, level: str) -> None:
    rec = recorder(tmp_path, level).start()
    before = modes()

    def do() -> None:
        rec.stop()
        rec.start()

    a_loss(net(), do).backward()
    assert modes() == before
    rec.close()


@pytest.mark.parametrize("level", LEVELS)
def test_paused_before_and_started_inside_of_backward(tmp_path: Path, level: str) -> None:
    rec = recorder(tmp_path, level).start()
    before = modes()
    loss = a_loss(net(), rec.start)
    rec.pause()
    loss.backward()
    assert modes() == before
    rec.close()


@pytest.mark.parametrize("level", LEVELS)
def test_stopped_in_a_backward_inside_of_another(tmp_path: Path, level: str) -> None:
    rec = recorder(tmp_path, level).start()
    model = net()

    def again(x: torch.Tensor) -> torch.Tensor:
        def do() -> None:
            with torch.enable_grad():
                a_loss(model, rec.stop).backward()

        result: torch.Tensor = Does.apply(model(x), do)
        return result

    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(again, x, use_reentrant=True).sum().backward()
    assert modes() == []
    rec.close()


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Doing(nn.Module):
    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.do = do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.do()
        result: torch.Tensor = self.inner(y)
        return result


@pytest.mark.parametrize("level", LEVELS)
def test_stopped_in_nested_modules_below_other_modes(tmp_path: Path, level: str) -> None:
    rec = recorder(tmp_path, level).start()
    model = nn.Sequential(_Doing(rec.stop), nn.ReLU())
    function, dispatch = BaseTorchFunctionMode(), _Dispatch()
    with function, dispatch:
        model(torch.ones(2, 3)).sum().backward()
        assert modes() == [function, dispatch]
        assert _python_dispatch._is_in_torch_dispatch_mode
    assert modes() == []
    rec.close()


def test_closed_below_a_mode_with_attributes_like_torchs(tmp_path: Path) -> None:
    rec = recorder(tmp_path, "L2").start()
    mode: Any = _Dispatch()
    mode.old_values = torch.ones(3)
    with mode:
        torch.ones(2).add(1)
        rec.close()
        assert modes() == [mode]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["main", "there"])
def test_stopped_while_another_thread_is_in_a_module(
    tmp_path: Path, level: str, where: str
) -> None:
    inside, stopped = threading.Event(), threading.Event()
    rec = recorder(tmp_path, level).start()
    left: list[Any] = []

    def do() -> None:
        if where == "there":
            rec.stop()
        else:
            inside.set()
            assert stopped.wait(60)

    def work() -> None:
        nn.Sequential(_Doing(do), nn.ReLU())(torch.ones(2, 3))
        left.extend(modes())

    thread = threading.Thread(target=work)
    thread.start()
    if where == "main":
        assert inside.wait(60)
        rec.stop()
        stopped.set()
    thread.join()
    assert left == []
    rec.close()
    assert modes() == []


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_started_again_while_another_thread_is_in_a_module(tmp_path: Path, level: str) -> None:
    inside, started = threading.Event(), threading.Event()
    rec = recorder(tmp_path, level).start()
    left: list[Any] = []

    def do() -> None:
        inside.set()
        assert started.wait(60)

    def work() -> None:
        _Doing(do)(torch.ones(2, 3))
        left.extend(modes())

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    rec.stop()
    rec.start()
    net()(torch.ones(2, 3))
    started.set()
    thread.join()
    rec.close()
    assert left == modes() == []
    (call,) = tp.load(tmp_path).calls(op="Sequential", direction="forward")
    assert call.status == "complete"
