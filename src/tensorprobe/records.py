"""The nouns: a Capture holds Calls, a Call holds TensorRecords with summaries. No torch."""

from __future__ import annotations

import difflib
import fnmatch
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from tensorprobe.errors import NoSuchCall, UnreadableCapture
from tensorprobe.notebooks import html_of
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.summary import TensorSummary as TensorSummary

if TYPE_CHECKING:
    import numpy as np
    import torch

Direction = Literal["forward", "backward"]
Level = Literal["L0", "L1", "L2", "mix"]
Keep = Literal["structure", "stats", "digest", "tensors"]
# `state` is what an optimizer remembers: momenta, step counters.
Role = Literal["input", "output", "parameter", "parameter_grad", "buffer", "state"]
Status = Literal["complete", "begun", "raised"]

HOST = "cpu"
# The beginning of a note of DDP's and FSDP's modules: then come the ranks, group and hook, as in
# "gradients are reduced outside of any call over ranks 0-7, group 0, hook none".
REDUCES_GRADIENTS = "gradients are reduced outside of any call over ranks "
# The note of a backward call whose gradients some other tool took there.
REQUESTS = "requests"  # as what a server saves whose tokens its model reads
LAST_NODE = "outputs are those of the last autograd node, not the gradients of the inputs"
# Before a digest that is of a content's numbers in the order in which they lie in memory, as where
# statistics are kept: a matrix and its transpose have one.
IN_MEMORY = "memory:"


def kind_of_digest(digest: str) -> str:
    """What a digest was made by: "crc32" of "crc32:8fa00131"; ours of row-major bytes have none."""
    return digest.partition(":")[0] if ":" in digest else ""


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How a DTensor lies on the ranks; the record that has this is one rank's part of it."""

    shape: tuple[int, ...]  # of the whole
    placements: tuple[str, ...]  # by dimension of the mesh, in torch's words: "Shard(dim=0)"
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]  # of the mesh, row by row
    mesh_names: tuple[str, ...] = ()  # of its dimensions: "dp", "tp"


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
    """One tensor as a call saw it: identity, layout, and whatever of its content was kept.

    `name` is the full one ("Functional.linear.0.forward.input.0"). `dtype` is torch's name without
    the prefix ("bfloat16"). `stride` is that of the live tensor; stored bytes are row-major.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    device: str = HOST
    requires_grad: bool = False
    summary: TensorSummary | None = None
    digest: str | None = None
    blob: Blob | None = None
    gap: str | None = None  # why there is no content where there should be some
    alias_of: str | None = None  # the tensor of the same call that this is the same object as
    sharding: Sharding | None = (
        None  # of a DTensor: shape and content are those of this rank's part
    )

    @property
    def numel(self) -> int:
        n = 1
        for length in self.shape:
            n *= max(length, 0)  # -1: the rows of a nested tensor have lengths of their own
        return n

    @property
    def is_on_host(self) -> bool:
        return self.device == HOST

    def array(self) -> np.ndarray[Any, Any]:
        """The content as a read-only numpy array, memory-mapped (ml_dtypes for bf16 and fp8)."""
        from tensorprobe.tensors.arrays import read_array

        return read_array(self.name, self.dtype, self.shape, self._kept())

    def load(self) -> torch.Tensor:
        """The content as a CPU tensor of its own, exact in every dtype."""
        from tensorprobe.tensors.arrays import read_tensor

        return read_tensor(self.name, self.dtype, self.shape, self._kept())

    def _kept(self) -> Blob:
        if self.blob is None:
            why = self.gap or "the capture keeps no tensors; record with keep='tensors'"
            raise UnreadableCapture(f"{self.name} has no stored content: {why}")
        return self.blob


class Special(msgspec.Struct, frozen=True):
    """An argument that is neither a tensor nor a Python scalar or container.

    `kind` is one of dtype, device, layout, memory_format, generator, process_group, reduce_op,
    enum, function, storage, module, numpy, or `unsupported`; `text` is what a person should read.
    """

    kind: str
    text: str


class Fields(msgspec.Struct, frozen=True):
    """A container with named fields, of a type that is not one of Python's own."""

    kind: Literal["namedtuple", "dataclass", "mapping"]
    type: str  # "transformers.modeling_outputs.BaseModelOutput"
    fields: dict[str, Any]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """With whom a call communicates: the same communication has the same facts on each rank.

    Two calls belong together if `group`, `group_name`, `op` and `sequence` are equal. A message
    is a `send` on one rank and a `recv` on the other, with the same `sequence` and `tag`.
    """

    op: str  # "all_reduce", whatever the name by which the program called it
    group: tuple[int, ...]  # the ranks of all members, in the order of the group
    # From 0 in each process: collectives of this group, or messages from one rank to another.
    sequence: int
    group_name: str = ""  # torch's own, the same for all members
    description: str = ""  # "default_pg", "mesh_dp"
    reduce: str | None = None  # "SUM", "AVG"
    root: int | None = None  # the rank that broadcasts, scatters, or is given the result
    peer: int | None = None  # of a message: the other rank
    tag: int | None = None
    is_async: bool = False  # the call may return before it has happened


