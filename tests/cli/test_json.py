"""Every verb has --json, and what it prints is one JSON document."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe as tp
from tensorprobe.cli.main import VERBS, build_parser, main


def verbs_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of a verb that do something: those of its own verbs, if it has some."""
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for each in action.choices.values():
            yield from verbs_of(each)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_it(verb: str) -> None:
    whole = build_parser(verb)
    (action,) = [each for each in whole._actions if isinstance(each, argparse._SubParsersAction)]
    for parser in verbs_of(action.choices[verb]):
        assert "--json" in parser._option_string_actions, parser.prog


@pytest.fixture
def capture(tmp_path: Path) -> str:
    path = tmp_path / "a"
    with tp.Recorder(path, level="L1", keep="tensors", log=lambda text: None):
        torch.full((3,), float("inf")).exp().sum()
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(words) == status
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_what_is_printed(capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "show", capture, "--json", "--limit", "2")
    names = [call["name"] for call in found["calls"]]
    assert names == ["Torch.full.0.forward", "Tensor.exp.0.forward"]
    assert (found["more"], found["counts"]) == (1, {"calls": 3, "gaps": 0})
    found = printed(capsys, "show", capture, "--json", "Tensor.exp")
    (call,) = found["calls"]
    assert call["arguments"]["input.0"] == "tensor float32[3]"
    assert (call["tensors"][0]["inf"], call["tensors"][0]["stored"]) == (3, 12)
    assert any("in capture" in frame for frame in call["stack"])
    assert printed(capsys, "show", capture, "--gaps", "--json")["gaps"] == []
    out = str(tmp_path / "repro")
    found = printed(capsys, "repro", capture, "Tensor.exp.0.forward", "-o", out, "--json")
    assert Path(found["script"]).is_file()
    out = str(tmp_path / "msprobe")
    found = printed(capsys, "convert", capture, "--to", "msprobe", "-o", out, "--json")
    assert found["counts"]["calls"] == 3
    out = str(tmp_path / "check")
    assert "counts" in printed(capsys, "check", capture, "-o", out, "--json")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "a", "--foo"], "tensorprobe show: unrecognized arguments: --foo. All options: "),
        (["--foo"], "tensorprobe: unrecognized arguments: --foo. All options: tensorprobe --help"),
    ],
)
def test_a_wrong_option_says_where_the_right_ones_are(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err
