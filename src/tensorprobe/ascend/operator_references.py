"""What common operators should have given: one table of numpy functions, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from tensorprobe.ascend.element_types import dtype_of_name, ge_dtype, kind_of
from tensorprobe.errors import BadUsage

Array = np.ndarray[Any, Any]
Attributes = dict[str, Any]
Function = Callable[[list[Array], Attributes], "list[Array]"]

# How far apart results of one dtype may be and still be the same: hardware approximates
# transcendental functions, and reductions add up in another order.
_TOLERANCE = {
    "float64": 1e-9, "float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3, "complex64": 1e-4,
    "complex128": 1e-9, "float8_e4m3fn": 0.0625, "float8_e5m2": 0.125, "hifloat8": 0.125,
}  # fmt: skip


# A check holds its inputs and its result in float64.
MAX_ELEMENTS = 1 << 25
MAX_RESULT = 1 << 24
MAX_PRODUCTS = 1 << 36
_CHUNK = 1 << 16


class ReferenceCheck(msgspec.Struct, frozen=True):
    """A dumped output against the reference; `agrees` is None where there is nothing to compare."""

    agrees: bool | None
    text: str
    max_abs: float | None = None
    max_rel: float | None = None


# --- the functions --------------------------------------------------------------------------


def _one(function: Callable[..., Any]) -> Function:
    return lambda x, a: [function(x[0])]


def _two(function: Callable[..., Any]) -> Function:
    return lambda x, a: [function(x[0], x[1])]


def _axes(x: list[Array], a: Attributes) -> tuple[int, ...] | None:
    """Axes as an attribute (the D forms) or as the second input; none at all means every one."""
    value: Any = a.get("axes", a.get("axis"))
    if value is None and len(x) > 1:
        value = x[1].reshape(-1).tolist()
    axes = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(int(axis) for axis in axes) or None


def _reduce(function: Callable[..., Any]) -> Function:
    def reduced(x: list[Array], a: Attributes) -> list[Array]:
        keep = bool(a.get("keep_dims", a.get("keepdims", False)))
        return [np.asarray(function(x[0], axis=_axes(x, a), keepdims=keep))]

    return reduced


def _flag(a: Attributes, *names: str) -> bool:
    return any(bool(a.get(name)) for name in names)


def _factors(x: list[Array], a: Attributes) -> tuple[Array, Array]:
    left, right = x[0], x[1]
    if _flag(a, "transpose_x1", "transpose_a", "adj_x1", "adj_x"):
        left = np.swapaxes(left, -1, -2)
    if _flag(a, "transpose_x2", "transpose_b", "adj_x2", "adj_y"):
        right = np.swapaxes(right, -1, -2)
    return left, right


def _matmul(x: list[Array], a: Attributes) -> list[Array]:
    left, right = _factors(x, a)
    out = left @ right
    return [out + x[2] if len(x) > 2 and x[2].size else out]


def _softmax(x: list[Array], a: Attributes) -> list[Array]:
    axes = _axes(x[:1], a) or (-1,)
    shifted = np.exp(x[0] - x[0].max(axis=axes, keepdims=True))
    return [shifted / shifted.sum(axis=axes, keepdims=True)]


def _log_softmax(x: list[Array], a: Attributes) -> list[Array]:
    axes = _axes(x[:1], a) or (-1,)
    shifted = x[0] - x[0].max(axis=axes, keepdims=True)
    return [shifted - np.log(np.exp(shifted).sum(axis=axes, keepdims=True))]


def _layer_norm(x: list[Array], a: Attributes) -> list[Array]:
    first = int(a.get("begin_norm_axis", -1)) % x[0].ndim
    axes = tuple(range(first, x[0].ndim))
    mean = x[0].mean(axis=axes, keepdims=True)
    variance = x[0].var(axis=axes, keepdims=True)
    out = (x[0] - mean) / np.sqrt(variance + float(a.get("epsilon", 1e-7)))
    if len(x) > 2:
        out = out * x[1] + x[2]
    return [out, mean, variance]


def _rms_norm(x: list[Array], a: Attributes) -> list[Array]:
    axes = tuple(range(x[0].ndim - x[1].ndim, x[0].ndim))
    scale = 1 / np.sqrt((x[0] ** 2).mean(axis=axes, keepdims=True) + float(a.get("epsilon", 1e-6)))
    return [x[0] * scale * x[1], scale]


def _batch_norm(x: list[Array], a: Attributes) -> list[Array]:
    """BNInfer: x, scale, offset, mean, variance, with channels on the second axis."""
    shape = [1, -1, *[1] * (x[0].ndim - 2)]
    scale, offset, mean, variance = (value.reshape(shape) for value in x[1:5])
    return [(x[0] - mean) / np.sqrt(variance + float(a.get("epsilon", 1e-7))) * scale + offset]


def _gather_axis(x: list[Array], a: Attributes) -> int:
    return int(x[2].reshape(-1)[0]) if len(x) > 2 and x[2].size else int(a.get("axis", 0))


def _gather(x: list[Array], a: Attributes) -> list[Array]:
    axis = _gather_axis(x, a)
    batch = int(a.get("batch_dims", 0))
    table, places = x[0], x[1].astype(np.int64)
    if not batch:
        return [np.take(table, places, axis=axis)]
    lead = table.shape[:batch]
    axis = axis % table.ndim - batch
    rows = [np.take(table[at], places[at], axis=axis) for at in np.ndindex(*lead)]
    return [np.stack(rows).reshape(*lead, *rows[0].shape)]


def _gather_elements(x: list[Array], a: Attributes) -> list[Array]:
    return [np.take_along_axis(x[0], x[1].astype(np.int64), axis=int(a.get("dim", 0)))]


def _cast(x: list[Array], a: Attributes) -> list[Array]:
    """`dst_type` is in ge::DataType's numbering; the comparison itself casts to the output."""
    target: Any = a.get("dst_type", a.get("DstT"))
    name = ge_dtype(target) if isinstance(target, int) else dtype_of_name(str(target))
    kind = kind_of(name)
    if name == "bool":
        return [x[0] != 0]
    return [np.trunc(x[0]) if kind.wide.kind in "iu" and x[0].dtype.kind == "f" else x[0]]