def digests_tell(actual: TensorRecord, expected: TensorRecord) -> bool:
    """Whether two digests tell whether two contents are the same numbers in the same places."""
    ours, theirs = actual.digest, expected.digest
    if ours is None or theirs is None or kind_of_digest(ours) != kind_of_digest(theirs):
        return False
    return not ours.startswith(IN_MEMORY) or actual.stride == expected.stride


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a recorded program: forward, backward, an optimizer step, or a saved value.

    `args`, `kwargs` and `outputs` are trees of Python scalars and containers whose leaves may be
    TensorRecord, Special and Fields. For a backward call `args` are the gradients that came in (one
    per output of the forward call), `outputs` the gradients it sent to the forward call's inputs.
    """

    index: int  # execution order within a rank, over all steps
    name: str
    op: str
    module: str = ""
    direction: Direction = "forward"
    step: int = 0
    rank: int = 0
    thread: str = "MainThread"
    parent: str | None = None
    stack: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    outputs: Any = None
    tensors: tuple[TensorRecord, ...] = ()
    status: Status = "complete"
    error: str | None = None
    notes: tuple[str, ...] = ()
    collective: Collective | None = None

    def tensor(self, suffix: str) -> TensorRecord:
        """The tensor whose name ends in `suffix`, as in `call.tensor("input.0")`."""
        for record in self.tensors:
            if record.name == suffix or record.name == f"{self.name}.{suffix}":
                return record
        names = ", ".join(record.name.removeprefix(self.name + ".") for record in self.tensors)
        raise KeyError(f"{self.name} has no tensor '{suffix}'; it has {names or 'none'}")

    def __repr__(self) -> str:
        status = "" if self.status == "complete" else f", {self.status}"
        where = f" in {self.module}" if self.module else ""
        tensors = count(len(self.tensors), "tensor")
        return f"<Call {self.name}{where}: {tensors}, step {self.step}, rank {self.rank}{status}>"

    def _repr_html_(self) -> str:
        return html_of(self)


class Gap(msgspec.Struct, frozen=True):
    """Something that should be in the capture and is not, and why."""

    name: str
    reason: str
    step: int = 0
    rank: int = 0


class Calls(Sequence[Call]):
    """The calls of a capture in execution order; `calls(step=0, op="*linear")` narrows them.

    Text filters are shell patterns; a name also matches any call that it is a dotted prefix of,
    an op any that it is the dotted end of.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = tuple(calls)

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> Calls: ...
    def __getitem__(self, index: int | slice) -> Call | Calls:
        if isinstance(index, slice):
            return Calls(self._calls[index])
        return self._calls[index]

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __repr__(self) -> str:
        return f"<{count(len(self._calls), 'call')}>"

    def __call__(
        self,
        *,
        step: int | None = None,
        rank: int | None = None,
        name: str | None = None,
        module: str | None = None,
        op: str | None = None,
        direction: Direction | None = None,
    ) -> Calls:
        tests = call_tests(step, rank, name, module, op, direction)
        return Calls(call for call in self._calls if all(test(call) for test in tests))


