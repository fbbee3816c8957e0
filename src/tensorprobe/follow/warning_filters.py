"""Filters of warnings that come and go without the program seeing a warning twice.

`warnings.filterwarnings` and `catch_warnings` make Python forget which warnings it has shown, and
show each of them once more. A filter that is put into the list by hand does not.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Calling a compiled module while there are global hooks warns, and those hooks are ours.
COMPILED_MODULE = "Using `torch.compile\\(module\\)` when there are global hooks"


def add_filter(message: str | None = None) -> Any:
    """Ignore warnings whose text begins so, or all; gives what `remove_filter` takes away."""
    pattern = re.compile(message, re.IGNORECASE) if message is not None else None
    ours = ("ignore", pattern, Warning, None, 0)
    warnings.filters.insert(0, ours)  # type: ignore[attr-defined]
    return ours


def remove_filter(ours: Any) -> None:
    """Take a filter away, if the program has not done so."""
    if ours in warnings.filters:
        warnings.filters.remove(ours)  # type: ignore[attr-defined]


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Inside, nothing warns."""
    ours = add_filter()
    try:
        yield
    finally:
        remove_filter(ours)
