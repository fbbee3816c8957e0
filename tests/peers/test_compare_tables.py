"""The peers' tables, cell by cell, as they themselves wrote them for the same data."""

from __future__ import annotations

import ast
import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorprobe as tp
from tensorprobe.comparing.align import Pair
from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.measure import CallPair, TensorPair, pair_tensors
from tensorprobe.comparing.rounding import Mode
from tensorprobe.comparing.verdict import Verdict
from tensorprobe.records import Call, Capture, TensorRecord, TensorSummary
from tensorprobe.report.columns import table
from tensorprobe.report.csv import write_csv
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.pair_metrics import PairMetrics

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("TENSORPROBE_SHARED") or ROOT.parent / "shared")
SAMPLES = SHARED / "data"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="no ../shared/data")

Cells = dict[str, str]
# The arguments of the sample program that are no tensors, by their digest.
NUMBERS = {"f570d16c": 2.0, "0dae4479": -0.1}


def read_rows(path: Path) -> list[Cells]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(text: str) -> Any:
    if text in ("None", "N/A", ""):
        return None
    return ast.literal_eval(text) if text not in ("inf", "nan", "-inf") else float(text)


def leaf(row: Cells, side: str, blob: bool) -> Any:
    """The value that a row of theirs is about."""
    dtype, shape = row[f"{side} Dtype"], row[f"{side} Tensor Shape"]
    cells = [row.get(f"{side} {key}", "None") for key in ("max", "min", "mean", "l2norm")]
    if dtype == "N/A":
        return None
    if not dtype.startswith("torch."):
        if f"{side} max" not in row:
            return NUMBERS[row["NPU MD5"]]
        return cells[0] if "str" in dtype else number(cells[0])
    numbers = [number(cell) for cell in cells]
    counts = (0, 0, 0)
    summary = TensorSummary(numbers[1], numbers[0], numbers[2], numbers[3], *counts)
    name = row[f"{side} Name"]
    return TensorRecord(
        name, role_of(name), dtype.removeprefix("torch."), tuple(ast.literal_eval(shape)),
        requires_grad=row[f"{side} Requires_grad"] == "True", summary=summary,
        digest=row.get("NPU MD5" if side == "NPU" else "BENCH MD5"),
        blob=Blob(Path(f"{name}.pt"), 0, 0) if blob else None,
    )  # fmt: skip


def role_of(name: str) -> Any:
    kinds = {"output": "output", "parameters": "parameter", "parameters_grad": "parameter_grad"}
    return next((role for part, role in kinds.items() if f".{part}." in name), "input")


def split(name: str) -> tuple[str, str]:
    """A row's name as its call and the place in it."""
    for part in (".input.", ".kwargs.", ".output.", ".parameters."):
        head, found, tail = name.partition(part)
        if found:
            return head, part.strip(".") + "." + tail
    head, _, tail = name.rpartition(".parameters_grad.0.")
    return f"{head}.parameters_grad.0", tail


def rebuild(rows: list[Cells], side: str, blob: bool) -> list[Call]:
    """The calls that those rows are about."""
    parts: dict[str, dict[str, Any]] = {}
    stacks: dict[str, tuple[str, ...]] = {}
    for row in rows:
        call, place = split(row[f"{side} Name"])
        parts.setdefault(call, {})[place] = leaf(row, side, blob)
        if row.get("NPU_Stack_Info", "N/A") != "N/A":
            stacks[call] = tuple(ast.literal_eval(row["NPU_Stack_Info"]))
    return [
        make_call(i, name, values, stacks.get(name, ()))
        for i, (name, values) in enumerate(parts.items())
    ]


def make_call(index: int, name: str, values: dict[str, Any], stack: tuple[str, ...]) -> Call:
    args, kwargs, outputs = [], {}, []
    for place, value in values.items():
        group, _, path = place.partition(".")
        if group == "input" and path.isdigit():
            args.append(value)
        elif group in ("input", "kwargs"):
            kwargs[path] = value
        elif group == "output":
            outputs.append(value)
    return Call(
        index=index, name=name, op="torch.x", stack=stack, args=tuple(args), kwargs=kwargs,
        direction="backward" if ".backward" in name else "forward", outputs=tuple(outputs),
        tensors=tuple(v for v in values.values() if isinstance(v, TensorRecord)),
    )  # fmt: skip


