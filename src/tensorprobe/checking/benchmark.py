"""The three-way judgement: a device may be as far off as another one is. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from tensorprobe.checking.row import Judgement

# The device may be this many times as far from the reference as the benchmark device is.
BENCHMARK_FACTOR = 2.0


def hold_against(judgements: list[Judgement], errors: Mapping[str, float | None]) -> None:
    """Excuse what the benchmark device does as well."""
    for judgement in judgements:
        bench = errors.get(judgement.name)
        if bench is None:
            continue
        judgement.benchmark_error = bench
        error = judgement.error
        if error is not None and not judgement.ok and error <= BENCHMARK_FACTOR * bench:
            judgement.ok = True
            judgement.reason = f"{error:.3g}, and the benchmark device has {bench:.3g}"
