"""Results of cat and stack: what they hold that is not finite, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tensorprobe as tp
from guard_notes import stand_in_for_kernels
from tensorprobe import native

Join = Callable[[list[Tensor]], Tensor]


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)


@pytest.fixture(params=["operations", "kernels"], autouse=True)
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernels":
        stand_in_for_kernels(monkeypatch)


def found(folder: Path, program: Callable[[], object]) -> list[tuple[str, int]]:
    guard = tp.Guard(folder, look_every=10**6, overflow_nums=-1, log=lambda text: None)
    with guard:
        torch.ones(2) * 1
        kept = program()  # up to the end of the step
    del kept
    return [(each.name, each.affected) for each in guard.findings]


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_an_integer_may_be_too_large(tmp_path: Path, join: Join) -> None:
    def program() -> Tensor:
        large, half = torch.tensor([100_000, 2]), torch.ones(2, dtype=torch.float16)
        return join([large, half]) * 1

    name = "Torch.cat" if join is torch.cat else "Torch.stack"
    assert found(tmp_path, program) == [(f"{name}.0.forward", 1)]


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda y: torch.cat([y[1:], torch.ones(1)]),
    "select": lambda y: torch.stack([y[1], y[2]]),
    "expand": lambda y: torch.stack([y[1:2].expand(3), torch.ones(3)]),
}


@pytest.mark.parametrize("parts", PARTS)
def test_a_part_is_not_taken_for_all_of_a_memory(tmp_path: Path, parts: str) -> None:
    """1 / 0 is left out: no finding, though what was taken stays."""

    def program() -> Tensor:
        return PARTS[parts](1 / torch.tensor([0.0, 1.0, 2.0]))

    assert found(tmp_path, program) == []


def test_all_of_a_memory_goes_on(tmp_path: Path) -> None:
    def program() -> Tensor:
        y = (torch.tensor([[3e38, 1.0], [2.0, 4.0]]) * 10).t()
        return torch.cat([y, torch.ones(2, 2)]) - 1

    [(name, affected)] = found(tmp_path, program)
    assert (name, affected) == ("Tensor.mul.1.forward", 3)  # t, cat, sub