def comparison(rows: list[Cells], mode: Mode, fill: Callable[[Cells], PairMetrics | None]) -> Any:
    calls = [rebuild(rows, side, mode == "tensors") for side in ("NPU", "Bench")]
    pairs = [pair_tensors(Pair(a, e, "exact")) for a, e in zip(*calls, strict=True)]
    by_name = {row["NPU Name"]: row for row in rows}
    for pair in pairs:
        for row in pair.tensors:
            assert row.actual is not None
            row.metrics = fill(by_name[row.actual.name])
    return compared(pairs, mode)


def compared(pairs: list[CallPair], mode: Mode) -> Compared:
    captures = [
        Capture(Path(name), "msprobe", [c for p in pairs if (c := p.pair[side]) is not None])
        for side, name in enumerate("ae")
    ]
    verdict = Verdict(
        verdict="match", actual="a", expected="e", mode=mode, counts={}, culprits=[]
    )  # fmt: skip
    return Compared(*captures, pairs, verdict)


def metrics_of(row: Cells) -> PairMetrics | None:
    """Metrics with which these cells come about: what is tested is what becomes of them."""
    if row["MaxAbsErr"] == "unsupported":
        return None

    def cell(name: str) -> float:
        return float(row[name]) if row[name] != "unsupported" else 0.5

    return PairMetrics(
        6, cosine=cell("Cosine"), max_abs=cell("MaxAbsErr"), euclidean=cell("EucDist"),
        max_rel_nonzero=cell("MaxRelativeErr"), within_1_1000=cell("One Thousandth Err Ratio"),
        within_5_1000=cell("Five Thousandths Err Ratio"),
    )  # fmt: skip


@needs_samples
@pytest.mark.parametrize(
    ("file", "mode"),
    [
        ("compare_L1_statistics.csv", "stats"),
        ("compare_L1_md5.csv", "digest"),
        ("compare_L1_xor.csv", "digest"),
        ("compare_L1_tensor.csv", "tensors"),
        ("compare_L0_tensor.csv", "tensors"),
        ("compare_mix_tensor.csv", "tensors"),
    ],
)
def test_msprobe_wrote_the_same_cells(file: str, mode: Mode, tmp_path: Path) -> None:
    theirs = read_rows(SAMPLES / "msprobe" / "compare" / file)
    found = comparison(theirs, mode, metrics_of if mode == "tensors" else lambda row: None)
    write_csv(tmp_path / "ours.csv", table(found, "msprobe"))
    ours = read_rows(tmp_path / "ours.csv")
    assert list(ours[0]) == list(theirs[0])
    assert [row["NPU Name"] for row in ours] == [row["NPU Name"] for row in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        was_wrong = their["Result"] == "pass" and mine["Result"] == "warning"
        for column in their:
            if not (was_wrong and column in ("Result", "Err_message")):
                assert mine[column] == their[column], (their["NPU Name"], column)


def ptdbg_cells(shapes: list[tuple[int, ...]], m: PairMetrics | None) -> Cells:
    """What `--columns ptdbg` says of one tensor."""
    name = "Torch.relu.0.forward"
    records = [TensorRecord(f"{name}.input.0", "input", "float32", shape) for shape in shapes]
    calls = [make_call(0, name, {"input.0": record}, ()) for record in records]
    pair = CallPair(Pair(calls[0], calls[1], "exact"), [TensorPair("input.0", *records, m)])
    made = table(compared([pair], "tensors"), "ptdbg")
    ((row, _),) = made.rows
    return dict(zip(made.header, map(str, row), strict=True))


@needs_samples
@pytest.mark.parametrize("name", ["compare_all", "compare_api_stack"])
def test_ptdbg_reached_the_same_verdicts(name: str) -> None:
    (file,) = (SAMPLES / "ptdbg" / "v2.3" / name).glob("*.csv")
    judged = 0
    for row in read_rows(file):
        # of the stored file: their index has one shape for both
        if row["Cosine"] in ("Nan", "shape unmatched") or row["NPU Tensor Shape"] in ("[]", "[1]"):
            continue
        shapes = [tuple(ast.literal_eval(row[f"{s} Tensor Shape"])) for s in ("NPU", "Bench")]
        m = PairMetrics(
            6, cosine=float(row["Cosine"]), max_abs=float(row["MaxAbsErr"]), mismatched=1
        )  # fmt: skip
        found = ptdbg_cells(shapes, m)
        for column in ("Cosine", "MaxAbsErr", "Accuracy Reached or Not", "Err_message"):
            assert found[column] == row[column], (row["NPU Name"], column)
        judged += 1
    assert judged > 40


def test_ptdbg_with_other_shapes() -> None:
    found = ptdbg_cells([(2, 3), (3, 2)], None)
    assert found["Cosine"] == found["MaxAbsErr"] == "shape unmatched"
    assert found["Accuracy Reached or Not"] == "Unmatched"


def tensor(name: str, *, dtype: str = "float32", **more: Any) -> TensorRecord:
    summary = TensorSummary(-1.0, 2.0, 0.5, 3.0, 0, 0, 0)
    return TensorRecord(name, role_of(name), dtype, (2, 3), **{"summary": summary, **more})


def one_call(mode: Mode, ours: dict[str, Any], theirs: dict[str, Any] | None) -> list[Cells]:
    """The rows of one call with an input and an output, each given as what differs in it."""
    name = "Functional.relu.0.forward"
    calls = [
        make_call(0, name, {
            "input.0": tensor(f"{name}.input.0"),
            "output.0": tensor(f"{name}.output.0", **part),
        }, ())
        for part in (ours, theirs) if part is not None
    ]  # fmt: skip
    pair: CallPair = pair_tensors(Pair(calls[0], calls[1] if theirs is not None else None, "exact"))
    made = table(compared([pair], mode), "msprobe")
    return [dict(zip(made.header, map(str, row), strict=True)) for row, _ in made.rows]


def test_a_call_without_partner_is_n_a_throughout() -> None:
    for row in one_call("stats", {}, None):
        assert (row["Bench Name"], row["Max diff"], row["Bench max"]) == ("N/A",) * 3
        assert (row["Requires_grad Consistent"], row["Result"]) == ("False", "warning")
        assert row["Err_message"] == '["warning: no bench data matched."]'
    for row in one_call("digest", {"digest": "1"}, None):
        assert row["Result"] == "warning"


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ({"requires_grad": True}, {}, "requires_grad"),
        ({"dtype": "float16"}, {}, "dtype"),
        ({"summary": TensorSummary(-1.0, float("inf"), 0.5, 3.0, 0, 1, 0)}, {}, "infinity"),
        ({"summary": TensorSummary(-1.0, 2.0, 0.5, 9.0, 0, 0, 0)}, {}, "half"),
    ],
)
def test_msprobes_errors(ours: dict[str, Any], theirs: dict[str, Any], word: str) -> None:
    given, made = one_call("stats", ours, theirs)
    assert (given["Result"], given["Err_message"]) == ("pass", "[]")
    assert made["Result"] == "error"
    assert word in json.loads(made["Err_message"])[0]


