"""Objects in a notebook and on a terminal, and the figure of a comparison."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import SRC, record
from tensorprobe.records import Capture
from tensorprobe.report.along import sparkline


def network(eps: float) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps=eps))
    net(torch.randn(3, 4)).square().sum().backward()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Capture]:
    home = tmp_path_factory.mktemp("sides")
    return [record(home / f"{eps}", lambda e=eps: network(e)) for eps in (1e-2, 1e-5)]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)


def test_every_object_has_a_form_for_notebooks(sides: list[Capture], tmp_path: Path) -> None:
    comparison = tp.compare(*sides, replay=False)
    html = comparison._repr_html_()
    assert "diverged at Functional.layer_norm.0.forward" in html
    assert "<svg" in html
    assert "diverged at" in comparison.verdict._repr_html_()
    assert sides[0].calls[0].name in sides[0]._repr_html_()
    call = sides[0].call("Functional.layer_norm.0.forward")
    assert "output.0" in call._repr_html_()
    checked = tp.check(sides[0], tmp_path / "checked", only=["*layer_norm*"])
    assert "Functional.layer_norm.0.forward" in checked._repr_html_()
    with tp.Guard(tmp_path / "guard", overflow_nums=-1, log=lambda _: None) as guard:
        torch.ones(2).div(0)
    assert "is not finite" in guard._repr_html_()
    assert "Tensor.div.0.forward" in guard.findings[0]._repr_html_()
    for thing in (comparison, comparison.verdict, sides[0], call, checked, guard):
        assert repr(thing).startswith("<")


def test_nothing_in_a_name_is_markup(sides: list[Capture]) -> None:
    import msgspec

    attack = "<img src=x onerror=alert(1)>"
    calls = [msgspec.structs.replace(c, op=attack, module=attack) for c in sides[0].calls]
    capture = Capture(Path(attack), "native", calls)
    for thing in (capture, capture.calls[0], tp.compare(capture, sides[1], replay=False)):
        assert "img" not in Elements(thing._repr_html_()).names


def test_the_figure_has_every_call(sides: list[Capture]) -> None:
    pytest.importorskip("matplotlib")
    comparison = tp.compare(*sides, replay=False)
    figure = comparison.plot()
    (axes,) = figure.axes
    drawn = [len(each.get_offsets()) for each in axes.collections]
    assert sum(drawn[:2]) == sum(pair.is_paired for pair in comparison.pairs)
    assert drawn[2] == len(comparison.verdict.culprits)


def test_a_sparkline_rises_where_the_error_begins(sides: list[Capture]) -> None:
    line = sparkline(tp.compare(*sides, replay=False), 400)
    first = next(i for i, letter in enumerate(line) if letter != "▁")
    assert set(line[:first]) == {"▁"}
    assert "█" in line
    same = sparkline(tp.compare(sides[0], sides[0], replay=False), 10)
    assert set(same) == {"▁"}


def test_a_terminal_has_colours_and_a_pipe_has_none(sides: list[Capture], tmp_path: Path) -> None:
    paths = [str(side.path) for side in sides]
    words = [sys.executable, "-m", "tensorprobe", "compare", *paths, "--timeout", "0"]
    environ = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "100"}
    environ.pop("NO_COLOR", None)
    piped = subprocess.run(words, env=environ, capture_output=True, check=False)
    assert b"\x1b" not in piped.stdout
    assert "▁".encode() not in piped.stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, env=environ, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += part
    os.close(ours)
    assert process.wait() == 3
    assert b"\x1b[1;31mdiverged at " in shown
    assert "error ▁".encode() in shown
