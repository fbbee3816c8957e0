"""The sentences of a report in Chinese, for the page; chinese.txt has them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The fields that hold sentences of ours. All others are names, paths and texts of programs.
_FIELDS = frozenset({
    "reason", "recorded", "notes", "facts", "structure", "conclusion", "next", "warnings", "note",
    "what", "why", "text", "answer", "badge", "about", "title", "head",
})  # fmt: skip
_MOST = 5000  # sentences of a page that are looked up
_LONGEST = 2000
_DEEPEST = 4
_FILE = Path(__file__).with_name("chinese.txt")


class _Sentence(NamedTuple):
    """A sentence with gaps: what stands before, between and behind them, and their names."""

    between: tuple[str, ...]
    gaps: tuple[str, ...]
    chinese: str

    def filled(self, text: str) -> dict[str, str] | None:
        """What is in the gaps, if the text is such a sentence. No way back: it takes no longer
        than looking for each part once, whatever the text."""
        if not text.startswith(self.between[0]):
            return None
        if not self.gaps:
            return {} if text == self.between[0] else None
        at, found = len(self.between[0]), {}
        for gap, then in zip(self.gaps[:-1], self.between[1:-1], strict=True):
            end = text.find(then, at + 1)
            if end < 0:
                return None
            found[gap] = text[at:end]
            at = end + len(then)
        end = len(text) - len(self.between[-1])
        if end <= at or not text.endswith(self.between[-1]):
            return None
        found[self.gaps[-1]] = text[at:end]
        return found


@functools.cache
def _sentences() -> list[_Sentence]:
    """Those with the most words of their own first."""
    found = []
    english = ""
    for line in _FILE.read_text(encoding="utf-8").split("\n"):
        if line.startswith("    "):
            parts = re.split(r"\{(\w)\}", english)
            found.append(_Sentence(tuple(parts[::2]), tuple(parts[1::2]), line[4:]))
        elif line and not line.startswith("#"):
            english = line
    return sorted(found, key=lambda each: -sum(map(len, each.between)))


@functools.lru_cache(maxsize=10_000)
def in_chinese(text: str, depth: int = 0) -> str | None:
    """A sentence in Chinese; None if chinese.txt has no such one."""
    if len(text) > _LONGEST:
        return None
    for each in _sentences():
        found = each.filled(text)
        if found is not None:
            filled = {gap: _filling(part, depth) for gap, part in found.items()}
            return each.chinese.format_map(filled)
    return None


def _filling(text: str, depth: int) -> str:
    if depth == _DEEPEST:
        return text
    whole = in_chinese(text, depth + 1)
    if whole is not None:
        return whole
    parts = text.split("; ")
    if not parts[1:]:
        return text
    return "\uff1b".join(in_chinese(part, depth + 1) or part for part in parts)


def sentences_in_chinese(shown: Mapping[str, Any]) -> dict[str, str]:
    """The Chinese of what a page shows, by the English."""
    texts = itertools.islice(dict.fromkeys(_of_fields(shown, False)), _MOST)
    return {text: chinese for text in texts if (chinese := in_chinese(text)) is not None}


def _of_fields(value: Any, is_sentence: bool) -> Iterator[str]:
    if isinstance(value, str):
        if is_sentence:
            yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _of_fields(part, key in _FIELDS)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _of_fields(part, is_sentence)
