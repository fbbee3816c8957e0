"""NPU ops that move, cut, pad, sort, scatter and pack."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tensorprobe.replay.npu_op_table import OpTable

OPS = OpTable()
Tensor = torch.Tensor


@OPS.op(grad=True)
def npu_sort_v2(input: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return input.sort(dim, descending).values


@OPS.op(grad=True)
def npu_transpose(input: Tensor, perm: list[int], require_contiguous: bool = True) -> Tensor:
    return input.permute(perm).clone(memory_format=torch.contiguous_format)


@OPS.op(grad=True)
def npu_broadcast(input: Tensor, size: list[int]) -> Tensor:
    return input.expand(size).clone(memory_format=torch.contiguous_format)


@OPS.op(grad=True)
def npu_pad(input: Tensor, paddings: list[int]) -> Tensor:
    pairs = list(zip(paddings[::2], paddings[1::2], strict=True))  # first dimension first
    return F.pad(input, [width for pair in reversed(pairs) for width in pair])


@OPS.op(grad=True)
def npu_slice(input: Tensor, offsets: list[int], size: list[int]) -> Tensor:
    cut = tuple(slice(start, start + length) for start, length in zip(offsets, size, strict=True))
    return input[cut].clone()


@OPS.op(grad=True)
def npu_indexing(
    input: Tensor,
    begin: list[int],
    end: list[int],
    strides: list[int],
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
) -> Tensor:
    """A strided slice; bit i of a mask speaks of the i-th entry, as in a strided-slice kernel."""
    index: list[Any] = []
    for i, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        if ellipsis_mask >> i & 1:
            index.append(...)
        elif new_axis_mask >> i & 1:
            index.append(None)
        elif shrink_axis_mask >> i & 1:
            index.append(first)
        else:
            start = None if begin_mask >> i & 1 else first
            index.append(slice(start, None if end_mask >> i & 1 else last, step))
    return input[tuple(index)].clone()


@OPS.op("npu_max.dim(Tensor input, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)",
        grad=True)  # fmt: skip
def npu_max(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = input.max(dim, keepdim)
    return values, indices.to(torch.int32)


@OPS.op(grad=True)
def npu_scatter(input: Tensor, indices: Tensor, updates: Tensor, dim: int) -> Tensor:
    at, new = indices.long(), updates
    if at.dim() < input.dim():
        at, new = at.unsqueeze(dim), new.unsqueeze(dim)
    return input.scatter(dim, at, new)


@OPS.op(
    "npu_stride_add(Tensor input, Tensor other, Scalar offset1, Scalar offset2, Scalar c1_len)"
    " -> Tensor",
    grad=True,
)
def npu_stride_add(input: Tensor, other: Tensor, offset1: int, offset2: int, c1_len: int) -> Tensor:
    length = int(c1_len)
    return input.narrow(1, int(offset1), length) + other.narrow(1, int(offset2), length)


@OPS.op()
def npu_masked_fill_range(
    input: Tensor, start: Tensor, end: Tensor, value: Tensor, axis: int = -1
) -> Tensor:
    """Row r of `start` and `end` holds, for each slice of the first dimension, range number r."""
    filled = input.clone().movedim(axis, -1)
    position = torch.arange(filled.shape[-1])
    for first, last, number in zip(start, end, value, strict=True):
        inside = (position >= first[:, None]) & (position < last[:, None])
        while inside.dim() < filled.dim():
            inside = inside.unsqueeze(1)
        filled = torch.where(inside, number.to(filled.dtype), filled)
    return filled.movedim(-1, axis).contiguous()


@OPS.op()
def npu_normalize_batch(input: Tensor, seq_len: Tensor, normalize_type: int = 0) -> Tensor:
    """Zero mean and unit variance over the valid length: by feature (0) or over all (1)."""
    normal = torch.zeros_like(input)
    for row, (length, batch) in enumerate(zip(seq_len.tolist(), input, strict=True)):
        valid = batch[:, :length]
        dims = [1] if normalize_type == 0 else [0, 1]
        spread, mean = torch.std_mean(valid, dims, keepdim=True)
        normal[row] = (batch - mean) / (spread + 1e-5)
    return normal


@OPS.op()
def npu_sign_bits_pack(input: Tensor, size: int) -> Tensor:
    """One bit a number, eight to a byte, lowest first: 1 where it is not negative."""
    bits = F.pad((input >= 0).to(torch.uint8), [0, -input.numel() % 8]).view(-1, 8)
    packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
    return F.pad(packed, [0, -packed.numel() % size]).view(size, -1)


@OPS.op()
def npu_sign_bits_unpack(input: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    bits = input.view(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.to(dtype) * 2 - 1).view(size, -1)


@OPS.op()
def npu_ifmr(
    data: Tensor,
    data_min: Tensor,
    data_max: Tensor,
    cumsum: Tensor,
    min_percentile: float,
    max_percentile: float,
    search_start: float,
    search_end: float,
    search_step: float,
    with_offset: bool,
) -> tuple[Tensor, Tensor]:
    """The 8-bit scale, of those tried around the data's range, that loses least; and the offset."""
    steps = int((search_end - search_start) / search_step) + 1
    low = data_min.reshape(-1)[0] if with_offset else torch.zeros(())
    high = data_max.reshape(-1)[0]
    widest = high - low if with_offset else torch.maximum(high.abs(), data_min.abs().max())
    levels = 255 if with_offset else 127
    least, best = math.inf, widest * search_start / levels
    for step in range(steps):
        scale = widest * (search_start + step * search_step) / levels
        offset = torch.round(-low / scale)
        codes = torch.round(data / scale + offset).clamp(0 if with_offset else -128, levels)
        loss = float(((codes - offset) * scale - data).pow(2).sum())
        if loss < least:
            least, best = loss, scale
    scale = best.reshape(1)
    return scale, torch.round(-low / scale).reshape(1)
