"""The tables that users of ptdbg_ascend's and msprobe's accuracy check know, by their rules.

`accuracy_checking_*` are those of one device, `api_precision_compare_*` set two devices against
each other. Their verdicts are in there; ours are in check.json.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorprobe.checking.row import Row

if TYPE_CHECKING:
    import torch

RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
# Their titles, and the key of each in what peer_metrics gives; those without one stay blank.
_METRICS = {
    "余弦相似度": "cosine",
    "最大绝对误差": "max_abs",
    "双百指标": "within_1e2",
    "双千指标": "within_1e3",
    "双万指标": "within_1e4",
    "二进制一致错误率": "unequal",
    "误差均衡性": "balance",
    "均方根误差": "rmse",
    "小值域错误占比": "small_value",
    "相对误差最大值": "max_rel",
    "相对误差平均值": "mean_rel",
    "inf/nan错误率": "",
    "相对误差错误率": "",
    "绝对误差错误率": "",
    "ULP误差最大值": "",
    "ULP误差平均值": "",
    "ULP误差大于阈值占比": "",
}
DETAIL_COLUMNS = (
    "API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_METRICS, "Status", "Message",
)  # fmt: skip
_BLANK = " "  # what an unused cell holds in their tables
_PASS, _WARNING, _ERROR, _SKIP = "pass", "warning", "error", "SKIP"


# One device against its reference


class _Small(NamedTuple):
    """Up to which size a number is small, and how far off it may be then."""

    threshold: float
    tolerance: float


_SMALL = {"float16": _Small(2.0**-10, 1e-16), "bfloat16": _Small(2.0**-10, 1e-16)}
_SMALL_DEFAULT = _Small(2.0**-20, 2.0**-30)


def peer_metrics(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """Their measures of one result and what they make of it: `status` and `why`."""
    import torch

    found, expected = found.detach().cpu(), expected.detach()
    if found.shape != expected.shape:
        return {"status": _ERROR, "why": "other shapes"}
    if found.numel() == 0 or found.is_complex():
        return {"status": _SKIP, "why": "nothing that is compared"}
    if not found.is_floating_point():
        unequal = float((found != expected.to(found.dtype)).double().mean())
        return {"unequal": unequal, "status": _ERROR if unequal else _PASS, "why": ""}
    dtype = str(found.dtype).removeprefix("torch.")
    epsilon = 2.0**-8 if dtype == "bfloat16" else float(torch.finfo(expected.dtype).eps)
    actual, wanted = found.double(), expected.double()
    error = (actual - wanted).abs()
    relative = error / (wanted.abs() + epsilon)
    metrics = {
        **_benchmark_measures(found, expected, error, relative, _SMALL.get(dtype, _SMALL_DEFAULT)),
        "max_abs": float(error.max()),
    }
    return _judged(metrics, dtype, actual.reshape(-1), wanted.reshape(-1), relative)


def _benchmark_measures(
    found: torch.Tensor,
    expected: torch.Tensor,
    error: torch.Tensor,
    relative: torch.Tensor,
    small: _Small,
) -> dict[str, float]:
    """Small numbers and others apart; the others without NaN and infinity."""
    narrowed = expected.to(found.dtype)
    finite = found.isfinite() & narrowed.isfinite()
    is_small = (expected.abs() <= small.threshold) & finite
    normal = finite & ~is_small
    n, n_normal, n_small = found.numel(), int(normal.sum()), int(is_small.sum())
    square = float(error[normal].square().sum()) / n
    difference = (found - narrowed).double()
    balance = int((difference > 0).sum()) - int((difference < 0).sum())
    wrong = int((is_small & (error > small.tolerance)).sum())
    return {
        "balance": abs(balance) / n,
        # the mean over the normal ones, by way of a factor that is never infinite
        "rmse": math.sqrt(square * (n / (n_normal + 1e-4) + 1e-4)),
        "small_value": wrong / n_small if n_small else 0.0,
        "max_rel": float(relative[normal].max()) if n_normal else 0.0,
        "mean_rel": float(relative[normal].mean()) if n_normal else 0.0,
    }


def _judged(
    metrics: dict[str, Any],
    dtype: str,
    actual: torch.Tensor,
    wanted: torch.Tensor,
    relative: torch.Tensor,
) -> dict[str, Any]:
    """One measure after the other until one decides; those after it stay blank."""

    def verdict(status: str, why: str) -> dict[str, Any]:
        return {**metrics, "status": status, "why": why}

    def share_within(limit: float) -> float:
        return float((relative < limit).double().mean())

    if actual.numel() > 1:
        norms = float(actual.norm() * wanted.norm())
        if norms:
            metrics["cosine"] = min(max(float(actual @ wanted) / norms, -1.0), 1.0)
        one_is_zero = bool(actual.any()) != bool(wanted.any())
        if one_is_zero or ("cosine" in metrics and not metrics["cosine"] > 0.99):
            del metrics["max_abs"]
            return verdict(_ERROR, "the cosine is not above 0.99")
    if metrics["max_abs"] < 0.001:
        return verdict(_PASS, "the largest absolute error is below 0.001")
    if dtype in ("float16", "bfloat16"):
        metrics["within_1e2"] = share_within(1e-2)
        if metrics["within_1e2"] <= 0.99:
            return verdict(_ERROR, "less than 99 % are within 1 %")
        metrics["within_1e3"] = share_within(1e-3)
        fine = metrics["within_1e3"] > 0.999
        return verdict(_PASS if fine else _WARNING, "" if fine else "not all are within 0.1 %")
    metrics["within_1e3"], metrics["within_1e4"] = share_within(1e-3), share_within(1e-4)
    if metrics["within_1e3"] <= 0.999:
        return verdict(_ERROR, "less than 99.9 % are within 0.1 %")
    fine = metrics["within_1e4"] > 0.9999
    return verdict(_PASS if fine else _WARNING, "" if fine else "not all are within 0.01 %")


def write_tables(folder: Path, rows: Sequence[Row]) -> None:
    """Write both pairs of tables; the second one where a benchmark device was given."""
    for old in folder.glob("a*_20*.csv"):
        if old.name.startswith(("accuracy_checking_", "api_precision_compare_")):
            old.unlink()
    stamp = time.strftime("%Y%m%d%H%M%S")
    details = [detail for row in rows for detail in _details(row)]
    results = [
        (_api(row.name), *_both(row, details_of(row)), row.reason if row.verdict != "pass" else "")
        for row in rows
    ]
    _write(folder / f"accuracy_checking_result_{stamp}.csv", RESULT_COLUMNS, results)
    cells = [[detail[column] for column in DETAIL_COLUMNS] for detail in details]
    _write(folder / f"accuracy_checking_details_{stamp}.csv", DETAIL_COLUMNS, cells)
    benchmark = [detail for row in rows for detail in _details(row, benchmark=True)]
    if benchmark:
        compared = compare_precision(details, benchmark)
        write_precision_compare(folder, compared, stamp)


def details_of(row: Row) -> list[str]:
    """The status of each of a call's results, by their rules."""
    return [f"{t.name} {t.peer['status']}" for t in row.tensors if t.peer]


