"""The tables of the peers' accuracy check: their columns, their rules, their verdicts."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tensorprobe as tp
from recorded import ROOT, record
from tensorprobe.peers import check_tables as peer_tables
from tensorprobe.peers.check_tables import compare_precision, peer_metrics

SHARED = Path(os.environ.get("TENSORPROBE_SHARED", ROOT.parent / "shared")) / "data"
MSPROBE = SHARED / "msprobe" / "acc_check"
PTDBG = SHARED / "ptdbg" / "api_accuracy_checker" / "oct2024"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def columns(path: Path) -> tuple[str, ...]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return tuple(next(csv.reader(file)))


@pytest.mark.skipif(not MSPROBE.is_dir(), reason="no samples of the peers' tables")
def test_the_columns_are_theirs() -> None:
    ours = {
        "accuracy_checking_result.csv": peer_tables.RESULT_COLUMNS,
        "accuracy_checking_details.csv": peer_tables.DETAIL_COLUMNS,
        "api_precision_compare_result.csv": peer_tables.COMPARE_RESULT_COLUMNS,
        "api_precision_compare_details.csv": peer_tables.COMPARE_COLUMNS,
    }
    assert {name: columns(MSPROBE / name) for name in ours} == ours
    for path in sorted(PTDBG.glob("ut_noise*/*.csv")):
        assert columns(path) == ours["_".join(path.name.split("_")[:3]) + ".csv"]


@pytest.mark.skipif(not MSPROBE.is_dir(), reason="no samples of the peers' tables")
def test_their_table_of_two_devices_comes_out_of_their_details() -> None:
    details = read(MSPROBE / "accuracy_checking_details.csv")
    # all errors of the other device were below what theirs are at least taken for
    measures = ("均方根误差", "相对误差最大值", "相对误差平均值", "小值域错误占比")
    exact = [
        {**line, **{m: "0" for m in measures if line[m].strip()}} for line in details
    ]  # fmt: skip
    found = compare_precision(details, exact)
    expected = read(MSPROBE / "api_precision_compare_details.csv")
    assert [line["API Name"] for line in found] == [line["API Name"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for title in peer_tables.COMPARE_COLUMNS[1:9] + peer_tables.COMPARE_COLUMNS[11:-1]:
            if theirs[title].replace(".", "").isdigit():
                # their table has more digits than the details it was made from
                assert float(ours[title]) == pytest.approx(float(theirs[title]), abs=2e-10)
            else:
                assert ours[title] == theirs[title], (ours["API Name"], title)


NOISE = 1 + 0.003 * (2 * torch.rand(1000, generator=torch.Generator().manual_seed(0)) - 1)
LARGE = torch.linspace(1, 10, 1000)
RULES = {
    "equal": (LARGE, LARGE.double(), "pass", {"max_abs": 0.0, "rmse": 0.0, "balance": 0.0}),
    "another direction": (LARGE.flip(0), LARGE.double(), "error", {}),
    "0.3 % off in float32": (LARGE * NOISE, LARGE.double(), "error", {}),
    "0.3 % off in float16": ((LARGE * NOISE).half(), LARGE.float(), "warning", {"within_1e2": 1.0}),
    "2 % off in float16": ((LARGE * 1.02).half(), LARGE.float(), "error", {"within_1e2": 0.0}),
    "0.02 % off": (LARGE * 1.0002, LARGE.double(), "warning", {"within_1e3": 1.0}),
    "off, but small": (LARGE * 1e-4 * NOISE, LARGE.double() * 1e-4, "pass", {}),
    "small numbers": (
        torch.tensor([1e-8, 1.0]), torch.tensor([0.0, 1.0]).double(), "pass",
        {"small_value": 1.0, "max_rel": 0.0},
    ),
    "a scalar": (torch.tensor(2.0), torch.tensor(2.0).double(), "pass", {"max_abs": 0.0}),
    "whole numbers": (
        torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), "error", {"unequal": 0.25}
    ),
    "zeros": (torch.zeros(3), torch.zeros(3).double(), "pass", {"max_abs": 0.0}),
    "zeros on one side": (torch.zeros(3), torch.ones(3).double(), "error", {}),
    "another shape": (torch.zeros(3), torch.zeros(4).double(), "error", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_their_rules(name: str) -> None:
    found, expected, status, measures = RULES[name]
    metrics = peer_metrics(found, expected)
    assert metrics["status"] == status, metrics
    assert {key: metrics[key] for key in measures} == measures


def test_ratios_are_judged_by_the_grade_of_the_operator() -> None:
    line = {
        **dict.fromkeys(peer_tables.DETAIL_COLUMNS, " "),
        "API Name": "Functional.relu.0.forward.output.0", "DEVICE Dtype": "torch.float32",
        "均方根误差": "0.0014", "小值域错误占比": "0", "相对误差最大值": "0.003",
        "相对误差平均值": "0.001", "误差均衡性": "0.9", "Status": "pass",
    }  # fmt: skip
    other = {**line, "均方根误差": "0.001", "相对误差最大值": "0.001", "误差均衡性": "0.1"}
    (relu,) = compare_precision([line], [other])
    assert (relu["均方根误差比值"], relu["比对结果"]) == ("1.40000000000000", "pass")
    assert relu["误差均衡性判定结果"] == "error"  # shown, not counted
    name = "Torch.matmul.0.forward.output.0"
    (matmul,) = compare_precision([{**line, "API Name": name}], [{**other, "API Name": name}])
    assert matmul["比对结果"] == "error"
    assert matmul["Message"] == "均方根误差比值 > 1.2; 相对误差最大值比值 > 2"


def program() -> None:
    x = torch.randn(8, 16)
    weight = torch.randn(4, 16, requires_grad=True)
    y = F.gelu(F.linear(x, weight))
    (y.sum() + y.argmax()).backward()


def test_both_pairs_of_tables_are_written(tmp_path: Path) -> None:
    record(tmp_path / "run", program, level="L1")
    (tmp_path / "faults.py").write_text(
        "from tensorprobe.devices import sim_npu\n"
        "sim_npu.install()\n"
        "sim_npu.plant('gelu', effect='scale:1.01')\n"
    )
    for _ in range(2):  # the tables of the first time make room
        tp.check(
            tmp_path / "run", tmp_path / "out", device="npu", against=tmp_path / "run",
            references=tmp_path / "faults.py", only=["linear", "gelu", "argmax"], peer_tables=True,
        )  # fmt: skip
    tables = {path.name[:-19]: read(path) for path in (tmp_path / "out").glob("*.csv")}
    assert len(tables) == 4
    results = {line["API name"]: line for line in tables["accuracy_checking_result"]}
    assert results["Functional.gelu.0"]["Forward Test Success"] == "error"
    assert results["Functional.linear.0"]["Backward Test Success"] == "pass"
    assert results["Tensor.argmax.0"]["Backward Test Success"] == " "
    details = {line["API Name"]: line for line in tables["accuracy_checking_details"]}
    linear = details["Functional.linear.0.forward.output.0"]
    assert (linear["Bench Dtype"], linear["Shape"]) == ("torch.float64", "(8, 4)")
    assert linear["余弦相似度"] == "1.00000000000000"
    assert details["Functional.linear.0.backward.output.0"]["Status"] == "SKIP"
    assert details["Tensor.argmax.0.forward.output.0"]["二进制一致错误率"] == "0.00000000000000"
    compared = {line["API Name"]: line for line in tables["api_precision_compare_result"]}
    assert compared["Functional.gelu.0"]["Forward Test Success"] == "error"
    assert compared["Functional.linear.0"]["Forward Test Success"] == "pass"
    assert compared["Tensor.argmax.0"]["Forward Test Success"] == "pass"
