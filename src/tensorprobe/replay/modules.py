"""A module made anew from what a capture says about it: its class and how it was made."""

from __future__ import annotations

import ast
import sys
from typing import Any

import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call

MADE_AS = "made as "  # the note of a recorder: "made as Linear(in_features=4, out_features=8)"
EVAL = "eval"


def module_source(call: Call) -> str:
    """The expression that makes the module: "torch.nn.Linear(in_features=4, out_features=8)"."""
    text = next((n.removeprefix(MADE_AS) for n in call.notes if n.startswith(MADE_AS)), None)
    if text is None:
        raise NotReplayable(
            f"{call.name} cannot be run alone: it is made of other modules, whose calls are "
            f"recorded too. To see them: tensorprobe show CAPTURE --module '{call.module or '*'}*'"
        )
    return f"{_public(call.op)}{text[text.index('(') :]}"


def build_module(call: Call) -> torch.nn.Module:
    """The module of an L0 call, with parameters of the right shape and any content."""
    source = module_source(call)
    try:
        tree = ast.parse(source, mode="eval").body
        assert isinstance(tree, ast.Call)
        args = [ast.literal_eval(arg) for arg in tree.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in tree.keywords if word.arg}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise NotReplayable(
            f"{call.name} cannot be run alone: '{source}' does not say how to make it"
        ) from error
    kind = _find_class(call)
    try:
        module: torch.nn.Module = kind(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotReplayable(
            f"{call.name} cannot be run alone: {source} cannot be made: {error}"
        ) from error
    return module.eval() if EVAL in call.notes else module.train()


def _public(op: str) -> str:
    """torch.nn.modules.linear.Linear is torch.nn.Linear."""
    if op.startswith("torch.nn.modules."):
        return f"torch.nn.{op.rpartition('.')[2]}"
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
