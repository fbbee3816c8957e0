"""A test that two runs match, or that a run matches one that was stored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorprobe.comparing.comparison import Source
from tensorprobe.errors import BadUsage
from tensorprobe.report.saving import Comparison, compare
from tensorprobe.store.claim import RUN_FILE, run_of


def assert_match(actual: Source, expected: Source, **options: Any) -> Comparison:
    """Fail with the verdict for a text, unless two captures match.

        tp.assert_match("runs/new", "runs/old")

    The options are those of tp.compare. Runs that are incomparable do not match.
    """
    __tracebackhide__ = True
    comparison = compare(actual, expected, **options)
    if not comparison.ok:
        raise AssertionError(str(comparison.verdict))
    return comparison


def record_run(run: Callable[[], Any], folder: Path, recording: Mapping[str, Any]) -> None:
    """Record a function; what could not be recorded is raised."""
    from tensorprobe.record.recorder import Recorder

    options = {"keep": "tensors", "step_on": "auto", **recording}
    with Recorder(folder, strict=True, log=lambda text: None, **options):
        run()


def check_replaceable(golden: Path) -> None:
    """Refuse to replace what is not a capture of ours."""
    if os.path.lexists(golden) and (golden.is_symlink() or not run_of(golden / RUN_FILE)):
        raise BadUsage(f"'{golden}' is there and is no capture: it is not replaced")


def renew(golden: Path, recorded: Path) -> None:
    """Put a capture in the place of the stored one; that is whole at any time, or gone."""
    check_replaceable(golden)
    golden.parent.mkdir(parents=True, exist_ok=True)
    beside = golden.with_name(f".{golden.name}.{os.getpid()}")
    shutil.copytree(recorded, beside, ignore=shutil.ignore_patterns(".lock"))
    if golden.exists():
        shutil.rmtree(golden)
    beside.rename(golden)
