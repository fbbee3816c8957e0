"""Each fault of a training is named within 20 steps, and the steps before it are silent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorprobe as tp


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small tensors are slower with more, on a busy machine by far."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


AT = 60  # the step of the fault
LATEST = AT + 20


class Training:
    """A small healthy training in float32; faults change it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
        )
        self.optimizer = self.make_optimizer()
        self.weights = torch.randn(8, 3)
        self.zeroes = True
        self.kept: dict[str, Any] = {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        body, head = self.model[:4].parameters(), self.model[4].parameters()
        return torch.optim.AdamW([{"params": [*body]}, {"params": [*head]}], lr=1e-3)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 8)
        return x, (x @ self.weights).argmax(1)

    def step(self) -> None:
        if self.zeroes:
            self.optimizer.zero_grad()
        x, y = self.batch()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


class Momentum(Training):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


class Normed(Training):
    """A BatchNorm takes the bias before it away, whose gradient is rounding errors. The model is
    called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        )

        class Model(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, values: torch.Tensor, **rest: Any) -> torch.Tensor:
                return self.inner(values[:, None])  # type: ignore[no-any-return]

        self.named = Model(self.inner)
        self.optimizer = torch.optim.SGD(
            [{"params": [*self.inner[:2].parameters()]}, {"params": [*self.inner[4].parameters()]}],
            lr=0.05,
            momentum=0.9,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        x, y = self.batch()
        n = 3 if self.kept.setdefault("n", 0) % 30 == 29 else 3000  # as of the last batch there is
        self.kept["n"] += 1
        named = {"labels": y * n, "num_items_in_batch": torch.tensor([n, n])}
        F.cross_entropy(self.named(values=x, count=torch.tensor(n), **named), y).backward()
        self.optimizer.step()


class Half(Training):
    """float16 by autocast, with a scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        x, y = self.batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def freeze(training: Training) -> None:
    training.model[2].requires_grad_(False)


def drop_from_optimizer(training: Training) -> None:
    group = training.optimizer.param_groups[1]
    group["params"] = [each for each in group["params"] if each.ndim > 1]


def stop_gradients(training: Training) -> None:
    """A gradient of zeros: momentum still moves the parameter."""
    training.model[2].weight.register_hook(torch.zeros_like)


def double_rate(training: Training) -> None:
    training.optimizer.param_groups[1]["lr"] *= 2


def double_updates(training: Training) -> None:
    """The learning rate stays as it is; the optimizer applies it twice to one group."""
    head = [*training.model[4].parameters()]
    # below torch's wrapper, which tells hooks: as a wrong kernel would be
    inner = type(training.optimizer).step.__wrapped__  # type: ignore[attr-defined]

    def kernel(self: Any, closure: Any = None) -> None:
        before = [each.detach().clone() for each in head]
        inner(self, closure)
        with torch.no_grad():
            for parameter, old in zip(head, before, strict=True):
                parameter.add_(parameter - old)

    training.optimizer.step = functools.partial(  # type: ignore[method-assign]
        torch.optim.Optimizer.profile_hook_step(kernel), training.optimizer
    )


def spoil_batch(training: Training) -> None:
    batch = training.batch

    def spoiled() -> tuple[torch.Tensor, torch.Tensor]:
        training.batch = batch  # type: ignore[method-assign]
        x, y = batch()
        return x * 300, y

    training.batch = spoiled  # type: ignore[method-assign]


def shuffle_labels(training: Training) -> None:
    batch = training.batch

    def spoiled() -> tuple[torch.Tensor, torch.Tensor]:
        training.batch = batch  # type: ignore[method-assign]
        x, y = batch()
        x[3, 2] = float("nan")
        return x, y

    training.batch = spoiled  # type: ignore[method-assign]


def lose_state(training: Training) -> None:
    training.optimizer.state.clear()


def new_optimizer(training: Training) -> None:
    """As after a restart that loads the model and forgets the optimizer."""
    training.optimizer = training.make_optimizer()


def keep_gradients(training: Training) -> None:
    training.zeroes = False


def underflow(training: Training) -> None:
    assert isinstance(training, Half)
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-18)


def collapse(training: Training) -> None:
    batch = training.batch
    training.batch = lambda: (batch()[0] * 1e6, batch()[1])  # type: ignore[method-assign]


