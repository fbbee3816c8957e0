"""Pages of ranks, checkpoints, environments, a compiler's stages and of monitors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tensorprobe as tp
from conftest import type_command
from recorded import record
from tensorprobe.errors import BadArtefact
from tensorprobe.monitoring.series_reading import Trend
from tensorprobe.report.documents import SHEETS, read_document, write_document
from tensorprobe.report.serving import ServedPaths
from tensorprobe.report.trend_curves import curve

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from gloo_ranks import run_ranks

Opened = Callable[..., Any]

TRAIN = """\
import sys
import torch
from torch import nn
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weights = torch.randn(8, 3)
for step in range(60):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), (x @ weights).argmax(1)).backward()
    if step == 30 and "frozen" in sys.argv:
        model[2].requires_grad_(False)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings, in one of which a layer is frozen at step 30."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "train.py").write_text(TRAIN)
    for name, words in (("bad", ["frozen"]), ("good", [])):
        done = type_command(folder, "run", "--monitor", name, "train.py", *words)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_monitor_has_a_page_with_its_curves(watched: Path, opened: Opened) -> None:
    done = type_command(watched, "monitor", "show", "bad", "-o", "shown")
    assert done.returncode == 3, done.stderr
    assert done.stdout.endswith("\nwritten: shown/report.html\n")
    page = opened((watched / "shown" / "report.html").as_uri())
    assert "requires_grad is off now" in page.locator("#answer").inner_text()
    assert "--steps 31" in page.locator("#verdict code").first.inner_text()
    assert "train.py frozen" in page.locator("#verdict code").first.inner_text()
    curves = page.locator(".curve canvas")
    curves.first.wait_for()
    names = page.locator(".curves figcaption bdi").all_inner_texts()
    assert names[:3] == ["loss", "gradient total", "lr.0"]
    assert "parameter 2.weight" in names
    assert curves.count() == len(names)
    label = (
        page.locator(".curve").nth(names.index("parameter 2.weight")).get_attribute("aria-label")
    )
    assert "step 31: frozen" in label
    page.locator("#language").click()
    page.locator("h2", has_text="\u66f2\u7ebf").wait_for()


def test_two_trainings_have_a_page_with_both(watched: Path, opened: Opened) -> None:
    done = type_command(watched, "monitor", "compare", "bad", "good", "-o", "two/trends.json")
    assert done.returncode == 3, done.stderr
    found = json.loads((watched / "two" / "trends.json").read_text())
    page = opened((watched / "two" / "trends.html").as_uri(), color_scheme="dark")
    first = found["partings"][0]
    assert f"Parted at step {first['step']}" in page.locator("#answer").inner_text()
    assert found["next"] == page.locator("#verdict code").inner_text()
    assert page.locator(".legend").inner_text().split() == ["actual", "expected"]
    assert first["name"] in page.locator(".curves figcaption").first.inner_text()


def test_the_folder_of_a_monitor_is_viewed(watched: Path) -> None:
    served = ServedPaths([watched / "bad"])
    assert [item.kind for item in served.items] == ["monitor"]
    assert json.loads(served.index(0))["badge"] == "2 alarms"


def test_a_long_curve_keeps_its_extremes() -> None:
    values = np.sin(np.arange(100_000) / 5000.0)
    values[12_345], values[54_321], values[77_777] = 1000.0, np.nan, -1000.0
    made = curve("a", [Trend(np.arange(100_000), values)], [])
    steps, drawn = (
        np.frombuffer(msgspec.convert(text, bytes, strict=False), "<f8")
        for text in (made["steps"], made["values"][0])
    )
    assert len(steps) < 7000
    assert {12_345.0, 54_321.0, 77_777.0} <= set(steps)
    assert np.isnan(drawn[list(steps).index(54_321.0)])
    assert made["log"] is False


def test_checkpoints_have_a_page(tmp_path: Path, opened: Opened) -> None:
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    torch.save({"model": net.state_dict(), "step": 3}, tmp_path / "a.pt")
    with torch.no_grad():
        net[1].weight[2, 2] += 0.1
    torch.save({"model": net.state_dict(), "step": 4}, tmp_path / "b.pt")
    done = type_command(tmp_path, "checkpoints", "a.pt", "b.pt", "-o", "out")
    assert done.returncode == 3, done.stderr
    page = opened((tmp_path / "out" / "report.html").as_uri())
    assert "1 tensor by more than rounding" in page.locator("#answer").inner_text()
    shown = page.locator("main").inner_text()
    assert "first in model.1" in shown
    assert "model.1.weight" in shown
    assert "1 of 16" in shown
    done = type_command(tmp_path, "checkpoints", "a.pt", "a.pt", "-o", "same")
    assert read_document("checkpoints", tmp_path / "same")["outcome"] == "match"


