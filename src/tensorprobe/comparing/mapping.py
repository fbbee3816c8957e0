"""What the user says is the same in two programs: names of calls and paths of modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe.errors import BadUsage
from tensorprobe.operators import native_name
from tensorprobe.records import Call
from tensorprobe.tensors.yaml_files import read_yaml

# What wraps a model and adds a part to every path below it.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_CALL_PREFIXES = (
    "Functional", "Tensor", "Torch", "VF", "NPU", "Aten", "Distributed", "Module", "Ops",
    "Optimizer", "Function", "Saved", "Mint", "MintFunctional", "Primitive", "Cell", "Jit",
)  # fmt: skip


class WeightParts(NamedTuple):
    """Modules that one side has in one and the other in several, in the order of their weights."""

    inside: str  # the class of the module that they are in; "" for any
    actual: tuple[str, ...]
    expected: tuple[str, ...]


class Mapping(NamedTuple):
    """What the user says is the same: names of calls, prefixes of module paths, and `layers`,
    children of modules by the class they are in (or `TopLayer`, the model). `parts` and `ignore`
    are for comparing at chosen places."""

    calls: dict[str, str]
    modules: dict[str, str]
    layers: dict[str, dict[str, str]]
    parts: tuple[WeightParts, ...] = ()
    ignore: tuple[str, ...] = ()


NO_MAPPING = Mapping({}, {}, {})
IGNORE = "ignore"
TOP_LAYER = "TopLayer"


def plain_path(module: str) -> str:
    """A module path without the parts that DDP, compile, FSDP and checkpointing add."""
    if not module:
        return module
    return ".".join(part for part in module.split(".") if part not in _WRAPPERS)


def backward_renaming(modules: dict[str, str]) -> Callable[[str], str]:
    """A mapping is actual -> expected: paths of the expected side are renamed back."""
    back = {plain_path(theirs): plain_path(ours) for ours, theirs in modules.items()}
    prefixes = sorted(back, key=len, reverse=True)

    def renamed(path: str) -> str:
        for prefix in prefixes:
            if path == prefix or path.startswith(prefix + "."):
                return (back[prefix] + path[len(prefix) :]).strip(".")
        return path

    return renamed


class Layers:
    """Paths of actual renamed part by part, by the class of the module that each part is in."""

    def __init__(self, calls: Sequence[Call], rules: dict[str, dict[str, str]]) -> None:
        self._rules = rules
        self._classes: dict[str, str] = {}
        for call in calls:
            if call.name.startswith("Module.") and call.direction == "forward":
                name = call.name.rpartition(".forward")[0]
                self._classes.setdefault(plain_path(call.module), name.rpartition(".")[2])

    def renamed(self, path: str) -> str:
        """The path as expected has it."""
        parts = path.split(".") if path else []
        found: list[str] = []
        i = 0
        while i < len(parts):
            rules = self._rules_in(".".join(parts[:i]))
            for n in range(len(parts) - i, 0, -1):
                other = rules.get(".".join(parts[i : i + n]))
                if other is not None:
                    break
            else:
                n, other = 1, parts[i]
            found.append(other)
            i += n
        return ".".join(found)

    def _rules_in(self, parent: str) -> dict[str, str]:
        if not self._classes:  # no modules were recorded: nobody knows what is in what
            return {key: value for part in self._rules.values() for key, value in part.items()}
        own = self._rules.get(self._classes.get(parent, ""), {})
        return own if parent else {**self._rules.get(TOP_LAYER, {}), **own}


def mapped_calls(
    actual: Sequence[Call], expected: Sequence[Call], mapping: Mapping
) -> dict[int, int]:
    """Calls that the user has named on both sides: places in actual, and in expected."""
    if not mapping.calls:
        return {}
    place = {native_name(call.name): j for j, call in enumerate(expected)}
    pairs = {}
    wanted = {native_name(ours): native_name(theirs) for ours, theirs in mapping.calls.items()}
    for i, call in enumerate(actual):
        name = native_name(call.name)
        theirs = wanted.get(name)
        if theirs is None:
            head, dot, direction = name.rpartition(".")
            if direction in ("forward", "backward") and head in wanted:
                theirs = wanted[head] + dot + direction
        if theirs is not None and theirs in place:
            pairs[i] = place[theirs]
    return pairs


def read_mapping(source: str | os.PathLike[str] | AnyMapping[str, Any]) -> Mapping:
    """Read a file, or a dict, of names of actual to names of expected.

    Flat, `actual: expected`: names of calls, or of their tensors, and module paths may be mixed.
    Nested, `Class: {child: other child}`: children of the modules of a class of actual, or of the
    model (`TopLayer`); a child may be a path of several parts. `wkv: [k, v]` and `q + k + v: qkv`
    are modules that one side has in one; `ignore: [pattern]` leaves modules out.
    """
    tree = source if isinstance(source, AnyMapping) else _read(Path(source))
    calls: dict[str, str] = {}
    modules: dict[str, str] = {}
    layers: dict[str, dict[str, str]] = {}
    parts: list[WeightParts] = []
    ignore: list[str] = []
    for key, value in tree.items():
        if key == IGNORE and not isinstance(value, AnyMapping):
            ignore += _names(value)
        elif isinstance(value, AnyMapping):
            scope = TOP_LAYER if key == "Cell" else str(key)  # its name in their older files
            for child, other in value.items():
                if _is_parts(child, other):
                    parts.append(WeightParts(scope, _names(child), _names(other)))
                else:  # they write the class of the other behind it: "attention(SelfAttention)"
                    layers.setdefault(scope, {})[str(child)] = str(other).partition("(")[0]
        elif _is_parts(key, value):
            parts.append(WeightParts("", _names(key), _names(value)))
        elif _is_call(str(key)):
            ours, theirs = _call(str(key)), _call(str(value))
            calls[ours] = theirs
        else:
            modules[str(key)] = str(value)
    return Mapping(calls, modules, layers, tuple(parts), tuple(ignore))


def _is_parts(key: Any, value: Any) -> bool:
    return isinstance(value, list | tuple) or " + " in str(key) or " + " in str(value)


def _names(value: Any) -> tuple[str, ...]:
    """The names in a list, or in a text: k + v."""
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return tuple(part.strip() for part in str(value).split(" + "))


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path, "mapping file", "actual: expected")
    if not isinstance(tree, dict):
        raise BadUsage(
            f"mapping file '{path}' holds a {type(tree).__name__}; expected 'actual: expected'"
        )
    return tree


def _is_call(name: str) -> bool:
    return name.partition(".")[0] in _CALL_PREFIXES and "." in name


def _call(name: str) -> str:
    """The call of a tensor's name: their data_mapping maps tensors, which pairs the calls."""
    for part in (".forward.", ".backward."):
        head, found, tail = name.partition(part)
        if found and not name.startswith(("Module.", "Cell.")):
            return head + part.rstrip(".")
        if found:
            return head + part + tail.split(".")[0]
    return name
