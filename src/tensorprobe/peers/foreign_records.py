"""Reading what other tools wrote: hostile or damaged, it gives values or problems, never harm."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tensorprobe.errors import BadArtefact
from tensorprobe.store.lines import speakable
from tensorprobe.tensors.layouts import MAX_DIMENSIONS
from tensorprobe.tensors.opening import inside, open_file, read_text

MAX_DEPTH = 60  # of nested containers in one record
MAX_DIGITS = 40  # of a whole number: a 64-bit one has 20
_MAX_PROBLEMS = 200  # of one file: each costs a look through what is left
_MAX_NAME = 180  # of a file: most disks take 255 bytes
_LONGEST = 1 << 48  # elements along one dimension; larger than any disk


class Problem(NamedTuple):
    """A piece of a file that was skipped: where it is, and why."""

    line: int
    column: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line} column {self.column}: {self.reason}"


# JSON


def decode_text(data: bytes) -> tuple[str, Problem | None]:
    """The text of a file in UTF-8 or UTF-16, with or without a byte-order mark.

    Bytes that are no UTF-8 become U+FFFD, and the first of them is the problem.
    """
    for mark, encoding in (
        (b"\xef\xbb\xbf", "utf-8"),
        (b"\xff\xfe", "utf-16-le"),
        (b"\xfe\xff", "utf-16-be"),
    ):
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace"), None
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        text = data.decode(errors="replace")
        at = len(data[: error.start].decode())
        return text, problem_at(text, at, f"byte {data[error.start]:#x} is not UTF-8")


def problem_at(text: str, position: int, reason: str) -> Problem:
    """A problem at a character of a text."""
    line = text.count("\n", 0, position) + 1
    return Problem(line, position - text.rfind("\n", 0, position), reason)


def open_object(text: str, key: str) -> tuple[dict[str, Any], int]:
    """The items of a JSON object before `key`, whose value is an object too, and where that opens.

    BadArtefact when there is no such key, or what is before it is damaged.
    """
    before: dict[str, Any] = {}
    at = _open(text, 0)
    try:
        while True:
            at = _skip(text, at)
            found = _KEY.match(text, at)
            if found is None:
                raise BadArtefact(f"{problem_at(text, at, f'expected the key {key!r}')}")
            if found[1] == key:
                return before, _open(text, found.end())
            before[found[1]], at = _decode(text, found.end())
            at = _skip(text, at)
            if text[at : at + 1] == ",":
                at += 1
    except (ValueError, RecursionError) as error:
        raise BadArtefact(f"{problem_at(text, at, _reason(error))}") from error


def parse_items(text: str, at: int | None = None) -> Iterator[tuple[str, Any] | Problem]:
    """The items of the JSON object that opens before `at`, or that the whole text is, in order.

    An item that is damaged is a problem, and reading goes on with the next one that begins a line
    as the others do. NaN and Infinity are taken as numbers.
    """
    problems = 0
    for item in _items(text, _open(text, 0) if at is None else at):
        yield item
        if isinstance(item, Problem):
            problems += 1
            if problems == _MAX_PROBLEMS:
                yield Problem(item.line, item.column, "too much is damaged: the rest is not read")
                return


def read_foreign(path: Path, tell: Callable[[str], None], root: Path | None = None) -> str | None:
    """The text of a file; None if it is not there. What is wrong with it is told."""
    try:
        text, problem = decode_text(read_text(open_file(path, root), path))
    except FileNotFoundError:
        return None
    except BadArtefact as error:
        tell(str(error))
        return None
    if problem is not None:
        tell(str(problem))
    return text


def sound_items(
    text: str | None, tell: Callable[[str], None], at: int | None = None
) -> Iterator[tuple[str, Any]]:
    """The items of `parse_items` that are not damaged; the others are told."""
    if text is None:
        return
    try:
        for item in parse_items(text, at):
            if isinstance(item, Problem):
                tell(str(item))
            else:
                yield item
    except BadArtefact as error:
        tell(str(error))


def parse_lines(data: bytes) -> Iterator[tuple[int, Any | Problem]]:
    """The JSON values of a file with one on each line, by the number of their line.

    Several on one line, as a run that was started twice leaves them, are all given.
    """
    text, problem = decode_text(data)
    if problem is not None:
        yield problem.line, problem
    for number, line in enumerate(text.split("\n"), 1):
        at = _skip(line, 0)
        while at < len(line):
            try:
                value, at = _decode(line, at)
            except (ValueError, RecursionError) as error:
                column = getattr(error, "pos", at) + 1
                yield number, Problem(number, column, _reason(error))
                break
            yield number, value
            at = _skip(line, at)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_decoder = json.JSONDecoder(parse_int=_parse_int, strict=False)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\r\n\f\v]*")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*')


def _decode(text: str, at: int = 0, surrogates: bool | None = None) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends. No file can take a lone surrogate."""
    value, end = _decoder.raw_decode(text, at)
    if surrogates is None:
        surrogates = _SURROGATE.search(text, at, end) is not None
    return (speakable(value) if surrogates else value), end


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _open(text: str, at: int) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != "{":
        raise BadArtefact(f"{problem_at(text, at, 'expected an object')}")
    return at + 1


