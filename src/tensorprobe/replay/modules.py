"""A module made anew from what a capture says about it: its class and how it was made.

Notes are text from a file. They are parsed into literals and names; a name is looked up in the
table of what may be called, and source is written from the parsed values.
"""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.allowed import module_named, public_module, value_named

# Notes of a recorder: "made as Linear(in_features=4, out_features=8)", the constructor's call;
# "made with lib.Block({'factor': 2.0}, {'up': 'torch.nn.modules.linear.Linear'}, ['config'])",
# its class, attributes, children, and the attributes of which nothing is known.
MADE_AS = "made as "
MADE_WITH = "made with "
EVAL = "eval"
_LONGEST = 8000  # characters; a recorder writes half as many at most


@dataclass(frozen=True)
class NamedValue:
    """A value that is not a literal, by its name in the table: torch.float32, F.relu."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Made:
    """How to make a module: by its constructor, or by its class, attributes and children."""

    kind: str  # a name in the table
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] | None = None  # None: its constructor is called
    children: dict[str, Made | None] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    training: bool = True

    def source(self, indent: int = 4) -> str:
        """The expression that makes it, as a repro has it."""
        mode = "" if self.training else ".eval()"
        if self.attributes is None:
            given = [literal(arg) for arg in self.args]
            given += [f"{key}={literal(value)}" for key, value in self.kwargs.items()]
            return f"{self.kind}({', '.join(given)}){mode}"
        inner = " " * (indent + 4)
        parts = [f"{inner}{self.kind},", f"{inner}{literal(self.attributes)},"]
        if self.children:
            deeper = " " * (indent + 8)
            parts.append(f"{inner}{{")
            for name, child in self.children.items():
                text = "None" if child is None else child.source(indent + 8)
                parts.append(f"{deeper}{name!r}: {text},")
            parts.append(f"{inner}}},")
        return "\n".join(["make(", *parts, f"{' ' * indent}){mode}"])

    def packages(self) -> set[str]:
        """What has to be imported to make it."""
        inside = [child.packages() for child in self.children.values() if child is not None]
        names = {self.kind, *_names_in(self.attributes or {})}
        homes = {name.rpartition(".")[0] for name in names if not name.startswith("torch.")}
        return homes.union(*inside)

    def may_draw(self) -> bool:
        """Whether it, or a child, drops numbers by chance."""
        own = {**self.kwargs, **(self.attributes or {})}
        if "ropout" in self.kind:
            own = {**own, **{f"dropout{i}": value for i, value in enumerate(self.args)}}
            own = {f"dropout {key}": value for key, value in own.items()}
        active = self.training and any(
            "ropout" in key and type(value) in (int, float) and 0 < value <= 1
            for key, value in own.items()
        )
        return active or any(c.may_draw() for c in self.children.values() if c is not None)

    def unknown(self, path: str = "") -> list[str]:
        """The attributes of it and its children of which nothing was recorded."""
        found = [path + name for name in self.opaque]
        for name, child in self.children.items():
            found += child.unknown(f"{path}{name}.") if child is not None else []
        return found


def literal(value: Any) -> str:
    """A parsed value as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def _names_in(value: Any) -> set[str]:
    if isinstance(value, NamedValue):
        return {value.name}
    items = value.values() if isinstance(value, dict) else value
    return set().union(*map(_names_in, items)) if isinstance(value, dict | list | tuple) else set()


# Reading the notes


class _Unclear(Exception):
    """The note is not of the form that a recorder writes."""


def _unclear(call: Call, note: str) -> NotReplayable:
    return NotReplayable(
        f"{call.name} cannot be run alone: '{note[:200]}' does not say how to make it"
    )


def how_made(call: Call, inside: Mapping[str, Call] | None = None) -> Made:
    """What a module call says about its module; `inside`: the calls of its children, by path."""
    note = next((n for n in call.notes if n.startswith((MADE_AS, MADE_WITH))), None)
    if note is None:
        raise NotReplayable(f"{call.name} cannot be run alone: it does not say how it was made")
    if "<locals>" in call.op or call.op.startswith("__main__."):
        raise NotReplayable(
            f"{call.name} cannot be run alone: {call.op} cannot be imported. Move the class into a "
            f"module of its own, or repro a call inside it: {_look_inside(call)}"
        )
    kind = public_module(call.op)
    module_named(kind)
    training = EVAL not in call.notes
    try:
        if note.startswith(MADE_AS):
            args, kwargs = _arguments(note.removeprefix(MADE_AS))
            return Made(kind, args, kwargs, training=training)
        attributes, names, unknown = _parts(note.removeprefix(MADE_WITH))
    except (_Unclear, RecursionError) as error:
        raise _unclear(call, note) from error
    if names and inside is None:
        raise NotReplayable(
            f"{call.name} is made of other modules, whose calls are checked. To see them: "
            f"{_look_inside(call)}"
        )
    made = _children(call, names, call.module, inside or {})
    return Made(kind, (), {}, attributes, made, unknown, training)


def _look_inside(call: Call) -> str:
    return f"tensorprobe show CAPTURE --module {inside_of(call)}"


def inside_of(call: Call) -> str:
    """The pattern for the modules inside of this one, quoted for a shell."""
    return shlex.quote(f"{call.module}.*" if call.module else "*")


