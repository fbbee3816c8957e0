"""What to record: one RecordConfig, made from arguments, options or an msprobe config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec

from tensorprobe.errors import BadUsage
from tensorprobe.keywords import did_you_mean, unknown_name
from tensorprobe.records import Direction, Keep, Level
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named

Side = Literal["input", "output"]
Dtypes = Literal["all", "float"]
Flush = Literal["queue", "call"]
Digests = Literal["native", "crc32"]
Operators = Literal["native", "dunder"]
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
    _refuse(field, value, "a size such as 50G, 512MiB or a number of bytes above 0")


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
            _refuse(field, value, wanted)
        first = int(found[1])
        last = int(found[2] or first)
        if not first <= last < first + LONGEST_RANGE:
            _refuse(
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


def _parse_names(field: str, value: object) -> tuple[str, ...]:
    """Names from one string (commas separate) or several."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Iterable):
        _refuse(field, value, "a name or a list of names")
    names: dict[str, None] = {}
    for item in value:
        if not isinstance(item, str) or not item.strip():
            _refuse(field, item, "a name (a string that is not empty)")
        names[item.strip()] = None
    return tuple(names)


def _parse_between(field: str, value: object) -> tuple[str, str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence) or len(value) != 2:
        _refuse(field, value, "two call names, the first and the last of the range")
    ends = [item.strip() if isinstance(item, str) else "" for item in value]
    if not all(ends):
        _refuse(field, value, "two call names, the first and the last of the range")
    return ends[0], ends[1]


