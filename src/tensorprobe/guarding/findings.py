"""What a guard found: in the form of a culprit, as findings.json, and as lines for a person."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tensorprobe.nests import strict_json
from tensorprobe.notebooks import html_of
from tensorprobe.records import Direction
from tensorprobe.store.frames import users_line

FORMAT = 1
FILE = "findings.json"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A call that made a value which is not finite, or that failed.

    `inputs` says where what it was given is saved and `repro` which folder shows it alone; None
    where there is none. `travelled` are later calls that carry a bad value on, the first few of
    the `affected`. `next` is the command to type.
    """

    name: str
    kind: Literal["nonfinite", "error"]
    direction: Direction
    step: int
    rank: int
    module: str
    op: str
    stack: tuple[str, ...]
    reason: str
    own_error: float | None = None
    inherited_error: float | None = None
    metrics: dict[str, Any] = {}
    affected: int = 0
    inputs: str | None = None
    repro: str | None = None
    travelled: tuple[str, ...] = ()
    reached: str = ""  # where the bad value was last seen: the loss, gradients, parameters
    next: str = ""

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """What two reports of one finding share."""
        return self.kind, self.name, self.step, self.rank

    def __repr__(self) -> str:
        return f"<Finding {self.kind}: {self.name}, step {self.step}, rank {self.rank}>"

    def _repr_html_(self) -> str:
        return html_of(self)


def write_findings(
    folder: str | os.PathLike[str],
    findings: Iterable[Finding],
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write findings.json, whole or not at all; numbers JSON has no word for become text.

    `more` are further fields of the file: warnings, skipped steps.
    """
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "findings": list(findings), **(more or {})}
    text = msgspec.json.encode(strict_json(msgspec.to_builtins(content)))
    temporary = path.with_name(f".{FILE}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    os.replace(temporary, path)
    return path


def describe(finding: Finding) -> str:
    """A finding in a few lines: what, where, how large, and what to type next."""
    verb = "failed" if finding.kind == "error" else "is not finite"
    lines = [f"{finding.name} {verb} (step {finding.step}, rank {finding.rank}): {finding.reason}"]
    where = [finding.module, finding.op, users_line(finding.stack)]
    lines.append("in " + ", ".join(filter(None, where)))
    if finding.travelled:
        rest = finding.affected - len(finding.travelled)
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"then in {', '.join(finding.travelled)}{more}")
    if finding.reached:
        lines.append(f"it reached {finding.reached}")
    if finding.inputs:
        lines.append(f"its inputs are saved: {finding.inputs}")
    if finding.repro:
        lines.append(f"shown alone: python {finding.repro}/repro.py")
    if finding.next:
        lines.append(f"next: {finding.next}")
    return "\n  ".join(lines)
