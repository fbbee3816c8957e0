"""msprobe's config.json, and the arguments of its PrecisionDebugger: what they ask to record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from tensorprobe.config import (
    ConfigFile,
    RecordConfig,
    Side,
    parse_between,
    parse_bool,
    parse_choice,
    parse_names,
    parse_numbers,
    refuse,
)
from tensorprobe.errors import BadUsage
from tensorprobe.keywords import unknown_name
from tensorprobe.records import Direction, Level
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named


class DoorConfig(NamedTuple):
    """What a script of msprobe's own asks for; it gets msprobe's names, checksums and files.

    `dump_enable` is None where the file does not have it: then it is not looked at again. With
    `overflow_nums` nothing is dumped but what a guard finds, and so many overflows end the program.
    `seed` is what to seed with, and whether with deterministic algorithms. `content` is all that
    was asked for, as it stands in the file.
    """

    config: RecordConfig
    dump_path: str | None
    notes: tuple[str, ...]
    dump_enable: bool | None
    content: dict[str, Any]
    overflow_nums: int | None = None
    seed: tuple[int, bool] | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The fields of the chosen task."""
        found = self.content.get(self.content.get("task", "statistics"))
        return found if isinstance(found, dict) else {}


_DEBUG_LEVEL = "debug"
_NO_OBJECT = "expected a JSON object with the fields task, dump_path, level..."
_NATIVE_DIGEST = "summary_mode md5: a position-aware digest is kept, not a CRC-32"
_SAVED = "Saved."  # what the names of values saved by hand begin with
_TASKS = {"statistics": "stats", "tensor": "tensors", "structure": "structure"}
# Tasks that another one does, and what to read in its dump.
_OTHER_TASKS = {
    "nan_check": ("statistics", "it reads an NPU register. Statistics of every call are dumped; "
                  "then: tensorprobe ranks DUMP names the first call that made NaN or infinity"),
    "diff_check": ("tensor", "as task tensor"),
}  # fmt: skip
_CHECK = "record with task 'tensor', then: tensorprobe check DUMP --device DEVICE"
_REFUSED_TASKS = {
    "acc_check": _CHECK,
    "run_ut": _CHECK,
    "free_benchmark": _CHECK,
    "grad_probe": "use tensorprobe run --monitor DIR: it has the statistics of each gradient",
    "exception_dump": "it is for MindSpore; use: tensorprobe run --guard errors SCRIPT",
    "overflow_check": "use tp.Guard",
}
_TOP_FIELDS = (
    "task", "dump_path", "rank", "step", "level", "async_dump", "enable_async_dump", "dump_enable",
    "extra_info", "precision", "risk_level", "custom_op_namespaces", "load", "seed",
    "is_deterministic", "enable_dataloader", "acl_config",
)  # fmt: skip
_FILTER_FIELDS = ("scope", "list", "data_mode", "summary_mode", "slice", "request_id")
_ONLINE_FIELDS = (
    "online_run_ut", "online_run_ut_recompute", "is_online", "nfs_path", "host", "port",
    "rank_list", "tls_path", "master_ip", "master_port", "is_benchmark_device",
)  # fmt: skip
_MINDSPORE_FIELDS = ("device", "stat_cal_mode", "device_stat_precision_mode")
_CHECK_FIELDS = ("white_list", "black_list", "error_data_path")
_TENSOR_FIELDS = (
    *_FILTER_FIELDS, "bench_path", "diff_nums", "file_format", "backward_input", *_ONLINE_FIELDS,
)  # fmt: skip
_SECTIONS: dict[str, tuple[str, ...]] = {
    "statistics": (*_FILTER_FIELDS, "tensor_list", *_MINDSPORE_FIELDS),
    "tensor": _TENSOR_FIELDS,
    "structure": _FILTER_FIELDS,
    "nan_check": (*_FILTER_FIELDS, "tensor_list"),
    "diff_check": _TENSOR_FIELDS,
    # nothing is read of these
    "acc_check": (*_CHECK_FIELDS, *_ONLINE_FIELDS),
    "run_ut": (*_CHECK_FIELDS, *_ONLINE_FIELDS),
    "overflow_check": ("overflow_nums", "check_mode"),
    "exception_dump": ("scope", "list", "data_mode", "file_format"),
    "free_benchmark": (
        "scope", "list", "fuzz_device", "pert_mode", "handler_type", "fuzz_level", "fuzz_stage",
        "if_preheat", "preheat_step", "max_sample",
    ),
    "grad_probe": ("grad_level", "param_list", "bounds"),
}  # fmt: skip
# Fields that select nothing here: taken, and said what happens instead.
_WHOLE = "tensors are recorded whole, whatever request their rows belong to"
_NOT_SENT = "nothing is sent to another machine; dump with task tensor, then: tensorprobe check"
_NOTED_FIELDS = {
    "slice": "tensors are recorded whole, so that a call can be replayed",
    "request_id": f"{_WHOLE}; with start(scheduled_tokens=...) steps without it are left out",
    "acl_config": "the dumps of ACL are torch_npu's; level L2 records every ATen operator instead",
    "backward_input": "no backward is run again while recording; use: tensorprobe repro",
    "online_run_ut": _NOT_SENT,
    "is_online": _NOT_SENT,
    "stat_cal_mode": "it is for MindSpore",
    "device_stat_precision_mode": "it is for MindSpore",
}
# Fields that cannot be passed over; fine when empty, as in msprobe's own templates.
_REFUSED_FIELDS = {
    "load": "feeding a module the inputs of an earlier dump is not part of recording; to start two "
    "runs equal use: tensorprobe run --save-start / --load-start",
    "enable_dataloader": "steps do not end with a batch; call start(), stop() and step()",
}


