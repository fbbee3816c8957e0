"""Two checkpoints compared: the verdict, its lines for a person, and checkpoints.json."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensorprobe.checkpoints.checkpoint_reading import Checkpoint, read_checkpoint
from tensorprobe.checkpoints.key_pairs import (
    KeyPair,
    Only,
    Pairs,
    chosen,
    pair_keys,
    values_by_name,
)
from tensorprobe.checkpoints.pickled_texts import Value
from tensorprobe.checkpoints.same_bytes import digest_of
from tensorprobe.checkpoints.stored_weights import StoredWeight
from tensorprobe.checkpoints.weight_differences import WeightDifference, compare_weights
from tensorprobe.comparing.mapping import NO_MAPPING, plain_path, read_mapping
from tensorprobe.errors import BadArtefact
from tensorprobe.records import count
from tensorprobe.tensors.pair_metrics import PairMetrics

CHECKPOINTS_FILE = "checkpoints.json"
_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.)")
_SHOWN = 10
_MOST_MOVED = 4000  # tensors that are looked for elsewhere
_LONGEST = 160

Told = Callable[[int, int, int, int], None]  # bytes read, of how many, tensors, of how many


class ComparedWeight(NamedTuple):
    """One pair of tensors, and what it differs by."""

    pair: KeyPair
    difference: WeightDifference


class CheckpointComparison(NamedTuple):
    """What two checkpoints differ by."""

    actual: Checkpoint
    expected: Checkpoint
    only: Only
    pairs: Pairs
    compared: list[ComparedWeight]
    values: list[tuple[str, Any, Any]]  # that differ; None: only one side has it
    values_equal: int
    moved: list[tuple[str, str]]  # differing tensors with the content of another one there
    notes: list[str]

    @property
    def verdict(self) -> Literal["match", "rounding", "differ"]:
        kinds = {each.difference.kind for each in self.compared}
        alone = self.pairs.only_actual or self.pairs.only_expected
        if kinds & {"differ", "shape"} or alone or self.values:
            return "differ"
        other_dtype = any(
            each.difference.kind == "same values"
            and each.pair.actual.dtype != each.pair.expected.dtype
            for each in self.compared
        )
        return "rounding" if "rounding" in kinds or other_dtype else "match"


def compare_checkpoints(
    actual: Path,
    expected: Path,
    *,
    mapping: str | None = None,
    only: Only = "all",
    actual_layout: Path | None = None,
    expected_layout: Path | None = None,
    told: Told | None = None,
) -> CheckpointComparison:
    """Compare two checkpoints of any form, tensor by tensor, in little memory."""
    names = NO_MAPPING if mapping is None else read_mapping(mapping)
    ours = read_checkpoint(actual, actual_layout)
    theirs = read_checkpoint(expected, expected_layout)
    pairs = pair_keys(ours, theirs, names, only)
    values, equal, notes = _compare_values(ours, theirs, only)
    if not (pairs.pairs or pairs.only_actual or pairs.only_expected or values or equal):
        raise BadArtefact(f"nothing to compare: neither side has anything of --only {only}")
    compared = _compare_pairs(pairs.pairs, told)
    notes = [
        *(f"actual: {note}" for note in ours.notes),
        *(f"expected: {note}" for note in theirs.notes),
        *pairs.notes,
        *notes,
        *_note_ties(pairs.pairs),
    ]
    if actual.resolve() == expected.resolve():
        notes.insert(0, "both paths are the same checkpoint")
    moved = _find_moved(compared, pairs)
    return CheckpointComparison(ours, theirs, only, pairs, compared, values, equal, moved, notes)


def _compare_pairs(pairs: list[KeyPair], told: Told | None) -> list[ComparedWeight]:
    total = sum(pair.actual.nbytes for pair in pairs)
    done = number = 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if told is not None:
            told(done, total, number, len(pairs))

    known: dict[Any, WeightDifference] = {}
    compared = []
    for number, pair in enumerate(pairs):  # noqa: B007  read() tells it
        both = pair.actual.identity, pair.expected.identity
        if both in known:  # tied weights are read once
            read(pair.actual.nbytes)
        else:
            known[both] = compare_weights(pair.actual, pair.expected, read)
        compared.append(ComparedWeight(pair, known[both]))
    return compared


def _compare_values(
    ours: Checkpoint, theirs: Checkpoint, only: Only
) -> tuple[list[tuple[str, Any, Any]], int, list[str]]:
    """Values that differ, how many do not, and what to say."""
    if only == "weights":
        return [], 0, []
    mine, its = (
        {plain_path(k): v for k, v in values_by_name(side).items() if chosen(k, only)}
        for side in (ours, theirs)
    )
    if not mine or not its:
        side = "actual" if mine else "expected"
        number = len(mine or its)
        notes = [f"{count(number, 'value')} of {side} not compared: the other side holds none"]
        return [], 0, notes if number else []
    differ = [
        (key, mine.get(key), its.get(key))
        for key in dict.fromkeys([*mine, *its])
        if key not in mine or key not in its or not _is_same(mine[key], its[key])
    ]
    return differ, len(mine.keys() | its.keys()) - len(differ), []


def _is_same(a: Value, e: Value) -> bool:
    both_nan = isinstance(a, float) and isinstance(e, float) and math.isnan(a) and math.isnan(e)
    return both_nan or (a == e and isinstance(a, str) == isinstance(e, str))


def _note_ties(pairs: list[KeyPair]) -> Iterator[str]:
    """Names that share their memory on one side only, as tied embeddings do."""
    tied: list[dict[Any, list[str]]] = [defaultdict(list), defaultdict(list)]
    for pair in pairs:
        for groups, weight in zip(tied, (pair.actual, pair.expected), strict=True):
            if weight.numel > 1:
                groups[weight.identity].append(pair.actual.key)
    one, other = ({tuple(keys) for keys in groups.values() if len(keys) > 1} for groups in tied)
    for keys in sorted(one - other):
        yield f"tied in actual only: {', '.join(keys[:4])}"
    for keys in sorted(other - one):
        yield f"tied in expected only: {', '.join(keys[:4])}"


def _find_moved(compared: list[ComparedWeight], pairs: Pairs) -> list[tuple[str, str]]:
    """Tensors that differ, and have the content of another one there: swapped, or shifted."""
    unlike = [c.pair for c in compared if c.difference.kind in ("differ", "shape")]
    ours = [pair.actual for pair in unlike] + pairs.only_actual
    theirs = [pair.expected for pair in unlike] + pairs.only_expected
    if not ours or not theirs or len(ours) + len(theirs) > _MOST_MOVED:
        return []
    forms = {(weight.dtype, weight.shape) for weight in ours}
    places: dict[Any, list[str]] = defaultdict(list)
    for weight in theirs:
        form = weight.dtype, weight.shape
        if form in forms and weight.numel > 1:
            places[form, digest_of(weight)].append(weight.key)
    wanted = {form for form, _ in places}
    found = []
    for weight in ours:
        form = weight.dtype, weight.shape
        if form in wanted and weight.numel > 1:
            there = places.get((form, digest_of(weight)), [])
            if len(there) == 1:
                found.append((weight.key, there[0]))
    return found


# What is said and written.


def lines(found: CheckpointComparison) -> Iterator[str]:
    """The answer for a person."""
    kinds: Counter[str] = Counter(each.difference.kind for each in found.compared)
    number = count(len(found.compared), "tensor")
    equal = kinds["equal"] + kinds["same values"]
    values = f", {count(found.values_equal, 'value')}" if found.values_equal else ""
    if found.verdict == "match":
        yield f"match: {number}{values} are equal"
    elif found.verdict == "rounding":
        yield f"differ by rounding only: {number}, {equal} of them with equal values"
    else:
        yield f"differ: {', '.join(_what_differs(found, kinds))}; {equal} of {number} equal"
    yield f"  actual {found.actual.form}, expected {found.expected.form}"
    layers = [row for row in layer_rows(found) if row["differ"] or row["rounding"]]
    if layers and len(found.compared) > 1:
        first = next((row for row in layers if row["differ"]), layers[0])
        yield f"  first in {first['layer']}: {first['differ'] or first['rounding']} of " + (
            f"{count(first['tensors'], 'tensor')}; {count(len(layers), 'layer')} in all"
        )
    unlike = [c for c in found.compared if c.difference.kind not in ("equal", "same values")]
    unlike.sort(key=lambda c: c.difference.kind == "rounding")  # sorted: the order is kept
    for each in unlike[:_SHOWN]:
        yield f"  {_short(each.pair.actual.key)}: {_words(each)}"
    if len(unlike) > _SHOWN:
        yield f"  and {len(unlike) - _SHOWN} more"
    yield from _alone("actual", found.pairs.only_actual)
    yield from _alone("expected", found.pairs.only_expected)
    for key, a, e in found.values[:_SHOWN]:
        yield f"  {_short(key)}: {_short(repr(a))} here, {_short(repr(e))} there"
    if len(found.values) > _SHOWN:
        yield f"  and {count(len(found.values) - _SHOWN, 'value')} more"
    for key, there in found.moved[:_SHOWN]:
        yield f"  {_short(key)} has the content that {_short(there)} has there"
    for mine, its, how, times in found.pairs.renamed[:_SHOWN]:
        yield f"  names: {_short(mine)} is {_short(its)} there ({times}, by {how})"
    if len(found.pairs.renamed) > _SHOWN:
        yield f"  and {len(found.pairs.renamed) - _SHOWN} more names"
    same = kinds["same values"]
    if same:
        yield f"  {count(same, 'tensor')} with equal values and other bits (zeros, NaN, dtype)"
    for note in found.notes[:_SHOWN]:
        yield f"  note: {_short(note)}"
    if len(found.notes) > _SHOWN:
        yield f"  and {count(len(found.notes) - _SHOWN, 'note')} more"
    yield from _next(found, kinds)


def _next(found: CheckpointComparison, kinds: Counter[str]) -> Iterator[str]:
    paths = " ".join(shlex.quote(str(side.path)) for side in (found.actual, found.expected))
    weights_are_fine = not kinds["differ"] and not kinds["shape"]
    if found.only == "all" and found.verdict == "differ" and weights_are_fine:
        lost = (*found.pairs.only_actual, *found.pairs.only_expected)
        if not any(chosen(w.key, "weights") for w in lost):
            yield f"  next: tensorprobe checkpoints {paths} --only weights"


def _what_differs(found: CheckpointComparison, kinds: Counter[str]) -> Iterator[str]:
    number = kinds["differ"] + kinds["shape"]
    if number:
        yield f"{count(number, 'tensor')} by more than rounding"
    if kinds["rounding"]:
        yield f"{count(kinds['rounding'], 'tensor')} by rounding"
    alone_by_side = ("actual", found.pairs.only_actual), ("expected", found.pairs.only_expected)
    for name, alone in alone_by_side:
        if alone:
            yield f"{count(len(alone), 'tensor')} only in {name}"
    if found.values:
        yield count(len(found.values), "value")


def _alone(side: str, weights: list[StoredWeight]) -> Iterator[str]:
    for weight in weights[:_SHOWN]:
        yield f"  only in {side}: {_short(weight.key)} {weight.dtype} {list(weight.shape)}"
    if len(weights) > _SHOWN:
        yield f"  and {len(weights) - _SHOWN} more only in {side}"


def _words(each: ComparedWeight) -> str:
    weight, difference = each.pair.actual, each.difference
    metrics = difference.metrics
    if metrics is None:
        return difference.reason
    share = f"{metrics.mismatched:,} of {max(metrics.numel, metrics.mismatched):,} numbers"
    parts = [f"{weight.dtype} {list(weight.shape)}, {share}", f"at most {metrics.max_abs:.3g}"]
    if math.isfinite(metrics.rel_l2):
        parts.append(f"{metrics.rel_l2:.2g} of its size")
    if difference.kind == "rounding":
        parts = parts[:1]
    if difference.reason:
        parts.append(difference.reason)
    return ", ".join(parts)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}... ({len(text)} characters)"


def layer_rows(found: CheckpointComparison) -> list[dict[str, Any]]:
    """Layers in the order of the model, with how many of their tensors differ, and how far."""
    rows: dict[str, dict[str, Any]] = {}
    for each in found.compared:
        name = layer_of(each.pair.actual.key)
        row = rows.setdefault(
            name, {"layer": name, "tensors": 0, "differ": 0, "rounding": 0, "max_rel_l2": 0.0}
        )
        row["tensors"] += 1
        row["differ"] += each.difference.kind in ("differ", "shape")
        row["rounding"] += each.difference.kind == "rounding"
        if each.difference.metrics is not None and each.difference.kind != "equal":
            row["max_rel_l2"] = max(row["max_rel_l2"], each.difference.metrics.rel_l2)
    return [*rows.values()]


def layer_of(key: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up.weight`; else the module of the tensor."""
    found = _LAYER.match(key)
    return found[0] if found else key.rpartition(".")[0] or key


