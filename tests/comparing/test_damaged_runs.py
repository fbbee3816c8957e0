"""What a recording has lost may be what differs: it is no match."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe as tp
from tensorprobe.cli.main import main

GELU = "Functional.gelu.0.forward"
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    x = torch.randn(4, 8)
    with tp.Recorder(folder, keep="tensors") as recorder:
        for _ in range(2):
            net(x).square().mean().backward()
            recorder.step()
    return folder


def number(lines: Lines) -> int:
    return next(int(line["id"]) for line in lines if line.get("name") == GELU)


def without_call(lines: Lines) -> Lines:
    gone = number(lines)
    return [x for x in lines if x["type"] not in ("call", "end") or x["id"] != gone]


def without_end(lines: Lines) -> Lines:
    gone = number(lines)
    return [x for x in lines if x["type"] != "end" or x["id"] != gone]


def without_values(lines: Lines) -> Lines:
    return [line for line in lines if line["type"] != "value"]


def without_one_value(lines: Lines) -> Lines:
    end = next(x for x in lines if x["type"] == "end" and x["id"] == number(lines))
    gone = end["outputs"]["tensor"]["value"]
    return [line for line in lines if line["type"] != "value" or line["id"] != gone]


def cut_off(lines: Lines) -> Lines:
    """After the last call whose values are all there."""
    last = max(i for i, line in enumerate(lines) if line["type"] == "value")
    ends = [i for i, line in enumerate(lines) if line["type"] == "call" and i > last // 2]
    return lines[: ends[0]]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_call, "calls were written before it"),
        (without_end, f"actual has no end of {GELU} of step 1"),
        (without_values, "actual has no value of input.0 of Module.Sequential.forward.0 of step 1"),
        (without_one_value, "actual has no value of output.0 of Module.1.GELU.forward.0 of step 1"),
        (cut_off, "All else matches"),
    ],
)
def test_what_was_lost_is_no_match(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Lines], Lines],
    says: str,
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    log = damaged / "rank0" / "step1" / "calls.jsonl"
    lines = damage([json.loads(line) for line in log.read_text().splitlines()])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main(["compare", str(damaged), str(whole)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("incomparable: ")
    assert says in said
    assert main(["compare", str(whole), str(damaged)]) == 1


def test_two_runs_that_ended_at_the_same_place_match(whole: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / name)
        log = tmp_path / name / "rank0" / "step1" / "calls.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:40]))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
