"""Which call of the forward a call of a checkpoint's recomputation is.

A recorder counts on through a recomputation, so that a call there has a number of its own. To be
rerouted where its original was, it has to be known which that is: saved tensors would not fit, and
the gradient comes from the recomputed call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from tensorprobe.follow.naming import ApiName
from tensorprobe.torch_versions import CHECKPOINT_RUNNERS

_CHECKPOINT = os.path.join(os.path.dirname(torch.__file__), "utils", "checkpoint.py")


class Recomputation:
    """Follows checkpointed regions, and gives recomputed calls the number of their original."""

    def __init__(self) -> None:
        # region -> what it calls -> the numbers of those calls, in order
        self._regions: dict[int, dict[str, list[int]]] = {}
        self._tokens: list[Any] = []  # keeps the regions' objects, so that no id is used twice
        self._passes: dict[tuple[int, int, str], int] = {}

    def begin_step(self) -> None:
        self._regions.clear()
        self._tokens.clear()
        self._passes.clear()

    def original(self, api: ApiName, number: int, frame: FrameType | None) -> int:
        """The number to match by of a call that `frame` makes: its own, or that of the call it
        computes again."""
        if "torch.utils.checkpoint" not in sys.modules:
            return number
        token, run = _outermost_region(frame)
        if token is None:
            return number
        if run is None:
            self._numbers(token, api).append(number)
            return number
        key = (id(token), id(run), api.stem)
        place = self._passes.get(key, 0)
        self._passes[key] = place + 1
        numbers = self._regions.get(id(token), {}).get(api.stem, [])
        return numbers[place] if place < len(numbers) else number

    def _numbers(self, token: Any, api: ApiName) -> list[int]:
        region = self._regions.get(id(token))
        if region is None:
            region = self._regions[id(token)] = {}
            self._tokens.append(token)
        return region.setdefault(api.stem, [])


def _outermost_region(frame: FrameType | None) -> tuple[Any, FrameType | None]:
    """The checkpointed region that `frame` is in, and the frame of its recomputation if any."""
    token, run = None, None
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            found = _TOKENS.get(frame.f_code.co_name)
            if found is not None:
                here = found(frame.f_locals)
                if here is not None:
                    token = here
                    run = frame if frame.f_code.co_name in _AGAIN else None
        frame = frame.f_back
    return token, run


def _frame_of_generator(names: dict[str, Any]) -> Any:
    generator = names.get("gen")
    inner = getattr(generator, "gi_frame", None)
    return inner.f_locals.get("new_frame") if inner is not None else None


# By the functions of torch.utils.checkpoint that run a region. The object that both the forward and
# the recomputation hold: without reentry the bookkeeping of the region, with it the graph node.
_TOKENS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(CHECKPOINT_RUNNERS, _frame_of_generator),
    "unpack_hook": lambda names: names.get("frame"),
    "forward": lambda names: names.get("ctx"),
    "backward": lambda names: names.get("ctx"),
}
_AGAIN = ("unpack_hook", "backward")
