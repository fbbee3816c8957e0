"""How far the replay of a call moves when its inputs are moved by a rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.rebuild import Source
from tensorprobe.replay.reference import replay

_TIMES = 2


def shaken(step: float, seed: int) -> Source:
    """Loads inputs with each number moved up or down by a part of its size."""
    generator = torch.Generator().manual_seed(seed)

    def load(record: TensorRecord) -> torch.Tensor:
        found = record.load()
        if not (found.is_floating_point() or found.is_complex()):
            return found
        wide = found.to(torch.complex128 if found.is_complex() else torch.float64)
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8) * 2 - 1
        return wide * (1 + step * signs.to(wide.dtype))  # of int8 it would be float32's 1

    return load


def differences(
    forward: Call, backward: Call | None, outputs: Mapping[str, torch.Tensor]
) -> Callable[[str], Callable[[float], list[torch.Tensor]]]:
    """For an output and a step, how far inputs moved by that step move it; worked out once."""
    known: dict[float, list[dict[str, torch.Tensor]]] = {}

    def of(name: str) -> Callable[[float], list[torch.Tensor]]:
        def at(step: float) -> list[torch.Tensor]:
            if step not in known:
                known[step] = _replays(forward, backward, step)
            return [found[name] - outputs[name] for found in known[step] if name in found]

        return at

    return of


def _replays(forward: Call, backward: Call | None, step: float) -> list[dict[str, torch.Tensor]]:
    found = []
    for seed in range(_TIMES):
        source = shaken(step, seed)
        try:
            found.append(replay(forward, backward=backward, noise=False, source=source).outputs)
        except NotReplayable:
            break
    return found
