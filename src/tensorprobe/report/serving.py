"""`tensorprobe view`: the page over data that is too large for one file, or for a folder of runs.

The server listens on 127.0.0.1 alone. It answers only those who know the token in its address and
ask for it by that address, it only reads, and it opens nothing outside of the paths it was given.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import secrets
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from tensorprobe.comparing.align import Pair
from tensorprobe.comparing.measure import measure, pair_tensors
from tensorprobe.errors import BadArtefact, BadUsage, TensorprobeError
from tensorprobe.monitoring.series_reading import rank_folders
from tensorprobe.records import Call, Capture
from tensorprobe.report.documents import FILES, SHEETS, read_document, sheet_data
from tensorprobe.report.html import (
    DATA_FILE,
    PAGE_FILE,
    json_block,
    page,
    policy,
    read_data,
    read_index,
)
from tensorprobe.report.page_data import (
    N_METRICS,
    N_STATISTICS,
    PageData,
    capture_data,
    clean,
    packed,
    shown,
    unpacked,
)
from tensorprobe.report.trend_curves import monitor_sheet
from tensorprobe.store.loading import find, load
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file, read_text

HOST = "127.0.0.1"
_DEEPEST = 4  # folders below a path that are looked into
_MOST_FOLDERS = 5000
_MOST_PAGE_NBYTES = 64 << 20
_VALUE = 2 * N_STATISTICS + N_METRICS
# What a report that is damaged may raise.
REFUSED = (
    TensorprobeError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
    RecursionError, MemoryError,
)  # fmt: skip
_DATA = re.compile(r"data/(\d{1,9})/(index|(?:call|pictures)/(\d{1,9}))")


class Item(msgspec.Struct):
    """Something to look at: a report or a recording in a folder."""

    path: Path
    kind: str
    about: str = ""


def find_items(paths: Sequence[Path]) -> list[Item]:
    """What there is to look at in these folders, those inside them too."""
    found: list[Item] = []
    for path in paths:
        if not path.exists():
            raise BadUsage(f"nothing to view at '{path}': there is no such path")
        before = len(found)
        found += _items(path if path.name else path.absolute(), _DEEPEST, [0])
        if len(found) == before:
            raise BadUsage(
                f"nothing to view at '{path}': expected the OUT of compare, check, run --guard or "
                "another verb, a recording, the folder of a monitor, or a folder of them"
            )
    return found


def _items(path: Path, depth: int, seen: list[int]) -> Iterator[Item]:
    seen[0] += 1
    if seen[0] > _MOST_FOLDERS:
        return
    kinds = list(_kinds(path)) if path.is_dir() else []
    yield from kinds
    if all(each.kind == "monitor" for each in kinds):  # which may stand beside a recording
        try:
            layout, _ = find(path)
            yield Item(path, "capture", layout)
            return
        except (TensorprobeError, OSError):
            pass  # no recording
    if depth and path.is_dir() and not kinds:
        for child in _children(path):
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _items(child, depth - 1, seen)


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:  # a folder of somebody else's
        return []


def _kinds(path: Path) -> Iterator[Item]:
    verdict = path / "verdict.json"
    if verdict.is_file():
        yield Item(path, "compare", _outcome(verdict))
    for kind, (name, _) in (*FILES.items(), *SHEETS.items()):
        if (path / name).is_file():
            yield Item(path, kind)
    if rank_folders(path):
        yield Item(path, "monitor")


def _outcome(path: Path) -> str:
    try:
        found = _verdict(path)
        culprits = found.get("culprits") or [{}]
        return " ".join(filter(None, (found["verdict"], culprits[0].get("name"))))
    except (TensorprobeError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _verdict(path: Path) -> dict[str, Any]:
    found = read_json(open_file(path), path)
    if not isinstance(found, dict):
        raise BadArtefact(f"'{path}' is no verdict: expected an object")
    return found


class ServedPaths:
    """The data of items, read when somebody asks for it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.items = find_items(paths)
        self._roots = [Path(os.path.realpath(path)) for path in paths]
        self._lock = threading.RLock()
        self._opened: dict[int, _Opened] = {}
        self._captures: dict[Path, dict[tuple[str, int, int], Call]] = {}

    def index(self, number: int) -> bytes:
        return self._open(number).index

    def call(self, number: int, at: int) -> bytes:
        return json_block(self._open(number).call(at))

    def pictures(self, number: int, at: int) -> bytes:
        """Of any call, made of its tensors; null where the recordings are not at hand."""
        opened = self._open(number)
        item = self.items[number]
        found = opened.pictures.get(str(at))
        if found is None:
            place = opened.place(at)
            if item.kind == "capture":
                pair = Pair(self._calls(item.path).get(place[0]), None, "exact")
            else:
                sides = [self._calls_of(each) for each in opened.captures]
                pair = Pair(sides[0].get(place[0]), sides[1].get(place[1]), "exact")
            found = self._pictures(pair)
        return json_block(clean(found))

    def _pictures(self, pair: Pair) -> list[dict[str, Any]] | None:
        from tensorprobe.report.tensor_pictures import pictures_of

        if pair.actual is None and pair.expected is None:
            return None
        tensors = pair_tensors(pair)
        measure([tensors])
        return pictures_of(tensors)

    def _open(self, number: int) -> _Opened:
        with self._lock:
            if number not in self._opened:
                self._opened[number] = _Opened(self.items[number])
            return self._opened[number]

    def _calls_of(self, path: str) -> dict[tuple[str, int, int], Call]:
        """The calls of a recording that a report names, if it is in a path that we were given."""
        place = Path(path)
        real = Path(os.path.realpath(place))
        if not any(real == root or root in real.parents for root in self._roots):
            return {}
        return self._calls(place)

    def _calls(self, path: Path) -> dict[tuple[str, int, int], Call]:
        with self._lock:
            if path not in self._captures:
                capture: Capture = load(path)
                self._captures[path] = {
                    (shown(call.name), call.step, call.rank): call for call in capture.calls
                }
            return self._captures[path]


