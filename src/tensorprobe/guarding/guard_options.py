"""What a guard can be asked for, checked without torch."""

from __future__ import annotations

from collections.abc import Iterable

from tensorprobe.config import parse_size
from tensorprobe.errors import BadUsage

WATCHES = ("overflow", "errors")


def check_watches(watch: str | Iterable[str]) -> tuple[str, ...]:
    """The watches asked for; BadUsage names one that there is not."""
    names = tuple(watch.split(",")) if isinstance(watch, str) else tuple(watch)
    unknown = [name for name in names if name not in WATCHES]
    if unknown or not names:
        what = f"unknown guard '{unknown[0]}'" if unknown else "nothing to watch"
        raise BadUsage(f"{what}: expected {' or '.join(WATCHES)}, or both")
    return tuple(dict.fromkeys(names))


def check_numbers(overflow_nums: int, look_every: int | None) -> None:
    """Refuse numbers that mean nothing."""
    if overflow_nums == 0 or overflow_nums < -1:
        raise BadUsage(f"overflow_nums={overflow_nums}: expected a number from 1, or -1 for no end")
    if look_every is not None and look_every < 1:
        raise BadUsage(f"look_every={look_every}: expected a number of calls from 1")


def check_budget(inputs_budget: int | str) -> int:
    """How many bytes of inputs to hold; 0 for none beyond the call that runs."""
    if str(inputs_budget) == "0":
        return 0
    return parse_size("inputs_budget", inputs_budget)


def check_timeout(timeout: float) -> float:
    """How long a failed call may run alone; 0 for not at all."""
    if timeout < 0:
        raise BadUsage(f"timeout={timeout}: expected a number of seconds from 0")
    return timeout
