"""A module made anew from what a capture says about it: its class and how it was made."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.rebuild import is_safe_name

# Notes of a recorder: "made as Linear(in_features=4, out_features=8)", the constructor's call;
# "made with lib.Block({'factor': 2.0}, {'up': 'torch.nn.modules.linear.Linear'}, ['config'])",
# its class, attributes, children, and the attributes of which nothing is known.
MADE_AS = "made as "
MADE_WITH = "made with "
EVAL = "eval"


@dataclass(frozen=True)
class Made:
    """How to make a module: by `constructor`, or by its class, attributes and children."""

    kind: str
    constructor: str | None = None
    attributes: str = "{}"
    children: dict[str, Made | None] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    training: bool = True

    def source(self, indent: int = 4) -> str:
        """The expression that makes it, as a repro has it."""
        mode = "" if self.training else ".eval()"
        if self.constructor is not None:
            return self.constructor + mode
        inner = " " * (indent + 4)
        parts = [f"{inner}{self.kind},", f"{inner}{self.attributes},"]
        if self.children:
            deeper = " " * (indent + 8)
            parts.append(f"{inner}{{")
            for name, child in self.children.items():
                text = "None" if child is None else child.source(indent + 8)
                parts.append(f'{deeper}"{name}": {text},')
            parts.append(f"{inner}}},")
        return "\n".join(["make(", *parts, f"{' ' * indent}){mode}"])

    def packages(self) -> set[str]:
        """What has to be imported to make it."""
        inside = [child.packages() for child in self.children.values() if child is not None]
        own = set() if self.kind.startswith("torch.nn.") else {self.kind.rpartition(".")[0]}
        return own.union(*inside)

    def may_draw(self) -> bool:
        """Whether it, or a child, drops numbers by chance."""
        own = f"{self.constructor or ''} {self.attributes}"
        active = self.training and re.search(r"ropout\w*(\(p=|=|': )(0\.0*[1-9]|\de-|1\.0)", own)
        return bool(active) or any(c.may_draw() for c in self.children.values() if c is not None)

    def unknown(self, path: str = "") -> list[str]:
        """The attributes of it and its children of which nothing was recorded."""
        found = [path + name for name in self.opaque]
        for name, child in self.children.items():
            found += child.unknown(f"{path}{name}.") if child is not None else []
        return found


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
    training = EVAL not in call.notes
    if not is_safe_name(call.op):
        raise NotReplayable(f"{call.name} cannot be run alone: '{call.op}' is no class of a module")
    if note.startswith(MADE_AS):
        kind = _public(call.op)
        constructor = f"{kind}{note[note.index('(') :]}"
        arguments_of(constructor)  # a capture is data: no more than literals go on from here
        return Made(kind, constructor, training=training)
    try:
        tree = ast.parse(note.removeprefix(MADE_WITH), mode="eval").body
        assert isinstance(tree, ast.Call)
        attributes, children, opaque = tree.args
        assert isinstance(attributes, ast.Dict)
        assert all(_is_plain(value) for value in attributes.values)
        names = ast.literal_eval(children)
        unknown = tuple(ast.literal_eval(opaque))
    except (SyntaxError, ValueError, AssertionError) as error:
        raise NotReplayable(
            f"{call.name} cannot be run alone: '{note}' does not say how to make it"
        ) from error
    if names and inside is None:
        raise NotReplayable(
            f"{call.name} is made of other modules, whose calls are checked. To see them: "
            f"{_look_inside(call)}"
        )
    made = _children(names, call.module, inside or {})
    return Made(_public(call.op), None, ast.unparse(attributes), made, unknown, training)


def _look_inside(call: Call) -> str:
    return f"tensorprobe show CAPTURE --module '{call.module + '.' if call.module else ''}*'"


def _children(
    names: Mapping[str, Any], path: str, inside: Mapping[str, Call]
) -> dict[str, Made | None]:
    found: dict[str, Made | None] = {}
    for name, kind in names.items():
        where = f"{path}.{name}" if path else name
        if kind is None:
            found[name] = None
        elif isinstance(kind, dict):  # a ModuleList
            held = _children({k: v for k, v in kind.items() if k}, where, inside)
            found[name] = Made(_public(kind[""]), None, "{}", held)
        elif kind.startswith(MADE_AS):  # its parent does not call it, but uses its parameters
            constructor = kind.removeprefix(MADE_AS)
            arguments_of(constructor)
            found[name] = Made(
                "torch.nn.Linear", f"torch.nn.Linear{constructor[constructor.index('(') :]}"
            )
        elif where in inside:
            found[name] = how_made(inside[where], inside)
        else:
            found[name] = Made("torch.nn.Module", "torch.nn.Module()")  # it was not called
    return found


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


def build_module(call: Call) -> torch.nn.Module:
    """The module of an L0 call, with parameters of the right shape and any content."""
    made = how_made(call)
    kind = _find_class(call)
    module: torch.nn.Module
    if made.constructor is None:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        module.__dict__.update(_evaluate(call, made.attributes))
    else:
        args, kwargs = arguments_of(made.constructor)
        try:
            with torch.random.fork_rng(devices=[]):  # making it draws numbers that are its call's
                module = kind(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotReplayable(
                f"{call.name} cannot be run alone: {made.constructor} cannot be made: {error}"
            ) from error
    return module.train(made.training)


def arguments_of(constructor: str) -> tuple[list[Any], dict[str, Any]]:
    """The values that a constructor is called with, all of them literals."""
    try:
        tree = ast.parse(constructor, mode="eval").body
        assert isinstance(tree, ast.Call)
        args = [ast.literal_eval(arg) for arg in tree.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in tree.keywords if word.arg}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise NotReplayable(
            f"a module cannot be made again: '{constructor}' does not say how"
        ) from error
    return args, kwargs


def _evaluate(call: Call, attributes: str) -> dict[str, Any]:
    """The attributes as values: literals, and names of what this process has imported."""
    tree = ast.parse(attributes, mode="eval").body
    assert isinstance(tree, ast.Dict)
    found = {}
    for key, value in zip(tree.keys, tree.values, strict=True):
        assert isinstance(key, ast.Constant)
        found[str(key.value)] = _value(call, value)
    return found


def _is_plain(node: ast.expr) -> bool:
    """Whether it is a literal, a number that has none, or the name of something in a package."""
    if isinstance(node, ast.Attribute):
        return is_safe_name(ast.unparse(node))
    if isinstance(node, ast.Call):
        return ast.unparse(node) in ("float('inf')", "float('-inf')", "float('nan')")
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_plain(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)


def _value(call: Call, node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        home, _, name = ast.unparse(node).rpartition(".")
        if hasattr(sys.modules.get(home), name):
            return getattr(sys.modules[home], name)
        raise NotReplayable(
            f"{call.name} cannot be run alone: {home}.{name} is not imported here. "
            "Import it in a file given by --references"
        )
    if isinstance(node, ast.Call):  # float('inf')
        return float(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(call, item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)


def _public(op: str) -> str:
    """torch.nn.modules.linear.Linear is torch.nn.Linear."""
    name = op.rpartition(".")[2]
    if op.startswith("torch.nn.modules.") and hasattr(torch.nn, name):
        return f"torch.nn.{name}"
    return op


def _find_class(call: Call) -> Any:
    home, _, name = _public(call.op).rpartition(".")
    found = getattr(sys.modules.get(home), name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise NotReplayable(
            f"{call.name} cannot be run alone: {call.op} is not imported here. "
            "Import it in a file given by --references"
        )
    return found
