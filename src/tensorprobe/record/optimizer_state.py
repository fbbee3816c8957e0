"""What an optimizer remembers from one step to the next: momenta, step counters, histories."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.encode import map_tensors
from tensorprobe.record.values import digest_of_memory
from tensorprobe.torch_versions import is_own

NamedTensors = list[tuple[str, torch.Tensor]]
_INT_BOUND = 1 << 63
# LBFGS keeps a hundred old directions, each as large as all parameters: of a longer list only the
# last tensor is wanted, the one that the last step has added.
_LONG_LIST = 4


def state_of(optimizer: Optimizer, names: Mapping[int, str]) -> NamedTensors:
    """The tensors of an optimizer's state, named `{parameter}.exp_avg`; `names` has those of its
    parameters by identity. Numbers come as tensors: a step counter is one or the other."""
    found: NamedTensors = []
    with Quiet():
        for key, held in list(optimizer.state.items()):
            named = isinstance(key, torch.Tensor)
            name = names.get(id(key), "unknown") if named else str(key)
            parts = list(held.items()) if isinstance(held, Mapping) else [(None, held)]
            for part, value in parts:
                found += _tensors(name if part is None else f"{name}.{part}", value)
    return found


def _tensors(name: str, value: Any) -> NamedTensors:
    if type(value) is float or (type(value) is int and -_INT_BOUND <= value < _INT_BOUND):
        return [(name, torch.tensor(value, dtype=None if type(value) is int else torch.float64))]
    if isinstance(value, list | tuple) and len(value) > _LONG_LIST:
        return _tensors(f"{name}.{len(value) - 1}", value[-1])
    found: NamedTensors = []
    map_tensors(value, lambda tensor, path: found.append((".".join((name, *path)), tensor)))
    return found


class LeftState:
    """How a recorded step left the state: what is found so again need not be read again."""

    def __init__(self, optimizer: Optimizer, state: NamedTensors) -> None:
        self._optimizer = weakref.ref(optimizer)
        with Quiet():
            self._marks = [(name, _mark(tensor), weakref.ref(tensor)) for name, tensor in state]

    def is_still(self, optimizer: Optimizer, state: NamedTensors) -> bool:
        """Whether this is the state that was left."""
        if self._optimizer() is not optimizer or len(state) != len(self._marks):
            return False
        with Quiet():
            return all(
                (name, _mark(tensor)) == (known, mark)
                and (reference() is tensor or _is_number(tensor))
                for (name, tensor), (known, mark, reference) in zip(state, self._marks, strict=True)
            )


def _mark(tensor: torch.Tensor) -> float | str | None:
    """What differs once the tensor is written to: its version, of a counter its value, of memory
    that numpy may have a digest."""
    if _is_number(tensor):
        return tensor.item()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
        if not is_own(tensor.untyped_storage()):
            return digest_of_memory(tensor)
    return -1 if tensor.is_inference() else tensor._version


def _is_number(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.ndim == 0 and tensor.is_cpu
