"""What the ranks of a run gave each other, as far as blaming one rank needs it.

The result of a communication is made of what all its members gave. Blame of one rank therefore sees
how far apart the inputs of the others are, and their own gradients where all are reduced. Of each
rank only what is small is kept (`gave`), so any number of ranks can be gone through one by one.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensorprobe.collectives.links import Key, given, got, linked, listed, members_of, told
from tensorprobe.comparing.align import content, forward_of
from tensorprobe.comparing.arguments import differences
from tensorprobe.comparing.heard import Heard, Others, RankHears, ToldRow
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.rounding import ROUNDING, distance, pair_roundoff, rms_size, same_bits
from tensorprobe.comparing.scene import label_of, nonfinite_differs
from tensorprobe.records import Call, TensorRecord

if TYPE_CHECKING:
    from tensorprobe.collectives.reductions import ReductionError

_MANY, _MOST_MEMBERS = 64, 8  # rows of one communication, and the members of which some are kept
_Label = tuple[int, str]  # a step, and the name of a parameter
Judged = tuple["ReductionError | None", "ReductionError | None"]
# Judges communications, or says why one cannot be.
JudgeAll = Callable[
    [Iterator["ToJudge"]], Iterator[tuple["ToJudge", Mapping[int, Judged] | Exception]]
]


class Spoken(msgspec.Struct):
    """A communication of one rank."""

    key: Key
    rows: list[ToldRow]  # what it gave
    is_suspect: bool  # its result differs
    otherwise: list[str]  # how its arguments differ
    calls: bytes = b""  # of both sides, pickled, where tensors were kept


class RankGave(msgspec.Struct):
    """What one rank gave to others."""

    spoken: list[Spoken]
    own_gradients: list[tuple[_Label, float, float]]  # how far apart, and the size
    reduced: list[tuple[_Label, int, int]]  # the contents of both sides as numbers; 0: none


NOTHING_GIVEN = RankGave([], [], [])


class ToJudge(NamedTuple):
    """A communication whose results differ."""

    key: Key
    members: tuple[int, ...]
    calls: dict[int, bytes]  # of both sides, pickled, by rank


class Hears(msgspec.Struct):
    """What one rank hears, without what it knows by itself."""

    calls: dict[Key, HearsCall]
    gradients: dict[_Label, Others]


class HearsCall(msgspec.Struct):
    """What one rank hears in one communication."""

    rows: list[ToldRow]
    missing: tuple[int, ...]
    otherwise: dict[int, list[str]]
    judged: Judged = (None, None)


def gave(pairs: Sequence[CallPair]) -> RankGave:
    """What a rank gave to others; its pairs have been measured."""
    spoken = []
    for key, pair in _linked_pairs(pairs):
        call, other = pair.pair.actual, pair.pair.expected
        assert call is not None
        names = _names(given(call, key.kind), call)
        results = _names(got(call, key.kind), call)
        spoken.append(
            Spoken(
                key,
                [_told_row(row) for row in pair.tensors if row.name in names],
                any(distance(row) > ROUNDING for row in pair.tensors if row.name in results),
                [] if other is None else differences(call, other),
                _packed(pair),
            )
        )
    reduced = [
        (label, _number_of(made[0]), _number_of(made[1]))
        for label, made in _reduced_gradients(pairs).items()
    ]
    own = [(label, *found) for label, found in _own_gradients(pairs).items()]
    return RankGave(spoken, own, reduced)


def _linked_pairs(pairs: Sequence[CallPair]) -> Iterator[tuple[Key, CallPair]]:
    """The communications of a rank of which it is known whom it spoke to."""
    by_call = {id(pair.pair.actual): pair for pair in pairs if pair.pair.actual is not None}
    for key, call in linked(pair.pair.actual for pair in pairs if pair.pair.actual is not None):
        if key is not None:
            yield key, by_call[id(call)]


def _told_row(row: TensorPair) -> ToldRow:
    return ToldRow(distance(row), pair_roundoff(row), same_bits(row), nonfinite_differs(row))


def _packed(pair: CallPair) -> bytes:
    """Both calls, as far as judging them needs it; nothing where no tensor was kept."""
    calls = [call for call in pair.pair[:2] if isinstance(call, Call)]
    if not any(record.blob is not None for call in calls for record in call.tensors):
        return b""
    slim = [
        msgspec.structs.replace(call, stack=(), notes=(), module="", thread="")
        if isinstance(call, Call) else None
        for call in pair.pair[:2]
    ]  # fmt: skip
    return pickle.dumps(slim, pickle.HIGHEST_PROTOCOL)


def _own_gradients(pairs: Sequence[CallPair]) -> dict[_Label, tuple[float, float]]:
    """The same as `local_gradients`, as gradients may add up over steps."""
    found: dict[_Label, tuple[float, float]] = {}
    before: dict[str, tuple[float, float]] = {}
    for (step, name), (apart, size) in sorted(local_gradients(pairs).items()):
        worst = before.get(name, (0.0, 0.0))
        found[step, name] = before[name] = max(worst[0], apart), max(worst[1], size)
    return found


def _number_of(contents: object) -> int:
    """A number in place of a content, which takes far more memory; 0 is none."""
    if contents is None:
        return 0
    return (
        int.from_bytes(hashlib.blake2b(repr(contents).encode(), digest_size=8).digest(), "big") or 1
    )


class Exchanges:
    """The communications of all ranks; each rank is added once, in order, and then asked for what
    it heard.

    Only what is small is kept: of each communication the inputs of its members that differ most.
    What has to be judged lies on the disk until then.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._communications: dict[Key, _Communication] = {}
        self._keys: dict[int, list[_Communication]] = {}
        self._gradients = _Gradients()
        self._judged: dict[tuple[Key, int], Judged] = {}
        self._file: IO[bytes] | None = None

    def add(self, rank: int, gave: RankGave) -> None:
        """Take what a rank gave to others."""
        mine = self._keys.setdefault(rank, [])
        place = self._places.setdefault(rank, len(self._places))
        for each in gave.spoken:
            one = self._communications.get(each.key)
            if one is None:
                one = self._communications[each.key] = _Communication(each.key)
            one.add(rank, place, each)
            if each.calls:
                if self._file is None:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115 (judge closes it)
                    weakref.finalize(self, self._file.close)  # where nothing is judged
                one.calls[rank] = (self._file.tell(), len(each.calls))
                self._file.write(each.calls)
            mine.append(one)
        self._gradients.add(rank, gave)

    def settle(self, ranks: Sequence[int]) -> None:
        """All have been added."""
        self._ranks = tuple(ranks)

    def judge(self, judge_all: JudgeAll) -> None:
        """Hold the results that differ against what all members gave, where tensors were kept."""
        if self._file is None:
            return
        with self._file as file:
            for wanted, found in judge_all(self._to_judge(file)):
                if not isinstance(found, Exception):  # else it is not known
                    for rank, judged in found.items():
                        self._judged[wanted.key, rank] = judged
        for each in self._communications.values():
            each.calls.clear()

    def _to_judge(self, file: IO[bytes]) -> Iterator[ToJudge]:
        suspects = [each for each in self._communications.values() if each.is_suspect]
        for each in sorted(suspects, key=lambda each: each.key):
            calls = {}
            for rank, (offset, nbytes) in each.calls.items():
                file.seek(offset)
                calls[rank] = file.read(nbytes)
            if calls:
                yield ToJudge(each.key, members_of(each.key, self._ranks), calls)

    def heard_by(self, rank: int) -> Hears:
        """What this rank heard of the others."""
        calls = {}
        for one in self._keys.get(rank, ()):
            calls[one.key] = HearsCall(
                rows=[row for other, row in one.telling() if other != rank],
                missing=one.missing(members_of(one.key, self._ranks), self._places),
                otherwise={other: texts for other, texts in one.otherwise.items() if other != rank},
                judged=self._judged.get((one.key, rank), (None, None)),
            )
        return Hears(calls, self._gradients.heard_by(rank))

    def missing_notes(self) -> Iterator[str]:
        """Members that nobody recorded."""
        lacking = {
            rank
            for one in self._communications.values()
            for rank in one.missing(members_of(one.key, self._ranks), self._places)
        }
        if lacking:
            yield f"what {listed(sorted(lacking))} gave to the others was not compared"


