"""The tables that users of ptdbg_ascend's and msprobe's accuracy check know, with their columns."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.check.row import Judgement, Row, Verdict

if TYPE_CHECKING:
    import torch

RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
# Their titles, and the key of each in what peer_metrics gives.
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
    "inf/nan错误率": "nonfinite",
    "相对误差错误率": "relative",
    "绝对误差错误率": "absolute",
    "ULP误差最大值": "max_ulp",
    "ULP误差平均值": "mean_ulp",
    "ULP误差大于阈值占比": "over_ulp",
}
DETAIL_COLUMNS = (
    "API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_METRICS, "Status", "Message",
)  # fmt: skip
_BLANK = " "  # what an unused cell holds in their tables
_STATUS: dict[Verdict, str] = {
    "pass": "pass",
    "fail": "error",
    "crashed": "error",
    "skipped": "SKIP",
}


def peer_metrics(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """Their measures of one result, as far as they apply to its dtype."""
    import torch

    found, expected = found.detach().cpu(), expected.detach()
    if found.shape != expected.shape or found.numel() == 0 or found.is_complex():
        return {}
    unequal = float((found != expected.to(found.dtype)).double().mean())
    if not found.is_floating_point():
        return {"unequal": unequal}
    bits = torch.finfo(found.dtype)
    actual, wanted = found.double(), expected.double()
    usable = actual.isfinite() & wanted.isfinite()
    nonfinite = float((actual.isfinite() != wanted.isfinite()).double().mean())
    actual, wanted = actual[usable], wanted[usable]
    if actual.numel() == 0:
        return {"unequal": unequal, "nonfinite": nonfinite}
    error = (actual - wanted).abs()
    relative = error / (wanted.abs() + float(bits.smallest_normal))
    small = wanted.abs() < (2.0**-20 if bits.bits >= 32 else 2.0**-10)
    ulp = error / (
        bits.eps * torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(bits.tiny))))
    )
    norms = float(actual.norm() * wanted.norm())
    return {
        "cosine": float(actual @ wanted) / norms if norms else 1.0,
        "max_abs": float(error.max()),
        "within_1e2": float((relative < 1e-2).double().mean()),
        "within_1e3": float((relative < 1e-3).double().mean()),
        "within_1e4": float((relative < 1e-4).double().mean()),
        "unequal": unequal,
        "balance": abs(float(torch.sign(actual - wanted).mean())),
        "rmse": math.sqrt(float((error**2).mean())),
        "small_value": float((small & (error > 2.0**-16)).double().mean()),
        "max_rel": float(relative[~small].max()) if bool((~small).any()) else 0.0,
        "mean_rel": float(relative[~small].mean()) if bool((~small).any()) else 0.0,
        "nonfinite": nonfinite,
        "max_ulp": float(ulp.max()),
        "mean_ulp": float(ulp.mean()),
        "over_ulp": float((ulp > (32 if bits.bits >= 32 else 1)).double().mean()),
    }


def write_tables(folder: Path, rows: Sequence[Row]) -> None:
    """Write accuracy_checking_result.csv and accuracy_checking_details.csv."""
    results = [
        (
            _api(row.name),
            _STATUS[row.forward or row.verdict],
            _STATUS[row.backward] if row.backward else _BLANK,
            row.reason,
        )
        for row in rows
    ]
    _write(folder / "accuracy_checking_result.csv", RESULT_COLUMNS, results)
    details = [_detail(row, judgement) for row in rows for judgement in row.tensors]
    _write(folder / "accuracy_checking_details.csv", DETAIL_COLUMNS, details)


def _api(name: str) -> str:
    """Their names carry no direction."""
    return name.removesuffix(".forward").removesuffix(".backward")


def _detail(row: Row, judgement: Judgement) -> tuple[str, ...]:
    peer = judgement.peer or {}
    cells = [f"{peer[key]:.14f}" if key in peer else _BLANK for key in _METRICS.values()]
    return (
        f"{_api(row.name)}.{judgement.name}",
        f"torch.{judgement.reference_dtype}",
        f"torch.{judgement.device_dtype}",
        str(list(judgement.shape)),
        *cells,
        "pass" if judgement.ok else "error",
        judgement.reason or _BLANK,
    )


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # their files begin with a BOM
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
