"""What to record: one RecordConfig, made from arguments, options or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec

from tensorprobe.errors import BadUsage
from tensorprobe.keywords import did_you_mean, unknown_name
from tensorprobe.parts import NamedParts
from tensorprobe.records import Direction, Keep, Level

Side = Literal["input", "output"]
Dtypes = Literal["all", "float"]
Flush = Literal["queue", "call"]
Digests = Literal["native", "crc32"]
Operators = Literal["native", "dunder"]
Compiled = Literal["call", "graphs", "kernels"]
# What people may write for numbers of steps and ranks, for names, and for sizes in bytes.
Numbers = int | str | Iterable[int | str]
Names = str | Iterable[str]
Size = int | str

# A longer range is a slip ("0-1e9"), and every number of it would be held in memory.
LONGEST_RANGE = 1_000_000


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to record, in normal form. Made by `make`, which takes what people type.

    Every selecting field narrows what the others leave: `apis=["relu"], modules=["*.mlp"]` are the
    relus inside an mlp. An empty tuple or None selects everything.

        config = RecordConfig.make(level="L1", steps="0-1,4", apis="relu")
        config.steps    # (0, 1, 4)
    """

    level: Level = "mix"
    keep: Keep = "stats"
    steps: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    directions: tuple[Direction, ...] = ("forward", "backward")
    sides: tuple[Side, ...] = ("input", "output")
    calls: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    apis: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # a part of the call's name, anywhere in it
    keep_tensors: tuple[str, ...] = ()  # likewise: these calls keep tensors, whatever `keep` says
    dtypes: Dtypes = "all"  # float: nothing is kept of integer and bool tensors
    stacks: bool = True
    digests: Digests = "native"  # crc32: as the peers have them, made on the host
    operators: Operators = "native"  # dunder: a + b is Tensor.__add__, counted apart from a.add(b)
    compiled: Compiled = "call"  # graphs: what torch.compile makes of a part, and what runs there
    flush: Flush = "queue"
    max_disk: int | None = None  # bytes
    queue: int = 256 * 2**20  # bytes
    compress: bool = False  # tensors, without loss
    keep_last: int | None = None  # steps on disk: older ones are deleted as new ones end
    stop_after_last_step: bool = False
    strict: bool = False  # raise what else is only said: a disk that refuses, nothing recorded

    @classmethod
    def make(cls, **arguments: Any) -> RecordConfig:
        """The configuration for these arguments; BadUsage names the one that is wrong."""
        if "on_write_error" in arguments:
            arguments = {**strictness(arguments.pop("on_write_error")), **arguments}
        for name in arguments:
            if name not in _PARSERS:
                raise unknown_name("argument", name, _PARSERS)
        config = cls(**{name: _PARSERS[name](name, value) for name, value in arguments.items()})
        if config.compiled != "call" and config.level == "L2":
            raise BadUsage(
                f"`compiled={config.compiled!r}` needs another `level` than L2, at which torch "
                "itself runs compiled parts uncompiled. For example: `level='mix'`"
            )
        if config.compiled == "kernels" and config.keep != "tensors":
            raise BadUsage(
                f"`compiled='kernels'` needs `keep='tensors'`; `keep` is {config.keep!r}"
            )
        if config.stop_after_last_step and config.steps is None:
            raise BadUsage(
                "`stop_after_last_step` needs `steps`: without them there is no last one. "
                "For example: `steps='0-1'`"
            )
        return config

    def as_arguments(self) -> dict[str, Any]:
        """The configuration as plain JSON values that `make` reads back to an equal one."""
        arguments: dict[str, Any] = msgspec.to_builtins(self)
        arguments["steps"] = format_numbers(self.steps)
        arguments["ranks"] = format_numbers(self.ranks)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in arguments.items()}


