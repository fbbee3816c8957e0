"""Which rows of two tensors are the same: by place, by what the model had read, or as saved."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tensorprobe.comparing.places.boundaries import Piece, Tree, is_module, suffix
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.records import REQUESTS, Call, TensorRecord
from tensorprobe.terminal import printable

Array = np.ndarray[Any, Any]
Index = tuple[slice | int, ...]
Scheme = Literal["prefix", "sequence"]
AUTO, SAME, INPUTS, SAVED, SUM = "auto", "same", "inputs", "saved", "sum"
WORDS = (AUTO, SAME, INPUTS, SAVED, SUM)
NONE = -1  # the label of padding
_SLICE = re.compile(r"\s*(-?\d+)?\s*(:)?\s*(-?\d+)?\s*")
_TOKENS = ("input_ids", "tokens", "0")
_NO_TOKENS = (
    "decoder_",
    "labels",
    "attention_mask",
    "mask",
    "position",
    "cache_position",
    "token_type",
)


class Rows(NamedTuple):
    """How rows are paired: a word, or a slice of each side."""

    how: str
    actual: Index = ()
    expected: Index = ()

    def __str__(self) -> str:
        return self.how


def parse_rows(text: str) -> Rows:
    """`auto`, `same`, `inputs`, `saved`, `sum`, or slices: `[:, 1:] = [:, :-1]`."""
    if text in WORDS:
        return Rows(text)
    sides = text.split("=")
    if len(sides) != 2:
        raise BadUsage(
            f"rows='{text}': expected one of {', '.join(WORDS)}, or a slice of actual and of "
            "expected, such as '[:, 1:] = [:, :-1]'"
        )
    return Rows(text, _index(sides[0], text), _index(sides[1], text))


def _index(text: str, whole: str) -> Index:
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        found: list[slice | int] = []
        for part in inside[1:-1].split(","):
            match = _SLICE.fullmatch(part)
            if match is None or not part.strip():
                break
            first, colon, last = match.groups()
            if colon:
                found.append(slice(int(first) if first else None, int(last) if last else None))
            else:
                found.append(int(first))
        else:
            return tuple(found)
    raise BadUsage(f"rows='{whole}': '{inside}' is no slice; expected such as '[:, -1]'")


class Names:
    """A number for each thing that rows are told apart by; both sides take theirs from one."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._things: list[Hashable] = []

    def number(self, thing: Hashable) -> int:
        found = self._numbers.get(thing)
        if found is None:
            found = self._numbers[thing] = len(self._things)
            self._things.append(thing)
        return found

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._things)

    def request(self, number: int) -> tuple[str, int] | None:
        """The request and the place of a token in it, where rows are told apart by these."""
        thing = self._things[number] if 0 <= number < len(self._things) else None
        if isinstance(thing, tuple) and thing[0] == "request":
            return thing[1], thing[2]
        return None

    def step(self, number: int) -> tuple[int, int] | None:
        """The label before a token, and the token; None for rows that are no tokens."""
        thing = self._things[number] if 0 <= number < len(self._things) else None
        if isinstance(thing, tuple) and len(thing) == 2:
            before, token = thing
            if isinstance(before, int) and isinstance(token, int):
                return before, token
        return None


class Grid(NamedTuple):
    """The label of each row of a call of the model: [batch, token], or [batch]."""

    labels: Array
    source: Array | None = None  # of an encoder's rows, where the model has one

    @property
    def real(self) -> int:
        """How many rows are no padding."""
        return int(np.count_nonzero(self.labels != NONE))


Grids = dict[tuple[int, int, str], Grid]  # by rank, step and name of the model's call


def grids_by_input(tree: Tree, names: Names, scheme: Scheme) -> Grids:
    """The labels of rows by what the model has read when it comes to them.

    A token is what follows a prefix of tokens, without padding, wherever the call is that read
    them; or, in a sequence that is read as a whole, its place there. Else a row of a batch is its
    content. With a cache a call reads on where the one before it ended, row by row.
    """
    reader = _RowReader(names, scheme, _has_encoder(tree))
    found: Grids = {}
    for call in tree.model_calls:
        try:
            grid = reader.grid(call)
        except UnreadableCapture:
            continue  # its tensors were not kept
        if grid is not None:
            found[call.rank, call.step, call.name] = grid
    return found


