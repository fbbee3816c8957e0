"""Which process of a job this is."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


def current_rank(environment: Mapping[str, str] | None = None) -> int:
    """The rank: from torch.distributed once it runs, before that from the launcher's variables."""
    if is_distributed():
        return torch.distributed.get_rank()
    return _first_number(
        environment, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK"
    )


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
