"""What kind of tensor it is, and its memory as a numpy array without a copy."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import DispatchKey, DispatchKeySet

from tensorprobe.tensors.host import STORAGE
from tensorprobe.torch_versions import bit_of, dispatch_modes_off, key_bits

Array = np.ndarray[Any, Any]

# Own torch work runs below autograd, autocast, functorch and every Python mode: nothing is
# recorded, differentiated, cast or batched. One guard costs 1 us; no_grad plus
# _disable_current_modes cost 8.
_ABOVE = (
    "AutogradFunctionality AutogradOther AutogradNestedTensor ADInplaceOrView AutocastCPU "
    "AutocastCUDA AutocastXPU AutocastMPS AutocastPrivateUse1 Python PythonTLSSnapshot "
    "PythonDispatcher PreDispatch FuncTorchDynamicLayerFrontMode FuncTorchDynamicLayerBackMode "
    "FuncTorchVmapMode Functionalize"
)


def key_set(*names: str) -> DispatchKeySet:
    """The dispatch keys of these names, as far as this torch has them."""
    keys = DispatchKeySet(DispatchKey.Undefined)
    for name in names:
        if hasattr(DispatchKey, name):
            keys = keys.add(getattr(DispatchKey, name))
    return keys


ABOVE_KERNELS = key_set(*_ABOVE.split())


# A subclass may rely on what lies between it and the kernels, autograd's bookkeeping of views too.
_ABOVE_SUBCLASSES = ABOVE_KERNELS - key_set(
    "AutogradFunctionality", "ADInplaceOrView", "Python", "PythonTLSSnapshot"
)


@contextmanager
def kernels_only() -> Iterator[None]:
    """Run torch operations without anything above the kernels taking notice."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(ABOVE_KERNELS):
        yield


@contextmanager
def subclass_only() -> Iterator[None]:
    """Turn off all modes for work on a tensor subclass, whose own dispatch still computes."""
    guard = torch._C._ExcludeDispatchKeyGuard(_ABOVE_SUBCLASSES)
    with torch._C.DisableTorchFunction(), guard, torch.no_grad():
        if torch._C._len_torch_dispatch_stack():
            with dispatch_modes_off():
                yield
        else:
            yield


# In the order in which they are named to the user.
_OBSTACLES: tuple[tuple[int, str], ...] = (
    (bit_of("FuncTorchBatched"), "functorch batched"),
    (bit_of("FuncTorchGradWrapper"), "functorch grad"),
    (bit_of("Functionalize"), "functional"),
    (bit_of("Quantized"), "quantized"),
    (bit_of("NestedTensor"), "nested"),
    (bit_of("Sparse"), "sparse"),
    (bit_of("SparseCsr"), "sparse"),
    (bit_of("Meta"), "meta"),
)
_PYTHON_BIT = bit_of("Python")
_LAZY_BITS = bit_of("Conjugate") | bit_of("Negative") | bit_of("ZeroTensor")
_UNUSUAL = _PYTHON_BIT | _LAZY_BITS
for _bit, _name in _OBSTACLES:
    _UNUSUAL |= _bit

NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in STORAGE if hasattr(torch, name)
}
# Dtypes that have NaN, infinities and a mean of their own kind: floats and complex numbers.
WITH_FRACTION = frozenset(name for name in STORAGE if name.startswith(("float", "bf", "complex")))

WHOLE_NUMBERS = frozenset(dtype for dtype, name in NAMES.items() if name == "bool" or "int" in name)


class Unsupported(Exception):
    """There is no summary of this kind of tensor; the text says which kind it is."""


def is_plain(keys: int) -> bool:
    """Whether a tensor with these keys is its strided memory and nothing else."""
    return not keys & _UNUSUAL


def settle(tensor: torch.Tensor, keys: int) -> torch.Tensor:
    """An unusual tensor as one that has its numbers in memory; raises Unsupported."""
    for bit, kind in _OBSTACLES:
        if keys & bit:
            layout = str(tensor.layout).removeprefix("torch.")
            raise Unsupported(f"{layout if kind == 'sparse' else kind} tensor: no summary")
    if keys & _PYTHON_BIT:
        return _settle_subclass(tensor)
    if keys & _LAZY_BITS:
        with kernels_only():
            return (
                tensor.clone() if tensor._is_zerotensor() else tensor.resolve_conj().resolve_neg()
            )
    return tensor


# Of a subclass of Tensor: the tensor that has its numbers.
_NUMBERS_OF: dict[type, Callable[[Any], torch.Tensor]] = {}


def register_subclass(kind: type, numbers_of: Callable[[Any], torch.Tensor]) -> None:
    """Record tensors of this subclass by the numbers that `numbers_of` finds in them."""
    _NUMBERS_OF[kind] = numbers_of


def as_dtensor(tensor: torch.Tensor) -> Any:
    """The tensor, if it is a DTensor: this rank's part of a larger one; else None."""
    for home in ("torch.distributed.tensor", "torch.distributed._tensor"):  # the latter before 2.5
        kind = getattr(sys.modules.get(home), "DTensor", None)
        if kind is not None:
            return tensor if isinstance(tensor, kind) else None
    return None