def _both(row: Row, statuses: list[str]) -> tuple[str, str]:
    if row.verdict == "skipped":
        return _SKIP, _SKIP
    if row.verdict == "crashed":
        return _ERROR, _BLANK
    found = []
    for direction, own in (("forward", row.forward), ("backward", row.backward)):
        mine = [text.split()[1] for text in statuses if text.startswith(direction)]
        if not mine and own is not None:  # dropout: judged by its share of zeros
            mine = [_PASS if own == "pass" else _ERROR]
        found.append(_together(mine))
    return found[0], found[1]


def _together(statuses: Iterable[str]) -> str:
    """The worst of them; SKIP where all are."""
    found = set(statuses)
    if not found:
        return _BLANK
    order = (_ERROR, _WARNING, _PASS, _SKIP)
    return next(status for status in order if status in found)


def _api(name: str) -> str:
    """Their names carry no direction."""
    return name.removesuffix(".forward").removesuffix(".backward")


def _details(row: Row, *, benchmark: bool = False) -> list[dict[str, str]]:
    """The lines of a call. Gradients of arguments that need none are there, as skipped."""
    lines: list[dict[str, str]] = []
    next_gradient = 0
    for tensor in row.tensors:
        peer = tensor.benchmark_peer if benchmark else tensor.peer
        if not peer:
            continue
        number = tensor.name.rpartition(".")[2]
        if tensor.name.startswith("backward.output.") and number.isdigit():
            for missing in range(next_gradient, int(number)):
                name = f"{_api(row.name)}.backward.output.{missing}"
                line = dict.fromkeys(DETAIL_COLUMNS, _BLANK)
                why = "this argument needs no gradient"
                lines.append({**line, "API Name": name, "Status": _SKIP, "Message": why})
            next_gradient = int(number) + 1
        lines.append(
            {
                "API Name": f"{_api(row.name)}.{tensor.name}",
                "Bench Dtype": f"torch.{tensor.reference_dtype}",
                "DEVICE Dtype": f"torch.{tensor.device_dtype}",
                "Shape": str(tensor.shape),
                **{title: _cell(peer.get(key)) for title, key in _METRICS.items()},
                "Status": peer["status"],
                "Message": peer["why"],
            }
        )
    return lines


def _cell(value: float | None) -> str:
    return _BLANK if value is None else f"{value:.14f}"


# Two devices against each other

