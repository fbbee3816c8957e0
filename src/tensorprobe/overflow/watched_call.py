"""One call as a guard looks at it: what is held of it, how strongly, and its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tensorprobe.capture.gradients import InputEdges, Path
from tensorprobe.capture.tape import Tape
from tensorprobe.overflow.call_kinds import Plan
from tensorprobe.overflow.call_site import render
from tensorprobe.overflow.cases import Case, Sighting, tensors_in
from tensorprobe.overflow.pending_calls import NotedCall, NotedInput
from tensorprobe.overflow.saved_calls import write_forward
from tensorprobe.tensors.finiteness import readable

Tensors = list[tuple[torch.Tensor, Path]]


class Glance:
    """One call while it runs: what has to be known of it before, for the case that it is bad."""

    __slots__ = (
        "args",
        "call",
        "edges",
        "inputs",
        "kwargs",
        "needs",
        "noted",
        "number",
        "plan",
        "start",
        "was_bad",
        "written",
    )

    def __init__(self, plan: Plan, number: int, args: tuple[Any, ...], kwargs: Any) -> None:
        self.plan, self.number = plan, number
        self.args, self.kwargs = args, kwargs
        self.inputs: Tensors = []
        self.edges: InputEdges | None = None
        # Where the call leaves its inputs as they are: those that require a gradient, and the
        # number of the next graph node before it. Edges can be had from them when it has ended.
        self.needs: tuple[Path, ...] = ()
        self.start = 0
        self.written: dict[Path, torch.Tensor] = {}  # live ones, of which `args` has copies
        self.noted: Sequence[NotedInput] | None = None  # memory of inputs that will be written to
        self.was_bad: Case | bool = False  # what a collective was given: it has no copies
        self.call: NotedCall | None = None


def edges_of(glance: Glance) -> InputEdges | None:
    """The graph as it was before the call; None where backward does not come by."""
    if glance.edges is None and glance.needs:
        edges = glance.edges = InputEdges(glance.inputs)
        edges.start = glance.start
    return glance.edges


class Remembered:
    """What a call was given, held weakly: whoever needs it for backward keeps it alive."""

    __slots__ = ("_args", "_kwargs", "_versions")

    def __init__(self, glance: Glance) -> None:
        self._args = tuple(weaken(arg) for arg in glance.args)
        self._kwargs = {key: weaken(value) for key, value in glance.kwargs.items()}
        self._versions = [version_of(tensor) for tensor, _ in glance.inputs]
        if glance.written:
            self._versions = []  # what it was given is no more

    def write(self, tape: Tape, sighting: Sighting) -> bool:
        """Put the forward call into the capture; False where something of it is gone."""
        try:
            args = tuple(recover(arg) for arg in self._args)
            kwargs = {key: recover(value) for key, value in self._kwargs.items()}
        except LookupError:
            return False
        if [version_of(tensor) for tensor, _ in tensors_in(args, kwargs)] != self._versions:
            return False
        write_forward(tape, sighting.names(), frames_of(sighting), args, kwargs, None, {})
        return True


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that is known to have some."""
    content = readable(tensor)
    assert content is not None
    return content


def contents_of(tensors: Tensors) -> list[torch.Tensor]:
    """The numbers of those that have some."""
    return [each for each in (readable(tensor) for tensor, _ in tensors) if each is not None]


def labelled(tensors: Iterable[tuple[torch.Tensor, Path]], side: str) -> list[Any]:
    """Tensors with their labels, as `input.0`."""
    return [(f"{side}.{'.'.join(path)}", tensor) for tensor, path in tensors]


def live_tensors(glance: Glance) -> Tensors:
    """What the call wrote to, as it is now."""
    return [(tensor, path) for path, tensor in glance.written.items()]


def copied(value: Any, storages: set[int] | None = None) -> Any:
    """A copy of the tensors in an argument; of those in these storages, where some are given."""
    if isinstance(value, torch.Tensor):
        if storages is not None:
            content = readable(value)
            if content is None or content.untyped_storage()._cdata not in storages:
                return value
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(item, storages) for item in value)
    return value


def weaken(value: Any) -> Any:
    """The argument with weak references in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    if type(value) in (list, tuple):
        return type(value)(weaken(item) for item in value)
    return value


def recover(value: Any) -> Any:
    """The argument that was weakened; LookupError where a tensor of it is gone."""
    if isinstance(value, weakref.ref):
        tensor = value()
        if tensor is None:
            raise LookupError("a tensor is gone")
        return tensor
    if type(value) in (list, tuple):
        return type(value)(recover(item) for item in value)
    return value


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows when the tensor is written to; -1 for one of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def frames_of(sighting: Sighting) -> tuple[str, ...]:
    """The stack of a sighting, as text."""
    return render(sighting.trail)
