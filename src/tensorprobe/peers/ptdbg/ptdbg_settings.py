"""What the arguments of the door ask for: where a dump goes, and what is in it. No torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensorprobe.errors import BadUsage
from tensorprobe.peers.ptdbg.ptdbg_names import parse_name
from tensorprobe.peers.ptdbg.ptdbg_writing import Content, Stacks, Style, undirected

Release = Literal["2.3", "5.0"]
MODES = ("all", "list", "range", "stack", "acl", "api_list", "api_stack")
_DIRECTIONS = ("forward", "backward")
_SIDES = ("input", "output")
# Names in an api_list that stand for a whole kind of calls, as later releases have it.
_KINDS = {name.lower(): name for name in ("Distributed", "NPU", "Aten", "VF")}
# What later releases call an optimizer's step in `scope`.
_OPTIMIZER_STEP = re.compile(r"optim_(\w+)_step(?:_\d+)?(?:_forward)?")
_WHOLE = re.compile(
    r"(Tensor|Torch|Functional|VF|NPU|Aten|Distributed|Module|Ops)[._].+[._]\d+"
    r"([._](forward|backward))?"
)


class DumpTarget(NamedTuple):
    """Where dumps go: {folder}/{tag}_v{release}/[stepN/]rankN/{stem}.pkl."""

    folder: Path
    stem: str = "dump"
    tag: str = "ptdbg_dump"
    release: Release = "2.3"

    @property
    def root(self) -> Path:
        """The folder of the ranks, or of the steps."""
        return self.folder / f"{self.tag}_v{self.release}"

    def index_of(self, prefix: str, rank: int | str, step: int | None = None) -> Path:
        """The index of one rank, and of one step where steps have folders."""
        place = self.root if step is None else self.root / f"step{step}"
        return place / f"rank{rank}" / f"{prefix}{self.stem}.pkl"


def read_target(fpath: object, dump_tag: object) -> DumpTarget:
    """`./dump/npu.pkl` names the index as in release 2.3, `./dump` a folder as in later ones."""
    if not isinstance(dump_tag, str) or not dump_tag or os.sep in dump_tag:
        raise BadUsage(f"dump_tag={dump_tag!r}: expected the name of a folder, such as 'dump'")
    if fpath is None:
        work = os.environ.get("ASCEND_WORK_PATH")
        if work:
            return DumpTarget(Path(work) / "dump_data", tag=dump_tag)
    if not isinstance(fpath, str | os.PathLike) or not os.fspath(fpath):
        raise BadUsage(
            f"set_dump_path({fpath!r}): expected a file or a folder. "
            "Write set_dump_path('./dump_path/npu_dump.pkl')"
        )
    path = Path(fpath)
    if path.suffix == ".pkl" and not path.is_dir():
        return DumpTarget(path.parent.absolute(), path.stem, dump_tag)
    if path.exists() and not path.is_dir():
        raise BadUsage(
            f"set_dump_path('{path}'): there is a file of that name. "
            "Give a folder, or a name that ends in .pkl"
        )
    return DumpTarget(path.absolute(), tag=dump_tag)


class Switch(NamedTuple):
    """What one set_dump_switch("ON", ...) asks for."""

    mode: str
    options: dict[str, Any]  # of the Recorder
    style: Style
    prefix: str  # of the dump's name
    scope: tuple[str, ...] = ()


def read_on_off(name: str, switch: object) -> bool:
    """ "ON" is True and "OFF" False, in any case."""
    if isinstance(switch, str) and switch.upper() in ("ON", "OFF"):
        return switch.upper() == "ON"
    raise BadUsage(f"{name}={switch!r}: expected 'ON' or 'OFF'")


def read_switch(
    mode: object = "all",
    scope: object = None,
    api_list: object = None,
    filter_switch: object = "ON",
    dump_mode: object = "all",
    *,
    summary_only: object = False,
    summary_mode: object = None,
    release: Release = "2.3",
) -> Switch:
    """The arguments of set_dump_switch, or of configure_hook; BadUsage names the wrong one."""
    if not isinstance(mode, str) or mode not in MODES:
        near = difflib.get_close_matches(str(mode), MODES, n=1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise BadUsage(f"mode={mode!r}: expected one of {', '.join(MODES)}{hint}")
    names = _names("scope", scope)
    apis = _names("api_list", api_list)
    _check_scope(mode, names, apis)
    is_filtered = read_on_off("filter_switch", filter_switch)
    content = _content(summary_only, summary_mode)
    stacks: Stacks = "no"
    if mode == "stack":
        stacks = "only"
    elif mode in ("api_stack", "list", "range", "acl"):
        stacks = "yes"
    directions, sides = _directions_and_sides(dump_mode)
    # The forward of a backward that is asked for is recorded too; see Style.backward_only.
    backward_only = {"*"} if directions == ["backward"] else _backward_only(mode, names)
    recorded = [undirected(name) if undirected(name) in backward_only else name for name in names]
    options: dict[str, Any] = {
        "level": "L1",
        "operators": "dunder",  # a + b is Tensor___add___0, as they have it
        "keep": _keep(mode, content),
        "stacks": stacks != "no",
        "dtypes": "float" if is_filtered else "all",
        "directions": list(_DIRECTIONS) if "backward" in directions else directions,
        "sides": sides,
        **_selected(mode, recorded, apis),
    }
    style = Style(
        release,
        content,
        stacks,
        is_filtered,
        # of an optimizer's step, which is asked for by name, there is nothing else to write
        only_peers=not any(_OPTIMIZER_STEP.fullmatch(name) for name in names),
        backward_only=frozenset(backward_only),
    )
    prefix = f"{mode}_" if mode == "api_stack" or (release != "2.3" and mode != "all") else ""
    return Switch(mode, options, style, prefix, names)


def _names(field: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadUsage(f"{field}={value!r}: expected a list of names, such as ['relu']")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise BadUsage(f"{field} holds {name!r}: expected the name of a call")
    return names


def _check_scope(mode: str, scope: Sequence[str], apis: Sequence[str]) -> None:
    wanted = {"range": (2, 2), "list": (1, None), "stack": (0, 2), "acl": (1, 1)}
    least, most = wanted.get(mode, (0, None))
    if len(scope) < least or (most is not None and len(scope) > most):
        numbers = {(2, 2): "two names", (1, None): "at least one name", (0, 2): "at most two names"}
        expected = numbers.get((least, most), "one name")
        raise BadUsage(
            f"mode='{mode}' takes {expected} in scope, {len(scope)} given. Write "
            f"set_dump_switch('ON', mode='{mode}', scope=['Tensor_permute_1_forward', ...])"
        )
    if mode == "api_list" and not apis:
        raise BadUsage(
            "mode='api_list' takes functions in api_list, none given. "
            "Write set_dump_switch('ON', mode='api_list', api_list=['relu'])"
        )


def _content(summary_only: object, summary_mode: object) -> Content:
    if not isinstance(summary_only, bool):
        raise BadUsage(f"summary_only={summary_only!r}: expected True or False")
    contents: dict[object, Content] = {
        None: "statistics" if summary_only else "tensors",
        "all": "tensors",
        "summary": "statistics",
        "md5": "checksums",
    }
    if not isinstance(summary_mode, str | None) or summary_mode not in contents:
        raise BadUsage(f"summary_mode={summary_mode!r}: expected 'all', 'summary' or 'md5'")
    if summary_only and summary_mode is not None:
        raise BadUsage("summary_only=True and summary_mode: give one of the two")
    return contents[summary_mode]


def _keep(mode: str, content: Content) -> str:
    if mode == "stack":
        return "structure"
    return "stats" if content == "statistics" else "tensors"  # a CRC is made from the tensor


def _backward_only(mode: str, scope: Sequence[str]) -> set[str]:
    """The calls that a list names by their backward alone."""
    if mode != "list":
        return set()
    backward = {undirected(name) for name in scope if name.endswith("backward")}
    return backward - {undirected(name) for name in scope if not name.endswith("backward")}


def _directions_and_sides(dump_mode: object) -> tuple[list[str], list[str]]:
    """One word as in release 2.3, a list of them later; a direction alone means both sides."""
    words = [dump_mode] if isinstance(dump_mode, str) else dump_mode
    allowed = ("all", *_DIRECTIONS, *_SIDES)
    if words is None:
        words = ["all"]
    if not isinstance(words, Sequence) or not words or any(word not in allowed for word in words):
        raise BadUsage(f"dump_mode={dump_mode!r}: expected one or a list of {', '.join(allowed)}")
    if "all" in words:
        words = ()
    return (
        [word for word in _DIRECTIONS if word in words] or list(_DIRECTIONS),
        [word for word in _SIDES if word in words] or list(_SIDES),
    )


def _selected(mode: str, scope: Sequence[str], apis: Sequence[str]) -> dict[str, Any]:
    """The selection of the recorder for a mode and its scope."""
    if mode == "range" or (mode == "stack" and len(scope) == 2):
        return {"between": list(scope)}
    if mode in ("list", "stack"):
        if not scope:
            return {}
        if all(_WHOLE.fullmatch(name) for name in scope):
            return {"calls": list(scope)}
        return {"names": [_part(name) for name in scope]}
    if mode == "acl":
        stem = scope[0].removesuffix("forward").removesuffix("backward").rstrip("_.")
        return {"calls": [stem], "directions": list(_DIRECTIONS), "sides": list(_SIDES)}
    if mode == "api_list":
        return {"apis": [_api(name) for name in apis]}
    return {}


def _part(name: str) -> str:
    """The beginning of a name, as the recorder spells names: "Tensor_permute" is both parts."""
    if (step := _OPTIMIZER_STEP.fullmatch(name)) is not None:
        return f"Optimizer.{step[1]}.step."
    found = parse_name(name)
    if found is not None or _WHOLE.fullmatch(name):
        return name
    head, _, rest = name.partition("_")
    return f"{head}.{rest}" if rest else name


def _api(name: str) -> str:
    return f"{_KINDS[name.lower()]}.*" if name.lower() in _KINDS else name
