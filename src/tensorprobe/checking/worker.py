"""The process that runs calls, one at a time. A crash of it ends only that call."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.record.facts import environment_facts
from tensorprobe.replay.pairing import ForwardBackward


class Setting(msgspec.Struct, frozen=True):
    """What all calls of a check have in common."""

    device: str
    references: Path | None = None
    imports: tuple[str | Path, ...] = ()
    processes: int = 1  # that share the memory of the machine
    peer_metrics: bool = False
    threads: int = 1
    sim_npu: bool = False


def main(descriptor: int) -> None:
    """Answer (number, pair, benchmark) with (number, row) until there is no more."""
    connection = Connection(descriptor)
    # What a kernel or a library prints belongs to nobody here, and must not mix with a table.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    setting: Setting = connection.recv()
    try:
        _bring_in(setting)
        check, healthy = _ready(setting)
    except _Misused as error:
        connection.send(("misused", str(error)))
        return
    except Exception as error:  # noqa: BLE001 a device or a user's file: the parent says it
        own = isinstance(error, TensorprobeError)
        connection.send(("unusable", f"{error}" if own else f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", environment_facts()))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        number, pair, benchmark = task
        row = check(pair, benchmark)
        usable = row.verdict != "crashed" or healthy()
        connection.send((number, msgspec.json.encode(row), usable))
        if not usable:  # after a device-side assert nothing works in this process any more
            return


class _Misused(Exception):
    """A package or file of the user's cannot be brought in."""


def _bring_in(setting: Setting) -> None:
    """Make the device that is asked for, and import what the user allows."""
    import torch

    from tensorprobe.replay.references import bring_in, run_file

    torch.set_num_threads(setting.threads)
    if setting.sim_npu:
        from tensorprobe.devices import device_layer

        device_layer("npu").simulate()
    try:
        if setting.references is not None:
            run_file(setting.references)
        bring_in(setting.imports)
    except BadUsage as error:
        raise _Misused(str(error)) from error


def _ready(setting: Setting) -> tuple[Any, Any]:
    import torch

    from tensorprobe.checking.one import check_one
    from tensorprobe.checking.target import find_device
    from tensorprobe.replay.child_limits import limit_memory

    device = find_device(setting.device)
    limit_memory(setting.processes)

    def check(pair: ForwardBackward, benchmark: ForwardBackward | None) -> Any:
        return check_one(pair, device, benchmark, peer_metrics=setting.peer_metrics)

    def healthy() -> bool:
        try:
            return float((torch.ones(2, device=device) + 1).sum().cpu()) == 4.0
        except RuntimeError:
            return False

    return check, healthy


if __name__ == "__main__":
    main(int(sys.argv[1]))
