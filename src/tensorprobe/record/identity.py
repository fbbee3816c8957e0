"""Which rank of which run this process is; it may learn so only after it has begun to record."""

from __future__ import annotations

import os

import torch

from tensorprobe.devices import agreed_by_all, current_rank
from tensorprobe.store.claim import run_identity


class ProcessIdentity:
    """The rank and the run, as known now. What torch.distributed has said once stays, also after
    its process groups are destroyed."""

    def __init__(self) -> None:
        self._told: tuple[int, str] | None = None

    def __call__(self) -> tuple[int, str]:
        if self._told is not None:
            return self._told
        found = current_rank(), agreed_by_all(run_identity(os.environ))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._told = found
        return found
