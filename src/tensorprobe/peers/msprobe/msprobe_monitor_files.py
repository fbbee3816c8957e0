"""The CSV files of msprobe's monitors (TrainerMon and TrainerMonitorV2), read as trends."""

from __future__ import annotations

import csv
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tensorprobe.errors import BadArtefact
from tensorprobe.monitoring.series_reading import Trend, TrendKey, Trends
from tensorprobe.tensors.opening import open_file, split_lines

# <kind>_<first step>-<last step>.csv; v2 has a word more
_FILE = re.compile(
    r"(?:monitor_v[12]_)?(?P<kind>actv_grad|actv|grad_unreduced|grad_reduced|exp_avg_sq|exp_avg|"
    r"param_origin|param_updated|module|weight_grad|optimizer|param)_(?:step)?(?P<first>\d+)-\d+\.csv"
)
_RANK = re.compile(r"(?:^|[-_])rank_?(\d+)(?:[-_]|$)")
_KINDS = {
    "actv": "activation",
    "module.forward": "activation",
    "actv_grad": "activation.gradient",
    "module.backward": "activation.gradient",
    "grad_unreduced": "gradient.local",
    "weight_grad.unreduced": "gradient.local",
    "grad_reduced": "gradient",
    "weight_grad.reduced": "gradient",
    "exp_avg": "moment.exp_avg",
    "optimizer.exp_avg": "moment.exp_avg",
    "exp_avg_sq": "moment.exp_avg_sq",
    "optimizer.exp_avg_sq": "moment.exp_avg_sq",
    "param_origin": "parameter.before",
    "param.param_origin": "parameter.before",
    "param_updated": "parameter",
    "param.param_updated": "parameter",
}
_VALUES = ("norm", "mean", "max", "min")  # of the first that a file has
_MAX_LINE_NBYTES = 1 << 20
_MAX_STEP = 1 << 53
_MAX_DEPTH = 3
_Held = dict[TrendKey, dict[int, float]]


def recognises(path: Path) -> bool:
    """Whether such files lie in a folder, or one of them was named."""
    return any(True for _ in _files(path))


def read_trends(path: Path) -> list[Trends]:
    """The trends of each rank: norms, or what the files have in their place."""
    held: dict[int, _Held] = {}
    gaps: dict[int, list[str]] = {}
    for file, kind in sorted(_files(path), key=lambda each: _order(each[0])):
        ranks = _RANK.findall(str(file.parent))
        rank = int(ranks[-1]) if ranks else 0
        missing = gaps.setdefault(rank, [])
        _read(file, path if path.is_dir() else file.parent, kind, held.setdefault(rank, {}),
              missing.append)  # fmt: skip
    if not any(held.values()):
        reasons = [gap for each in gaps.values() for gap in each]
        raise BadArtefact(
            f"'{path}' has no number in the CSV files of msprobe's monitor"
            + (f": {reasons[0]}" if reasons else "")
        )
    facts = {"tool": "msprobe"}
    return [
        Trends(path, rank, facts, {key: _trend(each) for key, each in found.items()}, [],
               gaps[rank])
        for rank, found in sorted(held.items())
    ]  # fmt: skip


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    if path.is_file():
        name = _FILE.fullmatch(path.name)
        if name:
            yield path, name["kind"]
        return
    for folder, below, names in os.walk(path):
        if len(Path(folder).relative_to(path).parts) >= _MAX_DEPTH:
            below.clear()
        below.sort()
        for file in sorted(names):
            name = _FILE.fullmatch(file)
            if name:
                yield Path(folder) / file, name["kind"]


def _order(path: Path) -> tuple[str, int, str]:
    name = _FILE.fullmatch(path.name)
    return str(path.parent), int(name["first"]) if name else 0, path.name


def _read(path: Path, root: Path, kind: str, held: _Held, tell: Callable[[str], None]) -> None:
    with open_file(path, root) as file:
        lines = (
            (line or b"").decode("utf-8", "replace").removeprefix("\ufeff")
            for line in split_lines(file, _MAX_LINE_NBYTES)
        )
        rows = csv.reader(lines)
        try:
            header = next(rows, [])
            at = {name.strip(): number for number, name in enumerate(header)}
            name_at = at.get("name", at.get("module_name"))
            value_at = next((at[name] for name in _VALUES if name in at), None)
            if name_at is None or value_at is None or "step" not in at:
                tell(f"{path.name}: expected the columns name, step and norm, found {header}"[:300])
                return
            for row in rows:
                _add(row, kind, at, name_at, value_at, held, tell, f"{path.name}, {rows.line_num}")
        except csv.Error as error:
            tell(f"{path.name}: {error}")


def _add(
    row: list[str], kind: str, at: dict[str, int], name_at: int, value_at: int, held: _Held,
    tell: Callable[[str], None], place: str,
) -> None:  # fmt: skip
    try:
        scope = f"{kind}.{row[at['scope']]}" if "scope" in at else kind
        name = row[name_at]
        if kind == "optimizer":
            name = name.removesuffix("." + row[at["scope"]])
        if row[at.get("vpp_stage", name_at)] not in ("0", "-1", name):
            name = f"{row[at['vpp_stage']]}.{name}"  # stages number their modules from 0 each
        value = float(row[value_at] or "nan")
        step = int(row[at["step"]])
        if abs(step) > _MAX_STEP:
            raise ValueError("a step beyond all numbers")
    except (IndexError, ValueError) as error:
        tell(f"{place}: {error}"[:300])
        return
    values = held.setdefault(TrendKey(_KINDS.get(scope, scope), name or "model"), {})
    values.setdefault(step, value)  # of several micro steps the first


def _trend(values: dict[int, float]) -> Trend:
    steps = array("q", sorted(values))
    numbers = [values[step] for step in steps]
    return Trend(
        np.array(steps, np.int64),
        np.array([each if math.isfinite(each) else math.nan for each in numbers], float),
    )
