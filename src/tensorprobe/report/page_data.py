"""What the page shows of a comparison: columns of numbers, each text once.

`index` is what the page needs to open: the verdict and a line for each call. `details` has the
tensors, arguments and stacks of the calls. Columns are base64 of little-endian numbers: a tenth of
what JSON takes, and read at once by a browser.
"""

from __future__ import annotations

import base64
import heapq
import math
import shlex
import struct
import sys
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.collectives.links import listed
from tensorprobe.comparing.arguments import differences
from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.comparing.rounding import distance
from tensorprobe.comparing.scene import find_containers, is_written
from tensorprobe.comparing.verdict import Culprit, Verdict, describe, next_command
from tensorprobe.environment.environment_comparison import compare_environments
from tensorprobe.errors import TensorprobeError
from tensorprobe.records import Call, Capture, Fields, Special, TensorRecord, TensorSummary
from tensorprobe.replay.kinds import kind_of
from tensorprobe.report.chinese import sentences_in_chinese
from tensorprobe.report.collective_links import communications
from tensorprobe.store.frames import source_around, users_line
from tensorprobe.terminal import printable

if TYPE_CHECKING:
    from tensorprobe.comparing.comparison import Compared
    from tensorprobe.comparing.measure import CallPair, TensorPair
    from tensorprobe.tensors.pair_metrics import PairMetrics

FORMAT = 1
_CODES = {"phase": "B", "side": "B", "flags": "H", "error_in": "f", "error_out": "f"}
_LONGEST = 2000  # characters of a text
_GAPS = 500
_MOVES = 50
_MOST_CALLS = 20_000  # of many ranks
_NEIGHBOURS = 20
_AROUND = 4  # lines of source before and after the one that is named
_SOURCES = 20
PICTURED = 50  # calls with the largest errors, besides culprits
PHASES = ("set-up", "forward", "backward", "optimizer")
ROLES = ("input", "output", "parameter", "parameter_grad", "buffer", "state")
_ROLE = {role: number for number, role in enumerate(ROLES)}
# Bits of a call's `flags`.
NONFINITE_ACTUAL, NONFINITE_EXPECTED, OTHER_DTYPE, OTHER_SHAPE = 1, 2, 4, 8
OTHER_ARGUMENTS, CONTAINER, OTHER_NONFINITE, UNFINISHED, DIFFERS = 16, 32, 64, 128, 256
BOTH, ONLY_ACTUAL, ONLY_EXPECTED = 0, 1, 2
N_STATISTICS, N_METRICS = 7, 10
_NAN = math.nan
_PACK_STATISTICS = struct.Struct(f"<{N_STATISTICS}d").pack
_PACK_METRICS = struct.Struct(f"<{N_METRICS}d").pack
_NO_STATISTICS = _PACK_STATISTICS(*(_NAN,) * N_STATISTICS)
_NO_METRICS = _PACK_METRICS(*(_NAN,) * N_METRICS)