def _children(
    call: Call, names: Mapping[str, Any], path: str, inside: Mapping[str, Call]
) -> dict[str, Made | None]:
    found: dict[str, Made | None] = {}
    for name, kind in names.items():
        where = f"{path}.{name}" if path else name
        if kind is None:
            found[name] = None
        elif isinstance(kind, dict):  # a ModuleList
            held = _children(call, {k: v for k, v in kind.items() if k}, where, inside)
            holder = public_module(str(kind.get("", "torch.nn.ModuleList")))
            module_named(holder)
            found[name] = Made(holder, attributes={}, children=held)
        elif kind.startswith(MADE_AS):  # its parent does not call it, but uses its parameters
            try:
                args, kwargs = _arguments(kind.removeprefix(MADE_AS))
            except (_Unclear, RecursionError) as error:
                raise _unclear(call, kind) from error
            found[name] = Made("torch.nn.Linear", args, kwargs)
        elif where in inside:
            found[name] = how_made(inside[where], inside)
        else:
            found[name] = Made("torch.nn.Module")  # it was not called
    return found


def _parse(text: str) -> ast.Call:
    """A call in a note, as a tree; nothing of it is run."""
    if len(text) > _LONGEST:
        raise _Unclear(f"{len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Unclear(str(error)) from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name | ast.Attribute):
        raise _Unclear(text)
    return tree


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The literals that a constructor is called with: "Linear(4, 8, bias=False)"."""
    tree = _parse(text)
    kwargs = {}
    for word in tree.keywords:
        if word.arg is None or not word.arg.isascii():
            raise _Unclear(text)
        kwargs[word.arg] = _literal(word.value)
    return tuple(_literal(arg) for arg in tree.args), kwargs


def _parts(text: str) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """The attributes, children and opaque attributes of "lib.Block({...}, {...}, [...])"."""
    tree = _parse(text)
    if len(tree.args) != 3 or tree.keywords:
        raise _Unclear(text)
    attributes, children, opaque = (_value(arg) for arg in tree.args)
    if not (isinstance(attributes, dict) and isinstance(children, dict)):
        raise _Unclear(text)
    if not (isinstance(opaque, list) and all(isinstance(name, str) for name in opaque)):
        raise _Unclear(text)
    if "" in children or not _is_tree_of_names(children):
        raise _Unclear(text)
    return attributes, children, tuple(opaque)


def _is_tree_of_names(children: dict[str, Any]) -> bool:
    return all(
        _is_tree_of_names(kind) if isinstance(kind, dict) else kind is None or isinstance(kind, str)
        for kind in children.values()
    )


def _literal(node: ast.expr) -> Any:
    value = _value(node)
    if _names_in(value):
        raise _Unclear(ast.unparse(node))
    return value


def _value(node: ast.expr) -> Any:
    """A literal, a number that has none, or a name."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return NamedValue(ast.unparse(node))
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if type(number) in (int, float):
            return -number
    if isinstance(node, ast.Dict):
        return _dict(node)
    text = ast.unparse(node)
    if text in ("float('inf')", "float('-inf')", "float('nan')"):
        return float(text[7:-2])
    raise _Unclear(text)


def _dict(node: ast.Dict) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise _Unclear(ast.unparse(node))  # `**` has no key
        found[key.value] = _value(value)
    return found


# Making


def build_module(call: Call) -> torch.nn.Module:
    """The module of an L0 call, with parameters of the right shape and any content."""
    made = how_made(call)
    kind = module_named(made.kind)
    module: torch.nn.Module
    if made.attributes is not None:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        module.__dict__.update(_resolved(made.attributes))
    else:
        try:
            with torch.random.fork_rng(devices=[]):  # making it draws numbers that are its call's
                module = kind(*made.args, **made.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotReplayable(
                f"{call.name} cannot be run alone: {made.source()} cannot be made: {error}"
            ) from error
    return module.train(made.training)


def _resolved(value: Any) -> Any:
    """Values with their names looked up in the table."""
    if isinstance(value, NamedValue):
        return value_named(value.name)
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item) for item in value)
    return value


def check_names(made: Made) -> None:
    """NotReplayable unless every name that its source would hold is in the table."""
    module_named(made.kind)
    _resolved(made.attributes or {})
    for child in made.children.values():
        if child is not None:
            check_names(child)


def calls_inside(call: Call, calls: Iterable[Call]) -> dict[str, Call]:
    """The module calls that a module call makes, at any depth: the first of each path."""
    names = {call.name}
    found: dict[str, Call] = {}
    for each in calls:
        if each.direction == "forward" and each.parent in names:
            names.add(each.name)
            if each.name.startswith("Module."):
                found.setdefault(each.module, each)
    return found


def with_children(call: Call, inside: Mapping[str, Call]) -> Call:
    """The call with the parameters and buffers of its children as its own: "up.weight"."""
    prefix = f"{call.module}." if call.module else ""
    tensors = list(call.tensors)
    known = {record.name for record in tensors}
    for path, child in inside.items():
        for record in child.tensors:
            section, _, name = record.name.removeprefix(child.name + ".").partition(".")
            if section not in ("parameters", "buffers") or name == "rng_state":
                continue
            full = f"{call.name}.{section}.{path.removeprefix(prefix)}.{name}"
            if full not in known and not name.startswith("input."):
                known.add(full)
                tensors.append(msgspec.structs.replace(record, name=full, alias_of=None))
    return msgspec.structs.replace(call, tensors=tuple(tensors))
