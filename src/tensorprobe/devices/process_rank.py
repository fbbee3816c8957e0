"""Which process of a job this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch


def current_rank(environment: Mapping[str, str] | None = None) -> int:
    """The rank: from torch.distributed once it runs, before that from the launcher's variables.

    A child that `mp.spawn` started, or that `tensorprobe run` has armed, and that has neither is
    taken for the rank of its number.
    """
    if is_distributed():
        return torch.distributed.get_rank()
    return _first_number(
        environment, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK",
        default=_number_as_child(),
    )  # fmt: skip


def _number_as_child() -> int:
    """0 for workers of pools and others that a program starts by itself: those are no ranks."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return 0
    process = multiprocessing.current_process()
    target = getattr(process, "_target", None)
    is_spawned = getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
    if not is_spawned and not hasattr(process, "_tensorprobe"):
        return 0
    return process._identity[-1] - 1 if process._identity else 0


def agreed_by_all(text: str) -> str:
    """The text that the first process to come here had, once torch.distributed runs without a
    launcher that has told all processes the same. Nobody waits for others."""
    if not is_distributed() or "TORCHELASTIC_RUN_ID" in os.environ:
        return text
    try:
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        agreed = store.compare_set("tensorprobe/run", "", text)
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):  # a store without
        return text
    return agreed.decode() if isinstance(agreed, bytes) else str(agreed)


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """The number of this process among those of its machine, which is its device's number."""
    return _first_number(environment, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def world_size(environment: Mapping[str, str] | None = None) -> int:
    """How many processes the job has."""
    if is_distributed():
        return torch.distributed.get_world_size()
    return _first_number(environment, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


def is_distributed() -> bool:
    """Whether the process has a group, be it of itself alone."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _first_number(environment: Mapping[str, str] | None, *names: str, default: int = 0) -> int:
    variables = os.environ if environment is None else environment
    for name in names:
        text = variables.get(name, "")
        if text.isdecimal():
            return int(text)
    return default