def _transpose(x: list[Array], a: Attributes) -> list[Array]:
    order = a["perm"] if "perm" in a else x[1].reshape(-1).tolist()
    return [x[0].transpose([int(axis) for axis in order])]


def _concat(x: list[Array], a: Attributes) -> list[Array]:
    axis: Any = a.get("concat_dim", a.get("axis", 0))
    return [np.concatenate(x, axis=int(axis))]


def _arg(function: Callable[..., Any]) -> Function:
    def arg(x: list[Array], a: Attributes) -> list[Array]:
        named = a.get("dimension", a.get("axis"))
        axis: Any = x[1].reshape(-1)[0] if named is None else named
        return [function(x[0], axis=int(axis))]

    return arg


def _bias_add(x: list[Array], a: Attributes) -> list[Array]:
    first = a.get("data_format") == "NCHW"
    return [x[0] + (x[1].reshape(-1, *[1] * (x[0].ndim - 2)) if first else x[1])]


def _gelu(x: Array) -> Array:
    value: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return value


def _sigmoid(x: Array) -> Array:
    value: Array = 0.5 * (1 + np.tanh(0.5 * x))  # the same function, without overflow
    return value


def _erf(x: Array) -> Array:
    value: Array = np.vectorize(math.erf, otypes=[np.float64])(x)
    return value


_REDUCTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("ReduceSum", np.sum),
    ("ReduceMean", np.mean),
    ("ReduceMax", np.max),
    ("ReduceMin", np.min),
    ("ReduceProd", np.prod),
    ("ReduceAll", np.all),
    ("ReduceAny", np.any),
]

