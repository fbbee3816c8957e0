"""How a process started by this one gets the device that this one has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorprobe.devices.device_table import device_layer


class Child(NamedTuple):
    """A command, and what its environment needs beside that of this process."""

    command: list[str]
    environment: dict[str, str]


def child(device: torch.device | str, script: Sequence[str]) -> Child:
    """How to run a Python script, with its arguments, where `device` is what it is here.

    A simulated device goes along, with the faults planted in it; errors surface at their call.
    """
    row = device_layer(device)
    environment = {row.launch_blocking: "1"} if row.launch_blocking is not None else {}
    simulator = row.simulated_by()
    if simulator is None:
        return Child([sys.executable, *script], environment)
    command = [sys.executable, "-m", simulator.__name__, *script]
    return Child(command, {**environment, **simulator.child_environment()})
