"""Which process of a job this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Armed(Protocol):
    """What a process has that another one has told to record: of which run, and that one's RANK."""

    run: str
    name: str  # "" where multiprocessing has one
    outer_rank: str | None


def current_rank(environment: Mapping[str, str] | None = None) -> int:
    """The rank: from torch.distributed once it runs, before that from the launcher's variables.

    A child that `mp.spawn` started and that has neither is taken for the rank of its number.
    """
    if is_distributed():
        return torch.distributed.get_rank()
    return _first_number(
        environment, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK",
        default=_number_as_child(),
    )  # fmt: skip


def is_known_rank() -> bool:
    """Whether the process is one rank of several, as torch.distributed, its launcher or `mp.spawn`
    say; a child that only has its parent's variables is not."""
    if is_distributed():
        return world_size() > 1
    if _is_of_mp_spawn():
        return True
    armed = armed_process()
    if armed is not None and os.environ.get("RANK") == armed.outer_rank:
        return False
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return any(os.environ.get(name, "").isdecimal() for name in names)


def armed_process() -> Armed | None:
    """What the process was told that has started this one, if `tensorprobe run` records both."""
    process = _current_process()
    return getattr(process, "_tensorprobe", None)


def process_name() -> str:
    """What the process is called: by the one that started it, or "main"."""
    armed = armed_process()
    if armed is not None and armed.name:
        return armed.name
    process = _current_process()
    return "main" if process is None or process.name == "MainProcess" else str(process.name)


def _current_process() -> Any:
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return None if multiprocessing is None else multiprocessing.current_process()


def _is_of_mp_spawn() -> bool:
    target = getattr(_current_process(), "_target", None)
    return getattr(target, "__module__", "") == "torch.multiprocessing.spawn"


def _number_as_child() -> int:
    """0 for workers of pools and others that a program starts by itself: those are no ranks."""
    if not _is_of_mp_spawn():
        return 0
    process = _current_process()
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
