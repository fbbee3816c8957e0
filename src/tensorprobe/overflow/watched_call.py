"""One call as a guard looks at it: which of its tensors are held, and whether weakly."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from tensorprobe.follow.gradients import InputEdges, Path
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.nests import change_leaves
from tensorprobe.overflow.call_kinds import Plan
from tensorprobe.overflow.call_site import render
from tensorprobe.overflow.cases import NamedCall, NotedCall
from tensorprobe.overflow.judge import SeenTensor
from tensorprobe.overflow.pending_calls import NotedInput
from tensorprobe.overflow.saved_calls import write_forward
from tensorprobe.record.tape import Tape
from tensorprobe.tensors.finiteness import readable

Tensors = list[tuple[torch.Tensor, Path]]


class RunningCall:
    """One call while it runs, with all that could not be found out after it."""

    __slots__ = (
        "args", "before", "edges", "frame", "inputs", "kwargs", "memory", "needs", "noted",
        "number", "plan", "start", "written",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        number: int,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType | None = None,
    ) -> None:
        self.plan, self.number, self.frame = plan, number, frame
        self.args, self.kwargs = args, kwargs
        self.inputs: Tensors = []
        self.edges: InputEdges | None = None
        # Where the call leaves its inputs as they are: those that require a gradient, and the
        # number of the next graph node before it. Edges can be had from them when it has ended.
        self.needs: tuple[Path, ...] = ()
        self.start = 0
        self.written: dict[Path, torch.Tensor] = {}  # live ones, of which `args` has copies
        self.memory: Sequence[NotedInput] | None = None  # of inputs that will be written to
        self.before: list[SeenTensor] = []  # what a collective was given: it has no copies
        self.noted: NotedCall | None = None


def edges_of(watched: RunningCall) -> InputEdges | None:
    """The graph nodes of the inputs before the call; None if backward does not pass it."""
    if watched.edges is None and watched.needs:
        edges = watched.edges = InputEdges(watched.inputs)
        edges.start = watched.start
    return watched.edges


class Remembered:
    """The arguments of a call, held weakly: what backward needs stays alive by itself."""

    __slots__ = ("_args", "_kwargs", "_versions")

    def __init__(self, watched: RunningCall) -> None:
        self._args = tuple(weaken(arg) for arg in watched.args)
        self._kwargs = {key: weaken(value) for key, value in watched.kwargs.items()}
        self._versions = [version_of(tensor) for tensor, _ in watched.inputs]
        if watched.written:
            self._versions = []  # what it was given is no more

    def write(self, tape: Tape, call: NamedCall) -> bool:
        """Put the forward call into the capture; False where something of it is gone."""
        try:
            args = tuple(recover(arg) for arg in self._args)
            kwargs = {key: recover(value) for key, value in self._kwargs.items()}
        except LookupError:
            return False
        if [version_of(tensor) for tensor, _ in tensors_in(args, kwargs)] != self._versions:
            return False
        write_forward(tape, call.names(), render(call.trail), args, kwargs, None, {})
        return True


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with the numbers of one that is known to have numbers."""
    content = readable(tensor)
    assert content is not None
    return content


def contents_of(tensors: Tensors) -> list[torch.Tensor]:
    """The numbers of those that have some."""
    return [each for each in (readable(tensor) for tensor, _ in tensors) if each is not None]


def live_tensors(watched: RunningCall) -> Tensors:
    """What the call wrote to, as it is now."""
    return [(tensor, path) for path, tensor in watched.written.items()]


def copied(value: Any, storages: set[int] | None = None) -> Any:
    """A copy of the tensors in an argument; of those in these storages, where some are given."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if storages is not None:
            content = readable(leaf)
            if content is None or content.untyped_storage()._cdata not in storages:
                return leaf
        return leaf.detach().clone()

    return change_leaves(value, copy)


def weaken(value: Any) -> Any:
    """The argument with weak references in place of its tensors."""
    return change_leaves(
        value, lambda leaf: weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf
    )


def recover(value: Any) -> Any:
    """The argument that was weakened; LookupError where a tensor of it is gone."""
    return change_leaves(value, _recovered)


def _recovered(leaf: Any) -> Any:
    if not isinstance(leaf, weakref.ref):
        return leaf
    tensor = leaf()
    if tensor is None:
        raise LookupError("a tensor is gone")
    return tensor


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows when the tensor is written to; -1 for one of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


# Labels and paths of arguments by position, made once.
POSITIONS: list[Path] = [(str(number),) for number in range(64)]


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, Path]]:
    """The tensors among the arguments of a call, with their paths."""
    found: list[tuple[torch.Tensor, Path]] = []
    number = -1
    for value in args:
        number += 1
        kind = type(value)
        if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            found.append((value, POSITIONS[number] if number < 64 else (str(number),)))
        elif kind in _CONTAINERS:
            _inside(value, (str(number),), found)
    if kwargs:
        for key, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                found.append((value, (key,)))
            elif type(value) in _CONTAINERS:
                _inside(value, (key,), found)
    return found


def tensors_out(result: Any) -> list[tuple[torch.Tensor, Path]]:
    """The tensors that a call returned, with their paths."""
    if isinstance(result, torch.Tensor):
        return [(result, POSITIONS[0])]
    if isinstance(result, tuple | list | dict):
        found: list[tuple[torch.Tensor, Path]] = []
        _inside(result, (), found)
        return found
    return []


_CONTAINERS = frozenset([list, tuple, dict])


def _inside(value: Any, path: Path, found: list[tuple[torch.Tensor, Path]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            found.append((item, (*path, str(key))))
        elif isinstance(item, tuple | list | dict) and len(path) < 6:
            _inside(item, (*path, str(key)), found)