def test_nan_and_infinite_statistics_are_written_as_they_write_them() -> None:
    infinite = TensorSummary(float("-inf"), 2.0, None, 3.0, 0, 1, 0)
    (_, made) = one_call("stats", {"summary": infinite}, {})
    assert (made["Min diff"], made["MinRelativeErr"]) == ("-inf", "-inf")
    assert (made["Mean diff"], made["NPU mean"]) == ("-inf", "-inf")


SIDES = ("Dtype", "Tensor Shape", "Requires_grad", "max", "min", "mean", "l2norm")


@needs_samples
@pytest.mark.parametrize(
    ("dump", "file"),
    [
        ("L1_statistics", "compare_L1_statistics.csv"),
        ("L1_md5", "compare_L1_md5.csv"),
        ("L1_xor", "compare_L1_xor.csv"),
    ],
)
def test_their_dumps_give_their_rows(dump: str, file: str, tmp_path: Path) -> None:
    """Read by us, compared with itself: the cells of one side of their table."""
    theirs = read_rows(SAMPLES / "msprobe" / "compare" / file)
    capture = tp.load(SAMPLES / "msprobe" / "dump" / dump)
    tp.compare(capture, capture).save(tmp_path, columns="msprobe")
    ours = read_rows(tmp_path / "comparison.csv")
    assert list(ours[0]) == list(theirs[0])
    assert [row["NPU Name"] for row in ours] == [row["NPU Name"] for row in theirs]
    assert {(row["Result"], row["Err_message"]) for row in ours} == {("pass", "[]")}
    matches = []
    for side, digest in (("NPU", "NPU MD5"), ("Bench", "BENCH MD5")):
        columns = [(f"NPU {name}", f"{side} {name}") for name in SIDES] + [("NPU MD5", digest)]
        matches.append(
            all(
                mine[a] == their[b]
                for mine, their in zip(ours, theirs, strict=True)
                for a, b in columns
                if a in mine
            )
        )
    assert any(matches)
