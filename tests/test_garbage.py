"""How often Python looks through all objects while calls are watched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorprobe as tp


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 11)
    yield
    gc.set_threshold(*before)


def test_full_searches_are_rare_while_steps_are_recorded(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "a", steps=[1], step_on="explicit", log=print) as recorder:
        torch.ones(2).relu()
        recorder.step()
        assert gc.get_threshold() == (700, 10, 110)
        torch.ones(2).relu()
        recorder.step()
        assert gc.get_threshold() == (700, 10, 11)


def test_the_last_one_who_watches_sets_it_back(tmp_path: Path) -> None:
    recorder = tp.Recorder(tmp_path / "a", log=print)
    guard = tp.Guard(tmp_path / "b", watch=("overflow", "errors"), log=print)
    recorder.start()
    guard.start()
    torch.ones(2).relu()
    recorder.close()
    assert gc.get_threshold() == (700, 10, 110)
    guard.close()
    assert gc.get_threshold() == (700, 10, 11)


def test_a_program_that_wants_no_full_searches(tmp_path: Path) -> None:
    gc.set_threshold(700, 10, 2**31 - 1)
    with tp.Recorder(tmp_path / "a", log=print):
        torch.ones(2).relu()
    assert gc.get_threshold() == (700, 10, 2**31 - 1)


def test_what_the_program_sets_meanwhile_stays(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "a", log=print):
        torch.ones(2).relu()
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