def read_config(path: str | Path) -> ConfigFile:
    """What a config.json in msprobe's form asks for: every field is honoured or refused by name.

    Sections of tasks other than the chosen one are checked for unknown fields and else unused, as
    msprobe's own template carries all of them.
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
        return read_door(content)


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


def read_door(content: object) -> DoorConfig:
    """What the content of a config.json asks for, given to msprobe's own debugger."""
    if not isinstance(content, dict):
        raise BadUsage(_NO_OBJECT)
    if content.get("task") == "overflow_check":
        return _read_overflow(content)
    debug = content.get("level") == _DEBUG_LEVEL
    enable = content.get("dump_enable")
    if enable is not None:
        enable = parse_bool("dump_enable", enable)
    seed = _read_seed(content)
    left = {"dump_enable"} if seed is None else {"dump_enable", "seed", "is_deterministic"}
    rest = {name: value for name, value in content.items() if name not in left}
    config, dump_path, notes = _read_msprobe({**rest, **({"level": "L1"} if debug else {})})
    if seed is not None:
        notes = (*notes, f"seed: every generator was seeded with {seed[0]}")
    changes: dict[str, Any] = {"operators": "dunder"}
    if config.keep == "digest":
        changes["digests"] = "crc32"
    if debug:
        if config.keep == "structure":
            raise BadUsage("level='debug' saves values: task is statistics or tensor")
        changes["names"] = (_SAVED,)
    elif config.keep == "structure" and config.level not in ("L0", "mix"):
        changes["level"] = "mix"
        notes = (*notes, f"task structure: level {config.level} has no tree; mix is recorded")
    notes = tuple(note for note in notes if note != _NATIVE_DIGEST)
    config = msgspec.structs.replace(config, **changes)
    return DoorConfig(config, dump_path, notes, enable, content, seed=seed)


def _read_seed(content: dict[str, Any]) -> tuple[int, bool] | None:
    """What releases of 2024 seeded with when the debugger was made."""
    seed, deterministic = content.get("seed"), content.get("is_deterministic") or False
    parse_bool("is_deterministic", deterministic)
    if seed is None:
        return None
    if type(seed) is not int or not 0 <= seed < 2**32:
        refuse("seed", seed, f"a whole number from 0 to {2**32 - 1}")
    return seed, deterministic


