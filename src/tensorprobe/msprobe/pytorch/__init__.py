"""msprobe.pytorch: what its scripts import from there."""

from __future__ import annotations

from typing import NoReturn

from tensorprobe.msprobe.pytorch.compare import compare, compare_distributed
from tensorprobe.msprobe.pytorch.debugger.precision_debugger import (
    PrecisionDebugger,
    module_dump,
    module_dump_end,
)
from tensorprobe.msprobe.pytorch.seeding import seed_all

__all__ = [
    "PrecisionDebugger",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "seed_all",
]

# What msprobe has there and this door has not, with what to use instead.
_REFUSED = {
    "AclGraphDumper": "tensorprobe run --level L2, which sees every ATen operator",
    "TrainerMon": "tensorprobe run: parameters, gradients and optimizer steps are in it",
    "acl_save": "PrecisionDebugger.save",
    "random_save": "tensorprobe run --save-start and --load-start, which make two runs draw alike",
    "set_fx_dump_config": "tensorprobe run --level L2",
    "set_ge_dump_config": "tensorprobe run --level L2",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REFUSED:
        raise ImportError(f"msprobe.pytorch.{name} is not supported; use {_REFUSED[name]}")
    raise AttributeError(f"module 'msprobe.pytorch' has no attribute '{name}'")