# Title of a measure in the details, titles of its ratio and of what is made of it.
_RATIOS = (
    ("小值域错误占比", "小值域错误比值", "小值域判定结果"),
    ("均方根误差", "均方根误差比值", "均方根误差判定结果"),
    ("相对误差最大值", "相对误差最大值比值", "相对误差最大值判定结果"),
    ("相对误差平均值", "相对误差平均值比值", "相对误差平均值判定结果"),
    ("误差均衡性", "误差均衡性比值", "误差均衡性判定结果"),
)
_RATES = (
    "inf/nan错误率", "inf/nan判定结果", "相对误差错误率", "相对误差判定结果", "绝对误差错误率",
    "绝对误差判定结果", "二进制一致错误率", "二进制一致错误率判定结果", "ULP误差平均值",
    "ULP误差大于阈值占比", "ULP误差大于阈值占比比值", "ULP误差判定结果", "双千指标",
    "双千指标判定结果",
)  # fmt: skip
COMPARE_COLUMNS = (
    "API Name", *(title for _, *titles in _RATIOS for title in titles), *_RATES,
    "比对结果", "比对算法", "Message",
)  # fmt: skip
COMPARE_RESULT_COLUMNS = ("API Name", *RESULT_COLUMNS[1:])
_BY_RATIO, _BY_BITS = "标杆比对法", "二进制一致法"
# Errors of the benchmark device below this are taken for this.
_LEAST_ERROR = {"torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}
_LEAST_ERROR_DEFAULT = 2.0**-14
# What the ratios may be, by the grade of an operator.
_GRADES = {
    "L1": "embedding npu_fusion_attention_grad npu_fusion_attention scatter_ scatter_add_",
    "L2": "addmm npu_cross_entropy_loss npu_cross_entropy_loss_backward GELU layer_norm matmul mm "
    "index one_hot sum npu_rms_norm npu_rms_norm_backward nonzero",
}
_GRADE = {name: grade for grade, names in _GRADES.items() for name in names.split()}
_MOST: dict[str, dict[str, float]] = {
    "均方根误差": {"L0": 2.0, "L1": 1.5, "L2": 1.2},
    "相对误差最大值": {"L0": 10.0, "L1": 5.0, "L2": 2.0},
    "相对误差平均值": {"L0": 2.0, "L1": 1.5, "L2": 1.2},
    "小值域错误占比": dict.fromkeys(("L0", "L1", "L2"), 2.0),
    "误差均衡性": dict.fromkeys(("L0", "L1", "L2"), 2.0),
}


def compare_precision(
    details: Sequence[Mapping[str, str]], benchmark: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """api_precision_compare_details from two accuracy_checking_details: lines by their titles."""
    there = {line["API Name"]: line for line in benchmark}
    found = []
    for line in details:
        name = line["API Name"]
        if name in there or line["Status"] == _SKIP:
            found.append(_compared(line, there.get(name, line)))
    return found


def _compared(line: Mapping[str, str], benchmark: Mapping[str, str]) -> dict[str, str]:
    compared = {**dict.fromkeys(COMPARE_COLUMNS, _BLANK), "API Name": line["API Name"]}
    dtype = line["DEVICE Dtype"]
    if not dtype.strip():
        return {**compared, "比对结果": _SKIP, "Message": line["Message"]}
    if not line["均方根误差"].strip():  # whole numbers
        rate = line["二进制一致错误率"]
        status = _PASS if rate.strip() and float(rate) == 0 else _ERROR
        compared |= {"二进制一致错误率": rate, "二进制一致错误率判定结果": status}
        return {**compared, "比对结果": status, "比对算法": _BY_BITS, "Message": ""}
    grade = _GRADE.get(line["API Name"].split(".")[1], "L0")
    least = _LEAST_ERROR.get(dtype, _LEAST_ERROR_DEFAULT)
    statuses, reasons = [], []
    for measure, ratio_title, status_title in _RATIOS:
        mine, theirs = float(line[measure]), float(benchmark[measure])
        ratio = abs(mine) / max(abs(theirs), least)
        most = _MOST[measure][grade]
        status = _ERROR if ratio > most else _PASS
        compared |= {ratio_title: f"{ratio:.14f}", status_title: status}
        if measure != "误差均衡性":  # shown, not counted
            statuses.append(status)
            reasons += [f"{ratio_title} > {most:g}"] if status == _ERROR else []
    result = {"比对结果": _together(statuses), "比对算法": _BY_RATIO, "Message": "; ".join(reasons)}
    return {**compared, **result}


def write_precision_compare(
    folder: Path, compared: Sequence[Mapping[str, str]], stamp: str
) -> None:
    """Write api_precision_compare_details and, a line a call, api_precision_compare_result."""
    cells = [[line[column] for column in COMPARE_COLUMNS] for line in compared]
    _write(folder / f"api_precision_compare_details_{stamp}.csv", COMPARE_COLUMNS, cells)
    calls: dict[str, dict[str, list[str]]] = {}
    reasons: dict[str, str] = {}
    for line in compared:
        api, _, direction = line["API Name"].rpartition(".output.")[0].rpartition(".")
        calls.setdefault(api, {}).setdefault(direction, []).append(line["比对结果"])
        if line["比对结果"] == _ERROR:
            reasons.setdefault(api, line["Message"])
    rows = [
        (
            api,
            _together(ways.get("forward", ())),
            _together(ways.get("backward", ())),
            reasons.get(api, ""),
        )
        for api, ways in calls.items()
    ]
    _write(folder / f"api_precision_compare_result_{stamp}.csv", COMPARE_RESULT_COLUMNS, rows)


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # their files begin with a BOM
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