def _has_encoder(tree: Tree) -> bool:
    """Whether the model reads a sequence with an encoder, and another one with a decoder."""
    ends = {path.rpartition(".")[2] for path in tree.modules}
    return {"encoder", "decoder"} <= ends


class _RowReader:
    """What the calls of a model have read so far."""

    def __init__(self, names: Names, scheme: Scheme, has_encoder: bool) -> None:
        self.names, self.scheme, self.has_encoder = names, scheme, has_encoder
        self.ends: list[int] = []  # where each row of the last call ended
        self.sources: list[int] = []  # and what an encoder had read before
        self.was_decoder = False
        self.source: Array | None = None  # the labels of its rows
        self.is_unclear = False  # rows of a cache may have changed places

    def grid(self, call: Call) -> Grid | None:
        inputs = _inputs(call)
        tokens = _tokens(inputs)
        decoded = _decoded(inputs, self.has_encoder)
        if tokens is None and decoded is None:
            return _content_grid(call, self.names)
        source = None
        was_decoder, self.was_decoder = self.was_decoder, decoded is not None
        if tokens is not None:
            mask = _mask(inputs, tokens.shape)
            if decoded is None:
                self.sources = []
                self.source, _ = self._read_all(tokens, mask)
                return Grid(self._read(tokens, mask, self._past(call, inputs, tokens, mask)))
            source, self.sources = self._read_all(tokens, mask)
            self.ends = []
        elif not was_decoder:  # an encoder was called for itself
            self.sources, self.ends = self.ends, []
        assert decoded is not None
        if source is None and self.source is not None and len(self.source) == len(decoded):
            source = self.source
        past = self._past(call, inputs, decoded, None)
        return Grid(self._read(decoded, None, past), source)

    def _past(
        self, call: Call, inputs: dict[str, TensorRecord], tokens: Array, mask: Array | None
    ) -> bool:
        """Whether a call reads on where the last one ended."""
        if len(self.ends) != len(tokens):
            return False
        length = tokens.shape[1]
        if mask is not None and mask.shape[1] > length:
            return True
        for name in ("cache_position", "position_ids", "positions"):
            record = inputs.get(name)
            if record is not None and record.numel and record.shape[-1] == length:
                return bool(record.array().reshape(-1, length)[:, 0].max() > 0)
        return length == 1 and call.kwargs.get("past_key_values") is not None

    def _read(self, tokens: Array, mask: Array | None, goes_on: bool) -> Array:
        starts = self.ends if goes_on else self._beginnings(len(tokens))
        if goes_on and self.is_unclear:
            # beams: each row is one of its own, and has no partner
            new = [self.names.number(("unclear", self.names.size, n)) for n in range(tokens.size)]
            return np.array(new, np.int64).reshape(tokens.shape)
        labels, self.ends = read_on(tokens, mask, starts, self.names)
        if not goes_on:  # the same prompt in several rows is a beam search, or may be one
            self.is_unclear = len(set(self.ends)) < len(self.ends)
        return whole(labels, self.ends, self.names) if self.scheme == "sequence" else labels

    def _beginnings(self, n: int) -> list[int]:
        if len(self.sources) != n:
            return [NONE] * n
        return [self.names.number(("source", end)) for end in self.sources]

    def _read_all(self, tokens: Array, mask: Array | None) -> tuple[Array, list[int]]:
        labels, ends = read_on(tokens, mask, [NONE] * len(tokens), self.names)
        return whole(labels, ends, self.names), ends


def read_on(
    tokens: Array, mask: Array | None, starts: Sequence[int], names: Names
) -> tuple[Array, list[int]]:
    """The label of each token, by what was read before it; and the last label of each row."""
    labels = np.full(tokens.shape, NONE, np.int64)
    real = np.ones(tokens.shape, bool) if mask is None else mask[:, -tokens.shape[1] :]
    ends = []
    for b, row in enumerate(tokens.tolist()):
        number = starts[b]
        for t, token in enumerate(row):
            if real[b, t]:
                number = labels[b, t] = names.number((number, token))
        ends.append(number)
    return labels, ends


