"""Which rank of which run this process is; it may learn so only after it has begun to record."""

from __future__ import annotations

import os
import re

from tensorprobe.devices import agreed_by_all, current_rank, is_known_rank, world_size
from tensorprobe.devices.process_rank import armed_process, is_distributed, process_name
from tensorprobe.store.claim import Identity, Who, run_identity


class ProcessIdentity:
    """The rank, the run and the role, as known now. What torch.distributed has said once stays,
    also after its process groups are destroyed."""

    def __init__(self) -> None:
        self._told: Identity | None = None

    def __call__(self) -> Identity:
        if self._told is not None:
            return self._told
        armed = armed_process()
        is_rank = is_known_rank()
        name = folder_name(process_name())
        role = name if armed is not None and not is_rank else ""
        run = run_identity(os.environ) if armed is None else armed.run
        found = Identity(current_rank(), agreed_by_all(run), Who(role, name, is_rank))
        if is_distributed() and (world_size() > 1 or armed is None):
            self._told = found
        return found


def folder_name(text: str) -> str:
    """The name of a process as that of a folder, which none of ours has."""
    name = re.sub(r"[^\w.-]+", ".", text).strip(".")[:60]
    if not name or name == "earlier" or re.fullmatch(r"(rank|step)\d+", name):
        return f"process-{name}"
    return name
