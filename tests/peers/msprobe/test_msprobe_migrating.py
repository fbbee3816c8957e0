"""docs/migrating.md names everything there is, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from migrating_tables import replaced
from msprobe_making import ROOT, SHARED

from tensorprobe.msprobe import pytorch
from tensorprobe.peers.msprobe import msprobe_command as command
from tensorprobe.peers.msprobe import msprobe_config as config
from tensorprobe.peers.msprobe.msprobe_functions import REFUSED

PAGE = (ROOT / "docs" / "migrating.md").read_text()
MSPROBE = PAGE.partition("\n# msprobe\n")[2].partition("\n# ptdbg_ascend\n")[0]


def test_the_tables_are_made_of_what_the_door_does() -> None:
    """To make them anew: python tests/peers/msprobe/migrating_tables.py"""
    assert replaced(PAGE) == PAGE


def test_every_function_and_refused_name_is_there() -> None:
    for name in (*pytorch.__all__, *REFUSED):
        assert name in MSPROBE, name
    for name in vars(pytorch.PrecisionDebugger):
        if not name.startswith("_"):
            assert name in MSPROBE, name


def test_every_field_of_the_configuration_is_there() -> None:
    online = config._ONLINE_FIELDS  # "online checking"
    few = {"device", "diff_nums", "file_format", "white_list", "black_list", "error_data_path"}
    for name in (*config._TOP_FIELDS, *config._REFUSED_FIELDS, *config._SECTIONS):
        if name not in (*online, "grad_probe"):
            assert f"`{name}`" in MSPROBE or f"`{name}:" in MSPROBE, name
    for section in ("statistics", "tensor"):
        for name in config._SECTIONS[section]:
            assert f"`{name}`" in MSPROBE or name in few or name in online, name


def test_every_verb_is_there() -> None:
    for verb in (*command.INSTEAD, "compare", "acc_check", "run_ut", "multi_acc_check"):
        assert f"`{verb}" in MSPROBE, verb


def test_links_into_the_faq_lead_somewhere() -> None:
    anchors = set(re.findall(r'id="([^"]+)"', (ROOT / "docs" / "faq.md").read_text()))
    found = re.findall(r"faq\.md#([\w.-]+)", MSPROBE)
    assert set(found) <= anchors
    assert {anchor for anchor in anchors if anchor.startswith("002-")} == set(found)


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="no ../shared")
def test_every_entry_of_their_faq_has_a_row() -> None:
    (faq,) = Path(SHARED / "seeds").glob("002_*.txt")
    text = faq.read_text()
    entries = len(re.findall(r"^\d+\. ", text, re.MULTILINE)) + text.count("### 3.1.1")
    rows = re.findall(r"^\| \[\d", MSPROBE, re.MULTILINE)
    assert len(rows) == entries
