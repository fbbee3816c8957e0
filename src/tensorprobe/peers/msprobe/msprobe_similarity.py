"""The result of msprobe's comparison of checkpoints: each weight with its distance and cosine."""

from __future__ import annotations

import math
from typing import Any

from tensorprobe.checkpoints.checkpoint_comparison import CheckpointComparison


def similarity(found: CheckpointComparison) -> dict[str, Any]:
    """{name: {l2, cos, numel, shape}} of all weights that both sides have."""
    made: dict[str, Any] = {}
    for pair, difference in found.compared:
        ours, theirs = pair.actual, pair.expected
        row: dict[str, Any] = {"l2": None, "cos": None}
        metrics = difference.metrics
        if metrics is not None:
            row = {"l2": _finite(metrics.euclidean), "cos": _finite(metrics.cosine)}
        same_shape = ours.shape == theirs.shape
        row["numel"] = ours.numel if ours.numel == theirs.numel else [ours.numel, theirs.numel]
        row["shape"] = list(ours.shape) if same_shape else [list(ours.shape), list(theirs.shape)]
        made[ours.key] = row
    return made


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
