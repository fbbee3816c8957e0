"""Every command in the pages exists as it is written, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tensorprobe.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def commands(page: str) -> list[str]:
    """What a reader would type: in blocks, after the prompt of consoles, and in the text."""
    found = []
    for _, language, body in BLOCK.findall(page):
        lines = [line.strip() for line in body.splitlines()]
        if language == "console":
            lines = [line for line in lines if line.startswith("$ ")]
        if language in ("", "console", "bash"):
            found += [line.removeprefix("$ ") for line in lines]
    found += re.findall(r"`([^`\n]+)`", BLOCK.sub("", page))
    return [line for line in found if re.match(r"(torchrun .* -m )?tensorprobe [a-z]+( |$)", line)]


def words(command: str) -> list[str]:
    """The arguments of tensorprobe, without the launcher before it and the comment behind it."""
    return shlex.split(command.partition("tensorprobe ")[2], comments=True)


def why_not(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the parser says against a command."""
    verbs = [word for word in arguments if not word.startswith("-")]
    options = {word for word in arguments if word.startswith("--")}
    is_mention = len(verbs) <= 1 + (verbs[0] == "ascend") and "=" not in "".join(options)
    try:
        build_parser(verbs[0]).parse_args([*verbs, "--help"] if is_mention else arguments)
    except SystemExit as end:
        printed = capsys.readouterr()
        if end.code != 0:
            return printed.err.strip().splitlines()[-1]
        missing = options - set(re.findall(r"--[a-z-]+", printed.out))
        return f"no {missing}" if missing else ""
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        command: reason
        for command in commands(page.read_text())
        if (reason := why_not(words(command), capsys))
    }
    assert wrong == {}


def test_a_wrong_command_would_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run --bogus train.py", "inspect runs/a", "compare a b --not-there"):
        assert why_not(command.split(), capsys)
    assert len(commands((ROOT / "docs" / "guide.md").read_text())) > 15
    assert len(commands((ROOT / "README.md").read_text())) > 15
    assert len(commands((ROOT / "README.zh.md").read_text())) > 10


def test_the_guide_has_the_same_commands_in_both_languages() -> None:
    english, chinese = ((ROOT / "docs" / name).read_text() for name in ("guide.md", "guide.zh.md"))
    assert commands(chinese) == commands(english)


def anchors(page: Path) -> set[str]:
    """The places of a page that a link may name: its headings, and what it marks itself."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_reached_from_the_first() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = {link.partition("#")[0] for link in LINK.findall(readme)}
    named = set(re.findall(r"docs/[\w-]+\.md", readme))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked - named == set()
