"""The part of docs/migrating.md on ptdbg_ascend names everything there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tensorprobe import ptdbg_ascend
from tensorprobe.peers.ptdbg.ptdbg_settings import MODES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "migrating.md").read_text().partition("\n# ptdbg_ascend\n")[2]


def test_every_function_and_argument_is_there() -> None:
    for name in ptdbg_ascend.__all__:
        assert f"`{name}" in PAGE, name
    for name in ("compare", "compare_distributed", "set_dump_switch", "parse", "seed_all"):
        for argument in inspect.signature(getattr(ptdbg_ascend, name)).parameters:
            if argument not in ("is_print_compare_log", "switch"):
                assert argument in PAGE, (name, argument)
    for mode in MODES:
        assert f"`{mode}`" in PAGE, mode


def test_every_entry_of_the_faq_is_there_and_leads_somewhere() -> None:
    faq = (ROOT / "docs" / "faq.md").read_text()
    anchors = set(re.findall(r'<a id="(001-\w+)">', faq))
    assert anchors == set(re.findall(r"faq\.md#(001-\w+)\)", PAGE))


def test_every_wrong_answer_that_is_named_is_tested() -> None:
    section = PAGE.partition("## Where ptdbg_ascend is wrong")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    tests = (ROOT / "tests" / "peers" / "ptdbg" / "test_ptdbg_pains.py").read_text()
    assert len(re.findall(r"^def test_", tests, re.MULTILINE)) >= len(rows)