class _Opened:
    """An item's data: what the page needs at once, as bytes, and the rest in columns."""

    def __init__(self, item: Item) -> None:
        self.captures: tuple[str, str] = ("", "")
        self._item = item
        self._data: PageData | None = None
        if item.kind == "monitor":
            self.index = json_block(sheet_data(monitor_sheet(item.path)))
            return
        if item.kind in FILES or item.kind in SHEETS:
            self.index = json_block(read_document(item.kind, item.path))
            return
        if item.kind == "compare":
            verdict = _verdict(item.path / "verdict.json")
            self.captures = (str(verdict["actual"]), str(verdict["expected"]))
        beside = item.path / DATA_FILE
        if item.kind == "compare" and beside.is_file():
            self.index = read_index(beside)  # as it is: the page can begin at once
            return
        self._data = capture_data(load(item.path)) if item.kind == "capture" else _page_data(item)
        self.index = json_block(self._data.index)

    @functools.cached_property
    def _whole(self) -> PageData:
        return self._data or read_data(self._item.path / DATA_FILE)

    @property
    def pictures(self) -> dict[str, Any]:
        found: dict[str, Any] = self._whole.index["pictures"]
        return found

    @functools.cached_property
    def _columns(self) -> dict[str, array[Any]]:
        calls = self._whole.index["calls"]
        return {name: unpacked("i", calls[name]) for name in ("name", "other", "step", "rank")}

    def place(self, at: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
        """The names of a call on both sides, with step and rank."""
        c, strings = self._columns, self._whole.index["strings"]
        step, rank = c["step"][at], c["rank"][at]
        return (strings[c["name"][at]], step, rank), (strings[c["other"][at]], step, rank)

    @functools.cached_property
    def _details(self) -> _Details:
        if not self._whole.details:
            raise BadArtefact(f"there are no details: {DATA_FILE} is not beside the report")
        return _Details(self._whole.details)

    def call(self, at: int) -> dict[str, Any]:
        return self._details.of(at)


class _Details:
    """The details of all calls, in columns."""

    def __init__(self, details: dict[str, Any]) -> None:
        codes = {"role": "B", "flags": "B", "error": "f"}
        tensors = details["tensors"].items()
        self._calls = {name: unpacked("i", text) for name, text in details["calls"].items()}
        self._tensors = {name: unpacked(codes.get(name, "i"), text) for name, text in tensors}
        self._values = unpacked("d", details["values"])
        self._strings: list[str] = details["strings"]
        self._stacks: list[list[int]] = details["stacks"]

    def of(self, at: int) -> dict[str, Any]:
        """The details of one call, in the form of all."""
        texts: list[str] = [""]

        def text(number: int) -> int:
            texts.append(self._strings[number])
            return len(texts) - 1

        first, last = self._calls["first"][at], self._calls["first"][at + 1]
        tensors = {name: column[first:last] for name, column in self._tensors.items()}
        values = array("d")
        for k, number in enumerate(tensors["value"]):
            if number >= 0:
                values.extend(self._values[number * _VALUE : (number + 1) * _VALUE])
                tensors["value"][k] = len(values) // _VALUE - 1
        for name in ("name", "actual", "expected"):
            tensors[name] = array("i", map(text, tensors[name]))
        calls = {"first": array("i", (0, last - first)), "stack": array("i", (0,))}
        for name in ("arguments", "expected", "notes"):
            number = self._calls[name][at]
            calls[name] = array("i", (text(number) if number else 0,))
        return {
            "stacks": [[text(frame) for frame in self._stacks[self._calls["stack"][at]]]],
            "calls": {name: packed(column) for name, column in calls.items()},
            "tensors": {name: packed(column) for name, column in tensors.items()},
            "values": packed(values),
            "strings": texts,
        }


def _page_data(item: Item) -> PageData:
    """The data of a comparison that is in the page itself."""
    folder = item.path
    path = folder / PAGE_FILE
    if not path.is_file():
        raise BadArtefact(
            f"'{folder}' has no {PAGE_FILE}: an older version compared it. To make it: "
            "tensorprobe compare ACTUAL EXPECTED -o OUT"
        )
    text = read_text(open_file(path), path, _MOST_PAGE_NBYTES)
    try:
        index, details = (_block(text, name) for name in (b"index", b"details"))
    except (ValueError, RecursionError) as error:
        raise BadArtefact(f"'{path}' is no page of tensorprobe: {error}") from error
    index.pop("lacks", None)
    return PageData(index, details)


def _block(text: bytes, name: bytes) -> dict[str, Any]:
    start = b'<script type="application/json" id="%b">' % name
    at = text.find(start)
    if at < 0:
        return {}
    end = text.index(b"</script>", at)
    return msgspec.json.decode(text[at + len(start) : end], type=dict[str, Any])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Viewer:
    """The server; `address` is what a browser opens."""

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self.library = ServedPaths(paths)
        self._token = secrets.token_urlsafe(24)
        viewer = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "tensorprobe", ""
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                viewer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing: the terminal is the user's."""

        try:
            self._server = _Server((HOST, port), Handler)
        except OSError as error:
            raise TensorprobeError(
                f"cannot listen on port {port} of {HOST}: {error.strerror}. "
                "Give another with --port, or leave it out"
            ) from error
        self.port = self._server.server_address[1]
        self.address = f"http://{HOST}:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request: who asks, what for, and the answer."""
        if request.headers.get("Host", "") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            return _send(request, 403, b"this server answers to 127.0.0.1 only\n")
        url = urlsplit(request.path)
        _, token, *rest = [*url.path.split("/", 2), ""]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            return _send(request, 403, b"the address has a token, which is missing here\n")
        wanted = rest[0]
        try:
            if wanted == "":
                return _send(request, 200, self._page(parse_qs(url.query)), "text/html")
            data = _DATA.fullmatch(wanted)
            if data is None or int(data[1]) >= len(self.library.items):
                return _send(request, 404, b"there is no such thing here\n")
            return _send(request, 200, self._data(int(data[1]), data[2], data[3]), _JSON)
        except REFUSED as error:
            text = f"{error}" if isinstance(error, TensorprobeError) else f"{error!r}"
            return _send(request, 500, shown(text).encode())

    def _data(self, item: int, what: str, at: str | None) -> bytes:
        if at is None:
            return self.library.index(item)
        if what.startswith("call/"):
            return self.library.call(item, int(at))
        return self.library.pictures(item, int(at))

    def _page(self, query: dict[str, list[str]]) -> bytes:
        items = self.library.items
        wanted = query.get("open", [""])[0]
        opened = int(wanted) if wanted.isdecimal() and int(wanted) < len(items) else None
        if len(items) == 1 or (opened is None and items[0].kind == "compare" and len(items) <= 3):
            opened = opened or 0  # a report, and the recordings that it is about
        rows = [{"path": str(e.path), "kind": e.kind, "about": e.about} for e in items]
        block = json_block(clean({"open": opened, "items": rows}))
        return page("tensorprobe view", (), {"served": block}, connect="'self'")


_JSON = "application/json"


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "text/plain"
) -> None:
    request.send_response(status)
    for name, value in (
        ("Content-Type", f"{kind}; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Content-Security-Policy", policy("'self'") + "; frame-ancestors 'none'"),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-store"),
    ):
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
