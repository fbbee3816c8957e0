"""Writes the page beside a file of results; the report, above all rooms, is found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tensorprobe.parts import NamedParts

_PARTS = NamedParts("page", {"document": "tensorprobe.report.documents"})


def write_page(kind: Literal["check", "guard", "incident"], folder: Path) -> None:
    """Write report.html beside check.json, findings.json or incident.json."""
    _PARTS.module("document").write_document(kind, folder)