def whole(labels: Array, ends: Sequence[int], names: Names) -> Array:
    """The labels of sequences that are read as a whole: a place in one that ends so."""
    found = np.full_like(labels, NONE)
    for b, row in enumerate(labels):
        for t in np.flatnonzero(row != NONE).tolist():
            found[b, t] = names.number(("of", ends[b], int(row[t])))
    return found


def _inputs(call: Call) -> dict[str, TensorRecord]:
    return {suffix(call, r).removeprefix("input."): r for r in call.tensors if r.role == "input"}


def _content_grid(call: Call, names: Names) -> Grid | None:
    """Rows of a batch that are no tokens: each by its bits."""
    for record in call.tensors:
        if record.role == "input" and len(record.shape) >= 2 and record.numel:
            array = np.ascontiguousarray(record.array())
            rows = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in array]
            return Grid(np.array([names.number(row) for row in rows], np.int64))
    return None


def _tokens(inputs: dict[str, TensorRecord]) -> Array | None:
    """The tokens that a model, or its encoder, is given: a row of whole numbers a sequence."""
    named = [inputs[name] for name in _TOKENS if name in inputs]
    others = [r for name, r in inputs.items() if not name.startswith(_NO_TOKENS)]
    for record in (*named, *others):
        if len(record.shape) == 2 and record.dtype in ("int64", "int32") and record.numel:
            return record.array()
    return None


def _decoded(inputs: dict[str, TensorRecord], has_encoder: bool) -> Array | None:
    """The tokens that a decoder is given, where an encoder reads others."""
    for name in ("decoder_input_ids", *(("labels",) if has_encoder else ())):
        if name in inputs and len(inputs[name].shape) == 2:
            return inputs[name].array()
    return None


def _mask(inputs: dict[str, TensorRecord], shape: tuple[int, ...]) -> Array | None:
    """The padding mask: False where a token is padding."""
    for name, record in inputs.items():
        is_like = len(record.shape) == 2 and record.shape[0] == shape[0]
        if not is_like or record.shape[1] < shape[1] or "float" in record.dtype:
            continue
        found: Array = record.array() != 0
        if name.endswith("mask"):
            return found
        if name.isdigit() and record.dtype == "bool" and record.shape == shape:  # by position
            return found
    return None


def saved_grids(tree: Tree, names: Names) -> Grids:
    """The labels that the program has saved before each call of its model: rec.save("rows", t), or
    rec.save_requests(...)."""
    found: Grids = {}
    saved: Array | None = None
    roots = {id(call) for call in tree.model_calls}
    for call in tree.calls:
        if call.name.startswith("Saved.rows."):
            record = next((r for r in call.tensors if "int" in r.dtype), None)
            saved = None if record is None else record.array().astype(np.int64)
        elif call.name.startswith(f"Saved.{REQUESTS}."):
            saved = _request_labels(call, names)
        elif saved is not None and is_module(call) and id(call) in roots:
            found[call.rank, call.step, call.name] = Grid(np.where(saved < 0, NONE, saved))
            saved = None
    return found


def has_requests(tree: Tree) -> bool:
    """Whether the program has said which tokens of which request each call of its model reads."""
    return any(call.name.startswith(f"Saved.{REQUESTS}.") for call in tree.calls)


def _request_labels(call: Call, names: Names) -> Array | None:
    """A label for each token of a call, by the request and the place in it; None if damaged."""
    saved = call.outputs
    given = saved.get("names") if isinstance(saved, dict) else None
    record = next((r for r in call.tensors if r.dtype == "int64" and r.shape[-1:] == (2,)), None)
    if not isinstance(given, list) or record is None:
        return None
    cells = record.array().reshape(-1, 2).tolist()
    if not all(NONE <= who < len(given) for who, _ in cells):
        return None
    labels = [
        NONE if who == NONE else names.number(("request", str(given[who]), place))
        for who, place in cells
    ]
    return np.array(labels, np.int64).reshape(record.shape[:-1])


def labelled(piece: Piece, grids: Grids, path: str) -> tuple[Array, Array] | None:
    """The rows of a tensor and their labels, without padding; None if it has no such rows."""
    root = piece.root
    grid = None if root is None else grids.get((root.rank, root.step, root.name))
    if grid is None:
        return None
    both = [grid.labels, grid.source]
    if "encoder" in path.split(".") or ".encoder_" in piece.record.name:
        both.reverse()
    found = (_labels_of(piece.record.shape, labels) for labels in both)
    labels = next((each for each in found if each is not None), None)
    if labels is None:
        return None
    rows = piece.record.array().reshape(labels.size, -1)
    keep = labels.reshape(-1) != NONE
    return rows[keep], labels.reshape(-1)[keep]


