"""Sketches in captures: read back, left out by earlier versions, damaged."""

import json
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from tensorprobe.tensors.summarizer import summarize


def recorded(folder: Path, x: torch.Tensor) -> Path:
    with tp.Recorder(folder, level="L1", keep="stats"):
        torch.relu(x)
    return folder / "rank0" / "step0" / "calls.jsonl"


def rewrite(log: Path, **fields: object) -> None:
    """Change every value; None takes a field out."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["type"] == "value":
            line.update(fields)
    kept = [{key: value for key, value in line.items() if value is not None} for line in lines]
    log.write_text("".join(json.dumps(line) + "\n" for line in kept))


def test_they_come_back(tmp_path: Path) -> None:
    x = torch.randn(40, 50)
    recorded(tmp_path / "a", x)
    (call,) = tp.load(tmp_path / "a").calls
    assert call.tensor("input.0").summary == summarize(x)
    assert call.tensor("output.0").summary == summarize(torch.relu(x))


def test_a_capture_of_an_earlier_version(tmp_path: Path) -> None:
    x = torch.randn(40, 50)
    log = recorded(tmp_path / "a", x)
    recorded(tmp_path / "b", x)
    rewrite(log, sketch=None)
    (call,) = tp.load(tmp_path / "a").calls
    summary = call.tensor("input.0").summary
    assert summary is not None
    assert (summary.norm, summary.sketch) == (summarize(x).norm, None)
    assert tp.compare(tmp_path / "a", tmp_path / "b").verdict.verdict == "match"


@pytest.mark.parametrize("wrong", ["AAAA", 5, "***", "f/" * 85])
def test_what_is_no_sketch_is_a_gap(tmp_path: Path, wrong: object) -> None:
    log = recorded(tmp_path / "a", torch.randn(9))
    rewrite(log, sketch=wrong)
    capture = tp.load(tmp_path / "a")
    assert [call.name for call in capture.calls] == ["Torch.relu.0.forward"]
    assert capture.gaps