class Strings:
    """Each text once, by its number; 0 is the empty one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self.texts = [""]

    def __call__(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(shown(text))
        return number

    def lines(self, lines: Iterable[str]) -> int:
        """Several lines as one text; none of them can pretend to be two."""
        text = "\n".join(map(shown, lines))
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return number


def shown(text: str) -> str:
    """A text as the page shows it: of bearable length, what would hide or turn it escaped."""
    if len(text) > _LONGEST:
        return f"{printable(text[:_LONGEST])}... ({len(text)} characters)"
    return printable(text)


def clean(value: Any) -> Any:
    """A tree of JSON whose texts are as the page shows them, and whose numbers JSON has."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping):
        return {shown(str(key)): clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def packed(column: array[Any]) -> str:
    """A column for the page."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode()


def unpacked(typecode: str, text: str) -> array[Any]:
    """The column again."""
    column = array(typecode)
    column.frombytes(base64.b64decode(text))
    if sys.byteorder == "big":
        column.byteswap()
    return column


class Columns:
    """Numbers by name, a row at a time."""

    def __init__(self, **typecodes: str) -> None:
        self.columns: dict[str, array[Any]] = {
            name: array(code) for name, code in typecodes.items()
        }

    def to_json(self) -> dict[str, str]:
        return {name: packed(column) for name, column in self.columns.items()}


class PageData(msgspec.Struct):
    """The two parts of a page's data."""

    index: dict[str, Any]
    details: dict[str, Any]


def comparison_data(comparison: Compared, *, pictures: bool = True) -> PageData:
    """What the page shows of a comparison."""
    verdict = comparison.verdict
    lines = list(describe(verdict))
    if isinstance(comparison.pairs, PairsOfRanks):
        comparison, ranks = _some_ranks(comparison, comparison.pairs)
        if ranks:
            lines.append(f"  the page has the calls of {ranks}; comparison.csv has all")
    rows = _Rows(comparison.pairs)
    index = {
        **_about("compare"),
        "verdict": clean(verdict.to_json()),
        "text": [shown(line) for line in lines],
        "culprits": [
            _culprit(verdict, number, each) for number, each in enumerate(verdict.culprits)
        ],
        "structure": clean(comparison.structure[:_GAPS]),
        "environments": clean(_environments(comparison.actual, comparison.expected)),
        "moves": clean(_moves(comparison)),
        "gaps": _gaps((comparison.actual, comparison.expected)),
        "kept": [_keep(comparison.actual), _keep(comparison.expected)],
        "calls": rows.calls.to_json(),
        "n": len(comparison.pairs),
        "strings": rows.names.texts,
        "edges": _edges(comparison.pairs, rows),
        "program": shown(_program(comparison.actual)),
        "links": _links(comparison.pairs),
        "pictures": {},
    }
    index["chinese"] = sentences_in_chinese(index)
    if pictures and verdict.mode == "tensors":  # they have no sentences, but many numbers
        index["pictures"] = _pictures(comparison, rows)
    return PageData(index, rows.details())


def _some_ranks(comparison: Compared, pairs: PairsOfRanks) -> tuple[Compared, str]:
    """As many ranks as a page can show, first those with a culprit; and which they are, if these
    are not all."""
    wanted = dict.fromkeys(c.rank for c in comparison.verdict.culprits)
    wanted.update(dict.fromkeys(pairs.n_pairs))
    chosen: list[int] = []
    n = 0
    for rank in wanted:
        n += pairs.n_pairs.get(rank, 0)
        if chosen and n > _MOST_CALLS:
            break
        chosen.append(rank)
    found = [pair for rank in sorted(chosen) for pair in pairs.of_rank(rank)]
    some = type(comparison)(
        comparison.actual, comparison.expected, found, comparison.verdict, comparison.structure
    )
    return some, "" if len(chosen) == len(pairs.n_pairs) else listed(chosen)


def capture_data(capture: Capture) -> PageData:
    """What the page shows of one capture: its calls, as those that one side has alone."""
    from tensorprobe.comparing.align import Pair
    from tensorprobe.comparing.measure import pair_tensors

    pairs = [pair_tensors(Pair(call, None, "exact")) for call in capture.calls]
    rows = _Rows(pairs)
    index = {
        **_about("capture"),
        "path": shown(str(capture.path)),
        "program": shown(_program(capture)),
        "environments": clean(_environments(capture, None)),
        "gaps": _gaps((capture,)),
        "kept": [_keep(capture)],
        "calls": rows.calls.to_json(),
        "n": len(pairs),
        "strings": rows.names.texts,
        "edges": _edges(pairs, rows),
        "links": _links(pairs),
        "pictures": {},
    }
    index["chinese"] = sentences_in_chinese(index)
    return PageData(index, rows.details())


def _about(kind: str) -> dict[str, Any]:
    return {"format": FORMAT, "kind": kind, "tool": __version__}


class _Rows:
    """The calls of a comparison in columns, and their details."""

    def __init__(self, pairs: Sequence[CallPair]) -> None:
        self.names, self.texts = Strings(), Strings()
        self.calls = Columns(
            name="i", other="i", op="i", module="i", parent="i", step="i", rank="i", **_CODES
        )
        self._more = Columns(first="i", stack="i", arguments="i", expected="i", notes="i")
        self._tensors = Columns(
            name="i", role="B", value="i", actual="i", expected="i", error="f", flags="B"
        )
        self._values: list[bytes] = []
        self._known: dict[tuple[int, int, int], int] = {}
        self._stacks: dict[tuple[str, ...], int] = {}
        self._frames: list[list[int]] = []
        self._kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        self.containers = find_containers(pairs)
        self._add = [column.append for column in self._tensors.columns.values()]
        self._n_tensors = 0
        self._blank_ops: dict[str, bool] = {}  # which make memory that nobody has written to
        self._blank: set[int] = set()  # the summaries of that memory
        self._fill(pairs)

    def _fill(self, pairs: Sequence[CallPair]) -> None:
        phases = _Phases()
        names, columns = self.names, self.calls.columns
        add = {name: column.append for name, column in columns.items()}
        for pair, is_container in zip(pairs, self.containers, strict=True):
            actual, expected, _ = pair.pair
            call = pair.call
            add["name"](names(call.name))
            other = expected.name if actual is not None and expected is not None else call.name
            add["other"](names(other))
            add["op"](names(call.op))
            add["module"](names(call.module))
            add["parent"](names(call.parent or ""))
            add["step"](_whole(call.step))
            add["rank"](_whole(call.rank))
            add["phase"](phases(call))
            side = ONLY_EXPECTED if actual is None else ONLY_ACTUAL if expected is None else BOTH
            add["side"](side)
            flags, error_in, error_out = self._tensor_rows(pair)
            if is_container:
                flags |= CONTAINER
            if self._detail(call, actual, expected):
                flags |= OTHER_ARGUMENTS
            if call.status != "complete":
                flags |= UNFINISHED
            add["flags"](flags)
            add["error_in"](error_in)
            add["error_out"](error_out)
        self._more.columns["first"].append(self._n_tensors)

    def _tensor_rows(self, pair: CallPair) -> tuple[int, float, float]:
        """Writes down the tensors of a call; its flags, and how far its two ends are apart."""
        flags, error_in, error_out = 0, 0.0, 0.0
        self._more.columns["first"].append(self._n_tensors)
        self._n_tensors += len(pair.tensors)
        op = pair.call.op
        makes_blank = self._blank_ops.get(op)
        if makes_blank is None:
            makes_blank = self._blank_ops[op] = kind_of(pair.call) == "uninitialised"
        add_name, add_role, add_value, add_actual, add_expected, add_error, add_flags = self._add
        for row in pair.tensors:
            a, e = row.actual, row.expected
            away = distance(row)
            role = a.role if a is not None else row.role
            mine = 0
            if a is not None and e is not None:
                mine = (a.dtype != e.dtype) * OTHER_DTYPE | (a.shape != e.shape) * OTHER_SHAPE
            if makes_blank and role == "output":
                self._blank.update(id(each.summary) for each in (a, e) if each and each.summary)
            if self._blank and any(each and id(each.summary) in self._blank for each in (a, e)):
                away = 0.0  # whatever was there: no difference of the programs'
            elif role == "output":
                if away > error_out:
                    error_out = away
            elif away > error_in:
                error_in = away
            if away == math.inf and a is not None and e is not None and _is_spoilt(a, e):
                mine |= OTHER_NONFINITE
            if role != "input" and role != "parameter" and not makes_blank:
                if a is not None and (s := a.summary) is not None and (s.nan_count or s.inf_count):
                    flags |= NONFINITE_ACTUAL
                if e is not None and (s := e.summary) is not None and (s.nan_count or s.inf_count):
                    flags |= NONFINITE_EXPECTED
            flags |= mine
            if away > 0:
                flags |= DIFFERS
            add_name(self.texts(row.name))
            add_role(_ROLE.get(role, 0))
            add_value(self._value(row))
            add_actual(self._kind(a))
            add_expected(self._kind(e))
            add_error(away)
            add_flags(mine)
        return flags, error_in, error_out

    def _value(self, row: TensorPair) -> int:
        """The number of the statistics and metrics of a tensor: contents are seen many times."""
        a, e, m = row.actual, row.expected, row.metrics
        s = a.summary if a is not None else None
        t = e.summary if e is not None else None
        if s is None and t is None and m is None:
            return -1
        key = (id(s), id(t), id(m))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._values)
            self._values.append(_statistics(s) + _statistics(t) + _metrics(m))
        return number

    def _kind(self, record: TensorRecord | None) -> int:
        if record is None:
            return 0
        key = (record.dtype, record.shape)
        number = self._kinds.get(key)
        if number is None:
            text = f"{record.dtype} {list(record.shape)}"
            number = self._kinds[key] = self.texts(text)
        return number

    def _detail(self, call: Call, actual: Call | None, expected: Call | None) -> bool:
        """Writes down stack and arguments; whether the arguments of the two sides differ."""
        columns = self._more.columns
        columns["stack"].append(self._stack(call.stack))
        ours = self._arguments(actual)
        theirs = self._arguments(expected)
        columns["arguments"].append(ours)
        columns["expected"].append(theirs)
        columns["notes"].append(self.texts.lines(call.notes) if call.notes else 0)
        if actual is None or expected is None or ours == theirs:
            return False
        return bool(differences(actual, expected))

    def _arguments(self, call: Call | None) -> int:
        if call is None:
            return 0
        lines: list[str] = []
        for number, value in enumerate(call.args):
            if type(value) is not TensorRecord:
                lines += _argument(str(number), value)
        for key, value in call.kwargs.items():
            if type(value) is not TensorRecord:
                lines += _argument(key, value)
        return self.texts.lines(lines) if lines else 0

    def _stack(self, stack: tuple[str, ...]) -> int:
        number = self._stacks.get(stack)
        if number is None:
            number = self._stacks[stack] = len(self._frames)
            self._frames.append([self.texts(frame) for frame in stack])
        return number

    def details(self) -> dict[str, Any]:
        return {
            "strings": self.texts.texts,
            "stacks": self._frames,
            "calls": self._more.to_json(),
            "tensors": self._tensors.to_json(),
            "values": base64.b64encode(b"".join(self._values)).decode(),
        }


