"""`tp.env`: the facts of the running program in one file, in one line."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from tensorprobe.errors import BadUsage
from tensorprobe.record.facts import environment_facts
from tensorprobe.record.program_facts import plain, program_facts
from tensorprobe.terminal import warn

if TYPE_CHECKING:
    from torch import nn

Batch = TypeVar("Batch")
FIRST_BATCHES = 8
_MAX_TENSORS = 200  # of a batch


class Environment:
    """What `tp.env` has collected: `facts`, and `path`, the file they are in."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self._failed = False

    def batches(self, loader: Iterable[Batch], first: int = FIRST_BATCHES) -> Iterator[Batch]:
        """The batches of a loader as they are; digests of the first ones are added to the file.

        for batch in env.batches(loader):
            ...
        """
        for number, batch in enumerate(loader):
            if number < first:
                self.facts.setdefault("batches", []).append(batch_facts(batch))
                self._write()
            yield batch

    def __repr__(self) -> str:
        return f"Environment({str(self.path)!r})"

    def _write(self) -> None:
        if self.path is None or self._failed:
            return
        try:
            write_facts(self.path, self.facts)
        except OSError as error:  # it is not the program's trouble
            self._failed = True
            warn(f"tensorprobe: no environment in '{self.path}': {error}. The program goes on")


def env(
    path: str | os.PathLike[str] | None = None,
    *,
    config: Any = None,
    model: nn.Module | None = None,
) -> Environment:
    """Collect the environment of the running program, and write it to a JSON file.

        tp.env("env.json", model=model)

    Versions, devices, numeric flags, environment variables, installed packages, random states and
    sources; and hyperparameters, which are looked for in the variables of the program. `config`
    says them instead: a namespace, a dataclass, a mapping, or a dict of several. `model` adds its
    modules and digests of its weights. Secrets are masked.
    """
    place = None if path is None else Path(path)
    if place is not None and place.is_dir():
        raise BadUsage(f"'{place}' is a folder; expected the name of a file: 'env.json'")
    facts = collect(sys._getframe(1))
    if config is not None:
        facts["hyperparameters"] = {"config": plain(config, [10_000])}
    if model is not None:
        facts["model"] = model_facts(model)
    made = Environment(place, facts)
    made._write()
    return made


def collect(frame: FrameType | None = None) -> dict[str, Any]:
    """The facts of this process."""
    return {"format": 1, "kind": "environment", **environment_facts(), **program_facts(frame)}


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """The file is whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Its modules by path, and its parameters and buffers with their digests."""
    modules = {path: type(module).__qualname__ for path, module in model.named_modules()}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {"modules": modules, "weights": {name: _tensor_facts(value) for name, value in named}}


def batch_facts(batch: Any) -> dict[str, Any]:
    """The tensors of a batch by their place in it, with digests."""
    found: dict[str, Any] = {}
    _add_tensors(batch, "", found, 0)
    return found


def _add_tensors(node: Any, name: str, found: dict[str, Any], depth: int) -> None:
    import torch

    if depth > 10 or len(found) >= _MAX_TENSORS:
        return
    if isinstance(node, torch.Tensor):
        found[name or "batch"] = _tensor_facts(node)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            _add_tensors(value, f"{name}.{key}".strip("."), found, depth + 1)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            _add_tensors(value, f"{name}.{number}".strip("."), found, depth + 1)


def _tensor_facts(tensor: Any) -> str:
    """One text for a tensor: dtype, shape and digest."""
    from tensorprobe.follow.quiet import Quiet
    from tensorprobe.tensors.digest import digest_tensor

    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    try:
        with Quiet():
            return f"{text} {digest_tensor(tensor.detach())}"
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"{text} no digest: {type(error).__name__}"