def _items(text: str, at: int) -> Iterator[tuple[str, Any] | Problem]:
    begin = None  # how the first key begins its line; so do all
    surrogates = _SURROGATE.search(text) is not None
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return
        found = _KEY.match(text, at)
        if begin is None and found is not None:
            begin = text[text.rfind("\n", 0, at) : at + 1]
        try:
            if found is None:
                raise json.JSONDecodeError("expected a name", text, at)
            key = _decode(text[found.start() : found.end()].rstrip().removesuffix(":"))[0]
            value, end = _decode(text, found.end(), surrogates)
            end = _skip(text, end)
            if text[end : end + 1] not in (",", "}"):
                raise json.JSONDecodeError("expected ',' or '}'", text, end)
        except (ValueError, RecursionError) as error:
            where = getattr(error, "pos", at)
            what = f" (in {found[1][:80]})" if found is not None else ""
            yield problem_at(text, where, _reason(error) + what)
            at = text.find(begin, at + 1) if begin else -1
            if at < 0:
                return
            at += len(begin or "") - 1
            continue
        yield key, value
        if text[end] == "}":
            return
        at = end + 1


# Values that a file claims


def read_shape(value: object) -> tuple[int, ...]:
    """A shape; ValueError for what cannot be one."""
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMENSIONS:
        _refuse("shape", value)
    if not all(type(n) is int and 0 <= n <= _LONGEST for n in value):
        _refuse("shape", value)
    return tuple(value)


def _refuse(what: str, value: object) -> NoReturn:
    raise ValueError(f"{str(value)[:60]!r} is no {what}")


# Files


def confined(folder: Path, name: object) -> Path:
    """The file of this name in a folder; ValueError for a name that leads out of it."""
    if not isinstance(name, str) or not name or name in (".", ".."):
        _refuse("file name", name)
    if "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name[:80]!r} leads out of its folder; it is not read")
    return folder / name


def file_name(name: str, suffix: str) -> str:
    """A name for a file that any disk takes, from the name of a tensor: that, where it will do."""
    plain = re.sub(r"[/\\\0\n\r]", "_", name).lstrip(".") or "_"
    plain = plain.encode("utf-8", "replace").decode()
    if plain != name or len(plain.encode()) > _MAX_NAME:
        # Two names that differ only in what was cut or replaced must not meet in one file.
        mark = f"{zlib.crc32(name.encode('utf-8', 'backslashreplace')):08x}"
        plain = plain.encode()[:_MAX_NAME].decode(errors="ignore") + f"-{mark}"
    return plain + suffix


def numbered(folder: Path, pattern: re.Pattern[str], root: Path) -> list[tuple[int, Path]]:
    """The sub-folders whose name is a word and a number, by that number; without one it is 0."""
    found = []
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and len(match[1]) <= MAX_DIGITS and path.is_dir():
            found.append((int(match[1] or 0), inside(path, root) if path.is_symlink() else path))
    return sorted(found)
