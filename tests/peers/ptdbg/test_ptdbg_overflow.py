"""overflow_check: each overflow in files of its own, and a ValueError at the N-th."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dumping import lines, names

import tensorprobe as tp
from tensorprobe.errors import BadUsage
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import PrecisionDebugger, overflow_check

FILE = re.compile(r"Overflow_info_\d{8}_\d{6}_(\d+)\.pkl")


@pytest.fixture
def session() -> Iterator[PtdbgSession]:
    made = PtdbgSession()
    yield made
    made.close()


class Net(torch.nn.Module):
    """Overflows in a multiplication when `factor` is large."""

    def __init__(self, factor: float = 1e30) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) + 1) * self.factor * self.factor


def step(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def train(model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        step(model)


def test_the_first_overflow_stops_and_its_files_are_there(
    session: PtdbgSession, tmp_path: Path
) -> None:
    session.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    session.register_hook(Net(), overflow_check)
    with pytest.raises(ValueError, match=r"^\[overflow 1 times\]: dump file is saved in ") as e:
        train(Net(), 3)
    found = re.fullmatch(r"\[overflow 1 times\]: dump file is saved in '(.*)'\.", str(e.value))
    assert found is not None
    saved = Path(found[1])
    assert saved.parent == tmp_path / "ptdbg_dump_v2.3" / "rank0"
    assert FILE.fullmatch(saved.name)
    assert names(saved) == [
        f"Tensor___mul___1_forward_{part}" for part in ("input.0", "output", "stack_info")
    ]
    assert {line[1] for line in lines(saved) if len(line) > 2} == {101}
    (call,) = tp.load(saved).calls
    assert call.tensor("input.0").load().isfinite().all()
    assert call.tensor("output.0").load().isinf().all()
    session.close()
    assert not list(tmp_path.rglob("overflow-*"))


def test_the_n_th_stops_and_without_a_path_they_are_in_the_programs_folder(
    session: PtdbgSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    session.register_hook(model, overflow_check, overflow_nums=3)
    with pytest.raises(ValueError, match=r"\[overflow 3 times\]"):
        train(model, 9)
    folder = tmp_path / "ptdbg_dump_v2.3" / "rank0"
    numbers = [FILE.fullmatch(path.name) for path in folder.glob("*.pkl")]
    assert sorted(number[1] for number in numbers if number) == ["1", "2", "3"]
    assert len(tp.load(folder).calls) == 3


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_each_file_has_its_own_call(session: PtdbgSession, tmp_path: Path, backward: bool) -> None:
    session.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    session.register_hook(Net(), overflow_check, overflow_nums=2)
    torch.full((2,), 1e30).square()
    if backward:
        x = torch.full((3,), 1e-30, requires_grad=True)
        with pytest.raises(ValueError, match=r"\[overflow 2 times\]"):
            (x.reciprocal().sum().backward(), torch.optim.SGD([x], 0.1).step())
        second = ("Tensor.reciprocal.0.backward", (3,))
    else:
        torch.full((3,), 100.0).exp()
        second = ("Tensor.exp.0.forward", (3,))
    session.close()
    found = sorted(tmp_path.rglob("Overflow_info_*.pkl"), key=lambda path: path.stem[-1])
    calls = [tp.load(path).calls[-1] for path in found]
    assert [(call.name, call.tensor("output.0").shape) for call in calls] == [
        ("Tensor.square.0.forward", (2,)),
        second,
    ]


def test_it_is_switched_on_and_off(session: PtdbgSession, tmp_path: Path) -> None:
    session.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    session.set_overflow_check_switch("OFF", "ON")
    model = Net()
    session.register_hook(model, overflow_check)
    step(model)
    assert not list(tmp_path.rglob("*.pkl"))
    session.set_overflow_check_switch("ON", "ON")
    with pytest.raises(ValueError, match=r"\[overflow 1 times\]"):
        step(model)


def test_minus_one_never_stops(session: PtdbgSession, tmp_path: Path) -> None:
    session.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    model = Net()
    session.register_hook(model, overflow_check, overflow_nums=-1)
    for _ in range(4):
        step(model)
    session.set_overflow_check_switch("OFF", "ON")
    assert len(list(tmp_path.rglob("Overflow_info_*.pkl"))) >= 4


def test_a_program_that_does_not_overflow_is_left_alone(
    session: PtdbgSession, tmp_path: Path
) -> None:
    session.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    model = Net(factor=2.0)
    session.register_hook(model, overflow_check)
    step(model)
    session.close()
    assert not list(tmp_path.rglob("*.pkl"))


def test_wrong_arguments(session: PtdbgSession) -> None:
    with pytest.raises(BadUsage, match="overflow_nums=0: expected a number from 1, or -1"):
        session.register_hook(None, overflow_check, overflow_nums=0)
    with pytest.raises(BadUsage, match="switch='maybe'"):
        session.set_overflow_check_switch("maybe", "ON")


def test_the_debugger_names_files_by_the_call(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(tmp_path, "overflow_check", step=[1, 2])
    model = Net(factor=2.0)

    def train_with_debugger() -> None:
        for number in range(4):
            model.factor = 1e30 if number == 2 else 2.0
            debugger.start()
            step(model)
            debugger.stop()
            debugger.step()

    with pytest.raises(ValueError, match=r"\[overflow 1 times\]"):
        train_with_debugger()
    debugger.close()
    (found,) = tmp_path.rglob("*.pkl")
    name = "ptdbg_dump_v5.0/step2/rank0/Tensor___mul___1_forward_1.pkl"
    assert str(found.relative_to(tmp_path)) == name
    assert tp.load(tmp_path).steps == (2,)


def test_the_debugger_counts_steps_while_it_is_stopped(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(tmp_path, "overflow_check", step=[1, 3])
    debugger.configure_hook(overflow_nums=-1)
    for _ in range(5):
        debugger.start()
        torch.full((2,), 1e30) * 1e30
        debugger.stop()
        debugger.step()
    debugger.close()
    assert sorted(path.parts[-3] for path in tmp_path.rglob("*.pkl")) == ["step1", "step3"]
