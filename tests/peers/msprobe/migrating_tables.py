"""The tables of docs/migrating.md about msprobe, made from what the door does.

`python tests/peers/msprobe/migrating_tables.py` writes them into the page.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorprobe.errors import BadUsage
from tensorprobe.peers.msprobe import msprobe_command as command
from tensorprobe.peers.msprobe import msprobe_config as config
from tensorprobe.peers.msprobe.msprobe_functions import REFUSED
from tensorprobe.peers.msprobe.msprobe_packages import NOT_HERE

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"
SRC = Path(__file__).parents[3] / "src" / "tensorprobe"

Row = tuple[str, str, str]

# A value for each field that asks for something.
_VALUES: dict[str, object] = {
    "dump_path": "./dump", "rank": [0], "step": ["1-3"], "async_dump": True,
    "enable_async_dump": True, "dump_enable": True, "extra_info": False, "precision": "high",
    "risk_level": "FOCUS", "custom_op_namespaces": ["_C_ascend"], "load": {"path": "old"},
    "seed": 1234, "is_deterministic": True, "enable_dataloader": True, "acl_config": "acl.json",
    "scope": ["Torch.relu.0.forward", "Torch.relu.3.forward"], "list": ["relu"],
    "data_mode": ["forward"], "slice": [{"dim": 0}], "request_id": "r1", "tensor_list": ["relu"],
    "device": "device", "stat_cal_mode": "device", "device_stat_precision_mode": "high",
    "bench_path": "OLD", "diff_nums": 1, "file_format": "bin", "backward_input": ["x.pt"],
    "online_run_ut": True, "is_online": True, "overflow_nums": 2, "check_mode": "all",
}  # fmt: skip
_CHOICES = {
    "task": (
        "statistics", "tensor", "structure", "overflow_check", "nan_check", "diff_check",
        "acc_check", "run_ut", "free_benchmark", "grad_probe", "exception_dump",
    ),
    "level": ("L0", "L1", "mix", "L2", "debug"),
    "summary_mode": ("statistics", "md5", "xor"),
}  # fmt: skip
_REMARKS = {
    "task overflow_check": "a guard: `overflow_nums` overflows end the program. "
    "findings.json is in dump_path",
    "rank": "`[0]` of a single process records it",
    "summary_mode md5": "the CRC-32 of the bytes, of a copy taken at the call",
    "dump_enable": "the file is read again when it has changed; a damaged one turns recording off",
    "seed": "as `seed_all(seed, is_deterministic)` when the debugger is made",
    "is_deterministic": "with `seed`",
    "diff_nums": "of no consequence: with `bench_path` all that differ are found",
    "check_mode": "of no consequence",
}
_NOT_READ = "fields of tasks that are refused; `acc_check -config` reads the two lists"
_OF_ONLINE = [name for name in config._ONLINE_FIELDS if name not in config._NOTED_FIELDS]


def fields() -> Iterator[Row]:
    """Every field of config.json, in every section, asked for by itself."""
    for name in config._TOP_FIELDS:
        if name in _CHOICES:
            for value in _CHOICES[name]:
                yield _judge(f"{name} {value}", {name: value})
        else:
            yield _judge(name, {name: _VALUES[name], **({"seed": 1} if "deter" in name else {})})
    seen = set()
    for task in ("statistics", "tensor"):
        for name in config._SECTIONS[task]:
            if name in seen:
                continue
            seen.add(name)
            if name in _OF_ONLINE:
                continue
            if name in _CHOICES:
                for value in _CHOICES[name]:
                    yield _judge(f"{name} {value}", {"task": task, task: {name: value}})
            else:
                yield _judge(name, {"task": task, task: {name: _VALUES[name]}})
    for name in config._SECTIONS["overflow_check"]:
        section = {name: _VALUES[name]}
        yield _judge(name, {"task": "overflow_check", "overflow_check": section})
    yield _names(_OF_ONLINE), "no effect", "with `is_online` and `online_run_ut`"
    rest = [section for section in config._SECTIONS if section not in ("statistics", "tensor")]
    unread = {name for task in rest for name in config._SECTIONS[task] if name not in seen}
    yield _names(sorted(unread - {*config._SECTIONS["overflow_check"]})), "no effect", _NOT_READ
    yield "a field that does not exist", "refused", "the error names the one you may have meant"


def _judge(label: str, content: dict[str, object]) -> Row:
    name = f"`{label}`" if " " not in label else "`{}` `{}`".format(*label.split(" ", 1))
    try:
        found = config.read_door({"dump_path": "d", **content})
    except BadUsage as error:
        return name, "refused", _sentence(str(error))
    usual = config.read_door({"dump_path": "d", **_bare(content)}).notes
    notes = [note for note in found.notes if note not in usual]
    remark = _REMARKS.get(label, "")
    if remark or not notes:
        return name, "works", remark
    return (
        name,
        "works" if label.startswith(("level", "task")) else "no effect",
        _sentence(notes[0]),
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bare(content: dict[str, object]) -> dict[str, object]:
    task = content.get("task")
    return {"task": task} if task in ("statistics", "tensor", "overflow_check") else {}


def _sentence(text: str) -> str:
    text = re.sub(r"^\S+ is not supported: |^\S+ ?\w*: |\. Allowed: .*", "", text)
    return text.replace("|", "\\|")


def verbs() -> Iterator[Row]:
    """Every verb of every release."""
    yield "`compare`", "works", "the table as msprobe writes it, and a verdict"
    for name, text in {**command.CHECKS, **command.OVERFLOWS, **command.CONFIG_CHECKS}.items():
        yield f"`{name}`", "works", text
    for name, text in command.INSTEAD.items():
        yield f"`{name}`", "other word", text


def options() -> Iterator[Row]:
    """Every option of the verbs that are here."""
    parser = command.command_line()
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    for verb in ("compare", "acc_check", "overflow_check", "config_check"):
        for action in verbs[verb]._actions:
            if not action.option_strings or "--help" in action.option_strings:
                continue
            names = ", ".join(f"`{name}`" for name in action.option_strings)
            text = action.help or ""
            answer = "refused" if text.startswith("refused: ") else "works"
            if answer == "works" and text.startswith(("always", "of no ", "nothing", "not needed")):
                answer = "no effect"
            yield f"`{verb}` {names}", answer, text.removeprefix("refused: ")
    yield "`-f pytorch`, `--version`, `-V`", "works", ""


def imports() -> Iterator[Row]:
    """Every path that scripts import from."""
    home = SRC / "msprobe"
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        name = ".".join(("msprobe", *(part for part in parts if part != "__init__")))
        if path.name == "__main__.py":
            continue
        names = getattr(importlib.import_module(f"tensorprobe.{name}"), "__all__", [])
        shown = [each for each in names if each != "NOT_HERE"]
        if shown:
            yield f"`{name}`", "works", ", ".join(f"`{each}`" for each in shown)
    for name, instead in REFUSED.items():
        yield f"`msprobe.pytorch.{name}`", "other word", instead
    for name, instead in NOT_HERE.items():
        yield f"`msprobe.{name}`", "other word", instead


TABLES = {"fields": fields, "verbs": verbs, "options": options, "imports": imports}


def table(name: str) -> str:
    """One table in Markdown."""
    rows: Sequence[Row] = list(TABLES[name]())
    head = f"| {'field' if name == 'fields' else 'msprobe'} | here | |\n|---|---|---|\n"
    return head + "".join(f"| {a} | {b} | {c} |\n" for a, b, c in rows)


def replaced(page: str) -> str:
    """The page with its tables made anew."""
    for name in TABLES:
        begin, end = f"<!-- made by migrating_tables.py: {name} -->\n", "<!-- end -->"
        before, mark, rest = page.partition(begin)
        assert mark, f"docs/migrating.md lacks {begin}"
        page = before + mark + table(name) + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
    sys.stdout.write(f"written: {PAGE}\n")
