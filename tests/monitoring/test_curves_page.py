"""The page with the curves of a training: it opens by itself, and runs nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tensorprobe.cli.main import main
from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.monitor_file import append_alarm, write_facts
from tensorprobe.monitoring.series import StepTable, StepValues
from tensorprobe.monitoring.series_files import SeriesFiles

HOSTILE = "<script>alert(1)</script>"


def written(folder: Path, n_steps: int, factor: float = 1.0) -> Path:
    """A monitor's folder: a loss that falls, with a hole, and a gradient that changes at 50."""
    rank = folder / "rank0"
    write_facts(rank, {"rank": 0})
    files = SeriesFiles(rank, max_disk=1 << 20, header={})
    noise = np.random.default_rng(n_steps)
    for step in range(n_steps):
        loss = math.nan if step == 20 else 1000 * 0.9**step
        norm = (factor if step >= 50 else 1.0) * (1 + 0.01 * noise.standard_normal())
        table = StepTable((HOSTILE,), {"norm": np.array([norm])})
        files.write(StepValues(step, 0.0, {"loss": loss}, {"gradient": table}))
    files.close()
    return folder


def paths(page: Path) -> dict[str, list[dict[str, str]]]:
    """The lines of each figure by its title; what is wrong with the page is an error."""
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in text
    found = {}
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        tree = ElementTree.fromstring(figure)
        title = "".join(tree.find("figcaption").itertext())  # type: ignore[union-attr]
        found[title] = [dict(each.attrib) for each in tree.iter("path")]
    return found


def test_the_curves_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "a", 2000)
    alarm = Alarm(
        rule="spike",
        step=30,
        since=30,
        last_good_step=29,
        kind="gradient",
        name=HOSTILE,
        reason="x",
    )
    append_alarm(folder / "rank0", alarm)
    page = tmp_path / "out" / "a.html"
    assert main(["monitor", "show", str(folder), "--html", str(page)]) == 3
    assert capsys.readouterr().out.endswith(f"written: {page}\n")
    found = paths(page)
    assert list(found) == ["loss", "gradient total", f"gradient {HOSTILE}"]
    line, gone, mark = found["loss"]
    assert line["class"] == "actual"
    assert line["d"].count("M") == 2  # before the hole and after it
    assert len(line["d"].split()) < 2000  # fewer points than steps
    assert (gone["class"], gone["d"]) == ("gone", "M7.2 0v8")
    assert (mark["class"], mark["d"]) == ("alarm", "M10.8 0V120")
    assert "1000, logarithmic; steps 0 to 1999" in page.read_text(encoding="utf-8")
    assert [each["class"] for each in found[f"gradient {HOSTILE}"]] == ["actual", "alarm"]


def test_the_curves_of_two_trainings(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", 100, 2.0), written(tmp_path / "b", 100)
    page = tmp_path / "both.html"
    assert main(["monitor", "compare", str(one), str(other), "--html", str(page)]) == 3
    found = paths(page)
    assert list(found)[-1] == "loss actual expected"
    for title in ("gradient total actual expected", f"gradient {HOSTILE} actual expected"):
        assert [each["class"] for each in found[title]] == ["actual", "expected", "alarm"]
        assert found[title][-1]["d"].startswith("M36")  # step 50 of 0 to 99


def test_a_page_needs_the_name_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "a", 20)
    assert main(["monitor", "show", str(folder), "--html", str(tmp_path)]) == 2
    assert "is a folder; expected the name of a file" in capsys.readouterr().err