class _Phases:
    """Which part of a step a call belongs to, asked in execution order."""

    def __init__(self) -> None:
        self._started: set[tuple[int, int]] = set()

    def __call__(self, call: Call) -> int:
        if call.name.startswith("Optimizer.") or (call.parent or "").startswith("Optimizer."):
            return 3
        if call.direction == "backward":
            return 2
        unit = (call.rank, call.step)
        if unit in self._started:
            return 1
        if call.module or call.name.startswith("Module."):
            self._started.add(unit)
            return 1
        return 0


def _whole(number: int) -> int:
    return max(-(2**31), min(number, 2**31 - 1))


def _is_spoilt(a: TensorRecord, e: TensorRecord) -> bool:
    s, t = a.summary, e.summary
    return s is not None and t is not None and not (s.is_finite and t.is_finite)


def _number(value: float | int | bool | None) -> float:
    if value is None:
        return _NAN
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _statistics(s: TensorSummary | None) -> bytes:
    if s is None:
        return _NO_STATISTICS
    numbers = (s.min, s.max, s.mean, s.norm, s.nan_count, s.inf_count, s.zero_count)
    try:
        return _PACK_STATISTICS(*numbers)
    except (struct.error, OverflowError):  # a None, or an integer that no float has
        return _PACK_STATISTICS(*map(_number, numbers))