def _read_overflow(content: dict[str, Any]) -> DoorConfig:
    """A task of earlier releases: a guard that stops at the n-th overflow."""
    section = content.get("overflow_check") or {}
    found = read_door({**content, "task": "statistics"})
    count = section.get("overflow_nums", 1)
    if type(count) is not int or (count < 1 and count != -1):
        refuse("overflow_check.overflow_nums", count, "a number from 1 on, or -1 for never")
    parse_choice(("all", "aicore", "atomic"))("check_mode", section.get("check_mode", "all"))
    notes = (*found.notes, "overflow_check: every call is watched, on any device")
    return found._replace(notes=notes, content=content, overflow_nums=count)


def _read_msprobe(content: object) -> ConfigFile:
    if not isinstance(content, dict):
        raise BadUsage(_NO_OBJECT)
    _check_fields(content)
    notes: list[str] = []
    asked, task = _read_task(content, notes)
    section: dict[str, Any] = content.get(asked) or {}
    label = f"{asked}."
    arguments: dict[str, Any] = {
        "level": _read_level(content),
        "steps": parse_numbers("step", content.get("step")),
        "ranks": parse_numbers("rank", content.get("rank")),
        "stacks": parse_bool("extra_info", content.get("extra_info", True)),
        "keep": _read_keep(label, section, _TASKS[task], notes),
        "names": parse_names(label + "list", section.get("list")),
        "keep_tensors": parse_names(label + "tensor_list", section.get("tensor_list")),
        "between": parse_between(label + "scope", section.get("scope") or None),
        **_read_data_mode(label, section),
    }
    if arguments["between"] and arguments["names"]:
        raise BadUsage(
            f"{label}scope and {label}list contradict each other: "
            "a range or a filter, not both. Empty one of them"
        )
    _read_rest(content, section, label, notes)
    return ConfigFile(RecordConfig.make(**arguments), _read_dump_path(content), tuple(notes))


def _check_fields(content: dict[str, Any]) -> None:
    for name, value in content.items():
        if name in _SECTIONS:
            if not isinstance(value, dict):
                refuse(name, value, "an object with the fields of that task")
            for field in value:
                if field not in _SECTIONS[name]:
                    raise unknown_name("field", field, _SECTIONS[name], f" in '{name}'")
        elif name not in _TOP_FIELDS:
            raise unknown_name("field", name, (*_TOP_FIELDS, *_SECTIONS))


def _read_task(content: dict[str, Any], notes: list[str]) -> tuple[str, str]:
    """The task that is asked for, and the one that does it."""
    task = content.get("task", "statistics")
    if isinstance(task, str) and task in _OTHER_TASKS:
        instead, why = _OTHER_TASKS[task]
        notes.append(f"task {task}: {why}")
        return task, instead
    if isinstance(task, str) and task in _REFUSED_TASKS:
        raise BadUsage(
            f"task='{task}' is not supported: {_REFUSED_TASKS[task]}. Allowed: {', '.join(_TASKS)}"
        )
    chosen: str = parse_choice(tuple(_TASKS))("task", task)
    return chosen, chosen


def _read_level(content: dict[str, Any]) -> str:
    level = content.get("level", "L1")
    if level == "debug":
        raise BadUsage(
            "level='debug' is not a level here: rec.save(name, value) works at every level. "
            f"Allowed: {', '.join(get_args(Level))}"
        )
    chosen: str = parse_choice(get_args(Level))("level", level)
    return chosen


