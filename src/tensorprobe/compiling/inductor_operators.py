"""Inductor's own operators by formula, its random numbers on the CPU among them.

Inductor draws its seeds from the program's generator, and in a kernel each number from its seed and
its place: Philox 4x32 of ten rounds. So what a kernel should have drawn can be told exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorprobe.errors import NotReplayable

_U32 = np.uint64(0xFFFFFFFF)
_MUL = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_SCALE = np.float32(4.6566127342e-10)
_MOST = 1 << 27  # numbers of one tensor


def philox(seed: int, count: int, offset: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
    """The four 32-bit words for each of `count` places from `offset` on."""
    if count > _MOST:
        raise NotReplayable(f"{count} random numbers are more than are drawn here")
    places = np.arange(offset, offset + count, dtype=np.uint64) & _U32
    zeros = np.zeros(count, np.uint64)
    words = [places, zeros, zeros, zeros]
    key0, key1 = seed & 0xFFFFFFFF, 0
    for number in range(_ROUNDS):
        if number:
            key0, key1 = (key0 + _KEY[0]) & 0xFFFFFFFF, (key1 + _KEY[1]) & 0xFFFFFFFF
        product0, product1 = _MUL[0] * words[0], _MUL[1] * words[2]
        words = [
            (product1 >> np.uint64(32)) ^ words[1] ^ np.uint64(key0),
            product1 & _U32,
            (product0 >> np.uint64(32)) ^ words[3] ^ np.uint64(key1),
            product0 & _U32,
        ]
    return tuple(words)


def _uniform(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (words & np.uint64(0x7FFFFFFF)).astype(np.float32) * _SCALE


def inductor_random(size: Any, seed: Any, mode: str, *, offset: int = 0) -> torch.Tensor:
    """What `inductor_prims.random` gives on the CPU."""
    shape = [int(n) for n in size]
    count = int(np.prod(shape, dtype=np.int64))
    words = philox(int(seed), count, int(offset))
    if mode == "rand":
        found = _uniform(words[0])
    elif mode == "randn":
        u1, u2 = 1 - _uniform(words[0]), 1 - _uniform(words[1])
        wide1, wide2 = u1.astype(np.float64), u2.astype(np.float64)
        found = (np.sqrt(-2.0 * np.log(wide1)) * np.cos(2.0 * np.pi * wide2)).astype(np.float32)
    else:
        raise NotReplayable(f"inductor draws {mode[:40]!r} in a way that is not known here")
    return torch.from_numpy(found).reshape(shape)


def inductor_randint(low: int, high: int, size: Any, seed: Any, *, offset: int = 0) -> torch.Tensor:
    """What `inductor_prims.randint` gives on the CPU."""
    shape = [int(n) for n in size]
    count = int(np.prod(shape, dtype=np.int64))
    words = philox(int(seed), count, int(offset))
    if high <= low:
        raise NotReplayable(f"inductor's randint from {low} to {high}")
    whole = words[0] | (words[1] << np.uint64(32))
    found = (whole % np.uint64(high - low)).astype(np.int64) + low
    return torch.from_numpy(found).reshape(shape)


def inductor_seeds(count: int, device: Any = None) -> torch.Tensor:
    """Seeds, drawn from the generator as it stands."""
    return torch.randint(-(2**63), 2**63 - 1, [int(count)], dtype=torch.int64)


def inductor_seed(device: Any = None) -> torch.Tensor:
    """One seed."""
    return torch.randint(-(2**63), 2**63 - 1, [], dtype=torch.int64)


def _lookup(seeds: torch.Tensor, index: int) -> torch.Tensor:
    return seeds[index].clone()


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.clone()


def _pool_with_offsets(
    x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A maximum pooling, and where in its window each maximum is."""
    if len(kernel) != 2:
        raise NotReplayable("inductor's pooling of other than two dimensions")
    found, indices = torch.ops.aten.max_pool2d_with_indices.default(
        x, kernel, stride, padding, dilation, ceil_mode
    )
    width = x.shape[-1]
    rows, columns = _window_starts(indices, stride, padding)
    down = torch.div(indices.div(width, rounding_mode="floor") - rows, dilation[0])
    right = torch.div(indices.remainder(width) - columns, dilation[1])
    return found, (down * kernel[1] + right).to(torch.int8)


def _indices_of_offsets(
    offsets: torch.Tensor, kernel: Any, input_size: Any, stride: Any, padding: Any, dilation: Any
) -> torch.Tensor:
    if len(kernel) != 2:
        raise NotReplayable("inductor's pooling of other than two dimensions")
    rows, columns = _window_starts(offsets, stride, padding)
    wide = offsets.to(torch.int64)
    down = wide.div(kernel[1], rounding_mode="floor") * dilation[0] + rows
    right = wide.remainder(kernel[1]) * dilation[1] + columns
    indices: torch.Tensor = down * int(input_size[-1]) + right
    return indices


def _window_starts(like: torch.Tensor, stride: Any, padding: Any) -> tuple[torch.Tensor, ...]:
    rows = torch.arange(like.shape[-2])[:, None] * stride[0] - padding[0]
    columns = torch.arange(like.shape[-1]) * stride[1] - padding[1]
    return rows, columns


# Operators of inductor's own that its graph passes put in, by the names that recordings have.
FORMULAS: dict[str, Callable[..., Any]] = {
    "torch.ops.prims.inductor_seeds.default": inductor_seeds,
    "torch.ops.prims.inductor_seed.default": inductor_seed,
    "torch.ops.prims.inductor_lookup_seed.default": _lookup,
    "torch.ops.prims.inductor_random.default": inductor_random,
    "torch.ops.prims.inductor_randint.default": inductor_randint,
    "torch.ops.prims.inductor_force_stride_order.default": _same,
    "torch.ops.prims._low_memory_max_pool_with_offsets.default": _pool_with_offsets,
    "torch.ops.prims._low_memory_max_pool_offsets_to_indices.default": _indices_of_offsets,
    "torch.ops.prims.fma.default": lambda a, b, c: a * b + c,
}
RANDOM = frozenset(name for name in FORMULAS if "rand" in name or "seed" in name)