def _metrics(m: PairMetrics | None) -> bytes:
    if m is None:
        return _NO_METRICS
    numbers = (
        m.numel, m.mismatched, m.cosine, m.max_abs, m.max_rel, m.rel_l2, m.ulp_max, m.index,
        m.nonfinite_disagree, m.within_1_1000,
    )  # fmt: skip
    try:
        return _PACK_METRICS(*numbers)
    except (struct.error, OverflowError):
        return _PACK_METRICS(*map(_number, numbers))


def _argument(name: str, value: Any) -> Iterator[str]:
    """Arguments that are no tensors, a line each: `eps: 1e-05`."""
    if isinstance(value, TensorRecord):
        return
    if isinstance(value, Fields):
        value = value.fields
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _argument(f"{name}.{key}", part)
    elif isinstance(value, list | tuple) and any(map(_is_deep, value)):
        for number, part in enumerate(value):
            yield from _argument(f"{name}.{number}", part)
    elif isinstance(value, Special):
        yield f"{name}: {value.text}"
    else:
        yield f"{name}: {_text(value)}"


def _text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return "a number that is too long to be shown"


def _is_deep(value: Any) -> bool:
    return isinstance(value, TensorRecord | Special | Fields | dict | list | tuple)


def _edges(pairs: Sequence[CallPair], rows: _Rows) -> dict[str, str]:
    """Which call made what another was given, by their places; `side` as of calls.

    Modules and optimizers as a whole are left out: the calls inside them say more.
    """
    made: tuple[dict[Hashable, int], dict[Hashable, int]] = ({}, {})  # of each side, by content
    found: dict[tuple[int, int], int] = {}
    for at, (pair, is_container) in enumerate(zip(pairs, rows.containers, strict=True)):
        if is_container:
            continue
        rank = pair.call.rank
        results: list[tuple[int, Hashable]] = []
        for row in pair.tensors:
            for side, record in enumerate((row.actual, row.expected)):
                if record is None:
                    continue
                content = record.digest or _content(record)
                if content is None:
                    continue
                key = (rank, content)
                if record.role == "output" or (record.role != "input" and is_written(row)):
                    results.append((side, key))
                elif (source := made[side].get(key)) is not None:
                    found[source, at] = found.get((source, at), 0) | (1 << side)
        for side, result in results:
            made[side][result] = at
    columns = Columns(source="i", target="i", side="B")
    columns.columns["source"].extend(source for source, _ in found)
    columns.columns["target"].extend(target for _, target in found)
    sides = (BOTH, ONLY_ACTUAL, ONLY_EXPECTED, BOTH)
    columns.columns["side"].extend(sides[each] for each in found.values())
    return columns.to_json()