REFERENCES: dict[str, Function] = {
    "L2Loss": lambda x, a: [np.asarray(np.sum(np.abs(x[0]) ** 2) / 2)],
    # elementwise
    "Abs": _one(np.abs), "Neg": _one(np.negative), "Exp": _one(np.exp), "Log": _one(np.log),
    "Log1p": _one(np.log1p), "Expm1": _one(np.expm1), "Sqrt": _one(np.sqrt),
    "Rsqrt": _one(lambda x: 1 / np.sqrt(x)), "Reciprocal": _one(lambda x: 1 / x),
    "Square": _one(np.square), "Floor": _one(np.floor), "Ceil": _one(np.ceil),
    "Round": _one(np.rint), "Sign": _one(np.sign), "Sin": _one(np.sin), "Cos": _one(np.cos),
    "Tanh": _one(np.tanh), "Sigmoid": _one(_sigmoid), "Erf": _one(_erf),
    "Relu": _one(lambda x: np.maximum(x, 0)), "Relu6": _one(lambda x: np.clip(x, 0, 6)),
    "Gelu": _one(_gelu), "Swish": lambda x, a: [x[0] * _sigmoid(x[0] * float(a.get("scale", 1)))],
    "Softplus": _one(lambda x: np.logaddexp(x, 0)),
    "LeakyRelu": lambda x, a: [np.where(x[0] > 0, x[0], x[0] * float(a.get("negative_slope", 0)))],
    "LogicalNot": _one(np.logical_not),
    "Add": _two(np.add), "AddV2": _two(np.add), "Sub": _two(np.subtract),
    "Mul": _two(np.multiply), "RealDiv": _two(np.divide), "Div": _two(np.divide),
    "Maximum": _two(np.maximum), "Minimum": _two(np.minimum), "Pow": _two(np.power),
    "FloorDiv": _two(np.floor_divide), "FloorMod": _two(np.mod),
    "SquaredDifference": _two(lambda x, y: np.square(x - y)),
    "Equal": _two(np.equal), "NotEqual": _two(np.not_equal), "Less": _two(np.less),
    "LessEqual": _two(np.less_equal), "Greater": _two(np.greater),
    "GreaterEqual": _two(np.greater_equal), "LogicalAnd": _two(np.logical_and),
    "LogicalOr": _two(np.logical_or),
    "BiasAdd": _bias_add,
    "Adds": lambda x, a: [x[0] + float(a["value"])],
    "Muls": lambda x, a: [x[0] * float(a["value"])],
    "Axpy": lambda x, a: [x[0] + float(a["alpha"]) * x[1]],
    "AddN": lambda x, a: [np.sum(np.stack(np.broadcast_arrays(*x)), axis=0)],
    "Select": lambda x, a: [np.where(x[0] != 0, x[1], x[2])],
    "SelectV2": lambda x, a: [np.where(x[0] != 0, x[1], x[2])],
    "ClipByValue": lambda x, a: [np.minimum(np.maximum(x[0], x[1]), x[2])],
    # reductions
    **{name + suffix: _reduce(function) for suffix in ("", "D") for name, function in _REDUCTIONS},
    "ArgMaxV2": _arg(np.argmax), "ArgMaxD": _arg(np.argmax), "ArgMin": _arg(np.argmin),
    # matmul, norm, softmax
    **dict.fromkeys(
        ["MatMul", "MatMulV2", "MatMulV3", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], _matmul
    ),
    "SoftmaxV2": _softmax, "Softmax": _softmax, "LogSoftmaxV2": _log_softmax,
    "LayerNorm": _layer_norm, "LayerNormV3": _layer_norm, "RmsNorm": _rms_norm,
    "BNInfer": _batch_norm,
    # gather, cast, transpose and other moves
    "Gather": _gather, "GatherV2": _gather, "GatherV2D": _gather,
    "GatherElements": _gather_elements, "Cast": _cast,
    "Transpose": _transpose, "TransposeD": _transpose,
    "ConcatD": _concat, "ConcatV2D": _concat,
    # Outputs in a blocked format are compared in plain order, where TransData changes nothing.
    **dict.fromkeys(
        ["Identity", "TensorMove", "Reshape", "Flatten", "TransData"], _one(lambda x: x)
    ),
    "Assign": lambda x, a: [x[1]],
}  # fmt: skip


# --- the check ------------------------------------------------------------------------------


def check_outputs(
    op_type: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    dtypes: Sequence[str],
    attributes: Attributes,
) -> ReferenceCheck:
    """Whether dumped outputs are what the operator's definition gives for the dumped inputs."""
    function = REFERENCES.get(op_type)
    if function is None:
        return ReferenceCheck(None, f"no reference exists for {op_type}")
    if not inputs or not outputs:
        missing = "inputs" if not inputs else "outputs"
        return ReferenceCheck(None, f"the dump has no {missing} to check {op_type} with")
    try:
        _check_size(function, inputs, outputs, attributes)
        with np.errstate(all="ignore"):
            expected = function([_exact(value) for value in inputs], attributes)
            checks = [
                _compare(index, actual, want, dtype)
                for index, (actual, want, dtype) in enumerate(
                    zip(outputs, expected, dtypes, strict=False)
                )
            ]
    except Exception as error:  # noqa: BLE001 - replaying one foreign call, in a numpy that may refuse it
        return ReferenceCheck(
            None, f"the reference of {op_type} does not take these inputs: {error}"
        )
    return next((check for check in checks if check.agrees is False), checks[0])


def _check_size(
    function: Function, inputs: Sequence[Array], outputs: Sequence[Array], attributes: Attributes
) -> None:
    """Refuse what would take too much: two small inputs may ask for a huge result."""
    given = sum(value.size for value in (*inputs, *outputs))
    result, products = _result_size(function, list(inputs), attributes)
    if given > MAX_ELEMENTS or result > max(MAX_RESULT, given) or products > MAX_PRODUCTS:
        raise BadUsage(f"too much work: {given} elements in files, {result} in its result")


