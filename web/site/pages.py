"""The pages of the site: docs/ as they are, the README as the first, and a reference of the code.

python web/site/pages.py build/docs
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = "https://github.com/tensorprobe/tensorprobe/blob/main/"
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)")
_BESIDE = ("README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md")


def write_pages(folder: Path) -> None:
    """Write every page into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path in folder.rglob("*.md"):
        inside = path.relative_to(folder)
        path.write_text(_led_right(path.read_text(), ROOT / "docs" / inside, inside))
    for name, target in (("README.md", "index.md"), *((each, each) for each in _BESIDE)):
        text = _led_right((ROOT / name).read_text(), ROOT / name, Path(target))
        (folder / target).write_text(text)
    (folder / "reference").mkdir()
    (folder / "reference" / "commands.md").write_text("\n".join(commands()))
    (folder / "reference" / "python.md").write_text("\n".join(python_names()))


def _led_right(text: str, source: Path, target: Path) -> str:
    """Links that lead to where the pages are on the site, others to the source."""

    def led(found: re.Match[str]) -> str:
        aim = (source.parent / found[2]).resolve()
        if not aim.is_relative_to(ROOT):
            return found[0]
        path = aim.relative_to(ROOT)
        place = _place(path)
        if place is None:
            return f"{found[1]}{SOURCE}{path}"
        up = "../" * (len(target.parts) - 1)
        return f"{found[1]}{up}{place}"

    return _LINK.sub(led, text)


def _place(path: Path) -> Path | None:
    """Where a file of the project is on the site; None if it is not there."""
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    if str(path) == "README.md":
        return Path("index.md")
    return path if str(path) in _BESIDE else None


def commands() -> Iterator[str]:
    """Every verb with its options, from the parsers."""
    from tensorprobe.cli.completion import all_commands

    yield "# Commands\n\nEvery verb and option, from the code. What they are for is on the pages.\n"
    for command in all_commands():
        if not command.words:
            continue
        yield f"{'#' * (len(command.words) + 1)} tensorprobe {' '.join(command.words)}\n"
        yield f"{command.help[:1].upper()}{command.help[1:]}.\n"
        yield f"```text\n{command.usage}\n```\n"
        if command.options:
            yield "| option | |\n|---|---|"
            for option in command.options:
                names = ", ".join(f"`{name}`" for name in option.names)
                value = f" `{option.metavar}`".replace("|", "\\|") if option.takes_value else ""
                text = option.help.replace("|", "\\|").replace("<", "&lt;")
                yield f"| {names}{value} | {text} |"
            yield ""


def python_names() -> Iterator[str]:
    """Every public name with its signature and what it says of itself."""
    import tensorprobe as tp

    yield "# Python\n\n`import tensorprobe as tp`: every public name, from the code.\n"
    for block in re.split(r"\n(?=tensorprobe\.\w|\n)", (ROOT / "tests" / "api.txt").read_text()):
        head = re.match(r"\s*(?:class )?tensorprobe\.(\w+)", block)
        if head is None:
            continue
        yield f"## {head[1]}\n"
        text = inspect.getdoc(getattr(tp, head[1], None)) or ""
        yield f"```text\n{block.strip()}\n```\n"
        yield from _as_markdown(text)


def _as_markdown(text: str) -> Iterator[str]:
    """A docstring: what is indented in it is code."""
    for part in re.split(r"\n\s*\n", text):
        if part.startswith("    "):
            yield f"```python\n{inspect.cleandoc(part)}\n```\n"
        else:
            yield part.replace("<", "&lt;") + "\n"


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
