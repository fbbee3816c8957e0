"""Lines to the person who runs the program; no torch, which a comparison does not need."""

from __future__ import annotations

from tensorprobe.terminal import warn


def say(text: str) -> None:
    """One line, as the recorder says its own."""
    warn(f"tensorprobe: {text}")


def import_torch() -> None:
    """Before the rooms that need it: `tensorprobe run` starts recording when torch is imported,
    and cannot while one of those rooms is half imported."""
    import torch  # noqa: F401