def _parse_bool(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(field, value, "True or False")
    return value


def _parse_choice(allowed: Sequence[str]) -> Any:
    by_folded = {choice.lower(): choice for choice in allowed}

    def parse(field: str, value: object) -> str:
        choice = by_folded.get(value.strip().lower()) if isinstance(value, str) else None
        if choice is None:
            _refuse(field, value, f"one of {', '.join(allowed)}", allowed)
        return choice

    return parse


def _parse_choices(allowed: Sequence[str]) -> Any:
    parse_one = _parse_choice(allowed)

    def parse(field: str, value: object) -> tuple[str, ...]:
        chosen = {parse_one(field, name) for name in _parse_names(field, value)}
        if not chosen:
            _refuse(field, value, f"at least one of {', '.join(allowed)}")
        return tuple(choice for choice in allowed if choice in chosen)

    return parse


def _parse_optional_size(field: str, value: object) -> int | None:
    return None if value is None else parse_size(field, value)


def _parse_optional_count(field: str, value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    _refuse(field, value, "a number from 1")


_PARSERS: dict[str, Any] = {
    "level": _parse_choice(get_args(Level)),
    "keep": _parse_choice(get_args(Keep)),
    "steps": parse_numbers,
    "ranks": parse_numbers,
    "directions": _parse_choices(get_args(Direction)),
    "sides": _parse_choices(get_args(Side)),
    "calls": _parse_names,
    "between": _parse_between,
    "apis": _parse_names,
    "modules": _parse_names,
    "names": _parse_names,
    "keep_tensors": _parse_names,
    "dtypes": _parse_choice(get_args(Dtypes)),
    "stacks": _parse_bool,
    "digests": _parse_choice(get_args(Digests)),
    "operators": _parse_choice(get_args(Operators)),
    "flush": _parse_choice(get_args(Flush)),
    "max_disk": _parse_optional_size,
    "queue": parse_size,
    "compress": _parse_bool,
    "keep_last": _parse_optional_count,
    "stop_after_last_step": _parse_bool,
    "strict": _parse_bool,
}


def strictness(on_write_error: object) -> dict[str, bool]:
    """What `strict` was called before, when it was about the disk alone."""
    parse = _parse_choice(("continue", "stop"))
    return {"strict": parse("on_write_error", on_write_error) == "stop"}


def _refuse(field: str, value: object, expected: str, near: Iterable[str] = ()) -> NoReturn:
    raise BadUsage(f"{field}={value!r}: expected {expected}{did_you_mean(value, near)}")


# A config.json in msprobe's form.


class MsprobeConfig(NamedTuple):
    """A config.json in msprobe's form, understood: `notes` are what a user of msprobe should know
    is done differently here."""

    config: RecordConfig
    dump_path: str | None
    notes: tuple[str, ...]


class DoorConfig(NamedTuple):
    """Likewise for a script of msprobe's own, which gets msprobe's names, checksums and files.

    `dump_enable` is None where the file does not have it: then it is not looked at again. With
    `overflow_nums` nothing is dumped but what a guard finds, and so many overflows end the program.
    """

    config: RecordConfig
    dump_path: str | None
    notes: tuple[str, ...]
    dump_enable: bool | None
    overflow_nums: int | None = None


DEBUG_LEVEL = "debug"
SAVED = "Saved."  # what the names of values saved by hand begin with


_TASKS = {"statistics": "stats", "tensor": "tensors", "structure": "structure"}
_REFUSED_TASKS = {
    "acc_check": "record with task 'tensor', then: tensorprobe check CAPTURE --device DEVICE",
    "nan_check": "it reads an NPU register; use tp.Guard, which works on every device",
    "diff_check": "record both runs with keep='digest' and compare them: tensorprobe compare",
    "exception_dump": "it is for MindSpore; use tp.Guard",
    "overflow_check": "use tp.Guard",
    "free_benchmark": "record with task 'tensor', then: tensorprobe check CAPTURE --device DEVICE",
}
_TOP_FIELDS = (
    "task",
    "dump_path",
    "rank",
    "step",
    "level",
    "async_dump",
    "dump_enable",
    "extra_info",
    "precision",
    "risk_level",
    "custom_op_namespaces",
    "load",
    "seed",
    "is_deterministic",
    "enable_dataloader",
    "acl_config",
)
_FILTER_FIELDS = ("scope", "list", "data_mode", "summary_mode", "slice", "request_id")
_ONLINE_FIELDS = (
    "online_run_ut", "online_run_ut_recompute", "is_online", "nfs_path", "host", "port",
    "rank_list", "tls_path", "master_ip", "master_port", "is_benchmark_device",
)  # fmt: skip
_SECTIONS: dict[str, tuple[str, ...]] = {
    "statistics": (*_FILTER_FIELDS, "tensor_list", "device"),
    "tensor": (
        *_FILTER_FIELDS, "bench_path", "diff_nums", "file_format", "backward_input",
        *_ONLINE_FIELDS,
    ),
    "structure": _FILTER_FIELDS,
    "acc_check": ("white_list", "black_list", "error_data_path"),
    "nan_check": ("list", "scope", "tensor_list", "data_mode"),
    # of earlier releases; nothing is read of them
    "overflow_check": ("overflow_nums", "check_mode"),
    "run_ut": ("white_list", "black_list", "error_data_path", *_ONLINE_FIELDS),
    "free_benchmark": (
        "scope", "list", "fuzz_device", "pert_mode", "handler_type", "fuzz_level", "fuzz_stage",
        "if_preheat", "preheat_step", "max_sample",
    ),
    "grad_probe": ("grad_level", "param_list", "bounds"),
}  # fmt: skip
# Fields with no counterpart here, with the reason; fine when empty, as in msprobe's own template.
_REFUSED_FIELDS = {
    "load": "feeding a module the inputs of an earlier dump is not part of recording; to start two "
    "runs equal use: tensorprobe run --save-start / --load-start",
    "slice": "tensors are recorded whole, so that a call can be replayed; remove it",
    "request_id": "tensors are recorded whole, whatever request their rows belong to; remove it",
    "bench_path": "record both runs with summary_mode 'md5' and compare them: tensorprobe compare",
    "seed": "recording seeds nothing; call seed_all(seed)",
    "is_deterministic": "recording changes no algorithm; call seed_all(mode=True)",
    "enable_dataloader": "steps do not end with a batch; call start(), stop() and step()",
    "acl_config": "the dumps of ACL are torch_npu's; level L2 records every ATen operator instead",
    "backward_input": "a backward is not run again while recording; use: tensorprobe repro",
    "online_run_ut": "record with task 'tensor', then: tensorprobe check CAPTURE --device DEVICE",
    "is_online": "record with task 'tensor', then: tensorprobe check CAPTURE --device DEVICE",
}


def from_msprobe_config(path: str | Path) -> MsprobeConfig:
    """What a config.json in msprobe's form asks for: every field is honoured or refused by name.

    Sections of tasks other than the chosen one are checked for unknown fields and else unused, as
    msprobe's own template carries all of them.

        config, dump_path, notes = from_msprobe_config("config.json")
    """
    content = _read_json(path)
    with _naming(path):
        return _read_msprobe(content)


def from_door_arguments(
    path: str | Path | None, arguments: Mapping[str, Any] | None = None
) -> DoorConfig:
    """What msprobe's PrecisionDebugger is asked for: its config.json, and arguments that beat it.

    Names and checksums are msprobe's own here: `a + b` is Tensor.__add__, md5 a CRC-32.
    """
    content: Any = {"dump_path": "./dump_path"} if path is None else _read_json(path)
    if isinstance(content, dict):
        content = {**content, **(arguments or {})}
    with _naming(path):
        return _read_door(content)


@contextmanager
def _naming(path: str | Path | None) -> Iterator[None]:
    """Errors from inside say which file it is about; that they are raised again shows nothing."""
    try:
        yield
    except BadUsage as error:
        if path is None:
            raise
        raise BadUsage(f"{path}: {error}") from None


def _read_json(path: str | Path) -> Any:
    try:
        return read_json(open_named(Path(path)), Path(path))
    except OSError as error:
        raise BadUsage(f"no configuration can be read from '{path}': {error.strerror}") from None
    except ValueError as error:
        raise BadUsage(f"{path} is not JSON: {error}") from None


def _read_door(content: object) -> DoorConfig:
    if isinstance(content, dict) and content.get("task") == "overflow_check":
        return _read_overflow(content)
    debug = isinstance(content, dict) and content.get("level") == DEBUG_LEVEL
    enable = content.get("dump_enable") if isinstance(content, dict) else None
    if isinstance(content, dict):
        content = {**content, **({"level": "L1"} if debug else {})}
        content.pop("dump_enable", None)
    if enable is not None:
        enable = _parse_bool("dump_enable", enable)
    config, dump_path, notes = _read_msprobe(content)
    assert isinstance(content, dict)
    section = content.get(content.get("task", "statistics")) or {}
    changes: dict[str, Any] = {"operators": "dunder"}
    if section.get("summary_mode") == "md5":
        changes["digests"] = "crc32"
        notes = tuple(note for note in notes if not note.startswith("summary_mode"))
    if debug:
        if config.keep == "structure":
            raise BadUsage("level='debug' saves values: task is statistics or tensor")
        changes["names"] = (SAVED,)
    elif config.keep == "structure" and config.level not in ("L0", "mix"):
        changes["level"] = "mix"
        notes = (*notes, f"task structure: level {config.level} has no tree; mix is recorded")
    return DoorConfig(msgspec.structs.replace(config, **changes), dump_path, notes, enable)


def _read_overflow(content: dict[str, Any]) -> DoorConfig:
    """A task of earlier releases: a guard that stops at the n-th overflow."""
    section = content.get("overflow_check") or {}
    rest = {**content, "task": "statistics"}
    config, dump_path, notes, enable, _ = _read_door(rest)
    count = section.get("overflow_nums", 1)
    if type(count) is not int or (count < 1 and count != -1):
        _refuse("overflow_check.overflow_nums", count, "a number from 1 on, or -1 for never")
    _parse_choice(("all", "aicore", "atomic"))("check_mode", section.get("check_mode", "all"))
    notes = (*notes, "overflow_check: every call is watched, on any device")
    return DoorConfig(config, dump_path, notes, enable, count)


def _read_msprobe(content: object) -> MsprobeConfig:
    if not isinstance(content, dict):
        raise BadUsage("expected a JSON object with the fields task, dump_path, level...")
    _check_fields(content)
    task = _read_task(content)
    section: dict[str, Any] = content.get(task) or {}
    label = f"{task}."
    keep = _TASKS[task]
    notes: list[str] = []
    arguments: dict[str, Any] = {
        "level": _read_level(content),
        "steps": parse_numbers("step", content.get("step")),
        "ranks": parse_numbers("rank", content.get("rank")),
        "stacks": _parse_bool("extra_info", content.get("extra_info", True)),
        "keep": _read_summary_mode(label, section, keep, notes),
        "names": _parse_names(label + "list", section.get("list")),
        "keep_tensors": _parse_names(label + "tensor_list", section.get("tensor_list")),
        "between": _parse_between(label + "scope", section.get("scope") or None),
        **_read_data_mode(label, section),
    }
    if arguments["between"] and arguments["names"]:
        raise BadUsage(
            f"{label}scope and {label}list contradict each other: "
            "a range or a filter, not both. Empty one of them"
        )
    _read_rest(content, section, label, notes)
    return MsprobeConfig(RecordConfig.make(**arguments), _read_dump_path(content), tuple(notes))


def _check_fields(content: dict[str, Any]) -> None:
    for name, value in content.items():
        if name in _SECTIONS:
            if not isinstance(value, dict):
                _refuse(name, value, "an object with the fields of that task")
            for field in value:
                if field not in _SECTIONS[name]:
                    raise unknown_name("field", field, _SECTIONS[name], f" in '{name}'")
        elif name not in _TOP_FIELDS:
            raise unknown_name("field", name, (*_TOP_FIELDS, *_SECTIONS))


def _read_task(content: dict[str, Any]) -> str:
    task = content.get("task", "statistics")
    if isinstance(task, str) and task in _REFUSED_TASKS:
        raise BadUsage(
            f"task='{task}' is not supported: {_REFUSED_TASKS[task]}. Allowed: {', '.join(_TASKS)}"
        )
    chosen: str = _parse_choice(tuple(_TASKS))("task", task)
    return chosen


def _read_level(content: dict[str, Any]) -> str:
    level = content.get("level", "L1")
    if level == "debug":
        raise BadUsage(
            "level='debug' is not a level here: rec.save(name, value) works at every level. "
            f"Allowed: {', '.join(get_args(Level))}"
        )
    chosen: str = _PARSERS["level"]("level", level)
    return chosen


def _read_summary_mode(label: str, section: dict[str, Any], keep: str, notes: list[str]) -> str:
    mode = section.get("summary_mode", "statistics")
    if mode == "xor":
        raise BadUsage(
            f"{label}summary_mode='xor' is not supported: an xor cannot see two values swapped. "
            "Allowed: statistics, md5"
        )
    if _parse_choice(("statistics", "md5"))(f"{label}summary_mode", mode) == "md5":
        if keep == "stats":
            notes.append("summary_mode md5: a position-aware digest is kept, not a CRC-32")
            return "digest"
        notes.append(f"summary_mode md5 adds nothing to task '{label[:-1]}'")
    return keep


def _read_data_mode(label: str, section: dict[str, Any]) -> dict[str, Any]:
    modes = _parse_names(label + "data_mode", section.get("data_mode")) or ("all",)
    parse = _parse_choice(("all", *get_args(Direction), *get_args(Side)))
    modes = tuple(parse(label + "data_mode", mode) for mode in modes)
    if "all" in modes and len(modes) > 1:
        _refuse(label + "data_mode", list(modes), "'all' alone, or parts without 'all'")
    directions = [mode for mode in modes if mode in get_args(Direction)]
    sides = [mode for mode in modes if mode in get_args(Side)]
    return {
        "directions": directions or get_args(Direction),
        "sides": sides or get_args(Side),
    }


def _read_dump_path(content: dict[str, Any]) -> str | None:
    dump_path = content.get("dump_path")
    if dump_path is not None and (not isinstance(dump_path, str) or not dump_path.strip()):
        _refuse("dump_path", dump_path, "the folder to write to")
    return dump_path


def _read_rest(
    content: dict[str, Any], section: dict[str, Any], label: str, notes: list[str]
) -> None:
    """The fields that select nothing here: checked, then noted or refused."""
    for name, reason in _REFUSED_FIELDS.items():
        for fields, prefix in ((content, ""), (section, label)):
            if fields.get(name):
                raise BadUsage(f"{prefix}{name} is not supported: {reason}")
    if content.get("level") == "L2":
        notes.append("level L2: every ATen operator is recorded, on any device")
    if section.get("device") not in (None, "host"):
        _refuse(label + "device", section["device"], "'host' (the other value is for MindSpore)")
    if section.get("file_format") not in (None, "npy"):
        _refuse(label + "file_format", section["file_format"], "'npy', or leave it out")
    if "diff_nums" in section:
        notes.append("diff_nums has no effect without bench_path")
    if "dump_enable" in content:
        if not _parse_bool("dump_enable", content["dump_enable"]):
            raise BadUsage(
                "dump_enable=False is not supported: the file is read once, so recording would "
                "never begin. Remove it, or call rec.start() where recording should begin"
            )
        notes.append("dump_enable: the file is read once; later changes of it have no effect")
    if "risk_level" in content:
        _parse_choice(("ALL", "FOCUS", "CORE"))("risk_level", content["risk_level"])
        if content["risk_level"] != "ALL":
            notes.append("risk_level: every call is recorded")
    if "precision" in content:
        _parse_choice(("low", "high"))("precision", content["precision"])
        notes.append("precision: mean and norm are always accumulated in float64")
    if _parse_bool("async_dump", content.get("async_dump", False)):
        notes.append("async_dump: values always leave the device in the background")
    if "custom_op_namespaces" in content:
        _parse_names("custom_op_namespaces", content["custom_op_namespaces"])
        notes.append("custom_op_namespaces: custom ops are recorded whatever their namespace")
