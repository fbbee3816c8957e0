"""What was found, beside the curves: verdict, findings and report in W&B, MLflow, TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorprobe.config import Names
from tensorprobe.errors import BadUsage
from tensorprobe.monitoring.monitor_options import check_writers
from tensorprobe.monitoring.scalar_writers import make_writers
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named


def publish(
    path: str | os.PathLike[str],
    to: Names,
    *,
    name: str | None = None,
) -> list[str]:
    """Add a report to the run that the program has open in W&B or MLflow, or to TensorBoard.

        comparison.save("report")
        tp.publish("report", "wandb")        # the OUT of compare, check or a guard

    The files of the folder itself go there as an artifact, and what was found as one line; no
    tensors and no recordings, which are in folders of their own. Gives the names of those that
    took it: one without an open run does not.
    """
    folder = Path(path)
    text = _line(folder)
    files = [each for each in sorted(folder.iterdir()) if each.is_file() and not each.is_symlink()]
    taken = []
    for known, writer in make_writers(check_writers(to), folder).items():
        try:
            if writer.keep(name or folder.name, files, text):
                taken.append(known)
        finally:
            writer.close()
    return taken


def _line(folder: Path) -> str:
    """What a report says, in one line."""
    says: dict[str, Callable[[dict[str, Any]], str]] = {
        "verdict.json": _of_verdict,
        "findings.json": lambda it: _of_findings(it["findings"]),
        "check.json": lambda it: f"checked: {it['counts']}",
        "ranks.json": lambda it: _of_findings(it["findings"]),
    }
    for name, say in says.items():
        path = folder / name
        if path.is_file():
            try:
                return say(read_json(open_named(path), path))
            except (ValueError, LookupError, TypeError) as error:
                raise BadUsage(f"'{path}' cannot be read: {error}") from error
    raise BadUsage(
        f"'{folder}' is no report: expected a folder with one of {', '.join(says)}, "
        "such as the OUT of tensorprobe compare"
    )


def _of_verdict(verdict: dict[str, Any]) -> str:
    text = str(verdict["verdict"])
    culprits = verdict.get("culprits") or []
    return f"{text}: {_named(culprits[0])}" if culprits else text


def _of_findings(findings: list[dict[str, Any]]) -> str:
    if not findings:
        return "nothing found"
    more = f", and {len(findings) - 1} more" if findings[1:] else ""
    return f"{_named(findings[0])}{more}"


def _named(found: dict[str, Any]) -> str:
    where = f" (step {found.get('step', 0)}, rank {found.get('rank', 0)})"
    return f"{found.get('name', found.get('kind'))}{where}: {found.get('reason', '')}"
