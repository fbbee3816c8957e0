"""The reference table: right values, and a verdict that tells rounding from wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tensorprobe.ascend.operator_references import REFERENCES, check_outputs

rng = np.random.default_rng(0)
X = rng.normal(size=(4, 6))
Y = rng.normal(size=(4, 6))
P = np.abs(X) + 0.5


def ref(op: str, *inputs, **attributes):
    return REFERENCES[op]([np.asarray(x) for x in inputs], attributes)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x)
    return e / e.sum(axis=axis, keepdims=True)


CASES = [
    ("L2Loss", (X,), {}, np.sum(X**2) / 2),
    ("Rsqrt", (P,), {}, P**-0.5),
    ("Sigmoid", (X,), {}, 1 / (1 + np.exp(-X))),
    ("Swish", (X,), {"scale": 1.0}, X / (1 + np.exp(-X))),
    ("Softplus", (X,), {}, np.log1p(np.exp(X))),
    ("LeakyRelu", (X,), {"negative_slope": 0.1}, np.where(X > 0, X, 0.1 * X)),
    ("Erf", (np.array([0.0, 1.0]),), {}, np.array([0.0, 0.8427007929497149])),
    ("RealDiv", (X, P), {}, X / P),
    ("BiasAdd", (rng.normal(size=(1, 6, 2, 2)), X[0]), {"data_format": "NCHW"}, None),
    ("AddN", (X, Y, X), {}, 2 * X + Y),
    ("SelectV2", (X > 0, X, Y), {}, np.where(X > 0, X, Y)),
    ("ClipByValue", (X, -0.5, 0.5), {}, np.clip(X, -0.5, 0.5)),
    ("ReduceSumD", (X,), {"axes": [0], "keep_dims": True}, X.sum(0, keepdims=True)),
    ("ReduceMean", (X, np.array([1])), {}, X.mean(1)),
    ("ReduceMaxD", (X,), {"axes": []}, X.max()),
    ("ArgMaxV2", (X, np.array(1)), {}, X.argmax(1)),
    ("MatMulV2", (X, Y), {"transpose_x2": True}, X @ Y.T),
    ("MatMul", (X, Y), {"transpose_x1": True}, X.T @ Y),
    ("BatchMatMul", (X[None], Y[None]), {"adj_x2": True}, (X @ Y.T)[None]),
    ("SoftmaxV2", (X,), {"axes": [-1]}, softmax(X)),
    ("LogSoftmaxV2", (X,), {"axes": [0]}, np.log(softmax(X, 0))),
    ("Gather", (X, np.array([3, 0])), {}, X[[3, 0]]),
    ("GatherV2", (X, np.array([5, 1]), np.array(1)), {}, X[:, [5, 1]]),
    ("GatherV2", (X, np.array([[1], [2], [3], [4]]), np.array(1)), {"batch_dims": 1},
     X[np.arange(4), [1, 2, 3, 4]][:, None]),
    ("GatherElements", (X, np.zeros((4, 1), int)), {"dim": 1}, X[:, :1]),
    ("Cast", (np.array([1.9, -1.9]),), {"dst_type": 3}, np.array([1.0, -1.0])),
    ("Cast", (np.array([0.0, 2.0]),), {"dst_type": 12}, np.array([False, True])),
    ("Transpose", (X, np.array([1, 0])), {}, X.T),
    ("TransposeD", (X,), {"perm": [1, 0]}, X.T),
    ("ConcatD", (X, Y), {"concat_dim": 1}, np.concatenate([X, Y], 1)),
    ("Assign", (X, Y), {}, Y),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "attributes", "expected"), CASES)
def test_values(op, inputs, attributes, expected) -> None:
    if expected is None:
        expected = inputs[0] + inputs[1][None, :, None, None]
    got = ref(op, *inputs, **attributes)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert np.shape(got) == np.shape(expected)


def test_norms() -> None:
    gamma, beta = rng.normal(size=6), rng.normal(size=6)
    y, mean, variance = ref("LayerNorm", X, gamma, beta, begin_norm_axis=1, epsilon=1e-5)
    want = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5) * gamma + beta
    np.testing.assert_allclose(y, want)
    assert mean.shape == variance.shape == (4, 1)
    y, scale = ref("RmsNorm", X, gamma, epsilon=1e-6)
    np.testing.assert_allclose(y, X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-6) * gamma)
    assert scale.shape == (4, 1)


def test_there_are_enough_of_them() -> None:
    families = "L2Loss Add ReduceSumD MatMul LayerNorm SoftmaxV2 GatherV2 Cast TransposeD"
    assert set(families.split()) <= set(REFERENCES)
    assert len(REFERENCES) >= 30


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_agrees_and_a_wrong_element_does_not(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    x, y = X.astype(kind), Y.astype(kind)
    out = (x.astype(np.float64) @ y.astype(np.float64).T).astype(kind)
    attributes = {"transpose_x2": True}
    good = check_outputs("MatMul", [x, y], [out], [dtype], attributes)
    assert good.agrees
    assert good.text.startswith("the dump's output 0 agrees with the reference")
    bad = out.copy()
    bad[2, 1] = bad[2, 1] * 1.1 + 1
    wrong = check_outputs("MatMul", [x, y], [bad], [dtype], attributes)
    assert wrong.agrees is False
    assert "is off by" in wrong.text
    assert "in 1 of 16 elements, first at [2, 1]" in wrong.text


def test_nonfinite_and_saturation() -> None:
    big = np.array([300.0, 1.0], np.float16)
    for answer, agrees in ((np.inf, True), (65504.0, True), (-np.inf, False), (np.nan, False)):
        out = np.array([answer, 1.0], np.float16)
        assert check_outputs("Square", [big], [out], ["float16"], {}).agrees is agrees
    nan = np.array([np.nan, 1.0], np.float32)
    assert check_outputs("Abs", [nan], [nan], ["float32"], {}).agrees


def test_integers_are_exact() -> None:
    x = np.array([1, 2], np.int32)
    assert check_outputs("Add", [x, x], [x * 2], ["int32"], {}).agrees
    assert check_outputs("Add", [x, x], [x * 2 + 1], ["int32"], {}).agrees is False


def test_what_cannot_be_checked_says_so() -> None:
    assert check_outputs("MyOp", [X], [X], ["float32"], {}).text == "no reference exists for MyOp"
    assert "no outputs" in check_outputs("Abs", [X], [], [], {}).text
    assert "does not take these" in check_outputs("Add", [X], [X], ["float32"], {}).text
    assert "has shape" in check_outputs("Abs", [X], [X[:1]], ["float32"], {}).text