def _links(pairs: Sequence[CallPair]) -> dict[str, Any]:
    """Which calls of several ranks are one communication: a number of it beside each of them."""
    columns = Columns(call="i", link="i")
    names = []
    for link, (what, places) in enumerate(communications(pairs).items()):
        names.append([what.kind, shown(what.group), what.number, what.step])
        columns.columns["call"].extend(places)
        columns.columns["link"].extend([link] * len(places))
    return {**columns.to_json(), "names": names}


def _content(record: TensorRecord) -> Hashable | None:
    """What tells one content from another, without a digest."""
    s = record.summary
    if s is None or s.norm is None:
        return None
    return (s.min, s.max, s.mean, s.norm, record.dtype)


def _culprit(verdict: Verdict, number: int, culprit: Culprit) -> dict[str, Any]:
    """What verdict.json does not have: the line of the user's, its source, what to type next."""
    line = users_line(culprit.stack)
    source = None
    if number < _SOURCES:
        frame = next((each for each in culprit.stack if each.endswith(line)), "")
        source = source_of(frame)
    return {
        "line": shown(line),
        "next": shown(next_command(verdict, culprit)),
        "source": source,
    }


def source_of(frame: str) -> dict[str, Any] | None:
    """The lines around the one that a frame of a stack names, where this machine has them."""
    place = frame.rpartition(" in ")[0] or frame
    path, _, line = place.rpartition(":")
    first, lines = source_around(path, line, _AROUND)
    if not lines:
        return None
    return {"first": first, "at": int(line), "lines": [shown(each.expandtabs()) for each in lines]}


def _gaps(captures: Sequence[Capture]) -> dict[str, Any]:
    sides = ("actual", "expected")
    rows = [
        [side, shown(gap.name), shown(gap.reason), gap.step, gap.rank]
        for side, capture in zip(sides, captures, strict=False)
        for gap in capture.gaps[:_GAPS]
    ]
    return {"total": sum(len(capture.gaps) for capture in captures), "rows": rows[:_GAPS]}


def _keep(capture: Capture) -> str:
    config = capture.facts.get("config")
    keep = config.get("keep") if isinstance(config, Mapping) else None
    return shown(keep) if isinstance(keep, str) else ""


def _program(capture: Capture) -> str:
    """The script that was run, with its arguments, as a shell takes it; "" if it is not known."""
    command = capture.facts.get("command")
    words = [str(word) for word in command] if isinstance(command, list | tuple) else []
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    return "" if script is None else shlex.join(words[script:])


_FACTS = ("torch", "python", "tool", "devices", "platform", "command", "created")


def _environments(actual: Capture, expected: Capture | None) -> list[list[str]]:
    """A few facts of each run, beside each other."""
    sides = (actual.facts, expected.facts if expected is not None else {})
    found = [[key, *(_fact(facts.get(key)) for facts in sides)] for key in _FACTS]
    return [row for row in found if any(row[1:])]


