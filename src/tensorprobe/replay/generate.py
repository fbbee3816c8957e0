"""Inputs for a call of which only statistics were kept: same shape, dtype, range, mean and norm."""

from __future__ import annotations

import math
import zlib

import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import TensorRecord, TensorSummary
from tensorprobe.replay.allowed import dtype_named
from tensorprobe.replay.rebuild import load

_HUGE = 1e30  # a mask, not a number


def load_or_generate(record: TensorRecord) -> torch.Tensor:
    """The recorded content where it was kept, else generated content."""
    return load(record) if record.blob is not None else generate(record)


def generate(record: TensorRecord) -> torch.Tensor:
    """A tensor with the recorded statistics, the same each time."""
    summary = record.summary
    if summary is None:
        why = record.gap or "the capture keeps no statistics: record with keep='stats' or 'tensors'"
        raise NotReplayable(f"{record.name} has neither content nor statistics: {why}")
    generator = torch.Generator().manual_seed(zlib.crc32(record.name.encode()))
    dtype = dtype_named(record.dtype)
    n = record.numel
    if dtype is torch.bool:
        flat = torch.arange(n) >= summary.zero_count
    elif not (dtype.is_floating_point or dtype.is_complex):
        flat = _integers(summary, n, generator)
    else:
        flat = _floats(summary, n, generator)
    if dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        flat = flat[torch.randperm(n, generator=generator)]
    return flat.to(dtype).reshape(record.shape)


def _integers(summary: TensorSummary, n: int, generator: torch.Generator) -> torch.Tensor:
    low, high = int(summary.min or 0), int(summary.max or 0)
    drawn = torch.randint(low, high + 1, (n,), generator=generator)
    return _with_ends(drawn, low, high)


def _with_ends(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    if values.numel():
        values[0] = low
        values[-1] = high
    return values


def _floats(summary: TensorSummary, n: int, generator: torch.Generator) -> torch.Tensor:
    special = [math.nan] * summary.nan_count + _infinities(summary)
    special += [0.0] * min(summary.zero_count, n - len(special))
    m = n - len(special)
    body = _body(summary, m, n - summary.nan_count - summary.inf_count, generator)
    return torch.cat([torch.tensor(special, dtype=torch.float64), body])


def _infinities(summary: TensorSummary) -> list[float]:
    ends = [end for end in (summary.min, summary.max) if end is not None and math.isinf(end)]
    return [float(ends[i % len(ends)]) for i in range(summary.inf_count)] if ends else []


def _body(summary: TensorSummary, m: int, finite: int, generator: torch.Generator) -> torch.Tensor:
    """`m` numbers that are neither zero nor special; with the zeros they have mean and norm."""
    low, high = (
        float(end) if end is not None and math.isfinite(end) else fallback
        for end, fallback in ((summary.min, -1.0), (summary.max, 1.0))
    )
    if m == 0:
        return torch.empty(0, dtype=torch.float64)
    if max(abs(low), abs(high)) > _HUGE:
        values = torch.zeros(m, dtype=torch.float64)
        values[:] = low if abs(low) > _HUGE else high
        return values
    mean = (summary.mean or 0.0) * finite / m
    square = (summary.norm or 0.0) ** 2 / m
    spread = math.sqrt(max(square - mean * mean, 0.0))
    values = torch.randn(m, generator=generator, dtype=torch.float64)
    for _ in range(8):  # cutting at the ends changes mean and spread: put them right again
        values = (values - values.mean()) / max(float(values.std(correction=0)), 1e-300)
        values = (values * spread + mean).clamp(low, high)
    return _with_ends(values, low if summary.zero_count == 0 or low else float(values[0]), high)
