"""Ascend's blocked memory formats (FRACTAL_NZ, NC1HWC0, FRACTAL_Z...) back to plain axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorprobe.errors import BadUsage

Array = np.ndarray[Any, Any]
Shape = Sequence[int]

# Position = number, in DumpData and ge::Format alike. Only the low 8 bits of a field count.
_FORMAT_NAMES = (
    "NCHW NHWC ND NC1HWC0 FRACTAL_Z NC1C0HWPAD NHWC1C0 FSR_NCHW FRACTAL_DECONV C1HWNC0 "
    "FRACTAL_DECONV_TRANSPOSE FRACTAL_DECONV_SP_STRIDE_TRANS NC1HWC0_C04 FRACTAL_Z_C04 CHWN "
    "FRACTAL_DECONV_SP_STRIDE8_TRANS HWCN NC1KHKWHWC0 BN_WEIGHT FILTER_HWCK "
    "HASHTABLE_LOOKUP_LOOKUPS HASHTABLE_LOOKUP_KEYS HASHTABLE_LOOKUP_VALUE "
    "HASHTABLE_LOOKUP_OUTPUT HASHTABLE_LOOKUP_HITS C1HWNCoC0 MD NDHWC FRACTAL_ZZ FRACTAL_NZ "
    "NCDHW DHWCN NDC1HWC0 FRACTAL_Z_3D CN NC DHWNC FRACTAL_Z_3D_TRANSPOSE FRACTAL_ZN_LSTM "
    "FRACTAL_Z_G RESERVED ALL NULL ND_RNN_BIAS FRACTAL_ZN_RNN NYUV NYUV_A NCL FRACTAL_Z_WINO "
    "C1HWC0 FRACTAL_NZ_C0_16 FRACTAL_NZ_C0_32 FRACTAL_NZ_C0_2 FRACTAL_NZ_C0_4 FRACTAL_NZ_C0_8"
)
FORMATS = tuple(_FORMAT_NAMES.split())


def format_name(number: int) -> str:
    """The name of a format number, whatever sub-format sits above its low 8 bits."""
    primary = number & 0xFF
    return FORMATS[primary] if primary < len(FORMATS) else f"FORMAT_{primary}"


def _axes(name: str) -> str | None:
    """The axis letters of a plain format ("NCHW"), None for blocked and shapeless ones."""
    is_plain = len(set(name)) == len(name) and set(name) <= set("NCDHW")
    return name if is_plain and name != "ND" else None


def _permuted(array: Array, source: str, target: str) -> Array:
    return array.transpose([source.index(axis) for axis in target])


def _merged(array: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Axes brought into the order of `groups`, each group then being one axis."""
    order = [axis for group in groups for axis in group]
    shape = [math.prod(array.shape[axis] for axis in group) for group in groups]
    return array.transpose(order).reshape(shape)


def _cropped(array: Array, shape: Shape) -> Array | None:
    """The leading corner of that shape; None when the array is smaller or has other axes."""
    if array.ndim != len(shape) or any(
        have < want for have, want in zip(array.shape, shape, strict=True)
    ):
        return None
    return array[tuple(slice(size) for size in shape)]


def _from_nz(array: Array, original: Shape | None, order: str) -> Array | None:
    *_, n0, c0 = array.shape
    lead = list(range(array.ndim - 4))
    c1_axis, n1_axis, n0_axis, c0_axis = range(array.ndim - 4, array.ndim)
    plain = _merged(array, [*([axis] for axis in lead), [n1_axis, n0_axis], [c1_axis, c0_axis]])
    if original is None:
        return plain
    if len(original) == 1:  # a vector is stored as one row
        row = _cropped(plain, (*(1 for _ in lead), 1, *original))
        return None if row is None else row.reshape(-1)
    if math.prod(original[:-2]) != math.prod(plain.shape[:-2]):
        return None
    plain = plain.reshape(*original[:-2], *plain.shape[-2:])
    if plain.shape[-2] - original[-2] >= n0 or plain.shape[-1] - original[-1] >= c0:
        return None  # more than padding would go
    return _cropped(plain, original)


def _from_zz(array: Array, original: Shape | None, order: str) -> Array | None:
    return _from_nz(np.swapaxes(array, -4, -3), original, order)


def _in_order(plain: Array, axes: str, original: Shape | None, order: str) -> Array | None:
    """Axes brought into `order` and cropped; only channels and batches are ever padded."""
    ordered = _permuted(plain, axes, order)
    if original is None:
        return ordered
    if len(original) != len(order):
        return None
    size = dict(zip(order, original, strict=True))
    if any(size[axis] != plain.shape[axes.index(axis)] for axis in axes if axis in "DHW"):
        return None
    return _cropped(ordered, original)


def _from_nc1hwc0(array: Array, original: Shape | None, order: str) -> Array | None:
    plain = _merged(array, [[0], [1, 4], [2], [3]])
    if original is not None and len(original) == 2 and plain.shape[2:] == (1, 1):
        return _cropped(plain.reshape(plain.shape[:2]), original)
    return _in_order(plain, "NCHW", original, order)


