"""Whether a tensor holds NaN or infinity, and how large it gets: one reduction, no statistics."""

from __future__ import annotations

import importlib.util
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tensorprobe.tensors import memory
from tensorprobe.tensors.layouts import is_dense
from tensorprobe.torch_versions import key_bits

if TYPE_CHECKING:
    from tensorprobe.tensors.launch import Flagger

NAN, POSITIVE, NEGATIVE = 1, 2, 4  # bits: NaN, +inf, -inf
INFINITE = POSITIVE | NEGATIVE
SLOTS = 1 << 16  # tensors whose flags wait on a device
_MOST_LAYOUTS = 10_000  # that are known to have no holes, or some

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
    keys = key_bits(tensor)
    if not memory.is_plain(keys):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            tensor = memory.settle(tensor, key_bits(tensor))
        except memory.Unsupported:
            return None
    if tensor.layout is not torch.strided or not tensor.numel() or _is_freed(tensor):
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_freed(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass has its memory elsewhere
        return False


REAL = frozenset(dtype for dtype in LIMITS if not dtype.is_complex)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a torch.Tensor, or Parameter, is `readable` as it is: real floats in memory.

    Asked of every result, and twice as fast as a look at its dispatch keys. Tensors that are none
    of their own memory (meta, zero, functorch's) have no address, or raise.
    """
    try:
        return (
            tensor.dtype in REAL
            and tensor.layout is torch.strided
            and not (tensor.is_neg() or tensor.is_nested)
            and tensor.numel() > 0
            and tensor.data_ptr() != 0
            and tensor.untyped_storage().nbytes() != 0  # freed, of which a view has an address
        )
    except RuntimeError:
        return False


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


class Extents:
    """Extents by ticket, as numbers until one is asked for: few ever are."""

    def __init__(
        self, found: Sequence[tuple[int, float]] | memory.Array, limits: list[float]
    ) -> None:
        """What was found, and the largest number of the dtype of each."""
        table = np.asarray(found, dtype=np.float64).reshape(len(limits), 2)
        self._bits, self._tops, self._limits = table[:, 0], table[:, 1], np.asarray(limits)

    def __len__(self) -> int:
        return len(self._bits)

    def __getitem__(self, ticket: int) -> Extent:
        return Extent(int(self._bits[ticket]), float(self._tops[ticket]))

    @property
    def is_calm(self) -> bool:
        """Whether all are finite, and none within half of its limit; one at it is a mask."""
        if self._bits.any():
            return False
        return not ((self._tops >= self._limits / 2) & (self._tops < self._limits)).any()


class Flags(Protocol):
    """Extents that a device works out while the program goes on."""

    computes: bool  # `submit` calls torch operations, which no mode or graph is to see

    @property
    def parts(self) -> tuple[Any, ...] | None:
        """What C++ needs to start on tensors itself; None: it has to `submit` them."""
        ...

    def submit(self, tensor: torch.Tensor) -> int:
        """Start on a readable tensor as it is now; the number of its extent in `fetch`.

        Call it with function modes off.
        """
        ...

    def submit_piece(
        self, tensor: torch.Tensor, dtype: torch.dtype, count: int, address: int
    ) -> int:
        """Submit a tensor that is known to be contiguous."""
        ...

    def fetch(self) -> Extents:
        """Wait for all extents submitted since the last fetch, in order."""
        ...

    @property
    def full(self) -> bool:
        """Whether to fetch before more is submitted."""
        ...


class TorchFlags:
    """Flags by plain torch operations, for any device."""

    computes = True
    parts = None

    def __init__(self) -> None:
        self._bounds: list[torch.Tensor] = []
        self._limits: list[float] = []
        self._lock = threading.RLock()  # a signal's handler may come with a tensor meanwhile

    @property
    def full(self) -> bool:
        return len(self._limits) >= 4096

    def submit_piece(
        self, tensor: torch.Tensor, dtype: torch.dtype, count: int, address: int
    ) -> int:
        return self.submit(tensor)

    def submit(self, tensor: torch.Tensor) -> int:
        low, high = map(_as_float32, _low_and_high(tensor))
        limit = LIMITS[tensor.dtype]
        with self._lock:  # no call before both are there: a handler may run after any
            self._bounds += [low, high]
            self._limits += [limit]
            return len(self._limits) - 1

    def fetch(self) -> Extents:
        with self._lock:
            bounds, self._bounds = self._bounds, []
            limits, self._limits = self._limits, []
        numbers = torch.stack(bounds).tolist() if bounds else []
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return Extents([from_bounds(*pair) for pair in pairs], limits)


def _as_float32(value: torch.Tensor) -> torch.Tensor:
    if value.dtype is torch.float64:  # what is finite must not become infinite
        value = torch.where(torch.isinf(value), value, value.clamp(-3e38, 3e38))
    return value.to(torch.float32)


class KernelFlags:
    """Flags by one Triton kernel a tensor, into a table that is read as a whole."""

    computes = False

    def __init__(self, flagger: Flagger) -> None:
        self._flagger = flagger
        self._slots = itertools.count()  # backward runs in a thread a device
        self._limits = [math.inf] * SLOTS
        # of tables that were full before they were fetched
        self._before: list[memory.Array] = []
        self._past: list[float] = []
        self._reading = threading.RLock()  # as that of TorchFlags
        self._dense: dict[tuple[Any, Any], int] = {}
        self.full = False

    @property
    def parts(self) -> tuple[Any, ...] | None:
        """The flagger, what it asks and where it writes, and how many slots there are."""
        return (*self._flagger.parts, SLOTS)

    def submit(self, tensor: torch.Tensor) -> int:
        tensor, count = self._in_one_piece(tensor)
        return self.submit_piece(tensor, tensor.dtype, count, tensor.data_ptr())

    def submit_piece(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        count: int,
        address: int,
        slot: int | None = None,
    ) -> int:
        """Submit a contiguous tensor; `slot` if C++ has taken one already."""
        if slot is None:
            slot = next(self._slots)
        if slot >= SLOTS - 1:
            self.full = True
            if slot >= SLOTS:
                slot = self._next_table()
        self._limits[slot] = LIMITS[dtype]
        self._flagger.flag(tensor, dtype, count, address, slot)
        return slot + len(self._past) if self._past else slot

    def _in_one_piece(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The tensor, or a copy, and how many of its numbers lie from its first on."""
        if tensor.is_contiguous():
            return tensor, tensor.numel()
        layout = (tensor.shape, tensor.stride())
        count = self._dense.get(layout)
        if count is None:
            shape, strides, _ = memory.without_repeats(tensor)
            # in whatever order: they are the same numbers
            count = math.prod(shape) if is_dense(shape, strides) else 0
            if len(self._dense) < _MOST_LAYOUTS:
                self._dense[layout] = count
        if count:
            return tensor, count
        with memory.kernels_only():
            return tensor.contiguous(), tensor.numel()

    def _next_table(self) -> int:
        """More tensors than slots, and no fetch in between: wait for what is there."""
        with self._reading:
            slot = next(self._slots)
            if slot >= SLOTS:  # and no other thread was here first
                self._before.append(np.asarray(self._flagger.read(SLOTS)))
                self._past += self._limits
                self._slots = itertools.count(1)
                slot = 0
        return slot

    def fetch(self) -> Extents:
        count = min(next(self._slots), SLOTS)
        self._slots = itertools.count()
        self.full = False
        before, self._before = self._before, []
        past, self._past = self._past, []
        found: Any = self._flagger.read(count) if count else ()
        if before:
            found = np.concatenate([*before, np.asarray(found).reshape(count, 2)])
        return Extents(found, past + self._limits[:count])


def _on_cuda(device: torch.device) -> Flags:
    if importlib.util.find_spec("triton") is None:
        return TorchFlags()
    try:
        from tensorprobe.tensors import launch
    except ImportError:  # the Triton of an older torch
        return TorchFlags()
    try:
        return KernelFlags(launch.Flagger(device, SLOTS))
    except launch.FAILURES:
        return TorchFlags()


_CHOICES: dict[str, Callable[[torch.device], Flags]] = {"cuda": _on_cuda}


def flags_for(device: torch.device) -> Flags:
    """The flags of a device: kernels where Triton can build them, else torch operations."""
    choose = _CHOICES.get(device.type)
    return TorchFlags() if choose is None else choose(device)
