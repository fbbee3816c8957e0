"""Mapping files: which calls, and which modules, of two programs are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping as AnyMapping
from pathlib import Path
from typing import Any

from tensorprobe.comparing.align import TOP_LAYER, Mapping
from tensorprobe.errors import BadArtefact, BadUsage, MissingDependency
from tensorprobe.tensors.opening import open_named, read_text

# As much as PyYAML reads in a few seconds.
_MAX_NBYTES = 4 << 20
_MAX_NAMES = 100_000
_MAX_DEPTH = 20

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
    try:
        text = read_text(open_named(path), path, _MAX_NBYTES)
    except FileNotFoundError:
        raise BadUsage(
            f"no file '{path}': `mapping` takes a YAML or JSON file of actual: expected"
        ) from None
    tree = _parse(path, text)
    if not isinstance(tree, dict):
        raise BadUsage(
            f"mapping file '{path}' holds a {type(tree).__name__}; expected 'actual: expected'"
        )
    return tree


def _parse(path: Path, text: bytes) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependency("PyYAML", "a mapping file", "yaml") from None

    class Loader(yaml.BaseLoader):
        """Makes text of all that is no mapping or list, and follows no alias: one within another
        within another is more than any memory holds."""

        depth = nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            self.nodes += 1
            problem = (
                ("an alias" if isinstance(event, yaml.AliasEvent) else "")
                or (f"nested deeper than {_MAX_DEPTH}" if self.depth > _MAX_DEPTH else "")
                or (f"more than {_MAX_NAMES} names" if self.nodes > _MAX_NAMES else "")
            )
            if problem:
                raise BadArtefact(
                    f"mapping file '{path}', line {event.start_mark.line + 1}: {problem}; "
                    "expected 'actual: expected'"
                )
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise BadUsage(f"mapping file '{path}' is not YAML: {reason}") from error


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
