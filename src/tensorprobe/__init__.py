"""A precision debugger for PyTorch: which call did it, and a script that shows it alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorprobe._version import __version__

if TYPE_CHECKING:
    from tensorprobe.store.loading import load

__all__ = ["__version__", "load"]

# Loaded when first used: `tensorprobe --help` waits for no numpy, and reading for no torch.
_HOMES = {"load": "tensorprobe.store.loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorprobe' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
