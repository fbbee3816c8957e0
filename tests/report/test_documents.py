"""The pages of check, guard and incident, written by the real commands."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorprobe as tp
from conftest import Made, type_command
from recorded import record
from tensorprobe.errors import BadArtefact
from tensorprobe.report.documents import read_document

sys.path.append(str(Path(__file__).parents[1] / "ascend"))
from ascend_files import write_incident

OVERFLOW = """\
import torch
net = torch.nn.Linear(8, 2)
(net(torch.ones(4, 8)) * 1e30).square().mean().backward()
"""


def test_a_check(made: Callable[[str, str], Made], opened: Callable[..., Any]) -> None:
    folder = made("llama", "silu").folder
    done = type_command(folder, "check", "actual", "-o", "checked", "--all", "--only", "*silu*")
    assert done.returncode in (0, 3), done.stderr
    found = json.loads((folder / "checked" / "check.json").read_text())
    page = opened((folder / "checked" / "report.html").as_uri())
    assert "torch.nn.functional.silu" in page.locator("#accuracy").inner_text()
    assert f"{found['counts']['pass']}" in page.locator("#verdict .facts").inner_text()
    wrong = [call for call in found["calls"] if call.get("recorded")]  # they pass here
    assert wrong
    assert {call["verdict"] for call in found["calls"]} == {"pass"}
    first = page.locator("#calls .vt-spacer .vt-row").first
    assert "recorded wrong" in first.inner_text()
    first.click()
    assert wrong[0]["name"] in page.locator("#calls .detail").inner_text()
    assert "recorded wrong" in page.locator("#accuracy th").all_inner_texts()
    page.locator("#calls input").fill("recorded wrong")
    assert page.locator("#calls .count").inner_text().startswith(f"{len(wrong)} of")


def test_a_guard(tmp_path: Path, opened: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(OVERFLOW)
    done = type_command(tmp_path, "run", "--guard", "overflow", "--no-record", "train.py")
    assert done.returncode == 3, done.stderr
    (found,) = json.loads((tmp_path / "guard" / "findings.json").read_text())["findings"]
    page = opened((tmp_path / "guard" / "report.html").as_uri())
    shown = page.locator("main").inner_text()
    assert found["travelled"]
    assert found["reached"]
    for text in (found["name"], found["reason"], found["next"], *found["travelled"]):
        assert text in shown
    assert f"it reached {found['reached']}" in shown
    assert "square().mean().backward()" in page.locator(".source .at").inner_text()


def test_in_python_too_they_write_a_page(tmp_path: Path, opened: Callable[..., Any]) -> None:
    capture = record(tmp_path / "run", lambda: torch.linspace(1, 2, 6).sin().sqrt())
    checked = tp.check(capture, tmp_path / "checked")
    shown = opened((checked.path / "report.html").as_uri()).locator("main").inner_text()
    assert "All checked calls pass" in shown
    assert "torch.Tensor.sin" in shown

    with tp.Guard(tmp_path / "guard", overflow_nums=-1) as guard:
        torch.zeros(3).log().sum()
        torch.zeros(3).div(torch.zeros(3))
    shown = opened((guard.path / "report.html").as_uri()).locator("main").inner_text()
    assert guard.findings
    assert guard.findings[0].name in shown
    assert guard.findings[0].reason in shown


def test_a_guard_with_nowhere_to_write_leaves_the_program_alone(tmp_path: Path) -> None:
    told: list[str] = []
    with tp.Guard(tmp_path / "guard", overflow_nums=-1, log=told.append) as guard:
        shutil.rmtree(tmp_path / "guard", ignore_errors=True)
        (tmp_path / "guard").write_text("in the way")
        torch.zeros(3).div(torch.zeros(3))
    assert guard.failed is not None
    assert guard.findings
    assert told.count(f"{guard.failed}. The program goes on") == 1


def test_an_incident(tmp_path: Path, opened: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).normal(size=(62, 62)).astype(np.float32)
    home = write_incident(tmp_path, x)
    words = ["ascend", "incident", "-o", "out"]
    for option in ("log", "graph", "kernel_meta", "dump"):
        if (home / option).exists():
            words += [f"--{option.replace('_', '-')}", str(home / option)]
    done = type_command(tmp_path, *words)
    assert done.returncode == 3, done.stderr
    (found,) = json.loads((tmp_path / "out" / "incident.json").read_text())["incidents"]
    page = opened((tmp_path / "out" / "report.html").as_uri())
    shown = page.locator("main").inner_text()
    for text in (found["node"], found["conclusion"], found["kernel"], *found["error_codes"]):
        assert text in shown


@pytest.mark.parametrize("text", ["[]", "{", '{"findings": 3}', '{"findings": [1]}', "[" * 5000])
def test_a_damaged_file_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "findings.json").write_text(text)
    with pytest.raises(BadArtefact, match="cannot be shown"):
        read_document("guard", tmp_path)