def test_environments_have_a_page(tmp_path: Path, opened: Opened) -> None:
    tp.env(tmp_path / "a.json")
    facts = json.loads((tmp_path / "a.json").read_text())
    facts["torch"]["num_threads"] = 99
    (tmp_path / "b.json").write_text(json.dumps(facts))
    done = type_command(tmp_path, "env", "compare", "a.json", "b.json", "-o", "env/differ.json")
    assert done.returncode == 3, done.stderr
    (row,) = json.loads((tmp_path / "env" / "differ.json").read_text())["differences"]
    shown = opened((tmp_path / "env" / "differ.html").as_uri()).locator("main").inner_text()
    assert f"{row['fact']}: {torch.get_num_threads()} here, 99 there" in shown
    assert row["why"] in shown


def test_ranks_have_a_page(tmp_path: Path, opened: Opened) -> None:
    run_ranks(tmp_path, "replica_that_parts.py")
    done = type_command(tmp_path, "ranks", "run", "-o", "out")
    assert done.returncode == 3, done.stderr
    finding = json.loads((tmp_path / "out" / "ranks.json").read_text())["findings"][0]
    page = opened((tmp_path / "out" / "report.html").as_uri())
    assert finding["reason"] in page.locator("#answer").inner_text()
    assert page.locator(".source .at").count() == 1
    step, rank = finding["step"], finding["ranks"][0]
    command = f"tensorprobe show run {finding['name']} --step {step} --rank {rank}"
    assert page.locator("#verdict code").inner_text() == command


def test_one_rank_alone_is_not_called_fine(tmp_path: Path) -> None:
    record(tmp_path / "run", lambda: torch.ones(3).exp())
    done = type_command(tmp_path, "ranks", "run", "-o", "out")
    assert done.returncode == 2, done.stderr
    assert read_document("ranks", tmp_path / "out")["outcome"] == "incomparable"


STAGES = {
    "verdict": "fault", "against": None,
    "ranks": [{
        "runs": 3, "judged": 2, "judged_from_dynamo": 1, "worst": 5.0,
        "unjudged": {"no kernel": 1}, "findings": [{
            "stage": "inductor", "rank": 0, "step": 1, "run": 2, "compilation": "0/0",
            "direction": "forward", "node": "relu", "target": "aten.relu", "aten": None,
            "stack": [f"{__file__}:1 in f"], "kernel": None, "among": [], "error": 40.0,
            "text": "it gives something else", "script": "out/repro0/repro.py",
        }],
    }],
}  # fmt: skip


def test_the_stages_of_a_compiler_have_a_page(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "stages.json").write_text(json.dumps(STAGES))
    page = opened(write_document("compiled", tmp_path).as_uri())
    assert "Fault: inductor" in page.locator("#answer").inner_text()
    assert "it gives something else" in page.locator("#answer").inner_text()
    assert page.locator("#verdict code").inner_text() == "python out/repro0/repro.py"
    assert page.locator(".source .at").count() == 1
    assert "no kernel" in page.locator("main").inner_text()


@pytest.mark.parametrize(("judged", "words"), [(2, "others could not be"), (0, "no run")])
def test_what_was_not_judged_is_no_match(tmp_path: Path, judged: int, words: str) -> None:
    rank = {**STAGES["ranks"][0], "judged": judged, "findings": []}
    found = {**STAGES, "verdict": "incomparable", "ranks": [rank]}
    (tmp_path / "stages.json").write_text(json.dumps(found))
    shown = read_document("compiled", tmp_path)
    assert shown["outcome"] == "incomparable"
    assert words in shown["answer"]


ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_nothing_in_a_hostile_sheet_is_executed(tmp_path: Path, opened: Opened) -> None:
    finding = STAGES["ranks"][0]["findings"][0]
    hostile = {key: ATTACK if isinstance(value, str) else value for key, value in finding.items()}
    rank = {**STAGES["ranks"][0], "unjudged": {ATTACK: 1}, "findings": [hostile]}
    (tmp_path / "stages.json").write_text(json.dumps({**STAGES, "ranks": [rank]}))
    page = opened(write_document("compiled", tmp_path).as_uri())
    assert ATTACK in page.locator("main").inner_text()
    assert page.locator("img, svg[onload], iframe, object, embed").count() == 0
    assert page.locator("script:not([type])").count() == 1


@pytest.mark.parametrize("kind", SHEETS)
@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"verdict": 3}', "[" * 5000])
def test_a_damaged_file_is_said(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / SHEETS[kind][0]).write_text(text)
    with pytest.raises(BadArtefact, match="cannot be shown"):
        read_document(kind, tmp_path)


@pytest.mark.slow
def test_a_sheet_is_accessible(watched: Path, opened: Opened) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    done = type_command(watched, "monitor", "show", "bad", "-o", "axe")
    assert done.returncode == 3, done.stderr
    page = opened((watched / "axe" / "report.html").as_uri())
    page.locator(".curve canvas").first.wait_for()
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found] == []
