"""What a notebook shows of an object; report.notebook_html, above all rooms, is found by name."""

from __future__ import annotations

from typing import Any

from tensorprobe.parts import NamedParts

_PARTS = NamedParts("notebook", {"html": "tensorprobe.report.notebook_html"})


def html_of(thing: Any) -> str:
    """A few lines and tables, with everything escaped that came out of a file."""
    made: str = _PARTS.module("html").html_of(thing)
    return made
