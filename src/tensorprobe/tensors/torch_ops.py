# mypy: allow-untyped-calls
# torch leaves split, Stream and Event without types.
"""The same numbers with plain torch operations, for devices that have no kernel of their own.

Every function returns tensors of the device it was given; nothing here waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tensorprobe.tensors import memory, narrow_sums
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors.digest import (
    CHUNK_WORDS,
    GOLD,
    MASK,
    MIX_SHIFT,
    WEIGHTS,
    digest_bytes,
    finish,
)
from tensorprobe.tensors.host import SCALE

BLOCK = 1 << 22  # elements at a time: bounds the float64 copies that these operations need
_INT64_MIN = -(1 << 63)


def tally(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The floats (FLOAT_FIELDS) and the integers (INT_FIELDS) of a row, on the tensor's device."""
    floats: dict[int, torch.Tensor] = {}
    ints: dict[int, torch.Tensor] = {}
    for piece in _pieces(tensor):
        found_floats, found_ints = _tally_piece(piece, name)
        _combine(floats, found_floats)
        _combine(ints, found_ints)
    return _stacked(floats, FLOAT_FIELDS), _stacked(ints, INT_FIELDS)


def tally_narrow(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of floating-point numbers on a device that has no float64 (`narrow_sums`)."""
    fields: torch.Tensor | None = None
    ints: dict[int, torch.Tensor] = {}
    for piece in _pieces(tensor):
        value = piece.to(torch.float32)
        nan, inf = torch.isnan(value), torch.isinf(value)
        found = narrow_sums.tally(value, value.masked_fill(nan | inf, 0), nan)
        fields = found if fields is None else narrow_sums.combine(fields, found)
        counts = {rows.NAN: nan.sum(), rows.INF: inf.sum(), rows.ZERO: (value == 0).sum()}
        _combine(ints, counts)
    assert fields is not None  # empty tensors do not come here
    return fields, _stacked(ints, INT_FIELDS)


def narrow_row(fields: list[float], ints: list[int]) -> list[int]:
    """The row of what `tally_narrow` found."""
    row = [0] * rows.FIELDS
    for field, number in zip(INT_FIELDS, ints, strict=True):
        row[field] = number
    for field, value in zip(
        (rows.LOW, rows.HIGH, rows.TOTAL, rows.SQUARE), narrow_sums.decode(fields), strict=True
    ):
        row[field] = rows.as_bits(value)
    return row


def has_float64(device: torch.device) -> bool:
    """Whether float64 is float64 there. An NPU makes float32 of it, and others refuse."""
    with warnings.catch_warnings():  # of what the program has not asked for
        warnings.simplefilter("ignore")
        try:
            return torch.ones(1, device=device).to(torch.float64).dtype is torch.float64
        except (RuntimeError, TypeError):
            return False


FLOAT_FIELDS = (rows.LOW, rows.HIGH, *rows.FLOATS)
INT_FIELDS = (rows.LOW, rows.HIGH, rows.NAN, rows.INF, rows.ZERO)


def _stacked(found: dict[int, torch.Tensor], fields: tuple[int, ...]) -> torch.Tensor:
    zero = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(field, zero) for field in fields])


def to_row(floats: list[float], ints: list[int], name: str) -> list[int]:
    """The row of fields that both together are."""
    row = [0] * rows.FIELDS
    for field, number in zip(INT_FIELDS, ints, strict=True):
        row[field] = number
    for field, value in zip(FLOAT_FIELDS, floats, strict=True):
        if field in rows.FLOATS or name in memory.WITH_FRACTION:
            row[field] = rows.as_bits(value)
    return row


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() <= BLOCK:
        yield tensor
    else:
        yield from tensor.reshape(-1).split(BLOCK)


def _combine(sofar: dict[int, torch.Tensor], found: dict[int, torch.Tensor]) -> None:
    for field, value in found.items():
        if field not in sofar:
            sofar[field] = value
        elif field == rows.LOW:
            sofar[field] = torch.minimum(sofar[field], value)
        elif field == rows.HIGH:
            sofar[field] = torch.maximum(sofar[field], value)
        else:
            sofar[field] = sofar[field] + value


Found = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]


def _tally_piece(x: torch.Tensor, name: str) -> Found:
    if name == "bool":
        return _tally_bool(x)
    if name.startswith("complex"):
        parts = torch.view_as_real(x).to(torch.float64)
        return _tally_complex(parts[..., 0], parts[..., 1], wide=name == "complex128")
    if name in memory.WITH_FRACTION:
        return _tally_float(x, wide=name == "float64")
    return _tally_integer(x, name)


def _tally_bool(x: torch.Tensor) -> Found:
    zero = torch.logical_not(x).sum()
    low, high = x.all().to(torch.int64), x.any().to(torch.int64)
    ints = {rows.LOW: low, rows.HIGH: high, rows.ZERO: zero}
    return {rows.TOTAL: zero.to(torch.float64)}, ints


def _tally_integer(x: torch.Tensor, name: str) -> Found:
    if name == "uint64":
        bits = x.view(torch.int64)
        upper = (bits >> 32) & 0xFFFFFFFF
        wide = upper.to(torch.float64) * 2.0**32 + (bits & 0xFFFFFFFF).to(torch.float64)
        zero = (bits == 0).sum()
        value = bits ^ _INT64_MIN
    else:
        value = x.to(torch.int64)
        wide = value.to(torch.float64)
        zero = (value == 0).sum()
    ints = {rows.LOW: value.amin(), rows.HIGH: value.amax(), rows.ZERO: zero}
    return {rows.TOTAL: wide.sum(), rows.SQUARE: (wide * wide).sum()}, ints


def _tally_float(x: torch.Tensor, *, wide: bool) -> Found:
    value = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    nan, inf = torch.isnan(value), torch.isinf(value)
    finite = value.masked_fill(nan | inf, 0).to(torch.float64)
    floats = {
        # amin/amax: unlike min/max, no second result and no synchronisation for an index
        rows.LOW: value.masked_fill(nan, float("inf")).amin().to(torch.float64),
        rows.HIGH: value.masked_fill(nan, float("-inf")).amax().to(torch.float64),
    }
    if wide:
        _sum_wide(floats, finite, torch.zeros_like(finite), finite)
    else:
        floats[rows.TOTAL] = finite.sum()
        floats[rows.SQUARE] = (finite * finite).sum()
    return floats, {rows.NAN: nan.sum(), rows.INF: inf.sum(), rows.ZERO: (value == 0).sum()}


def _tally_complex(re: torch.Tensor, im: torch.Tensor, *, wide: bool) -> Found:
    nan = torch.isnan(re) | torch.isnan(im)
    inf = (torch.isinf(re) | torch.isinf(im)) & ~nan
    hidden = nan | inf
    re, im = re.masked_fill(hidden, 0), im.masked_fill(hidden, 0)
    magnitude = torch.hypot(re, im)
    value = magnitude.masked_fill(inf, float("inf"))
    floats = {
        rows.LOW: value.masked_fill(nan, float("inf")).amin(),
        rows.HIGH: value.masked_fill(nan, float("-inf")).amax(),
    }
    if wide:
        _sum_wide(floats, re, im, magnitude)
    else:
        floats[rows.TOTAL] = magnitude.sum()
        floats[rows.SQUARE] = (re * re + im * im).sum()
    zero = ((value == 0) & ~nan).sum()
    return floats, {rows.NAN: nan.sum(), rows.INF: inf.sum(), rows.ZERO: zero}


def _sum_wide(
    floats: dict[int, torch.Tensor], re: torch.Tensor, im: torch.Tensor, value: torch.Tensor
) -> None:
    """Sum float64 numbers so that neither sum nor squares leave the range."""
    size = torch.maximum(re.abs(), im.abs())
    big, small = size > rows.BIG, size < rows.SMALL
    down_re, down_im = re.masked_fill(~big, 0) * 2.0**-SCALE, im.masked_fill(~big, 0) * 2.0**-SCALE
    up_re, up_im = re.masked_fill(~small, 0) * 2.0**SCALE, im.masked_fill(~small, 0) * 2.0**SCALE
    middle = big | small
    mid_re, mid_im = re.masked_fill(middle, 0), im.masked_fill(middle, 0)
    # A real number keeps its sign in the sum; a complex one is its magnitude.
    down = down_re if value is re else torch.hypot(down_re, down_im)
    floats[rows.TOTAL] = value.masked_fill(big, 0).sum()
    floats[rows.TOTAL_BIG] = down.sum()
    floats[rows.SQUARE] = (mid_re * mid_re + mid_im * mid_im).sum()
    floats[rows.SQUARE_BIG] = (down_re * down_re + down_im * down_im).sum()
    floats[rows.SQUARE_SMALL] = (up_re * up_re + up_im * up_im).sum()


def distinct(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A view of what an expanded tensor repeats, and how often it does."""
    repeat = 1
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            repeat *= tensor.size(dim)
            tensor = tensor.select(dim, 0)
    return tensor, repeat


_FINAL_SHIFT = 33  # of the digest's last mixing


def digests_agree(device: torch.device) -> bool:
    """Whether this device, whose 64-bit integers may be made of others, digests as the host."""
    if device.type in ("cpu", "cuda"):  # they do, and to ask one would wait for it
        return True
    sample = torch.arange(1, 600, dtype=torch.int32) * 7_654_321
    nbytes = sample.numel() * sample.element_size()
    try:
        mixed = int(Digests(device).mixed_sum(sample.to(device)).item())
    except (RuntimeError, TypeError):
        return False
    return finish(mixed, nbytes) == digest_bytes(sample.numpy().tobytes())


class Digests:
    """Digests tensors of one device; keeps the weights of words and chunks there.

    The widths of shifts are kept there too: torch_npu copies a number that a tensor is shifted by
    to the device each time, with a warning, and such a copy ends the program if the device failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._chunks = BLOCK // CHUNK_WORDS  # at a time
        positions = np.arange(1, self._chunks + 1, dtype=np.uint64) * np.uint64(GOLD)
        # Kept: a copy that does not block may still be reading its source.
        self._sources = [
            *(torch.from_numpy(a.view(np.int64).copy()) for a in (WEIGHTS, positions)),
            *(torch.tensor([bits]) for bits in (MIX_SHIFT, _FINAL_SHIFT)),
        ]
        self._weights, self._positions, self._mix_shift, self._final_shift = (
            source.to(device, non_blocking=True) for source in self._sources
        )

    def mixed_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `digest.finish` wants of a tensor, as an int64 of the device."""
        words = _words(tensor)
        total: torch.Tensor | None = None
        for index, block in enumerate(words.split(self._chunks)):
            m = block ^ _shift_right(block, MIX_SHIFT, self._mix_shift)
            sums = (m * self._weights).sum(1) + self._positions[: len(block)]
            if index:
                sums = sums + _signed(index * self._chunks * GOLD & MASK)
            mixed = self._fmix(sums).sum()
            total = mixed if total is None else total + mixed
        assert total is not None  # words has at least one chunk: empty tensors do not come here
        return total

    def _fmix(self, value: torch.Tensor) -> torch.Tensor:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            value = (value ^ _shift_right(value, _FINAL_SHIFT, self._final_shift)) * _signed(factor)
        return value ^ _shift_right(value, _FINAL_SHIFT, self._final_shift)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as rows of CHUNK_WORDS int64, padded with zeros."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    raw = flat.view(torch.uint8)
    missing = -raw.numel() % (CHUNK_WORDS * 8)
    if missing or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    return raw.view(torch.int64).view(-1, CHUNK_WORDS)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, bits: int, on_device: torch.Tensor) -> torch.Tensor:
    # The shift of a signed number brings in copies of the sign; those go out again.
    return (value >> on_device) & ((1 << (64 - bits)) - 1)


def stack_and_copy(values: list[torch.Tensor]) -> torch.Tensor:
    """Many small tensors of one device as one on the host; complete once the device got there."""
    return torch.stack(values).to("cpu", non_blocking=True)


def device_module(device: torch.device) -> Any:
    """`torch.cuda`, `torch.npu` and the like, or None for a device that has none."""
    return getattr(torch, device.type, None)