def as_json(found: CheckpointComparison) -> dict[str, Any]:
    """The content of checkpoints.json."""
    kinds = Counter(each.difference.kind for each in found.compared)
    return {
        "format": 1,
        "verdict": found.verdict,
        "actual": str(found.actual.path),
        "expected": str(found.expected.path),
        "forms": [found.actual.form, found.expected.form],
        "only": found.only,
        "counts": {
            "compared": len(found.compared),
            "equal": kinds["equal"],
            "same_values": kinds["same values"],
            "rounding": kinds["rounding"],
            "differ": kinds["differ"] + kinds["shape"],
            "only_actual": len(found.pairs.only_actual),
            "only_expected": len(found.pairs.only_expected),
            "values_equal": found.values_equal,
            "values_differ": len(found.values),
        },
        "layers": [_finite(row) for row in layer_rows(found)],
        "differences": [_row(c) for c in found.compared if c.difference.kind != "equal"],
        "only_actual": [_outline(weight) for weight in found.pairs.only_actual],
        "only_expected": [_outline(weight) for weight in found.pairs.only_expected],
        "values": [_finite({"key": key, "actual": a, "expected": e}) for key, a, e in found.values],
        "moved": [{"key": key, "there": there} for key, there in found.moved],
        "names": [
            {"actual": a, "expected": e, "how": how, "count": number}
            for a, e, how, number in found.pairs.renamed
        ],
        "notes": found.notes,
    }


