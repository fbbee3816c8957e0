"""What scripts import from msprobe.pytorch, and what to use for the names that are not here."""

from __future__ import annotations

from typing import NoReturn

from tensorprobe.peers.msprobe.msprobe_compare import compare, compare_distributed
from tensorprobe.peers.msprobe.msprobe_debugger import (
    PrecisionDebugger,
    module_dump,
    module_dump_end,
)
from tensorprobe.peers.msprobe.msprobe_monitor import TrainerMon
from tensorprobe.peers.msprobe.msprobe_seeding import seed_all

__all__ = [
    "PrecisionDebugger",
    "TrainerMon",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "seed_all",
]

# What msprobe has there and this door has not, with what to use instead.
REFUSED = {
    "AclGraphDumper": "tensorprobe run --level L2, of the program without graph capture",
    "acl_save": "PrecisionDebugger.save",
    "random_save": "tensorprobe run --save-start and --load-start, which make two runs draw alike",
    "set_fx_dump_config": "tensorprobe run --level L2",
    "set_ge_dump_config": "tensorprobe run --level L2",
}


def refuse_name(name: str) -> NoReturn:
    """Raise for a name that msprobe.pytorch has and this door has not, or that nobody has."""
    if name in REFUSED:
        raise ImportError(f"msprobe.pytorch.{name} is not supported; use {REFUSED[name]}")
    raise AttributeError(f"module 'msprobe.pytorch' has no attribute '{name}'")
