"""What a monitor can be asked for, checked without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from tensorprobe.config import Names, Numbers, Size, parse_names, parse_numbers, parse_size
from tensorprobe.errors import BadUsage, MissingDependency
from tensorprobe.keywords import did_you_mean

FileFormat = Literal["jsonl", "parquet"]
FORMATS = ("jsonl", "parquet")
# Every how many steps each kind is measured; 0 never. docs/monitor.md has the same table.
EVERY: dict[str, int] = {
    "inputs": 1,
    "gradients": 1,
    "moments": 1,
    "updates": 1,
    "parameters": 5,
    "activations": 10,
}
WRITERS = ("tensorboard", "wandb", "mlflow")
MAX_DISK = "1G"
RECORDED_STEPS = 2  # by --record-on-alarm


class MonitorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure and where it goes, in normal form."""

    every: dict[str, int]
    modules: tuple[str, ...]
    ranks: tuple[int, ...] | None
    max_disk: int
    format: FileFormat
    writers: tuple[str, ...]


def check_writers(writers: Names) -> tuple[str, ...]:
    """The names of writers, whose packages are there."""
    chosen = parse_names("writers", writers)
    for name in chosen:
        if name not in WRITERS:
            raise BadUsage(
                f"writers={name!r}: expected {', '.join(WRITERS)}{did_you_mean(name, WRITERS)}"
            )
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise MissingDependency(name, f"writers={name!r}")
    return chosen


def check_options(
    *,
    every: int | str | Mapping[str, int],
    modules: Names,
    ranks: Numbers | None,
    max_disk: Size,
    format: str,
    writers: Names,
) -> MonitorOptions:
    """The options in normal form; BadUsage names the one that is wrong."""
    if format not in FORMATS:
        raise BadUsage(f"format={format!r}: expected {' or '.join(FORMATS)}")
    chosen = check_writers(writers)
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingDependency("pyarrow", "format='parquet'", "monitor")
    nbytes = parse_size("max_disk", max_disk)
    if nbytes < 1 << 16:
        raise BadUsage(f"max_disk={max_disk!r}: expected 64K or more, room for a few steps")
    return MonitorOptions(
        every=parse_every(every),
        modules=parse_names("modules", modules),
        ranks=parse_numbers("ranks", ranks),
        max_disk=nbytes,
        format="parquet" if format == "parquet" else "jsonl",
        writers=chosen,
    )


def parse_every(every: int | str | Mapping[str, int]) -> dict[str, int]:
    """Every how many steps each kind is measured, from 10, "activations=50" or a mapping.

    A number alone is the least for all kinds: 10 makes it 10 where it was 1 or 5.
    """
    given: dict[str, Any] = {}
    if isinstance(every, Mapping):
        given = dict(every)
    else:
        for part in str(every).split(","):
            name, equals, number = part.strip().partition("=")
            given[name if equals else "all"] = number if equals else name
    numbers: dict[str, int] = {name: _number(name, value) for name, value in given.items()}
    for name in numbers:
        if name not in ("all", *EVERY):
            raise BadUsage(
                f"every={name!r}: expected {', '.join(EVERY)}{did_you_mean(name, EVERY)}"
            )
    least = numbers.pop("all", 1)
    return {**{kind: max(least, usual) for kind, usual in EVERY.items()}, **numbers}


def _number(name: str, value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdigit() or (name == "all" and text == "0"):
        raise BadUsage(
            f"every={value!r}: expected a number of steps from 1, or activations=50,moments=0 "
            "(0: never)"
        )
    return int(text)


def check_rules(rules: str | Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The rules asked for: "all", names, or names to leave out: "all,-drift"."""
    names = tuple(known)
    words = rules.split(",") if isinstance(rules, str) else list(rules)
    chosen: dict[str, None] = {}
    for position, word in enumerate(part.strip() for part in words):
        name = word.removeprefix("-")
        if word == "all" or (position == 0 and word.startswith("-")):
            chosen.update(dict.fromkeys(names))
        if word in ("all", "none", ""):
            continue
        if name not in names:
            raise BadUsage(
                f"rules={word!r}: expected all, none, or some of {', '.join(names)}"
                f"{did_you_mean(name, names)}"
            )
        if word.startswith("-"):
            chosen.pop(name, None)
        else:
            chosen[name] = None
    return tuple(chosen)
