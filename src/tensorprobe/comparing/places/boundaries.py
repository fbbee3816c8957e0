"""The places of a run at which it is compared: results of modules and calls, and gradients."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorprobe.comparing.mapping import plain_path
from tensorprobe.errors import BadUsage
from tensorprobe.records import Call, Capture, TensorRecord, matches_name

OUTPUTS, GRADIENTS, MODULES = "outputs", "gradients", "modules"
WORDS = (OUTPUTS, GRADIENTS, MODULES)
_NEAREST = 4
_DEEPEST = 200  # modules within modules; a damaged file may have a ring of parents


class Boundary(NamedTuple):
    """A place: all results of one name that a module, or a kind of call, gave.

    `path` is the module's, or for calls that are no modules their name without its number.
    """

    path: str
    tensor: str  # "output.0", "input.0", "parameters_grad.weight"
    is_module: bool = True


class Piece(NamedTuple):
    """A tensor at a boundary, and the call of the model in which it was made."""

    call: Call
    record: TensorRecord
    root: Call | None


class Module(NamedTuple):
    """A module that was called."""

    path: str
    calls: list[Call]
    parent: str | None  # the path of the module that calls it
    n_before: int  # how many modules have ended when it ends, itself among them
    parameters: dict[str, TensorRecord]

    @property
    def op(self) -> str:
        return self.calls[0].op


class Tree:
    """The modules of one side, in the order in which their first calls end."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._by_name = {(call.rank, call.step, call.name): call for call in calls}
        forward = [call for call in calls if is_module(call)]
        self._roots: dict[tuple[int, int, str], Call | None] = {}
        found: dict[str, list[Call]] = {}
        for call in forward:
            found.setdefault(plain_path(call.module), []).append(call)
        self.ends = last = self._ends(forward)
        firsts = {path: group[0] for path, group in found.items()}
        order = sorted(firsts, key=lambda path: (last[key_of(firsts[path])], -firsts[path].index))
        self.modules: dict[str, Module] = {}
        for n, path in enumerate(order, 1):
            parent = self.module_above(firsts[path])
            above = plain_path(parent.module) if parent is not None else None
            self.modules[path] = Module(path, found[path], above, n, _parameters(firsts[path]))

    def _ends(self, forward: Iterable[Call]) -> dict[tuple[int, int, str], int]:
        """The index of the last call inside each module call."""
        last = {key_of(call): call.index for call in forward}
        for call in self.calls:
            above = None if call.direction == "backward" else self.module_above(call)
            for _ in range(_DEEPEST):
                if above is None:
                    break
                last[key_of(above)] = max(last[key_of(above)], call.index)
                above = self.module_above(above)
        return last

    def module_above(self, call: Call) -> Call | None:
        """The module call that a call is in."""
        above = call
        for _ in range(_DEEPEST):
            if above.parent is None:
                return None
            found = self._by_name.get((call.rank, call.step, above.parent))
            if found is None or is_module(found):
                return found
            above = found
        return None

    def root(self, call: Call) -> Call | None:
        """The call of a model, by no other module, that a call is in."""
        key = key_of(call)
        if key not in self._roots:
            found = call if is_module(call) else self.module_above(call)
            for _ in range(_DEEPEST):
                above = None if found is None else self.module_above(found)
                if above is None:
                    break
                found = above
            self._roots[key] = found
        return self._roots[key]

    @property
    def model_calls(self) -> list[Call]:
        """The calls of modules that no module calls, in order."""
        return [c for c in self.calls if is_module(c) and self.module_above(c) is None]

    def above(self, path: str) -> list[str]:
        """The paths of the modules that a module is in, the nearest first."""
        found: list[str] = []
        while len(found) < _DEEPEST:
            parent = self.modules[path].parent if path in self.modules else None
            if parent is None or parent in found:
                break
            found.append(parent)
            path = parent
        return found


def is_module(call: Call) -> bool:
    """Whether it is a forward call of a module."""
    return (
        call.direction == "forward"
        and call.name.startswith("Module.")
        and ".parameters_grad." not in call.name
    )


def key_of(call: Call) -> tuple[int, int, str]:
    return call.rank, call.step, call.name


def _parameters(call: Call) -> dict[str, TensorRecord]:
    found = {}
    for record in call.tensors:
        if record.role == "parameter":
            found[suffix(call, record).removeprefix("parameters.")] = record
    return found


def suffix(call: Call, record: TensorRecord) -> str:
    """A tensor's name without that of its call."""
    return record.name.removeprefix(call.name + ".")


Chosen = dict[Boundary, list[Piece]]


def choose(tree: Tree, at: Sequence[str]) -> Chosen:
    """The boundaries of one side, each with its tensors in order.

    Patterns that begin with the prefix of a call's name select calls, others paths of modules.
    """
    patterns = [word for word in at if word not in WORDS]
    roots = {key_of(call) for call in tree.model_calls}
    found: Chosen = {}
    for call in tree.calls:
        if is_module(call):
            path = plain_path(call.module)
            if (
                MODULES in at
                or (OUTPUTS in at and key_of(call) in roots)
                or any(_matches(path, call.name, pattern) for pattern in patterns)
            ):
                _add(found, tree, call, path, "output", True)
        elif ".parameters_grad." in call.name:
            if GRADIENTS in at:
                _add(found, tree, call, plain_path(call.module), "parameter_grad", True)
        elif any(matches_name(call.name, pattern) for pattern in patterns):
            _add(found, tree, call, _without_number(call.name), "output", False)
    return found


def inputs(tree: Tree, path: str) -> Chosen:
    """What a module is given."""
    found: Chosen = {}
    if path in tree.modules:
        for call in tree.modules[path].calls:
            _add(found, tree, call, path, "input", True)
    return found


def _add(found: Chosen, tree: Tree, call: Call, path: str, role: str, is_module: bool) -> None:
    for record in call.tensors:
        if record.role == role and record.alias_of is None:
            place = Boundary(path, suffix(call, record), is_module)
            found.setdefault(place, []).append(Piece(call, record, tree.root(call)))


def _matches(path: str, name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or matches_name(name, pattern)


def _without_number(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def last_of_each_step(pieces: Sequence[Piece]) -> list[Piece]:
    """Gradients as the last backward pass of a step left them: the sum of its micro-batches."""
    last = {(piece.call.rank, piece.call.step): piece for piece in pieces}
    return list(last.values())


def selects_nothing(at: str, side: str, capture: Capture, tree: Tree) -> BadUsage:
    """What to raise where a word or a pattern selects nothing on one side."""
    where = f"`at={at}` selects nothing in {side} '{capture.path}'"
    if at in WORDS and not tree.modules:
        return BadUsage(
            f"{where}: no modules were recorded. Record with level='L0' or 'mix', "
            "or choose calls by name: `at=Functional.softmax.*`"
        )
    if at == GRADIENTS:
        return BadUsage(f"{where}: no gradients of parameters were recorded there")
    names = sorted(path for path in tree.modules if path)
    if "." in at and at.partition(".")[0] in {call.name.partition(".")[0] for call in tree.calls}:
        names = sorted({call.name for call in tree.calls})
    near = [name for name in names if at.strip("*?") and at.strip("*?.") in name]
    near = near or difflib.get_close_matches(at, names, _NEAREST, 0.3) or names
    return BadUsage(f"{where}; near names: {', '.join(near[:_NEAREST]) or 'none'}")
