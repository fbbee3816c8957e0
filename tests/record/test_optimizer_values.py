"""What an optimizer's step leaves: weights, gradients and its own state, at every level."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.records import Call, Capture

LEVELS = ["L0", "L1", "mix", "L2"]


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    return str(request.param)


def model_and(kind: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, kind(model.parameters(), **options)


def train_once(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


class Snapshots:
    """What the program itself sees of an optimizer after each of its steps."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self.taken: list[dict[str, torch.Tensor]] = []

    def take(self) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        found = {f"output.{name}": p.detach().clone() for name, p in self._model.named_parameters()}
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor | int | float):
                    name = f"state.{names[id(parameter)]}.{key}.after"
                    found[name] = torch.as_tensor(value).clone()
        self.taken.append(found)


def recorded(call: Call, role: str, suffix: str = "") -> dict[str, torch.Tensor]:
    return {
        t.name.removeprefix(f"{call.name}."): t.load()
        for t in call.tensors
        if t.role == role and t.name.endswith(suffix)
    }


def check(capture: Capture, steps: list[dict[str, torch.Tensor]]) -> None:
    calls = [c for c in capture.calls if c.name.startswith("Optimizer.")]
    assert len(calls) == len(steps)
    for call, seen in zip(calls, steps, strict=True):
        found = recorded(call, "output") | recorded(call, "state", ".after")
        assert found.keys() == seen.keys()
        for name, tensor in seen.items():
            assert torch.equal(found[name].to(tensor.dtype), tensor), (call.name, name)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "loop": (torch.optim.AdamW, {"foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "fused Adam": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "fused SGD": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "fused Adagrad": (torch.optim.Adagrad, {"fused": True}),
    "capturable": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
}
if hasattr(torch.optim, "Adafactor"):  # from torch 2.5 on
    OPTIMIZERS["Adafactor"] = (torch.optim.Adafactor, {})


@pytest.mark.parametrize("mode", ["bare", "mode"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_and_state_after_each_step(
    kind: str, level: str, mode: str, tmp_path: Path
) -> None:
    model, optimizer = model_and(OPTIMIZERS[kind][0], **OPTIMIZERS[kind][1])
    seen = Snapshots(model, optimizer)
    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None) as recorder:
        for _ in range(2):
            if mode == "mode":
                with FlopCounterMode(display=False):
                    train_once(model, optimizer)
            else:
                train_once(model, optimizer)
            recorder.step()
            seen.take()
    capture = tp.load(tmp_path)
    check(capture, seen.taken)
    # the second step finds what the first has left, which is not written down again
    second = capture.calls(step=1, name="Optimizer")[0]
    assert all(name.endswith(".after") for name in recorded(second, "state"))


class Raw(torch.optim.Optimizer):
    """As many of others are: it writes to `data`, and counts with plain numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("step", 0)
            state["step"] += 1
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.data.mul_(0.9).add_(parameter.grad.data)
            parameter.data.sub_(0.1 * momentum)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_somebody_else(level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(Raw, defaults={})
    seen = Snapshots(model, optimizer)
    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None) as recorder:
        for _ in range(2):
            train_once(model, optimizer)
            recorder.step()
            seen.take()
    check(tp.load(tmp_path), seen.taken)


@pytest.mark.parametrize("level", LEVELS)
def test_state_that_no_recorded_step_has_left(level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(torch.optim.AdamW, fused=True)
    train_once(model, optimizer)
    options: dict[str, Any] = {"level": level, "keep": "tensors", "log": lambda text: None}
    before = []
    with tp.Recorder(tmp_path, steps=[0, 1, 3, 4], **options) as recorder:
        for step in range(5):
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            before.append(optimizer.state[model[0].weight]["exp_avg"].clone())
            train_once(model, optimizer)
            recorder.step()
    calls = [c for c in tp.load(tmp_path).calls if c.name.startswith("Optimizer.")]
    found = {
        call.step: name["state.0.weight.exp_avg"]
        for call in calls
        if "state.0.weight.exp_avg" in (name := recorded(call, "state"))
    }
    # at first, after a step that was not recorded, and after others were loaded
    assert list(found) == [0, 3, 4]
    for step, tensor in found.items():
        assert torch.equal(tensor, before[step])


@pytest.mark.parametrize("level", LEVELS)
def test_state_that_numpy_wrote_to(level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(torch.optim.AdamW)
    train_once(model, optimizer)
    memory = optimizer.state[model[0].weight]["exp_avg"].numpy()
    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None) as recorder:
        for step in range(4):
            if step == 2:
                memory[...] = 3
            train_once(model, optimizer)
            recorder.step()
    calls = [c for c in tp.load(tmp_path).calls if c.name.startswith("Optimizer.")]
    before = {call.step: recorded(call, "state").get("state.0.weight.exp_avg") for call in calls}
    assert [step for step, tensor in before.items() if tensor is not None] == [0, 2]
    assert before[2] is not None
    assert before[2].eq(3).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_gradients_that_a_closure_made(kind: Any, level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(kind, lr=0.1)
    seen = Snapshots(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None):
        model(torch.ones(5, 3))  # from here on its parameters have names
        optimizer.step(closure)
    step = tp.load(tmp_path).call(f"Optimizer.{kind.__name__}.step.0")
    seen.take()
    assert any("closure" in note for note in step.notes)
    grads = recorded(step, "parameter_grad")
    assert list(grads) == [f"parameters_grad.{name}" for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(grads[f"parameters_grad.{name}"], parameter.grad)
        assert torch.equal(recorded(step, "output")[f"output.{name}"], parameter.detach())
    state = recorded(step, "state", ".after")
    for name, tensor in seen.taken[0].items():
        if name.startswith("state."):
            assert torch.equal(state[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_a_hook_of_the_optimizer_clipped(level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    handle = optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None
    )
    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None):
        train_once(model, optimizer)
    handle.remove()
    step = tp.load(tmp_path).call("Optimizer.SGD.step.0")
    for name, parameter in model.named_parameters():
        assert torch.equal(step.tensor(f"parameters_grad.{name}").load(), parameter.grad)


@pytest.mark.parametrize("level", LEVELS)
def test_a_fused_step_that_unscales(level: str, tmp_path: Path) -> None:
    model, optimizer = model_and(torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen = Snapshots(model, optimizer)
    with tp.Recorder(tmp_path, level=level, keep="tensors", log=lambda text: None):
        scaler.scale(model(torch.ones(5, 3)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    seen.take()
    capture = tp.load(tmp_path)
    check(capture, seen.taken)


def test_a_long_history_is_not_written_down_whole(tmp_path: Path) -> None:
    model, optimizer = model_and(torch.optim.LBFGS, lr=0.1, max_iter=12)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    with tp.Recorder(tmp_path, level="L0", log=lambda text: None):
        model(torch.ones(5, 3))  # from here on its parameters have names
        optimizer.step(closure)
    step = tp.load(tmp_path).call("Optimizer.LBFGS.step.0")
    [state] = optimizer.state.values()
    count = len(state["old_dirs"])
    assert count > 4
    names = [t.name for t in step.tensors if ".old_dirs." in t.name]
    assert names == [f"Optimizer.LBFGS.step.0.state.0.weight.old_dirs.{count - 1}.after"]