def as_waiter(tensor: torch.Tensor) -> Any:
    """The tensor, if it waits at its first use for the collective that makes it; else None."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(functional, "AsyncCollectiveTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's part of it, which is a tensor of its own; others as they are."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed._local_tensor


def _settle_subclass(tensor: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    inner = own_part(tensor)
    if (waiter := as_waiter(inner)) is not None:
        inner = waiter.elem
    if inner is not tensor:
        return settle(inner, key_bits(inner))
    for base in kind.__mro__:
        if base in _NUMBERS_OF:
            inner = _NUMBERS_OF[base](tensor)
            return settle(inner, key_bits(inner))
    # A device written in Python is a subclass too; its numbers are reached by calling torch.
    if tensor.device.type in ("cpu", "cuda", "meta") or kind.__name__ == "FakeTensor":
        raise Unsupported(f"{kind.__module__}.{kind.__qualname__} tensor: no summary")
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor) and raw.is_cpu and raw.shape == tensor.shape:
        # A simulated device keeps its numbers in host memory. Read there: operations of ours would
        # be counted, and be spoilt, by the faults that are planted in its kernels.
        return settle(raw, key_bits(raw))
    return tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name of the dtype; raises Unsupported where there are no single numbers."""
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{str(tensor.layout).removeprefix('torch._')} tensor: no summary")
    name = NAMES.get(tensor.dtype)
    if name is None:
        raise Unsupported(f"{str(tensor.dtype).removeprefix('torch.')} tensor: no summary")
    return name


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]
    """All memory from an address on; keeps the tensor alive whose memory it is."""

    tensor: torch.Tensor


class _Lender:
    """What numpy asks of an object that lends it memory; keeps the tensor alive meanwhile."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, interface: dict[str, Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = interface


FREED = "tensor whose storage was freed: no summary"


def has_memory(tensor: torch.Tensor, itemsize: int, nbytes: int) -> bool:
    """Whether there are so many bytes in its storage: one that was freed keeps its tensors."""
    end = tensor.storage_offset() * itemsize + nbytes
    return tensor.untyped_storage().nbytes() >= end


def is_there(tensor: torch.Tensor) -> bool:
    """Whether the storage has the whole of a tensor: sharding libraries free that of parameters
    between their uses, and leave the tensors."""
    itemsize = tensor.element_size()
    return not tensor.numel() or has_memory(tensor, itemsize, _extent(tensor) * itemsize)


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, with these."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * step for length, step in pairs)


def stretch(tensor: torch.Tensor) -> Array:
    """The bytes from the first element of a CPU tensor to its last, what lies between included."""
    extent = _extent(tensor) if tensor.numel() else 0
    return borrow(tensor, np.dtype(f"V{tensor.element_size()}"), (extent,)).view(np.uint8)


def borrow(
    tensor: torch.Tensor,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> Array:
    """The memory of a CPU tensor, from its first element on, as an array that is only read.

    Not `tensor.numpy()`: that has no bfloat16, and goes through the dispatcher.
    """
    address = tensor.data_ptr()
    if 0 in shape:
        return np.empty(shape, dtype)
    steps = (1,) if strides is None else strides
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if not address or not has_memory(tensor, dtype.itemsize, extent * dtype.itemsize):
        raise Unsupported(FREED)
    if strides is None and len(shape) == 1:  # a third of the time of what follows
        memory = _Memory.from_address(address)
        memory.tensor = tensor
        # Left writeable: numpy's argmin would copy what is not. Nobody writes to it.
        array: Array = np.frombuffer(memory, dtype, shape[0])
        return array
    size = dtype.itemsize
    interface = {
        "data": (address, True),
        "shape": shape,
        "strides": None if strides is None else tuple(step * size for step in strides),
        "typestr": dtype.str,
        "version": 3,
    }
    return np.asarray(_Lender(tensor, interface))


def logical_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """A CPU tensor as it presents itself: its shape, row by row."""
    if tensor.is_contiguous():
        return borrow(tensor, dtype, (tensor.numel(),))
    return borrow(tensor, dtype, tuple(tensor.shape), tensor.stride())


def distinct_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> tuple[Array, int]:
    """The elements of a CPU tensor in the order of memory, and how often each is repeated."""
    if tensor.is_contiguous():
        return borrow(tensor, dtype, (tensor.numel(),)), 1
    shape, strides, repeat = without_repeats(tensor)
    if is_dense(shape, strides):
        return borrow(tensor, dtype, (math.prod(shape),)), repeat
    return borrow(tensor, dtype, shape, strides), repeat


def without_repeats(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape and strides of what an expanded tensor repeats, and how often it does."""
    shape, strides, repeat = [], [], 1
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        if step == 0:
            repeat *= length
        else:
            shape.append(length)
            strides.append(step)
    return tuple(shape), tuple(strides), repeat


class Runs(NamedTuple):
    """How elements lie of which `run` at a time are side by side, as in a slice or a transposed
    tensor: by the numbers of runs in the inner two of three dimensions, and the steps in all."""

    run: int
    n1: int
    n2: int
    s0: int
    s1: int
    s2: int


def in_runs(shape: Sequence[int], strides: Sequence[int]) -> Runs | None:
    """The runs of elements that are not one piece; None where it takes more dimensions."""
    found: list[tuple[int, int]] = []
    for length, step in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if found and found[-1][1] == length * step:  # the next begins where this one ends
            length *= found.pop()[0]
        found.append((length, step))
    if not 2 <= len(found) <= 4 or found[-1][1] != 1:
        return None
    run, _ = found.pop()
    (_, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(found)) + found
    return Runs(run, n1, n2, s0, s1, s2)


def as_in_memory(
    shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the same elements in the order of their addresses."""
    pairs = sorted(zip(strides, shape, strict=True), reverse=True)
    return tuple(length for _, length in pairs), tuple(step for step, _ in pairs)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these elements fill a stretch of memory without holes, in whatever order."""
    expected = 1
    for step, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def in_one_row(tensor: torch.Tensor) -> torch.Tensor | None:
    """A plain tensor's elements in the order of their addresses; None where there are holes or
    repetitions between them, or it is not plain."""
    if tensor.layout is not torch.strided or not is_plain(key_bits(tensor)):
        return None
    if tensor.is_contiguous():
        return tensor
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        return None
    with kernels_only():
        return tensor.as_strided((tensor.numel(),), (1,))
