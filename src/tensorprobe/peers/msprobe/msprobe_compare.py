"""msprobe's compare and compare_distributed: the same files and columns, over our comparison."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorprobe.comparing.comparison import Compared, compare_captures
from tensorprobe.errors import BadUsage
from tensorprobe.records import Capture
from tensorprobe.report.columns import table
from tensorprobe.report.console import render
from tensorprobe.report.csv import write_csv
from tensorprobe.report.xlsx import write_xlsx
from tensorprobe.store.loading import load
from tensorprobe.terminal import say, warn

# The keys of input_param, of earlier releases and of 26.
_ACTUAL = ("npu_path", "npu_json_path", "npu_dump_data_dir")
_EXPECTED = ("bench_path", "bench_json_path", "bench_dump_data_dir")
_STACK = ("stack_path", "stack_json_path")
_OTHERS = ("is_print_compare_log",)
_MAPPINGS = ("data_mapping", "cell_mapping", "layer_mapping")
# Done always, or of no consequence here.
_NEEDLESS = (
    "stack_mode", "auto_analyze", "fuzzy_match", "is_print_compare_log", "first_diff_analyze",
    "diff_analyze", "highlight",
)  # fmt: skip


def compare(
    input_param: Mapping[str, Any],
    output_path: str | Path = "./output",
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    *,
    suffix: str = "",
    xlsx: bool = False,
    rank: int | None = None,
    step: int | None = None,
    **more: Any,
) -> Compared:
    """Compare two dumps, files or folders of any depth: writes compare_result_{time}.csv.

    `input_param` names them by npu_json_path and bench_json_path (or npu_path and bench_path).
    Stacks are in the table when the dump has them, whatever `stack_mode` says, and calls are
    aligned by their order, whatever `fuzzy_match` says.
    """
    mapping = _mapping(more)
    actual = load(_path(input_param, _ACTUAL))
    expected = load(_path(input_param, _EXPECTED))
    comparison = compare_captures(actual, expected, mapping=mapping, rank=rank, step=step)
    prefix = "debug_compare_result" if _is_saved(actual) else "compare_result"
    _write(comparison, Path(output_path), f"{prefix}{suffix}", xlsx)
    return comparison


def compare_distributed(
    npu_dump_dir: str | Path,
    bench_dump_dir: str | Path,
    output_path: str | Path = "./output",
    *,
    xlsx: bool = False,
    step: int | None = None,
    **more: Any,
) -> list[Compared]:
    """Compare two dumps rank by rank: writes compare_result_rank{N}_{time}.csv for each.

    Ranks pair by number; one that only one side has is named.
    """
    mapping = _mapping(more)
    actual, expected = load(npu_dump_dir), load(bench_dump_dir)
    for side, mine, other in (("npu", actual, expected), ("bench", expected, actual)):
        for rank in sorted({*mine.ranks} - {*other.ranks}):
            warn(f"tensorprobe: rank {rank} is in the {side} dump only")
    both = sorted({*actual.ranks} & {*expected.ranks})
    if not both:
        raise BadUsage(
            f"no rank is in both: the npu dump has {list(actual.ranks)}, the bench dump "
            f"{list(expected.ranks)}"
        )
    comparisons = []
    for rank in both:
        comparison = compare_captures(actual, expected, rank=rank, step=step, mapping=mapping)
        _write(comparison, Path(output_path), f"compare_result_rank{rank}", xlsx)
        comparisons.append(comparison)
    return comparisons


def _path(input_param: Mapping[str, Any], names: tuple[str, ...]) -> Path:
    if not isinstance(input_param, Mapping):
        raise BadUsage(f"compare(input_param): expected a dict, found {type(input_param).__name__}")
    known = (*_ACTUAL, *_EXPECTED, *_STACK, *_OTHERS)
    for name in input_param:
        if name not in known:
            raise BadUsage(f"compare: input_param has '{name}'; it takes {', '.join(known)}")
    for name in names:
        value = input_param.get(name)
        if isinstance(value, str | Path) and str(value):
            return Path(value)
    raise BadUsage(f"compare: input_param lacks {names[1]}, the dump.json or folder to compare")


def _mapping(more: dict[str, Any]) -> Any:
    """The one mapping that was given; what has no effect here is passed over, the rest refused."""
    found = [more.pop(name) for name in _MAPPINGS if more.get(name)]
    if len(found) > 1:
        raise BadUsage(f"compare: give one of {', '.join(_MAPPINGS)}, not {len(found)}")
    for name, value in more.items():
        if name not in (*_NEEDLESS, *_MAPPINGS) and value:
            raise BadUsage(f"compare: {name}={value!r} is not supported")
    return found[0] if found else None


def _is_saved(capture: Capture) -> bool:
    return bool(capture.calls) and all(call.name.startswith("Saved.") for call in capture.calls)


def _write(comparison: Compared, folder: Path, stem: str, xlsx: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    time = datetime.now().strftime("%Y%m%d%H%M%S")
    path = folder / f"{stem}_{time}.{'xlsx' if xlsx else 'csv'}"
    if xlsx:
        write_xlsx(path, comparison, "msprobe")
    else:
        write_csv(path, table(comparison, "msprobe"))
    say(*render(comparison).split("\n"), "", f"written: {path}")