def _row(each: ComparedWeight) -> dict[str, Any]:
    pair, difference = each.pair, each.difference
    row: dict[str, Any] = {
        "key": pair.actual.key,
        "expected_key": pair.expected.key,
        "how": pair.how,
        "kind": difference.kind,
        "reason": difference.reason,
        "dtype": [pair.actual.dtype, pair.expected.dtype],
        "shape": [list(pair.actual.shape), list(pair.expected.shape)],
    }
    if difference.metrics is not None:
        row |= _finite(_metrics(difference.metrics, pair.actual))
    return row


def _metrics(metrics: PairMetrics, weight: StoredWeight) -> dict[str, Any]:
    return {
        "differing": metrics.mismatched,
        "numel": metrics.numel,
        "max_abs": metrics.max_abs,
        "max_rel": metrics.max_rel,
        "rel_l2": metrics.rel_l2,
        "l2": metrics.euclidean,
        "cosine": metrics.cosine,
        "steps_max": metrics.ulp_max,
        "nonfinite_disagree": metrics.nonfinite_disagree,
        "largest_at": _place(metrics.index, weight),
    }


def _place(index: int | None, weight: StoredWeight) -> list[int] | None:
    """Where a number is in its tensor; complex ones are counted as two."""
    if index is None:
        return None
    index //= 2 if weight.dtype.startswith("complex") else 1
    place = []
    for length in reversed(weight.shape):
        index, at = divmod(index, length)
        place.append(at)
    return place[::-1]


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has no word for, as text: "inf", "nan"."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _outline(weight: StoredWeight) -> dict[str, Any]:
    return {"key": weight.key, "dtype": weight.dtype, "shape": list(weight.shape)}


def json_text(found: CheckpointComparison) -> str:
    return json.dumps(as_json(found), indent=1, allow_nan=False)


def save(found: CheckpointComparison, folder: Path) -> Path:
    """Write checkpoints.json into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CHECKPOINTS_FILE
    path.write_text(json_text(found) + "\n", encoding="utf-8", errors="backslashreplace")
    return path