def _result_size(function: Function, x: list[Array], a: Attributes) -> tuple[int, int]:
    """How many elements the result may have, and how many products it takes."""
    if function is _matmul:
        left, right = _factors(x, a)
        lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        size = math.prod(lead) * math.prod(left.shape[-2:-1]) * right.shape[-1]
        return size, size * left.shape[-1]
    if function is _gather:
        axis, batch = _gather_axis(x, a), int(a.get("batch_dims", 0))
        others = [size for at, size in enumerate(x[0].shape) if at != axis % x[0].ndim]
        return math.prod(others[batch:]) * x[1].size, 0
    try:
        return math.prod(np.broadcast_shapes(*(value.shape for value in x))), 0
    except ValueError:  # not to be broadcast: nothing gets larger than it is
        return 0, 0


def _exact(array: Array) -> Array:
    if array.dtype.kind == "f" or array.dtype.isbuiltin != 1:
        return array.astype(np.float64)
    return array.astype(np.complex128) if array.dtype.kind == "c" else array


def _compare(index: int, actual: Array, expected: Array, dtype: str) -> ReferenceCheck:
    expected = np.asarray(expected)
    if actual.size != expected.size:
        return ReferenceCheck(
            False,
            f"output {index} has shape {list(actual.shape)}, the reference {list(expected.shape)}",
        )
    flat, wanted = actual.reshape(-1), expected.reshape(-1)

    def parts() -> Iterator[tuple[int, Array, Array, Array, Array]]:
        """Read in pieces, so that no copy is as large as the tensor."""
        for at in range(0, flat.size, _CHUNK):
            have = _exact(flat[at : at + _CHUNK])
            want = _as_dtype(wanted[at : at + _CHUNK], dtype)
            finite = np.isfinite(have) & np.isfinite(want)
            yield at, have, want, finite, np.where(finite, np.abs(want), 0.0)

    total = sum(float(size.sum()) for *_, size in parts())
    scale = total / flat.size if flat.size else 0.0
    tolerance = _TOLERANCE.get(dtype, 0.0)
    max_abs = max_rel = 0.0
    count = 0
    first: tuple[int, Any, Any] | None = None
    for at, have, want, finite, size in parts():
        difference = np.where(finite, np.abs(np.subtract(have, want, dtype=_wide(have, want))), 0.0)
        off = finite & (difference > tolerance * (size + scale))
        off |= ~finite & ~_same_nonfinite(have, want, dtype)
        relative = difference / np.maximum(size, np.finfo(np.float64).tiny)
        relative = np.where(difference == 0, 0.0, relative)
        max_abs = max(max_abs, float(difference.max()))
        max_rel = max(max_rel, float(relative.max()))
        count += int(np.count_nonzero(off))
        if first is None and off.any():
            index_in = int(np.flatnonzero(off)[0])
            first = at + index_in, have[index_in], want[index_in]
    if first is None:
        return ReferenceCheck(
            True,
            f"the dump's output {index} agrees with the reference (largest difference {max_abs:g})",
            max_abs, max_rel,
        )  # fmt: skip
    at, have, want = first
    place = [int(i) for i in np.unravel_index(at, actual.shape)] if actual.ndim else []
    return ReferenceCheck(
        False,
        f"the dump's output {index} is off by up to {max_abs:g} (relative {max_rel:g}) in {count} "
        f"of {flat.size} elements, first at {place}: {have:g}, reference {want:g}",
        max_abs, max_rel,
    )  # fmt: skip


def _wide(have: Array, want: Array) -> type:
    return np.complex128 if "c" in (have.dtype.kind, want.dtype.kind) else np.float64


_SMALL_FLOATS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def _as_dtype(expected: Array, dtype: str) -> Array:
    """The reference rounded to the output's own type, as the operator must."""
    kind = kind_of(dtype)
    if dtype in _SMALL_FLOATS:
        return _exact(expected.astype(_SMALL_FLOATS[dtype]))
    if kind.wide.kind in "iub" and expected.dtype.kind in "fiub":
        return np.trunc(expected) if expected.dtype.kind == "f" else expected
    return _exact(expected.astype(kind.wide))


def _same_nonfinite(have: Array, want: Array, dtype: str) -> Array:
    same: Array = (np.isnan(have) & np.isnan(want)) | (have == want)
    if dtype in ("float16", "float32", "bfloat16"):
        # Chips may be set to saturate: the largest number where the definition overflows.
        largest = float(ml_dtypes.finfo(np.dtype(_float_type(dtype))).max)  # type: ignore[no-untyped-call]
        same |= np.isinf(want) & (np.abs(have) == largest) & (np.sign(have) == np.sign(want))
    return same


def _float_type(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
