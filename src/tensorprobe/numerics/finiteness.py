"""Whether a tensor holds NaN or infinity, and how large it gets: one reduction, no statistics."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from tensorprobe.numerics import memory

if TYPE_CHECKING:
    from tensorprobe.numerics.launch import Flagger

NAN, POSITIVE, NEGATIVE = 1, 2, 4  # bits: NaN, +inf, -inf
INFINITE = POSITIVE | NEGATIVE
SLOTS = 1 << 16  # tensors whose flags wait on a device

LIMITS: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).max
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
LIMITS |= {
    getattr(torch, name): torch.finfo(getattr(torch, name)).max
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
LIMITS |= {
    torch.complex32: LIMITS[torch.float16],
    torch.complex64: LIMITS[torch.float32],
    torch.complex128: LIMITS[torch.float64],
}


class Extent(NamedTuple):
    """What a tensor holds: bits for NaN, +inf and -inf, and its largest magnitude.

    Where NaN is among its values the other two bits and the magnitude may be missing.
    """

    bits: int
    top: float


FINE = Extent(0, 0.0)


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has the numbers of a float or complex one; None where there are none.

    Call it with function modes off. Inside torch.func the wrappers are looked through.
    """
    if tensor.dtype not in LIMITS:
        return None
    keys = memory.keys_of(tensor)
    if not memory.is_plain(keys):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            tensor = memory.settle(tensor, memory.keys_of(tensor))
        except memory.Unsupported:
            return None
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# Dtypes so wide that their sum stays far within it, and how far: a sum is finite only where all
# numbers are, and takes a third of the time that finding the bounds does.
_WIDE = frozenset([torch.float32, torch.float64, torch.bfloat16])
_FAR_WITHIN = 1e30


def extent_now(tensor: torch.Tensor) -> Extent:
    """The extent of a `readable` tensor, waiting for its device where it has one.

    The magnitude of one that is far from its limit is given as 0.
    """
    if tensor.dtype in _WIDE and -_FAR_WITHIN < tensor.sum().item() < _FAR_WITHIN:
        return FINE
    low, high = _low_and_high(tensor)
    return from_bounds(low.item(), high.item())


def from_bounds(low: float, high: float) -> Extent:
    """The extent of values between two bounds, NaN where one of them is."""
    top = max(-low, high)
    if top < math.inf:  # and not NaN
        return Extent(0, top)
    if low != low or high != high:
        return Extent(NAN, math.nan)
    bits = (POSITIVE if high == math.inf else 0) | (NEGATIVE if low == -math.inf else 0)
    return Extent(bits, math.inf)


def _low_and_high(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN in both where there is one: unlike isfinite().all(), one pass and nothing allocated."""
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)  # 8-bit floats have no reductions
    low, high = torch.aminmax(tensor)
    return low, high


class Flags(Protocol):
    """Extents that a device works out while the program goes on."""

    def submit(self, tensor: torch.Tensor) -> int:
        """Start on a readable tensor as it is now; the number of its extent in `fetch`."""
        ...

    def fetch(self) -> list[Extent]:
        """Wait for all extents submitted since the last fetch, in order."""
        ...

    @property
    def full(self) -> bool:
        """Whether to fetch before more is submitted."""
        ...


class TorchFlags:
    """Flags by plain torch operations, for any device."""

    def __init__(self) -> None:
        self._bounds: list[torch.Tensor] = []

    @property
    def full(self) -> bool:
        return len(self._bounds) >= 2 * 4096

    def submit(self, tensor: torch.Tensor) -> int:
        low, high = _low_and_high(tensor)
        self._bounds += [_as_float32(low), _as_float32(high)]
        return len(self._bounds) // 2 - 1

    def fetch(self) -> list[Extent]:
        if not self._bounds:
            return []
        bounds, self._bounds = self._bounds, []
        numbers = torch.stack(bounds).tolist()
        return [from_bounds(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def _as_float32(value: torch.Tensor) -> torch.Tensor:
    if value.dtype is torch.float64:  # what is finite must not become infinite
        value = torch.where(torch.isinf(value), value, value.clamp(-3e38, 3e38))
    return value.to(torch.float32)


class KernelFlags:
    """Flags by one Triton kernel a tensor, into a table that is read as a whole."""

    def __init__(self, flagger: Flagger) -> None:
        self._flagger = flagger
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= SLOTS

    def submit(self, tensor: torch.Tensor) -> int:
        if not tensor.is_contiguous():
            shape, strides, _ = memory.without_repeats(tensor)
            if memory.is_dense(shape, strides):  # in whatever order: they are the same numbers
                count = math.prod(shape)
            else:
                tensor = tensor.contiguous()
                count = tensor.numel()
        else:
            count = tensor.numel()
        self._flagger.flag(tensor, count, self._count)
        self._count += 1
        return self._count - 1

    def fetch(self) -> list[Extent]:
        count, self._count = self._count, 0
        return [Extent(bits, top) for bits, top in self._flagger.read(count)] if count else []


def _on_cuda(device: torch.device) -> Flags:
    if importlib.util.find_spec("triton") is None:
        return TorchFlags()
    from tensorprobe.numerics import launch

    try:
        return KernelFlags(launch.Flagger(device, SLOTS))
    except launch.FAILURES:
        return TorchFlags()


_CHOICES: dict[str, Callable[[torch.device], Flags]] = {"cuda": _on_cuda}


def flags_for(device: torch.device) -> Flags:
    """The flags of a device: kernels where Triton can build them, else torch operations."""
    choose = _CHOICES.get(device.type)
    return TorchFlags() if choose is None else choose(device)