FAULTS: dict[str, tuple[type[Training], Callable[[Any], None], str, str]] = {
    "a frozen layer": (Training, freeze, "frozen", "2.weight"),
    "a layer without gradients": (Momentum, stop_gradients, "frozen", "2.weight"),
    "a batch by keyword": (Normed, spoil_batch, "batch", "model.values"),
    "a parameter left out": (Training, drop_from_optimizer, "frozen", "4.bias"),
    "a doubled rate": (Training, double_rate, "rates", "of group 1"),
    "doubled updates": (Training, double_updates, "updates", "of group 1"),
    "a corrupted batch": (Training, spoil_batch, "batch", "model"),
    "a batch with NaN": (Training, shuffle_labels, "nonfinite", "model"),
    "a lost state": (Training, lose_state, "moments", "0.weight and 5 more"),
    "a new optimizer": (Training, new_optimizer, "moments", "0.weight and 5 more"),
    "a lost momentum": (Momentum, lose_state, "moments", "0.weight and 5 more"),
    "no zero_grad": (Training, keep_gradients, "zero_grad", "of AdamW"),
    "no zero_grad, SGD": (Momentum, keep_gradients, "zero_grad", "of SGD"),
    "underflow": (Half, underflow, "underflow", ""),
    "a collapsing scale": (Half, collapse, "loss_scale", ""),
}


def watch(training: Training, folder: Path, fault: Callable[[Any], None] | None) -> tp.Monitor:
    told: list[str] = []
    with tp.Monitor(folder, log=told.append) as monitor:
        for number in range(LATEST + 1):
            if number == AT and fault is not None:
                assert monitor.alarms == (), monitor.alarms
                fault(training)
            training.step()
    if monitor.alarms:
        assert told[0].startswith(f"alarm {monitor.alarms[0].rule} at step")
    return monitor


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    kind, fault, rule, place = FAULTS[name]
    monitor = watch(kind(), tmp_path, fault)
    found = [alarm for alarm in monitor.alarms if alarm.rule == rule]
    assert found, monitor.alarms
    assert AT <= found[0].step <= LATEST
    assert AT - 1 <= found[0].since <= found[0].step
    assert found[0].last_good_step == found[0].since - 1
    assert place in [alarm.name for alarm in found] or not place, found


@pytest.mark.parametrize("kind", [Training, Momentum, Normed, Half])
def test_without_a_fault_all_is_silent(kind: type[Training], tmp_path: Path) -> None:
    assert watch(kind(), tmp_path, None).alarms == ()


def test_steps_that_are_rounded_away_freeze_nothing(tmp_path: Path) -> None:
    """As at the end of a schedule that goes to 0: a weight of 1 stays as it is."""
    training = Training()
    training.model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    norm = training.model[1].weight
    training.optimizer = torch.optim.AdamW(training.model.parameters(), 1e-8, weight_decay=0)
    with tp.Monitor(tmp_path, rules="frozen", log=lambda text: None) as monitor:
        for _ in range(25):
            training.step()
    assert (norm == 1).all()
    assert monitor.alarms == ()


def kill_units(training: Training) -> None:
    with torch.no_grad():
        training.model[0].bias.fill_(-1e3)


def test_dead_units_are_named(tmp_path: Path) -> None:
    monitor = watch(Training(), tmp_path, kill_units)
    (found,) = [alarm for alarm in monitor.alarms if alarm.rule == "dead" and alarm.name == "1"]
    assert AT <= found.since <= AT + 1
    assert found.step <= LATEST


class Between(nn.Module):
    """Makes what comes forward alike, and multiplies what comes backward."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x / x.detach().norm(dim=1, keepdim=True)
        made.register_hook(lambda grad: grad * self.factor)
        return made


@pytest.mark.parametrize(("factor", "word"), [(0.2, "vanish"), (5.0, "explode"), (1.0, "")])
def test_gradients_that_vanish_or_explode_with_depth(
    factor: float, word: str, tmp_path: Path
) -> None:
    training = Training()
    layers = [each for _ in range(10) for each in (nn.Linear(8, 8), Between(factor))]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight)
    training.model = nn.Sequential(*layers, nn.Linear(8, 3))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
    with tp.Monitor(tmp_path, rules="depth", log=lambda text: None) as monitor:
        for _ in range(20):
            training.step()
    assert [f"gradients {word}" in each.reason for each in monitor.alarms] == [True] * bool(word)


def test_a_layer_that_drifts_alone(tmp_path: Path) -> None:
    training = Training()
    training.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    with tp.Monitor(tmp_path, rules="drift", log=lambda text: None) as monitor:
        for number in range(161):
            if number == 140:
                assert monitor.alarms == ()
                training.model[2].weight.register_hook(lambda grad: grad * 50)
            training.step()
    (found,) = monitor.alarms
    assert (found.kind, found.name) == ("gradient", "2.weight")
    assert 140 <= found.since <= found.step <= 160
