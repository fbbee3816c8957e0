"""Whether gradients are cleared between two steps of an optimizer."""

from __future__ import annotations

import weakref
from typing import Any

import torch

FEW = 8  # parameters of an optimizer that are looked at: zero_grad treats all alike


class KeptGradients:
    """Knows of each optimizer whether its gradients are still those of its last step.

    A gradient that zero_grad has cleared is gone, or has another version. It is looked at when a
    backward begins and when it has ended; a backward that adds to what is still there, as that of
    another network's loss does, keeps it as it was.
    """

    def __init__(self) -> None:
        self._marks: dict[int, list[tuple[weakref.ref[Any], weakref.ref[Any], int]]] = {}
        self._intact: set[int] = set()
        self._seen_backward: set[int] = set()

    def optimizer_ended(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Its step is over: these gradients ought to be cleared now."""
        key = id(optimizer)
        with_grad = [each for each in parameters if each.grad is not None][:FEW]
        self._marks[key] = [_mark(each) for each in with_grad]
        self._intact.discard(key)
        self._seen_backward.discard(key)
        if with_grad:
            self._intact.add(key)

    def backward_begins(self) -> None:
        """What was not cleared by now is added to."""
        for key in list(self._intact):
            if not all(_is_intact(*mark) for mark in self._marks[key]):
                self._intact.discard(key)
        self._seen_backward |= self._intact

    def backward_ended(self) -> None:
        """What was added to is marked anew."""
        for key in self._intact:
            parameters = [reference() for reference, _, _ in self._marks[key]]
            alive = [each for each in parameters if each is not None and each.grad is not None]
            self._marks[key] = [_mark(each) for each in alive]

    def optimizer_begins(self, optimizer: Any) -> bool:
        """Whether its gradients have those of its last step in them."""
        key = id(optimizer)
        return key in self._intact and key in self._seen_backward and bool(self._marks[key])


def _mark(parameter: torch.Tensor) -> tuple[weakref.ref[Any], weakref.ref[Any], int]:
    grad = parameter.grad
    assert grad is not None
    return weakref.ref(parameter), weakref.ref(grad), grad._version


def _is_intact(parameter: weakref.ref[Any], grad: weakref.ref[Any], version: int) -> bool:
    held = parameter()
    known = grad()
    return (
        held is not None and known is not None and held.grad is known and known._version == version
    )
