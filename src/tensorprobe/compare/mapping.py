"""Mapping files: which calls, and which modules, of two programs are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping as AnyMapping
from pathlib import Path
from typing import Any

from tensorprobe.compare.align import TOP_LAYER, Mapping
from tensorprobe.errors import BadUsage, MissingDependency

_CALL_PREFIXES = (
    "Functional", "Tensor", "Torch", "VF", "NPU", "Aten", "Distributed", "Module", "Ops",
    "Optimizer", "Function", "Saved", "Mint", "MintFunctional", "Primitive", "Cell", "Jit",
)  # fmt: skip


def read_mapping(source: str | os.PathLike[str] | AnyMapping[str, Any]) -> Mapping:
    """Read a file, or a dict, of names of actual to names of expected.

    Flat, `actual: expected`: names of calls, or of their tensors, and module paths may be mixed.
    Nested, `Class: {child: other child}`: children of the modules of a class of actual, or of the
    model (`TopLayer`); a child may be a path of several parts.
    """
    tree = source if isinstance(source, AnyMapping) else _read(Path(source))
    calls: dict[str, str] = {}
    modules: dict[str, str] = {}
    layers: dict[str, dict[str, str]] = {}
    for key, value in tree.items():
        if isinstance(value, AnyMapping):
            scope = TOP_LAYER if key == "Cell" else str(key)  # its name in their older files
            # they write the class of the other behind it: "attention(SelfAttention)"
            children = {str(child): str(v).partition("(")[0] for child, v in value.items()}
            layers.setdefault(scope, {}).update(children)
        elif _is_call(str(key)):
            ours, theirs = _call(str(key)), _call(str(value))
            calls[ours] = theirs
        else:
            modules[str(key)] = str(value)
    return Mapping(calls, modules, layers)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadUsage(f"no file '{path}': `mapping` takes a YAML or JSON file of actual: expected")
    try:
        import yaml
    except ImportError:
        raise MissingDependency("PyYAML", "a mapping file", "yaml") from None
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadUsage(f"mapping file '{path}' is not YAML: {error}") from error
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
