"""Protobuf's text format without a schema: any message as a dict of lists, in one pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tensorprobe.errors import BadArtefact

# Values are str (quoted), int, float, Word (identifiers: enum names, true, nan) or a Message.
Message = dict[str, list[Any]]
MAX_DEPTH = 200
# Messages and fields. Real graphs have one in 30 to 160 characters; a hostile one is all braces.
MAX_PARTS = 5_000_000


class Word(str):
    """An identifier where a value stands: an enum's name, `true`, `inf`."""

    __slots__ = ()


# The three forms that make up nearly every line of a GE graph come first, each as one token.
_TOKEN = re.compile(
    r"""
    [\s,;]*(?:
      (?P<open>[A-Za-z_][\w.]*)\s*(?::\s*)?[{<]
    | (?P<close>[}>])
    | (?P<key>[A-Za-z_][\w.]*)\s*:\s*
    | (?P<extension>\[[\w./]+\])\s*:?\s*
    | (?P<comment>\#[^\n]*)
    )""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""
      (?P<quote>["'])
    | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?[fF]?))(?![\w.])
    | (?P<word>-?[A-Za-z_][\w.]*)
    | (?P<list>\[)
    | (?P<open>[{<])
    """,
    re.VERBOSE | re.DOTALL,
)
# In pieces: as one match, a megabyte of escapes would take a hundred of memory.
_STRING = {
    '"': re.compile(r"""(?:[^"\\\n]+|\\.){1,10000}""", re.DOTALL),
    "'": re.compile(r"""(?:[^'\\\n]+|\\.){1,10000}""", re.DOTALL),
}
_DATA_FROM = 1 << 20  # characters from which a string is no name but weights: kept as written
_SPACE = re.compile(r"[\s,;]*")
_MORE_STRING = re.compile(r"\s*(?=[\"'])")
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_SIMPLE = {
    "n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "?": "?",
}  # fmt: skip


def most_parts(length: int) -> int:
    """How many messages and fields a graph of that many characters may have."""
    return min(MAX_PARTS, 10_000 + length // 8)


def _unescape(text: str) -> str:
    if "\\" not in text or len(text) > _DATA_FROM:
        return text

    def one(match: re.Match[str]) -> str:
        octal, hexadecimal, short, long, other = match.groups()
        if octal:
            return chr(int(octal, 8) & 0xFF)
        if hexadecimal:
            return chr(int(hexadecimal, 16))
        if short or long:
            code = int(short or long, 16)
            return chr(code).encode("utf-8", "replace").decode("latin-1") if code < 0x110000 else ""
        return _SIMPLE.get(other, other)

    # Escapes are bytes, the rest is text: bring both to bytes, then read them as UTF-8.
    escaped = _ESCAPE.sub(one, text.encode("utf-8").decode("latin-1"))
    data = escaped.encode("latin-1")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return escaped


def _number(text: str) -> int | float:
    try:
        return int(text, 0) if not text.lstrip("-+").startswith("0") else _leading_zero(text)
    except ValueError:
        return float(text.rstrip("fF"))


def _leading_zero(text: str) -> int | float:
    digits = text.lstrip("-+")
    sign = -1 if text.startswith("-") else 1
    if digits[:2] in ("0x", "0X"):
        return sign * int(digits, 16)
    if digits.isdigit():
        return sign * int(digits, 8 if len(digits) > 1 else 10)
    return sign * float(digits.rstrip("fF"))


class _Parser:
    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    def bad(self, at: int, expected: str) -> BadArtefact:
        line = self.text.count("\n", 0, at) + 1
        found = self.text[at : at + 30].split("\n")[0] or "the end"
        return BadArtefact(
            f"{self.path}: line {line} (character {at}): found {found!r}; expected {expected}"
        )

    def parse(self) -> Message:
        text, size = self.text, len(self.text)
        token = _TOKEN.match
        root: Message = {}
        stack: list[Message] = []
        message = root
        count, limit = 0, most_parts(size)
        at = 1 if text.startswith("\ufeff") else 0
        while True:
            match = token(text, at)
            if match is None:
                at = self._skip_space(at)
                if at < size:
                    raise self.bad(at, "a field")
                break
            kind = match.lastgroup
            at = match.end()
            if kind == "key":
                key = match["key"]
                value, at = self._value(at)
                if value is _OPEN:
                    kind, inner = "open", key
                else:
                    if key not in message:
                        message[key] = []
                        count += 1
                        if count > limit:
                            raise self.bad(at, f"at most {limit} messages and fields")
                    values = message[key]
                    values.extend(value) if isinstance(value, list) else values.append(value)
                    continue
            elif kind == "open":
                inner = match["open"]
            elif kind == "extension":
                value, at = self._value(at)
                if value is _OPEN:
                    inner = match["extension"]
                else:
                    message.setdefault(match["extension"], []).append(value)
                    continue
            elif kind == "close":
                if not stack:
                    raise self.bad(at - 1, "a field: nothing is open here")
                message = stack.pop()
                continue
            else:  # a comment
                continue
            count += 1
            if len(stack) == MAX_DEPTH or count > limit:
                raise self.bad(at, f"at most {MAX_DEPTH} levels and {limit} messages and fields")
            child: Message = {}
            message.setdefault(inner, []).append(child)
            stack.append(message)
            message = child
        if stack:
            raise self.bad(size, f"{len(stack)} closing braces more (is the file cut off?)")
        return root

    def _skip_space(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        return match.end() if match else at

    def _value(self, at: int) -> tuple[Any, int]:
        match = _VALUE.match(self.text, at)
        if match is None:
            raise self.bad(at, "a value")
        kind, at = match.lastgroup, match.end()
        if kind == "quote":
            value, at = self._string(at)
            # Adjacent strings are one; the common next character is a line's end.
            more = _MORE_STRING.match(self.text, at)
            if more is None:
                return value, at
            values = [value]
            while more is not None:
                value, at = self._string(more.end() + 1)
                values.append(value)
                more = _MORE_STRING.match(self.text, at)
            return "".join(values), at
        if kind == "number":
            found = _number(match["number"])
            if isinstance(found, int) and abs(found) >= 1 << 64:
                raise self.bad(match.start(), "a number of at most 64 bits")
            return found, at
        if kind == "word":
            return Word(match["word"]), at
        if kind == "open":
            return _OPEN, at
        return self._list(at)

    def _string(self, start: int) -> tuple[str, int]:
        """The string whose opening quote is before `start`, and the place after its end."""
        quote = self.text[start - 1]
        at = start
        while match := _STRING[quote].match(self.text, at):
            at = match.end()
        if not self.text.startswith(quote, at):
            raise self.bad(start - 1, "a string that ends on its line")
        return _unescape(self.text[start:at]), at + 1

    def _list(self, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while True:
            at = self._skip_space(at)
            if self.text.startswith("]", at):
                return values, at + 1
            if self.text.startswith(("[", "{", "<"), at):
                raise self.bad(at, "numbers, words or strings in a list")
            value, at = self._value(at)
            values.append(value)


_OPEN = object()


def parse_text(text: str, path: Path) -> Message:
    """A text-format message as `{field: [values]}`; a nested message is again such a dict."""
    return _Parser(path, text).parse()
