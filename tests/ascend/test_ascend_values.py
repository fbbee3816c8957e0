"""Abnormal values: which, how many, where first."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ascend_files import Tensor, write_dump

from tensorprobe.ascend.abnormal_values import analyse
from tensorprobe.cli.main import main


def found(array: np.ndarray) -> dict[str, tuple[int, tuple]]:
    return {f.problem: (f.count, f.first) for f in analyse(array).findings}


def test_healthy() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    statistics = analyse(x)
    assert statistics.findings == ()
    assert (statistics.min, statistics.max) == (x.min(), x.max())
    assert statistics.mean == pytest.approx(x.astype(np.float64).mean(), rel=1e-12)
    assert statistics.std == pytest.approx(x.astype(np.float64).std(), rel=1e-9)


def test_nan_inf_and_where() -> None:
    x = np.ones((3, 4), np.float32)
    x[1, 2] = np.nan
    x[2, 0] = np.inf
    x[0, 3] = x[2, 3] = -np.inf
    statistics = analyse(x)
    assert found(x) == {
        "nan": (1, ((1, 2),)), "+inf": (1, ((2, 0),)), "-inf": (2, ((0, 3), (2, 3)))
    }  # fmt: skip
    assert (statistics.min, statistics.max, statistics.finite_count) == (1, 1, 8)
    assert len(statistics.alarms) == 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_edges_of_float_types(dtype) -> None:
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        x = np.array([1, float(info.max), -float(info.max) * 0.95, 0], dtype)
        x[3] = info.smallest_subnormal
    assert found(x) == {
        "saturated": (1, ((1,),)), "near the limit": (1, ((2,),)), "subnormal": (1, ((3,),))
    }  # fmt: skip


def test_integers() -> None:
    assert found(np.array([2**31 - 1, -5, -(2**31)], np.int32)) == {"saturated": (2, ((0,), (2,)))}
    assert found(np.array([60000, 1], np.uint16)) == {"near the limit": (1, ((0,),))}
    assert found(np.array([127, -128, 0], np.int8)) == {}  # quantised values use all of it
    assert found(np.array([True, False])) == {}
    assert analyse(np.array([-(2**63)], np.int64)).abs_max == 2**63


def test_constant_is_told_but_no_alarm() -> None:
    statistics = analyse(np.zeros((2, 2), np.float32))
    assert [f.problem for f in statistics.findings] == ["constant"]
    assert statistics.alarms == ()
    assert str(statistics.findings[0]) == "constant (every element is 0)"


def test_memory_nobody_wrote() -> None:
    x = np.arange(64, dtype=np.float32)
    x[40:].view(np.uint32)[:] = 0xA5A5A5A5
    finding = next(f for f in analyse(x).findings if f.problem == "uninitialised")
    assert (finding.count, finding.first, finding.note) == (24, ((40,),), "words 0xa5a5a5a5")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.array(5.0, np.float16),
        np.array([1 + 2j, np.nan], np.complex64),
        np.array([1, 2], ml_dtypes.float8_e4m3fn),
        np.full(5, np.nan, np.float32),
        np.array([1, 2, 3], ml_dtypes.int4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_no_array_upsets_it(array: np.ndarray) -> None:
    statistics = analyse(array)
    assert statistics.count == array.size


def test_beyond_one_chunk() -> None:
    x = np.zeros(3_000_000, np.float32)
    x[2_500_000] = np.nan
    x[1::2] = 1
    assert found(x)["nan"] == (1, ((2_500_000,),))
    assert analyse(x).mean == pytest.approx(0.5, rel=1e-5)


def test_inspect_says_it_and_exits_3(tmp_path: Path, capsys) -> None:
    x = np.ones((2, 2), np.float32)
    x[1, 0] = np.nan
    dump = write_dump(
        tmp_path / "A.b.1.2", inputs=[Tensor(x)], outputs=[Tensor(np.arange(4, dtype=np.float32))]
    )
    assert main(["ascend", "inspect", str(dump)]) == 3
    assert capsys.readouterr().out == (
        f"{dump}\n"
        "  input.0: float32 [2, 2] ND\n"
        "    min 1, max 1, mean 1, std 0\n"
        "    nan x1 first at [1, 0]\n"
        "  output.0: float32 [4] ND\n"
        "    min 0, max 3, mean 1.5, std 1.11803\n"
    )
    np.save(tmp_path / "clean.npy", np.arange(3.0))
    assert main(["ascend", "inspect", str(tmp_path / "clean.npy")]) == 0
    capsys.readouterr()
    assert main(["ascend", "inspect", "--json", str(dump), str(tmp_path / "clean.npy")]) == 3
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["input.0", "output.0", "npy"]
    assert rows[0]["findings"][0]["first"] == [[1, 0]]


def test_inspect_of_something_else_exits_1(tmp_path: Path, capsys) -> None:
    bad = tmp_path / "A.b.1.2"
    bad.write_bytes(b"nothing of the sort")
    evil = tmp_path / "evil.npy"
    np.save(evil, np.array([{}], dtype=object), allow_pickle=True)
    assert main(["ascend", "inspect", str(bad), str(evil)]) == 1
    error = capsys.readouterr().err
    assert "expected" in error
    assert "evil.npy" in error