def parse_size(field: str, value: object) -> int:
    """Bytes from 1024, "50G", "512MiB" or "1.5 TB".

    K, M, G, T and KiB... are powers of 1024, KB, MB... powers of 1000, as in GNU coreutils.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", value, re.IGNORECASE)
        if found:
            number, prefix, suffix = found.groups()
            base = 1000 if prefix and (suffix or "").lower() == "b" else 1024
            size = int(float(number) * base ** " kmgt".index(prefix.lower() or " "))
            if size > 0:
                return size
    refuse(field, value, "a size such as 50G, 512MiB or a number of bytes above 0")


def parse_numbers(field: str, value: object) -> tuple[int, ...] | None:
    """Sorted step or rank numbers from 3, "0-1,4", [0, "3-5"] or a range; None when all."""
    if value is None:
        return None
    wanted = "numbers from 0 and ranges: 3, '0-1,4' or [0, '3-5']"
    items: Iterable[object]
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, Iterable):
        items = [part for item in value for part in _parts(item)]
    else:
        items = [value]
    numbers: set[int] = set()
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            numbers.add(item)
            continue
        text = item.strip() if isinstance(item, str) else ""
        found = re.fullmatch(r"(\d{1,18})(?:\s*-\s*(\d{1,18}))?", text)
        if not found:
            refuse(field, value, wanted)
        first = int(found[1])
        last = int(found[2] or first)
        if not first <= last < first + LONGEST_RANGE:
            refuse(
                field, value, f"a range that ascends, of at most {LONGEST_RANGE}; '{text}' is not"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers)) or None


def format_numbers(numbers: Sequence[int] | None) -> str | None:
    """Sorted numbers as a person writes them: (0, 1, 2, 5) is "0-2,5"."""
    if not numbers:
        return None
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _parts(item: object) -> list[object]:
    return list(item.split(",")) if isinstance(item, str) else [item]


def parse_names(field: str, value: object) -> tuple[str, ...]:
    """Names from one string (commas separate) or several."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Iterable):
        refuse(field, value, "a name or a list of names")
    names: dict[str, None] = {}
    for item in value:
        if not isinstance(item, str) or not item.strip():
            refuse(field, item, "a name (a string that is not empty)")
        names[item.strip()] = None
    return tuple(names)


def parse_between(field: str, value: object) -> tuple[str, str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence) or len(value) != 2:
        refuse(field, value, "two call names, the first and the last of the range")
    ends = [item.strip() if isinstance(item, str) else "" for item in value]
    if not all(ends):
        refuse(field, value, "two call names, the first and the last of the range")
    return ends[0], ends[1]


def parse_bool(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(field, value, "True or False")
    return value


def parse_choice(allowed: Sequence[str]) -> Any:
    by_folded = {choice.lower(): choice for choice in allowed}

    def parse(field: str, value: object) -> str:
        choice = by_folded.get(value.strip().lower()) if isinstance(value, str) else None
        if choice is None:
            refuse(field, value, f"one of {', '.join(allowed)}", allowed)
        return choice

    return parse


def _parse_choices(allowed: Sequence[str]) -> Any:
    parse_one = parse_choice(allowed)

    def parse(field: str, value: object) -> tuple[str, ...]:
        chosen = {parse_one(field, name) for name in parse_names(field, value)}
        if not chosen:
            refuse(field, value, f"at least one of {', '.join(allowed)}")
        return tuple(choice for choice in allowed if choice in chosen)

    return parse


def _parse_optional_size(field: str, value: object) -> int | None:
    return None if value is None else parse_size(field, value)


def _parse_optional_count(field: str, value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    refuse(field, value, "a number from 1")


_PARSERS: dict[str, Any] = {
    "level": parse_choice(get_args(Level)),
    "keep": parse_choice(get_args(Keep)),
    "steps": parse_numbers,
    "ranks": parse_numbers,
    "directions": _parse_choices(get_args(Direction)),
    "sides": _parse_choices(get_args(Side)),
    "calls": parse_names,
    "between": parse_between,
    "apis": parse_names,
    "modules": parse_names,
    "names": parse_names,
    "keep_tensors": parse_names,
    "dtypes": parse_choice(get_args(Dtypes)),
    "stacks": parse_bool,
    "digests": parse_choice(get_args(Digests)),
    "operators": parse_choice(get_args(Operators)),
    "compiled": parse_choice(get_args(Compiled)),
    "flush": parse_choice(get_args(Flush)),
    "max_disk": _parse_optional_size,
    "queue": parse_size,
    "compress": parse_bool,
    "keep_last": _parse_optional_count,
    "stop_after_last_step": parse_bool,
    "strict": parse_bool,
}


def strictness(on_write_error: object) -> dict[str, bool]:
    """What `strict` was called before, when it was about the disk alone."""
    parse = parse_choice(("continue", "stop"))
    return {"strict": parse("on_write_error", on_write_error) == "stop"}


def refuse(field: str, value: object, expected: str, near: Iterable[str] = ()) -> NoReturn:
    raise BadUsage(f"{field}={value!r}: expected {expected}{did_you_mean(value, near)}")


class ConfigFile(NamedTuple):
    """A file of some other tool that says what to record, understood.

    `notes` are what a user of that tool should know is done differently here.
    """

    config: RecordConfig
    dump_path: str | None
    notes: tuple[str, ...]


# The module of each kind of file: `read_config(path)` gives a ConfigFile.
CONFIG_FILES = NamedParts("config", {"msprobe": "tensorprobe.peers.msprobe.msprobe_config"})


def from_msprobe_config(path: str | Path) -> ConfigFile:
    """What a config.json in msprobe's form asks for.

    config, dump_path, notes = from_msprobe_config("config.json")
    """
    found: ConfigFile = CONFIG_FILES.module("msprobe").read_config(path)
    return found
