"""Versions and numeric switches in which two runs differ: they are often the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# About when, where and by whom, not about numbers.
_SILENT = {
    "run", "created", "time", "host", "folder", "command", "ranks", "unfinished", "build", "tool",
    "format", "cpu_count", "platform", "seconds", "path", "converted_from",
    "flush", "queue", "max_disk", "on_write_error", "strict", "stop_after_last_step",
    "keep_last", "stacks", "compress",
    "seed",  # torch's before the program has set one, so it always differs
}  # fmt: skip
_SILENT_VARIABLES = {"RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
# What these lack was not there. Elsewhere a fact that one side lacks was not written down: other
# tools and versions know of others.
_COMPLETE = {"environment.", "packages."}


def fact_differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Each as "numerics.matmul_tf32: true here, false expected"."""
    found: list[str] = []
    _walk("", actual, expected, found)
    return found


def _walk(
    prefix: str, actual: Mapping[str, Any], expected: Mapping[str, Any], found: list[str]
) -> None:
    for key in sorted({*actual, *expected}):
        if key in _SILENT or key in _SILENT_VARIABLES:
            continue
        if prefix not in _COMPLETE and not (key in actual and key in expected):
            continue
        a, e = actual.get(key), expected.get(key)
        name = f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(e, Mapping):
            _walk(f"{name}.", a, e, found)
        elif a != e and not isinstance(a, Mapping) and not isinstance(e, Mapping):
            found.append(f"{name}: {_text(a)} here, {_text(e)} expected")


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