def _moves(comparison: Compared) -> list[dict[str, Any]]:
    """What else differs between the environments and can or may change numbers: the arguments of
    the programs, seeds, the data; besides the versions and switches that the verdict has."""
    paths = comparison.actual.path, comparison.expected.path
    if any(capture.layout != "native" for capture in (comparison.actual, comparison.expected)):
        return []
    try:
        rows = compare_environments(*paths).differences
    except (TensorprobeError, OSError):  # a capture that is not on disk
        return []
    told = {fact.partition(": ")[0] for fact in comparison.verdict.facts}
    return [
        {
            "fact": row.fact,
            "actual": "not set" if row.actual is None else str(row.actual),
            "expected": "not set" if row.expected is None else str(row.expected),
            "can": row.effect == "numbers",
            "why": row.why,
        }
        for row in rows
        if row.effect != "none" and row.fact not in told
    ][:_MOVES]


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return _fact(value.get("version") or value.get("name"))
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(_fact, value)))
    return "" if value is None else str(value)


def _pictures(comparison: Compared, rows: _Rows) -> dict[str, Any]:
    """Histograms and heat maps of culprits, and of the calls with the largest errors."""
    from tensorprobe.report.tensor_pictures import MANY, SOME, pictures_of

    culprits = {
        (each.rank, each.step, each.name)
        for cause in comparison.verdict.culprits
        for each in (cause, *cause.follows[:PICTURED])
    }
    errors = rows.calls.columns["error_out"]
    worst = set(heapq.nlargest(PICTURED, range(len(errors)), key=errors.__getitem__))
    found: dict[str, Any] = {}
    for at, pair in enumerate(comparison.pairs):
        call = pair.call
        is_culprit = (call.rank, call.step, call.name) in culprits
        if is_culprit or (at in worst and errors[at] > 0):
            made = pictures_of(pair, most=MANY if is_culprit else SOME, inputs=is_culprit)
            if made:
                found[str(at)] = clean(made)
    return found


def thinned(index: Mapping[str, Any], most: int) -> dict[str, Any]:
    """An index with at most about so many calls: culprits and their neighbours, and of each
    stretch of the run the call with the largest error."""
    columns = {name: unpacked(_CODES.get(name, "i"), text) for name, text in index["calls"].items()}
    n, errors = index["n"], columns["error_out"]
    strings = index["strings"]
    culprits = {
        (each["rank"], each["step"], each["name"])
        for cause in index["verdict"]["culprits"]
        for each in (cause, *cause["follows"])
    }
    keep: set[int] = set()
    for at, place in enumerate(zip(columns["rank"], columns["step"], columns["name"], strict=True)):
        if (place[0], place[1], strings[place[2]]) in culprits and len(keep) < most // 2:
            keep.update(range(max(0, at - _NEIGHBOURS), min(n, at + _NEIGHBOURS + 1)))
    stretch = max(1, n // (most // 2))
    for start in range(0, n, stretch):
        keep.add(max(range(start, min(n, start + stretch)), key=errors.__getitem__))
    kept = sorted(keep)
    places = {at: number for number, at in enumerate(kept)}
    fewer = {
        name: array(column.typecode, map(column.__getitem__, kept))
        for name, column in columns.items()
    }
    texts = Strings()
    for name in ("name", "other", "op", "module", "parent"):
        fewer[name] = array("i", (texts(strings[number]) for number in fewer[name]))
    edges = Columns(source="i", target="i", side="B")
    sources, targets = (unpacked("i", index["edges"][name]) for name in ("source", "target"))
    for source, target, side in zip(
        sources, targets, unpacked("B", index["edges"]["side"]), strict=True
    ):
        if source in places and target in places:
            edges.columns["source"].append(places[source])
            edges.columns["target"].append(places[target])
            edges.columns["side"].append(side)
    links = Columns(call="i", link="i")
    for call, link in zip(
        *(unpacked("i", index["links"][name]) for name in ("call", "link")), strict=True
    ):
        if call in places:
            links.columns["call"].append(places[call])
            links.columns["link"].append(link)
    return {
        **index,
        "calls": {name: packed(column) for name, column in fewer.items()},
        "n": len(kept),
        "strings": texts.texts,
        "edges": edges.to_json(),
        "links": {**index["links"], **links.to_json()},
        "pictures": {
            str(places[int(at)]): made
            for at, made in index["pictures"].items()
            if int(at) in places
        },
        "of": n,
    }