def call_tests(
    step: int | None,
    rank: int | None,
    name: str | None,
    module: str | None,
    op: str | None,
    direction: Direction | None,
) -> list[Callable[[Call], bool]]:
    """What a call has to pass, one test a filter that is given."""
    tests: list[Callable[[Call], bool]] = []
    if step is not None:
        tests.append(lambda call: call.step == step)
    if rank is not None:
        tests.append(lambda call: call.rank == rank)
    if name is not None:
        tests.append(lambda call: matches_name(call.name, name))
    if module is not None:
        tests.append(lambda call: fnmatch.fnmatchcase(call.module, module))
    if op is not None:
        tests.append(lambda call: matches_op(call.op, op))
    if direction is not None:
        tests.append(lambda call: call.direction == direction)
    return tests


def matches_name(name: str, wanted: str) -> bool:
    """Whether `wanted` is the name, a dotted prefix of it, or a shell pattern for it."""
    return name == wanted or name.startswith(wanted + ".") or fnmatch.fnmatchcase(name, wanted)


def matches_op(op: str, wanted: str) -> bool:
    """Whether `wanted` is the op, the dotted end of it (silu, F.silu), or a shell pattern."""
    if wanted.startswith("F."):
        wanted = "functional." + wanted.removeprefix("F.")
    return fnmatch.fnmatchcase(op, wanted) or fnmatch.fnmatchcase(op, f"*.{wanted}")


class Capture:
    """What was recorded: calls of all steps and ranks, gaps, and the facts about the run."""

    def __init__(
        self,
        path: Path,
        layout: str,
        calls: Iterable[Call],
        gaps: Iterable[Gap] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.layout = layout
        self._calls = Calls(calls)
        self.gaps = tuple(gaps)
        self.facts: Mapping[str, Any] = facts or {}

    @property
    def calls(self) -> Calls:
        return self._calls

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({call.step for call in self.calls}))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({call.rank for call in self.calls}))

    @property
    def begun(self) -> Calls:
        """Calls that had begun when the run ended: their outputs are missing."""
        return Calls(call for call in self.calls if call.status == "begun")

    def call(self, name: str, *, step: int | None = None, rank: int | None = None) -> Call:
        """The first call of exactly this name."""
        calls = self.calls(step=step, rank=rank)
        for call in calls:
            if call.name == name:
                return call
        raise no_such_call(self, name, calls)

    def __repr__(self) -> str:
        ranks = f" of {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        gaps = f", {count(len(self.gaps), 'gap')}" if self.gaps else ""
        calls, steps = count(len(self.calls), "call"), count(len(self.steps), "step")
        return f"<Capture {self.path}: {calls} in {steps}{ranks}{gaps}>"

    def _repr_html_(self) -> str:
        return html_of(self)


def no_such_call(capture: Capture, name: str, calls: Calls) -> NoSuchCall:
    """What to raise when none of these calls, which are all of a step and rank, is the wanted."""
    if not calls:
        return NoSuchCall(
            f"no call of that step and rank in '{capture.path}': it has steps "
            f"{list(capture.steps)} and ranks {list(capture.ranks)}"
        )
    names = sorted({call.name for call in calls})
    near = [each for each in names if name in each] or difflib.get_close_matches(name, names, 3)
    hint = (
        f"near names: {', '.join(near[:3])}"
        if near
        else f"try: tensorprobe show {shlex.quote(str(capture.path))}"
    )
    return NoSuchCall(f"no call '{name}' among {len(calls)} in '{capture.path}'; {hint}")


def count(number: int, noun: str) -> str:
    """1 call, 2 calls."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def by_rank_and_step(calls: Sequence[Call]) -> dict[tuple[int, int], list[Call]]:
    """The calls of each rank and step, in order."""
    units: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        units.setdefault((call.rank, call.step), []).append(call)
    return units