def _labels_of(shape: tuple[int, ...], labels: Array | None) -> Array | None:
    """The labels that go with the first dimensions of a tensor."""
    if labels is None or not shape or 0 in shape:
        return None
    n = labels.ndim
    if shape[:n] == labels.shape:
        return labels
    if n == 1:
        return None
    batch, length = labels.shape
    if len(shape) >= 3 and shape[0] == batch and shape[1] < length:
        return labels[:, -shape[1] :]  # the last tokens only
    if shape[0] == batch * length and len(shape) >= 2:
        return labels.reshape(-1)
    if shape[0] == batch and len(shape) == 2:  # one row a sequence: its last token's
        last = [row[row != NONE][-1] if (row != NONE).any() else NONE for row in labels]
        return np.array(last, np.int64)
    return None


class Join(NamedTuple):
    """Rows of both sides with the same labels."""

    actual: Array
    expected: Array
    labels: list[int]


class Joined(NamedTuple):
    """The rows of each tensor of actual that have a partner, and the labels that have none."""

    joins: list[Join]
    only_actual: list[int]
    only_expected: list[int]


Labelled = tuple[Array, Array]  # rows, and their labels


def join(ours: Sequence[Labelled], theirs: Sequence[Labelled]) -> Joined:
    """Pair rows by label. Where expected has fewer of a label, its last one serves for the rest."""
    places: dict[int, list[tuple[int, int]]] = {}
    for i, (_, labels) in enumerate(theirs):
        for j, label in enumerate(labels.tolist()):
            places.setdefault(label, []).append((i, j))
    seen: dict[int, int] = {}
    joins, only = [], []
    for rows, labels in ours:
        mine, others, names = [], [], []
        for j, label in enumerate(labels.tolist()):
            there = places.get(label)
            n = seen[label] = seen.get(label, -1) + 1
            if there is None:
                only.append(label)
                continue
            i, k = there[min(n, len(there) - 1)]
            mine.append(j)
            others.append(theirs[i][0][k])
            names.append(label)
        if names and {row.shape for row in others} == {rows.shape[1:]}:
            joins.append(Join(rows[mine], np.stack(others), names))
        else:
            joins.append(Join(rows[:0], rows[:0], []))
    return Joined(joins, only, [label for label in places if label not in seen])


class Fork(NamedTuple):
    """The sides read on with other tokens after the same ones."""

    label: int  # of the last row that they have in common
    actual: int
    expected: int


def forks(joined: Joined, names: Names) -> list[Fork]:
    """Where the sides go apart in what they read."""
    ours = _tokens_after(joined.only_actual, names)
    theirs = _tokens_after(joined.only_expected, names)
    common = {label for join in joined.joins for label in join.labels}
    return [Fork(at, ours[at], theirs[at]) for at in ours if at in theirs and at in common]


def not_after(labels: Sequence[int], ties: Sequence[Fork], names: Names) -> list[int]:
    """The labels of rows that do not come after a tie, by the token that a side went on with."""
    gone = {(fork.label, token) for fork in ties for token in fork[1:]}
    after: set[int] = set()
    found = []
    for label in sorted(labels):  # a row has a larger number than those before it
        step = names.step(label)
        if step is not None and (step in gone or step[0] in after):
            after.add(label)
        else:
            found.append(label)
    return found


def _tokens_after(labels: Sequence[int], names: Names) -> dict[int, int]:
    found: dict[int, int] = {}
    for label in labels:
        step = names.step(label)
        if step is not None:
            found.setdefault(*step)
    return found


def place_of(label: int, names: Names) -> str:
    """A row in words: which token of its sequence, or of its request, it is."""
    found = names.request(label)
    if found is not None:
        return f"token {found[1]} of request {printable(found[0])}"
    n = 0
    while (step := names.step(label)) is not None:
        label, n = step[0], n + 1
    return f"token {n - 1} of its sequence" if n else str(label)
