"""The site of the docs: every page is in its navigation, and its reference has the whole code."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipes.recipe_pages import FILES, commands
from tensorprobe.cli.main import VERBS

ROOT = Path(__file__).parents[1]
SITE = ROOT / "web" / "site"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", SITE / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    _, _, navigation = (SITE / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    made = {"index.md", "reference/commands.md", "reference/python.md"}
    made |= {"README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(docs | made)


def test_the_reference_has_every_verb_and_every_name(pages: ModuleType) -> None:
    text = "\n".join(pages.commands())
    assert [verb for verb in VERBS if f"## tensorprobe {verb}\n" not in text] == []
    assert "### tensorprobe ascend inspect\n" in text
    assert "| `--children` `processes\\|all\\|none` | record processes" in text
    import tensorprobe as tp

    names = "\n".join(pages.python_names())
    missing = [name for name in tp.__all__ if f"## {name}\n" not in names]
    assert missing == ["__version__"]
    assert "Records the torch calls of a program into a folder" in names


def test_links_lead_to_where_the_pages_are(pages: ModuleType) -> None:
    source = ROOT / "docs" / "recipes" / "half.md"
    text = "[a](../check.md#x) [b](../../README.md) [c](../../src/tensorprobe/errors.py) [d](#e)"
    assert pages._led_right(text, source, Path("recipes/half.md")) == (
        f"[a](../check.md#x) [b](../index.md) [c]({pages.SOURCE}src/tensorprobe/errors.py) [d](#e)"
    )


def test_the_first_page_is_the_same_in_both_languages() -> None:
    english, chinese = ((ROOT / "docs" / name).read_text() for name in ("start.md", "start.zh.md"))
    assert commands(chinese) == commands(english)
    assert FILES.findall(chinese) == FILES.findall(english)


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="no site without mkdocs: make docs")
def test_the_site_is_built_and_a_wrong_link_ends_it(tmp_path: Path) -> None:
    shutil.copytree(SITE, tmp_path / "web" / "site")
    subprocess.run([sys.executable, SITE / "pages.py", tmp_path / "build" / "docs"], check=True)
    build = [str(MKDOCS), "build", "--strict", "-f", str(tmp_path / "web/site/mkdocs.yml")]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "build" / "site" / "search" / "search_index.json").read_text()
    assert any("录制" in page["text"] for page in json.loads(index)["docs"])  # parted by jieba
    page = tmp_path / "build" / "docs" / "start.md"
    page.write_text(page.read_text() + "\n[nowhere](guide.md#not-there)\n")
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not-there" in done.stderr