def _from_ndc1hwc0(array: Array, original: Shape | None, order: str) -> Array | None:
    return _in_order(_merged(array, [[0], [2, 5], [1], [3], [4]]), "NCDHW", original, order)


def _from_c1hwnc0(array: Array, original: Shape | None, order: str) -> Array | None:
    return _in_order(_merged(array, [[3], [0, 4], [1], [2]]), "NCHW", original, order)


def _from_fractal_z(array: Array, original: Shape | None, order: str) -> Array | None:
    """(D * C1 * H * W, N1, N0, C0): only the original shape says how the first axis splits."""
    if original is None:
        return None
    outer, n1, n0, c0 = array.shape
    if len(original) == 2 and len(order) == 4:
        return _cropped(_merged(array, [[0, 3], [1, 2]]), original)
    if len(original) != len(order):
        return None
    size = {"D": 1, **dict(zip(order, original, strict=True))}
    d, h, w, c1 = size["D"], size["H"], size["W"], -(-size["C"] // c0)
    if d * c1 * h * w != outer or not 0 <= n1 * n0 - size["N"] < n0:
        return None
    split = array.reshape(d, c1, h, w, n1, n0, c0)
    plain = _merged(split, [[4, 5], [1, 6], [0], [2], [3]])
    if "D" not in order:
        return _in_order(plain[:, :, 0], "NCHW", original, order)
    return _in_order(plain, "NCDHW", original, order)


_Unblock = Callable[[Array, "Shape | None", str], "Array | None"]
_FLAT, _SPATIAL, _VOLUME = ("ND",), ("NCHW", "NHWC", "HWCN"), ("NCDHW", "NDHWC", "DHWCN")
# format -> (how many axes, the orders its original may have had, the way back)
_BLOCKED: dict[str, tuple[int, tuple[str, ...], _Unblock]] = {
    **{name: (4, _FLAT, _from_nz) for name in FORMATS if name.startswith("FRACTAL_NZ")},
    "FRACTAL_ZZ": (4, _FLAT, _from_zz),
    "NC1HWC0": (5, _SPATIAL, _from_nc1hwc0),
    "NC1HWC0_C04": (5, _SPATIAL, _from_nc1hwc0),
    "NDC1HWC0": (6, _VOLUME, _from_ndc1hwc0),
    "C1HWNC0": (5, _SPATIAL, _from_c1hwnc0),
    "FRACTAL_Z": (4, _SPATIAL, _from_fractal_z),
    "FRACTAL_Z_3D": (4, _VOLUME, _from_fractal_z),
}


def is_blocked(name: str) -> bool:
    """Whether this format stores blocks that can be put back in order here."""
    return name in _BLOCKED


def to_plain(
    array: Array,
    source: str,
    target: str = "ND",
    *,
    original_shape: Shape | None = None,
    origin_format: str | None = None,
) -> Array:
    """An array in `source` format as `target` ("ND": the original order of axes).

    `original_shape` crops the padding of blocks away. `origin_format` says which axes that shape
    names; without it the order that fits is taken, NCHW before the others. Block sizes come from
    the array's own shape, never from the dtype.

        to_plain(nz, "FRACTAL_NZ", original_shape=(62, 62))
    """
    if original_shape is not None and any(size < 0 for size in original_shape):
        original_shape = None
    if source not in _BLOCKED:
        return _plain_to_plain(array, source, target, original_shape)
    if not array.size:
        raise BadUsage(f"{source} {tuple(array.shape)} holds nothing to put in order")
    axis_count, orders, unblock = _BLOCKED[source]
    exactly = orders != _FLAT  # the others may have batch axes in front
    if array.ndim < axis_count or (exactly and array.ndim != axis_count):
        raise BadUsage(
            f"{source} has {'' if exactly else 'at least '}{axis_count} axes; "
            f"this array has shape {tuple(array.shape)}"
        )
    if origin_format in orders:
        orders = (str(origin_format),)
    elif target in orders:
        orders = (target, *(order for order in orders if order != target))
    for order in orders:
        plain = unblock(array, original_shape, order)
        if plain is not None:
            if target in (*_SPATIAL, *_VOLUME) and plain.ndim == len(order) == len(target):
                plain = _permuted(plain, order, target)
            return np.ascontiguousarray(plain)
    need = "its original shape: --shape" if original_shape is None else "a shape that fits"
    given = "" if original_shape is None else f", {tuple(original_shape)} does not"
    raise BadUsage(f"{source} {tuple(array.shape)} to {target} needs {need}{given}")


def _plain_to_plain(array: Array, source: str, target: str, shape: Shape | None) -> Array:
    have, want = _axes(source), _axes(target)
    if target == "ND" or source == target:
        if shape is not None and math.prod(shape) == array.size:
            return array.reshape(tuple(shape))
        if _axes(source) or source in ("ND", target):
            return array
    elif have and want and sorted(have) == sorted(want) and array.ndim == len(have):
        return np.ascontiguousarray(_permuted(array, have, want))
    raise BadUsage(
        f"no way from {source} {tuple(array.shape)} to {target}. Known: plain axes among "
        f"themselves, and from {', '.join(_BLOCKED)}"
    )
