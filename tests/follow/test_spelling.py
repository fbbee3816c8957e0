"""Operators by the dunder that the program wrote, where a recording is asked for that."""

from __future__ import annotations

from pathlib import Path

import torch

import tensorprobe as tp

X, W = torch.ones(2), torch.ones(2, 2)
THREE = 3


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def program() -> None:
    n = 5
    X + 1, X.add(1), 2 * X, 2 * same(X), THREE * X, X * THREE, n * X
    1 - X, X - 1, X / 2, W @ W, W.matmul(W), X**2, X.pow(2), 2**X
    X == 1, X.eq(1), X > 0, -X, X // 2, X % 2, X[0], X + X, 1 + X
    y = X.clone()
    y += 1
    y.add_(1)
    y *= 2
    y -= 1
    y[0] = 1
    torch.add(X, X)


def test_each_is_named_and_counted_as_it_is_written(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "a", level="L1", operators="dunder"):
        program()
    calls = tp.load(tmp_path / "a").calls
    assert [call.name.removesuffix(".forward") for call in calls] == [
        "Tensor.__add__.0", "Tensor.add.0", "Tensor.__rmul__.0", "Tensor.__rmul__.1",
        "Tensor.__rmul__.2", "Tensor.__mul__.0", "Tensor.__rmul__.3", "Tensor.__rsub__.0",
        "Tensor.__sub__.0", "Tensor.__truediv__.0", "Tensor.__matmul__.0", "Tensor.matmul.0",
        "Tensor.__pow__.0", "Tensor.pow.0", "Tensor.__rpow__.0", "Tensor.__eq__.0", "Tensor.eq.0",
        "Tensor.__gt__.0", "Tensor.__neg__.0", "Tensor.__floordiv__.0", "Tensor.__mod__.0",
        "Tensor.__getitem__.0", "Tensor.__add__.1", "Tensor.__radd__.0", "Tensor.clone.0",
        "Tensor.__iadd__.0", "Tensor.add_.0", "Tensor.__imul__.0", "Tensor.__isub__.0",
        "Tensor.__setitem__.0", "Torch.add.0",
    ]  # fmt: skip
    assert {call.op for call in calls if call.name.startswith("Tensor.__add__")} == {
        "torch.Tensor.add"
    }


def test_natively_they_are_one(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "a", level="L1"):
        X + 1, X.add(1), 1 + X
    assert [call.name for call in tp.load(tmp_path / "a").calls] == [
        f"Tensor.add.{i}.forward" for i in range(3)
    ]


def test_both_spellings_select(tmp_path: Path) -> None:
    for operators in ("native", "dunder"):
        for wanted in ("add", "__add__", "Tensor.add", "torch.add"):
            with tp.Recorder(
                tmp_path / operators / wanted, level="L1", operators=operators, apis=[wanted]
            ):
                X * 2, X + 1
            assert len(tp.load(tmp_path / operators / wanted).calls) == 1


def test_a_converted_recording_compares_with_a_native_one(tmp_path: Path) -> None:
    for name, operators in (("a", "dunder"), ("b", "native")):
        with tp.Recorder(tmp_path / name, level="L1", keep="tensors", operators=operators):
            program()
    verdict = tp.compare(tmp_path / "a", tmp_path / "b").verdict
    assert verdict.verdict == "match"
    assert verdict.counts["only_actual"] == verdict.counts["only_expected"] == 0