def _read_keep(label: str, section: dict[str, Any], keep: str, notes: list[str]) -> str:
    mode = parse_choice(("statistics", "md5", "xor"))(
        f"{label}summary_mode", section.get("summary_mode", "statistics")
    )
    if section.get("bench_path"):
        notes.append(
            f"bench_path: checksums are kept, not tensors. Then: tensorprobe compare DUMP "
            f"{section['bench_path']}, and dump the calls that differ by 'list'"
        )
        return "digest"
    if mode == "statistics":
        return keep
    if keep != "stats":
        notes.append(f"summary_mode {mode} adds nothing to task '{label[:-1]}'")
        return keep
    if mode == "xor":
        notes.append("summary_mode xor: a checksum is kept that sees two values swapped too")
    else:
        notes.append(_NATIVE_DIGEST)
    return "digest"


def _read_data_mode(label: str, section: dict[str, Any]) -> dict[str, Any]:
    modes = parse_names(label + "data_mode", section.get("data_mode")) or ("all",)
    parse = parse_choice(("all", *get_args(Direction), *get_args(Side)))
    modes = tuple(parse(label + "data_mode", mode) for mode in modes)
    if "all" in modes and len(modes) > 1:
        refuse(label + "data_mode", list(modes), "'all' alone, or parts without 'all'")
    directions = [mode for mode in modes if mode in get_args(Direction)]
    sides = [mode for mode in modes if mode in get_args(Side)]
    return {
        "directions": directions or get_args(Direction),
        "sides": sides or get_args(Side),
    }


def _read_dump_path(content: dict[str, Any]) -> str | None:
    dump_path = content.get("dump_path")
    if dump_path is not None and (not isinstance(dump_path, str) or not dump_path.strip()):
        refuse("dump_path", dump_path, "the folder to write to")
    return dump_path


def _read_rest(
    content: dict[str, Any], section: dict[str, Any], label: str, notes: list[str]
) -> None:
    """The fields that select nothing here: checked, then noted or refused."""
    for fields, prefix in ((content, ""), (section, label)):
        for name, reason in _REFUSED_FIELDS.items():
            if fields.get(name):
                raise BadUsage(f"{prefix}{name} is not supported: {reason}")
        for name, note in _NOTED_FIELDS.items():
            if fields.get(name):
                notes.append(f"{prefix}{name}: {note}")
    if content.get("seed") is not None:
        notes.append(f"seed: recording seeds nothing; give run --seed {content['seed']}")
    if content.get("is_deterministic"):
        notes.append("is_deterministic: recording changes no algorithm; call seed_all(mode=True)")
    if content.get("level") == "L2":
        notes.append("level L2: every ATen operator is recorded, on any device")
    if section.get("device") not in (None, "host"):
        notes.append(f"{label}device: it is for MindSpore")
    if section.get("file_format") not in (None, "npy", "pt"):
        notes.append(f"{label}file_format: tensors are written as .pt")
    if "diff_nums" in section and not section.get("bench_path"):
        notes.append("diff_nums has no effect without bench_path")
    if "dump_enable" in content:
        if not parse_bool("dump_enable", content["dump_enable"]):
            raise BadUsage(
                "dump_enable=False is not supported: the file is read once, so recording would "
                "never begin. Remove it, or call rec.start() where recording should begin"
            )
        notes.append("dump_enable: the file is read once; later changes of it have no effect")
    if "risk_level" in content:
        parse_choice(("ALL", "FOCUS", "CORE"))("risk_level", content["risk_level"])
        if content["risk_level"] != "ALL":
            notes.append("risk_level: every call is recorded")
    if "precision" in content:
        parse_choice(("low", "high"))("precision", content["precision"])
        notes.append("precision: mean and norm are always accumulated in float64")
    asynchronous = content.get("async_dump", content.get("enable_async_dump", False))
    if parse_bool("async_dump", asynchronous):
        notes.append("async_dump: values always leave the device in the background")
    if "custom_op_namespaces" in content:
        parse_names("custom_op_namespaces", content["custom_op_namespaces"])
        notes.append("custom_op_namespaces: custom ops are recorded whatever their namespace")