class _Communication:
    """What its members gave, of many only those that are furthest apart."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.is_suspect = False
        self.otherwise: dict[int, list[str]] = {}
        self.calls: dict[int, tuple[int, int]] = {}  # where they lie in the file
        self._n_rows = 0
        self._rows: dict[int, list[ToldRow]] = {}  # by rank, in the order in which these came
        self._spoke = 0  # a bit for each rank, by its place
        self._missing: tuple[int, ...] | None = None

    def add(self, rank: int, place: int, spoken: Spoken) -> None:
        self._n_rows += len(spoken.rows) - len(self._rows.get(rank, ()))
        self._rows[rank] = spoken.rows
        self._spoke |= 1 << place
        self.is_suspect |= spoken.is_suspect
        if spoken.otherwise:
            self.otherwise[rank] = spoken.otherwise
        if self._n_rows > _MANY and len(self._rows) > 4 * _MOST_MEMBERS:
            self._thin()

    def _sorted(self) -> list[tuple[int, ToldRow]]:
        rows = [(rank, row) for rank, given in self._rows.items() for row in given]
        rows.sort(key=lambda each: (each[1].distance, each[1].same_bits is False))
        return rows

    def _thin(self) -> list[tuple[int, ToldRow]]:
        """Keep the rows that tell most: of the members that are furthest apart, with other bits,
        and of one of the others. There may be thousands."""
        rows = self._sorted()
        if not rows:
            return rows
        ranks = dict.fromkeys(rank for rank, _ in reversed(rows))
        kept = set(list(ranks)[:_MOST_MEMBERS]) | {rows[0][0]}
        self._rows = {rank: given for rank, given in self._rows.items() if rank in kept}
        return [each for each in rows if each[0] in kept]

    def telling(self) -> list[tuple[int, ToldRow]]:
        """Of what all members gave, the rows that tell most."""
        if self._n_rows > _MANY:
            return self._thin()
        return [(rank, row) for rank, given in self._rows.items() for row in given]

    def missing(self, members: Sequence[int], places: Mapping[int, int]) -> tuple[int, ...]:
        """The members of which nothing is known; asked when all ranks were added."""
        if self._missing is None:
            self._missing = tuple(
                rank for rank in members
                if rank not in places or not self._spoke >> places[rank] & 1
            )  # fmt: skip
        return self._missing


class _Gradients:
    """What backward sent to each parameter on each rank, and which ranks got the same in the end.

    Numbers in arrays: there may be thousands of parameters, of thousands of ranks.
    """

    def __init__(self) -> None:
        self._own: dict[_Label, _Columns] = {}
        self._reduced: dict[_Label, _Columns] = {}
        self._members: dict[_Label, dict[int, tuple[int, ...]]] = {}
        self._tuples: dict[tuple[int, ...], tuple[int, ...]] = {}  # each once
        self._most: dict[tuple[_Label, int], tuple[_Two, _Two]] = {}

    def add(self, rank: int, gave: RankGave) -> None:
        for label, apart, size in gave.own_gradients:
            self._own.setdefault(label, _Columns("d")).add(rank, apart, size)
        for label, ours, theirs in gave.reduced:
            if ours or theirs:
                self._reduced.setdefault(label, _Columns("Q")).add(rank, ours, theirs)

    def heard_by(self, rank: int) -> dict[_Label, Others]:
        found = {}
        for label in self._reduced:
            if label not in self._own:
                continue
            members = self._members_of(label).get(rank, ())
            apart, size = self._most_of(label, members)
            if (others := apart.without(rank)) is not None:
                found[label] = Others(others, size.without(rank) or 0.0, members)
        return found

    def _members_of(self, label: _Label) -> dict[int, tuple[int, ...]]:
        """For each rank, those that got the same gradient, on one side or the other."""
        if label not in self._members:
            groups: dict[tuple[int, int], list[int]] = {}
            for rank, *numbers in self._reduced[label].rows():
                for side, number in enumerate(numbers):
                    if number:
                        groups.setdefault((side, int(number)), []).append(rank)
            same = {key: tuple(ranks) for key, ranks in groups.items()}
            found = {}
            for rank, *numbers in self._reduced[label].rows():
                mine = {same[side, int(n)] for side, n in enumerate(numbers) if n}
                ranks = mine.pop() if len(mine) == 1 else tuple(sorted(set().union(*mine)))
                found[rank] = self._tuples.setdefault(ranks, ranks)
            self._members[label] = found
        return self._members[label]

    def _most_of(self, label: _Label, members: tuple[int, ...]) -> tuple[_Two, _Two]:
        key = label, id(members)  # of those that are kept
        if key not in self._most:
            found = _Two(), _Two()
            wanted = set(members)
            for rank, apart, size in self._own[label].rows():
                if rank in wanted:
                    found[0].add(rank, apart)
                    found[1].add(rank, size)
            self._most[key] = found
        return self._most[key]


class _Columns:
    """Two numbers a rank."""

    def __init__(self, typecode: str) -> None:
        self._ranks = array("q")
        self._first: array[Any] = array(typecode)
        self._second: array[Any] = array(typecode)

    def add(self, rank: int, first: float, second: float) -> None:
        self._ranks.append(rank)
        self._first.append(first)
        self._second.append(second)

    def rows(self) -> Iterator[tuple[int, float, float]]:
        return zip(self._ranks, self._first, self._second, strict=True)


class _Two:
    """The largest number, and the largest of the other ranks."""

    def __init__(self) -> None:
        self._found: list[tuple[float, int]] = []

    def add(self, rank: int, number: float) -> None:
        self._found = sorted([*self._found, (number, rank)], reverse=True)[:2]

    def without(self, rank: int) -> float | None:
        return next((number for number, other in self._found if other != rank), None)


def rank_hears(
    rank: int, pairs: Sequence[CallPair], hears: Hears, ranks: Sequence[int], is_whole: bool
) -> RankHears:
    """What a rank hears, with what it knows by itself, for each of its calls."""
    calls = {}
    for key, pair in _linked_pairs(pairs):
        call = pair.pair.actual
        assert call is not None
        found = hears.calls[key]
        calls[call.step, call.name] = Heard(
            key=key,
            words=told(key, ranks),
            rows=found.rows,
            own=_names(given(call, key.kind), call),
            got=_names(got(call, key.kind), call),
            members=members_of(key, ranks),
            missing=found.missing,
            is_alone=not key.group and not is_whole,
            judged=found.judged,
            otherwise=found.otherwise,
        )
    ddp = {
        pair.call.step for pair in pairs
        if pair.call.name.startswith("Module.DistributedDataParallel.")
    }  # fmt: skip
    return RankHears(calls, hears.gradients, _own_gradients(pairs), ddp, is_whole)


def judged_one(wanted: ToJudge) -> dict[int, Judged]:
    """The results of all members against what they gave, on both sides."""
    # here: it takes numpy, which most comparisons do without
    from tensorprobe.collectives.reductions import gather, judge

    pairs = {rank: pickle.loads(text) for rank, text in wanted.calls.items()}
    found: dict[int, list[ReductionError | None]] = {rank: [None, None] for rank in pairs}
    for side in (0, 1):
        calls = {rank: pair[side] for rank, pair in pairs.items() if pair[side] is not None}
        gave = gather(wanted.key, calls, wanted.members)
        if gave is None:
            continue
        for rank, call in calls.items():
            one = judge(gave, call)
            found[rank][side] = None if one is None else _slim(one)
    return {rank: (ours, theirs) for rank, (ours, theirs) in found.items()}


_NO_TENSOR = TensorRecord("", "output", "", ())


def _slim(judged: ReductionError) -> ReductionError:
    """Without what nobody asks for: there is one for each member."""
    if not judged.is_wrong:
        return judged._replace(error=0.0, allowed=0.0, tensor=_NO_TENSOR)
    record = judged.tensor
    return judged._replace(
        tensor=TensorRecord(record.name, record.role, record.dtype, record.shape)
    )


def _names(records: Iterable[object], call: Call) -> set[str]:
    prefix = f"{call.name}."
    return {str(getattr(record, "name", "")).removeprefix(prefix) for record in records}


def local_gradients(pairs: Sequence[CallPair]) -> dict[_Label, tuple[float, float]]:
    """How far apart what backward sent to each parameter is, relative to its size, and its size.

    A parameter is known by its content, which modules and calls share.
    """
    labels: dict[tuple[int, object], str] = {}
    forwards: dict[tuple[int, str], CallPair] = {}
    found: dict[_Label, tuple[float, float]] = {}
    for pair in pairs:
        call = pair.call
        if call.direction == "forward":
            forwards[call.step, call.name] = pair
            for row in pair.tensors:
                if row.role == "parameter" and (key := _content(row)) is not None:
                    labels.setdefault((call.step, key), label_of(call, row))
            continue
        forward = forwards.get((call.step, forward_of(call.name)))
        if forward is None or call.name.startswith("Module."):
            continue
        inputs = {row.name: row for row in forward.tensors}
        for row in pair.tensors:
            if row.role != "output" or row.actual is None or row.expected is None:
                continue
            source = inputs.get(row.name.replace("output", "input", 1))
            label = None if source is None else labels.get((call.step, _content(source)))
            if label is None:
                continue
            before = found.get((call.step, label), (0.0, 0.0))
            apart = distance(row) * pair_roundoff(row)
            size = rms_size(row.expected) if row.expected.summary else 0.0
            found[call.step, label] = max(before[0], apart), max(before[1], size)
    return found


def _reduced_gradients(pairs: Sequence[CallPair]) -> dict[_Label, tuple[object, object]]:
    """The content of each parameter's gradient as the program has it after backward."""
    found: dict[_Label, tuple[object, object]] = {}
    for pair in pairs:
        for row in pair.tensors:
            if row.role == "parameter_grad":
                key = pair.call.step, label_of(pair.call, row)
                sides = (row.actual, row.expected)
                found.setdefault(key, tuple(content(r) if r else None for r in sides))  # type: ignore[arg-type]
    return found


def _content(row: TensorPair) -> object:
    record = row.actual or row.expected
    return content(record) if record is not None else None
