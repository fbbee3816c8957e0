"""A precision debugger for PyTorch: which call did it, and a script that shows it alone.

Names are imported when they are first used: reading a capture works without torch, and
`tensorprobe --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorprobe._version import __version__

if TYPE_CHECKING:
    from tensorprobe.capture.recorder import Recorder
    from tensorprobe.capture.seeding import seed_all
    from tensorprobe.check.run import check
    from tensorprobe.guard.guard import Guard
    from tensorprobe.guard.reroute import reroute
    from tensorprobe.replay.references import reference
    from tensorprobe.replay.repro import repro
    from tensorprobe.report.saving import compare
    from tensorprobe.store.loading import load

__all__ = [
    "Guard",
    "Recorder",
    "__version__",
    "check",
    "compare",
    "load",
    "reference",
    "repro",
    "reroute",
    "seed_all",
]

_HOMES = {
    "Guard": "tensorprobe.guard.guard",
    "Recorder": "tensorprobe.capture.recorder",
    "check": "tensorprobe.check.run",
    "compare": "tensorprobe.report.saving",
    "load": "tensorprobe.store.loading",
    "reference": "tensorprobe.replay.references",
    "repro": "tensorprobe.replay.repro",
    "reroute": "tensorprobe.guard.reroute",
    "seed_all": "tensorprobe.capture.seeding",
}


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module 'tensorprobe' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from tensorprobe.errors import MissingDependency

        raise MissingDependency("torch", f"tensorprobe.{name}", "torch") from None
