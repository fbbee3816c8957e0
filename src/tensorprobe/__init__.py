"""A precision debugger for PyTorch: which call did it, and a script that shows it alone.

Names are imported when they are first used: reading a capture works without torch, and
`tensorprobe --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tensorprobe._version import __version__

if TYPE_CHECKING:
    from tensorprobe.capture.recorder import Recorder
    from tensorprobe.capture.seeding import seed_all
    from tensorprobe.check.run import Checked, check
    from tensorprobe.compare.comparison import Verdict
    from tensorprobe.compare.culprit import Culprit
    from tensorprobe.errors import (
        BadArtefact,
        BadUsage,
        DeviceUnusable,
        GuardStopped,
        MissingDependency,
        NoSuchCall,
        NothingRecorded,
        NotReplayable,
        RecordingStopped,
        TensorprobeError,
        UnreadableCapture,
        WriteFailed,
    )
    from tensorprobe.guard.findings import Finding
    from tensorprobe.guard.guard import Guard
    from tensorprobe.guard.reroute import Reroute, reroute
    from tensorprobe.records import (
        Call,
        Calls,
        Capture,
        Fields,
        Gap,
        Special,
        TensorRecord,
        TensorSummary,
    )
    from tensorprobe.replay.references import reference
    from tensorprobe.replay.repro import repro
    from tensorprobe.report.saving import Comparison, compare
    from tensorprobe.store.loading import load

__all__ = [
    "BadArtefact",
    "BadUsage",
    "Call",
    "Calls",
    "Capture",
    "Checked",
    "Comparison",
    "Culprit",
    "DeviceUnusable",
    "Fields",
    "Finding",
    "Gap",
    "Guard",
    "GuardStopped",
    "MissingDependency",
    "NoSuchCall",
    "NotReplayable",
    "NothingRecorded",
    "Recorder",
    "RecordingStopped",
    "Reroute",
    "Special",
    "TensorRecord",
    "TensorSummary",
    "TensorprobeError",
    "UnreadableCapture",
    "Verdict",
    "WriteFailed",
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
    "BadArtefact": "tensorprobe.errors",
    "BadUsage": "tensorprobe.errors",
    "Call": "tensorprobe.records",
    "Calls": "tensorprobe.records",
    "Capture": "tensorprobe.records",
    "Checked": "tensorprobe.check.run",
    "Comparison": "tensorprobe.report.saving",
    "Culprit": "tensorprobe.compare.culprit",
    "DeviceUnusable": "tensorprobe.errors",
    "Fields": "tensorprobe.records",
    "Finding": "tensorprobe.guard.findings",
    "Gap": "tensorprobe.records",
    "Guard": "tensorprobe.guard.guard",
    "GuardStopped": "tensorprobe.errors",
    "MissingDependency": "tensorprobe.errors",
    "NoSuchCall": "tensorprobe.errors",
    "NotReplayable": "tensorprobe.errors",
    "NothingRecorded": "tensorprobe.errors",
    "Recorder": "tensorprobe.capture.recorder",
    "RecordingStopped": "tensorprobe.errors",
    "Reroute": "tensorprobe.guard.reroute",
    "Special": "tensorprobe.records",
    "TensorRecord": "tensorprobe.records",
    "TensorSummary": "tensorprobe.records",
    "TensorprobeError": "tensorprobe.errors",
    "UnreadableCapture": "tensorprobe.errors",
    "Verdict": "tensorprobe.compare.comparison",
    "WriteFailed": "tensorprobe.errors",
    "check": "tensorprobe.check.run",
    "compare": "tensorprobe.report.saving",
    "load": "tensorprobe.store.loading",
    "reference": "tensorprobe.replay.references",
    "repro": "tensorprobe.replay.repro",
    "reroute": "tensorprobe.guard.reroute",
    "seed_all": "tensorprobe.capture.seeding",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorprobe' has no attribute '{name}'")
    value = globals()[name] = _load(name)
    return value


def _load(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from tensorprobe.errors import MissingDependency

        raise MissingDependency("torch", f"tensorprobe.{name}", "torch") from None


class _Package(ModuleType):
    """Importing a room sets the attribute of its name: these two stay functions."""

    compare = property(lambda self: _load("compare"), lambda self, room: None)
    check = property(lambda self: _load("check"), lambda self, room: None)


sys.modules[__name__].__class__ = _Package
