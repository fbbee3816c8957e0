"""A precision debugger for PyTorch: which call did it, and a script that shows it alone.

Names are imported when they are first used: reading a capture works without torch, and
`tensorprobe --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorprobe._version import __version__

if TYPE_CHECKING:
    from tensorprobe.checking.run import Checked, check
    from tensorprobe.comparing.verdict import Culprit, Verdict
    from tensorprobe.environment.collecting import Environment, env
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
        UnsupportedTorch,
        WriteFailed,
    )
    from tensorprobe.guarding.findings import Finding
    from tensorprobe.guarding.guard import Guard
    from tensorprobe.monitoring.alarms import Alarm
    from tensorprobe.monitoring.monitor import Monitor
    from tensorprobe.monitoring.publishing import publish
    from tensorprobe.record.recorder import Recorder
    from tensorprobe.record.seeding import seed_all
    from tensorprobe.records import (
        Call,
        Calls,
        Capture,
        Collective,
        Fields,
        Gap,
        Sharding,
        Special,
        TensorRecord,
        TensorSummary,
    )
    from tensorprobe.replay.references import reference
    from tensorprobe.replay.repro import repro
    from tensorprobe.report.saving import Comparison, compare
    from tensorprobe.rerouting.reroute import Reroute, reroute
    from tensorprobe.store.loading import load
    from tensorprobe.testing.matching import assert_match
    from tensorprobe.training.trainer_callback import TensorProbeCallback

__all__ = [
    "Alarm",
    "BadArtefact",
    "BadUsage",
    "Call",
    "Calls",
    "Capture",
    "Checked",
    "Collective",
    "Comparison",
    "Culprit",
    "DeviceUnusable",
    "Environment",
    "Fields",
    "Finding",
    "Gap",
    "Guard",
    "GuardStopped",
    "MissingDependency",
    "Monitor",
    "NoSuchCall",
    "NotReplayable",
    "NothingRecorded",
    "Recorder",
    "RecordingStopped",
    "Reroute",
    "Sharding",
    "Special",
    "TensorProbeCallback",
    "TensorRecord",
    "TensorSummary",
    "TensorprobeError",
    "UnreadableCapture",
    "UnsupportedTorch",
    "Verdict",
    "WriteFailed",
    "__version__",
    "assert_match",
    "check",
    "compare",
    "env",
    "load",
    "publish",
    "reference",
    "repro",
    "reroute",
    "seed_all",
]

_HOMES = {
    "Alarm": "tensorprobe.monitoring.alarms",
    "BadArtefact": "tensorprobe.errors",
    "BadUsage": "tensorprobe.errors",
    "Call": "tensorprobe.records",
    "Calls": "tensorprobe.records",
    "Capture": "tensorprobe.records",
    "Checked": "tensorprobe.checking.run",
    "Collective": "tensorprobe.records",
    "Comparison": "tensorprobe.report.saving",
    "Culprit": "tensorprobe.comparing.verdict",
    "DeviceUnusable": "tensorprobe.errors",
    "Environment": "tensorprobe.environment.collecting",
    "Fields": "tensorprobe.records",
    "Finding": "tensorprobe.guarding.findings",
    "Gap": "tensorprobe.records",
    "Guard": "tensorprobe.guarding.guard",
    "GuardStopped": "tensorprobe.errors",
    "MissingDependency": "tensorprobe.errors",
    "Monitor": "tensorprobe.monitoring.monitor",
    "NoSuchCall": "tensorprobe.errors",
    "NotReplayable": "tensorprobe.errors",
    "NothingRecorded": "tensorprobe.errors",
    "Recorder": "tensorprobe.record.recorder",
    "RecordingStopped": "tensorprobe.errors",
    "Reroute": "tensorprobe.rerouting.reroute",
    "Sharding": "tensorprobe.records",
    "Special": "tensorprobe.records",
    "TensorProbeCallback": "tensorprobe.training.trainer_callback",
    "TensorRecord": "tensorprobe.records",
    "TensorSummary": "tensorprobe.records",
    "TensorprobeError": "tensorprobe.errors",
    "UnreadableCapture": "tensorprobe.errors",
    "UnsupportedTorch": "tensorprobe.errors",
    "Verdict": "tensorprobe.comparing.verdict",
    "WriteFailed": "tensorprobe.errors",
    "assert_match": "tensorprobe.testing.matching",
    "check": "tensorprobe.checking.run",
    "compare": "tensorprobe.report.saving",
    "env": "tensorprobe.environment.collecting",
    "load": "tensorprobe.store.loading",
    "publish": "tensorprobe.monitoring.publishing",
    "reference": "tensorprobe.replay.references",
    "repro": "tensorprobe.replay.repro",
    "reroute": "tensorprobe.rerouting.reroute",
    "seed_all": "tensorprobe.record.seeding",
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
    except RuntimeError as error:
        from tensorprobe.errors import UnsupportedTorch, why_no_torch

        why = why_no_torch(error)
        if why is None:
            raise
        raise UnsupportedTorch(why) from error


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext tensorprobe` calls: cells that begin with %%probe are recorded."""
    from tensorprobe.cell_magic import add_magic

    add_magic(shell)
