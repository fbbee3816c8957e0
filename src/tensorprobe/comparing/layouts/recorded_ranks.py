"""What a run has of parameters, results and gradients: of one process, or of each of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.comparing.align import content, is_constant
from tensorprobe.comparing.mapping import plain_path
from tensorprobe.comparing.places.boundaries import Tree
from tensorprobe.records import Call, Capture, TensorRecord
from tensorprobe.replay.kinds import kind_of
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

Array = np.ndarray[Any, Any]
_DRAWS = ("dropout", "random")
_WRAPPERS = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "DataParallel",
)


class Place(NamedTuple):
    """A tensor of a call."""

    call: Call
    record: TensorRecord

    def array(self) -> Array:
        """Its numbers, in float64 if they are no whole numbers."""
        array = self.record.array()
        return array.astype(np.float64) if self.record.dtype in FRACTION_BITS else array


class RankStep:
    """One step of one rank."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = list(calls)
        self.tree = Tree(self.calls)
        self.parameters = dict(self._parameters())
        self.gradients = self._gradients()
        self.stepped = dict(self._of_optimizers("parameter", "parameters."))
        self.made = dict(self._of_optimizers("output", "output."))  # the parameters after the step
        self.roots = self._roots()

    def module_calls(self, path: str) -> list[Call]:
        """The calls of a module, without those of what wraps it."""
        calls = self.tree.modules[path].calls if path in self.tree.modules else []
        plain = [call for call in calls if call.op.rpartition(".")[2] not in _WRAPPERS]
        return plain or calls

    def root_number(self, call: Call) -> int | None:
        """In which call of the model a call is."""
        root = self.tree.root(call)
        names = [each.name for each in self.roots]
        return names.index(root.name) if root is not None and root.name in names else None

    def _parameters(self) -> Iterable[tuple[str, Place]]:
        for path in self.tree.modules:
            calls = self.module_calls(path)
            for record in calls[0].tensors:
                if record.role == "parameter":
                    name = record.name.removeprefix(f"{calls[0].name}.parameters.")
                    yield label(path, name), Place(calls[0], record)

    def _of_optimizers(self, role: str, prefix: str) -> Iterable[tuple[str, Place]]:
        """The parameters as optimizers have them: FSDP has gathered those of modules."""
        for call in self.calls:
            if call.name.startswith("Optimizer."):
                for record in call.tensors:
                    name = record.name.removeprefix(f"{call.name}.")
                    if record.role == role and name.startswith(prefix):
                        yield plain_path(name.removeprefix(prefix)), Place(call, record)

    def _roots(self) -> list[Call]:
        """The calls of the model; not those by which a pipeline learns the shapes that come."""
        unwritten = {
            content(record)
            for call in self.calls
            if kind_of(call) == "uninitialised"
            for record in call.tensors
            if record.role == "output" and not is_constant(record)
        } - {None}
        given = [(call, _inputs(call)) for call in self.tree.model_calls]
        return [call for call, inputs in given if inputs and content(inputs[0]) not in unwritten]

    def _gradients(self) -> dict[str, Place]:
        """As an optimizer is given them; else as the last backward has left them."""
        found: dict[str, Place] = {}
        given: dict[str, Place] = {}
        for call in self.calls:
            for record in call.tensors:
                if record.role != "parameter_grad":
                    continue
                name = record.name.removeprefix(call.name + ".").removeprefix("parameters_grad.")
                if call.name.startswith("Optimizer."):
                    if not record.name.endswith(".after"):
                        given.setdefault(plain_path(name), Place(call, record))
                elif ".parameters_grad." in call.name:
                    found[label(plain_path(call.module), name)] = Place(call, record)
        return found | given


class RecordedRanks:
    """All steps of all ranks of a run."""

    def __init__(self, capture: Capture, step: int | None) -> None:
        self.capture = capture
        units: dict[tuple[int, int], list[Call]] = {}
        for call in capture.calls:
            if step is None or call.step == step:
                units.setdefault((call.rank, call.step), []).append(call)
        self.ranks = tuple(sorted({rank for rank, _ in units}))
        self.steps = tuple(sorted({number for _, number in units}))
        self._units = units
        self._made: dict[tuple[int, int], RankStep] = {}

    def at(self, rank: int, step: int) -> RankStep:
        key = rank, step
        if key not in self._made:
            self._made[key] = RankStep(self._units.get(key, []))
        return self._made[key]

    def of_step(self, step: int) -> Mapping[int, RankStep]:
        return {rank: self.at(rank, step) for rank in self.ranks}


def label(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def results(call: Call) -> list[Place]:
    """What a call gives, but for whole numbers."""
    return [
        Place(call, record) for record in call.tensors
        if record.role == "output" and record.alias_of is None and record.dtype in FRACTION_BITS
    ]  # fmt: skip


def _inputs(call: Call) -> list[TensorRecord]:
    return [r for r in call.tensors if r.role == "input" and r.shape]


def draws(calls: Iterable[Call]) -> Call | None:
    """The first call of a model that draws random numbers."""
    for call in calls:
        is_inside = call.module and call.direction == "forward"
        if is_inside and not call.name.startswith("Module.") and kind_of(call) in _DRAWS:
            return call
    return None


def given(call: Call) -> list[Place]:
    """What a call is given."""
    return [Place(call, record) for record in _inputs(call)]
