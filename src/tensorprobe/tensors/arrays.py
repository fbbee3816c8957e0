"""Stored bytes back to arrays and tensors, exact in every dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorprobe.errors import BadArtefact, MissingDependency, UnreadableCapture
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.dtypes import numpy_dtype, part_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.packing import PackedFile
from tensorprobe.tensors.tensor_files import locate
from tensorprobe.tensors.widening import narrow as narrowed

if TYPE_CHECKING:
    import torch


def read_array(name: str, dtype: str, shape: tuple[int, ...], blob: Blob) -> np.ndarray[Any, Any]:
    """The stored content of the tensor of that name, read-only; memory-mapped if it can be."""
    if blob.container in ("npy", "pt"):
        return _read_file(name, dtype, shape, blob)
    kind = numpy_dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if blob.nbytes != nbytes:
        raise UnreadableCapture(
            f"{name} is {dtype} of shape {list(shape)}, which takes {nbytes} bytes; "
            f"{blob.path} has {blob.nbytes} for it"
        )
    if blob.nbytes == 0:
        return np.empty(shape, kind)
    if blob.container == "packed":
        return _unpacked(name, kind, blob).view(kind).reshape(shape)
    raw: np.ndarray[Any, Any]
    try:
        with open_file(blob.path) as file:
            raw = np.memmap(file, np.uint8, "r", blob.offset, (blob.nbytes,))
    except (
        OSError,
        ValueError,
        BadArtefact,
    ) as error:  # it may have changed since the capture was loaded
        raise UnreadableCapture(f"{name}: {_problem(blob, error)}") from error
    if blob.offset % kind.alignment:  # shards have no holes; ml_dtypes wants alignment
        raw = np.array(raw)
        raw.flags.writeable = False
    return np.frombuffer(raw, kind).reshape(shape)


def _problem(blob: Blob, error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"its {blob.nbytes} bytes are more than the memory has room for"
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return reason if str(blob.path) in reason else f"{blob.path} cannot be read: {reason}"


def _unpacked(name: str, kind: np.dtype[Any], blob: Blob) -> np.ndarray[Any, Any]:
    at = 0
    try:
        itemsize = part_of(kind).itemsize
        file = PackedFile(blob.path, blob.offset, blob.packed_nbytes, blob.nbytes, itemsize)
        try:
            data = np.empty(blob.nbytes, np.uint8)  # as much as a file of that size may hold
            for block in file.blocks():
                data[at : at + block.nbytes] = block
                at += block.nbytes
        finally:
            file.close()
    except (OSError, ValueError, BadArtefact, MemoryError) as error:
        raise UnreadableCapture(f"{name}: {_problem(blob, error)}") from error
    data.flags.writeable = False
    return data


def _read_file(name: str, dtype: str, shape: tuple[int, ...], blob: Blob) -> np.ndarray[Any, Any]:
    """The tensor of a .npy or .pt file, in the dtype that it is said to have had.

    numpy has no bfloat16 and no fp8, so the peers widen those to float32, which loses nothing.
    """
    try:
        stored = locate(blob.path)
        if stored.shape != shape:
            raise BadArtefact(
                f"{blob.path} holds shape {list(stored.shape)}; the index says {list(shape)}"
            )
        array = stored.array()
    except BadArtefact as error:
        raise UnreadableCapture(f"{name}: {error}") from error
    if stored.dtype == dtype:
        return array
    narrow = narrowed(array, dtype)
    if not np.array_equal(narrow.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc"):
        raise UnreadableCapture(
            f"{name} is {dtype} by the index, and {blob.path} holds {stored.dtype} "
            "numbers that it has no room for"
        )
    narrow.flags.writeable = False
    return narrow


def read_tensor(name: str, dtype: str, shape: tuple[int, ...], blob: Blob) -> torch.Tensor:
    """The stored content of a tensor as a CPU tensor of its own."""
    array = read_array(name, dtype, shape, blob)
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            "torch", "TensorRecord.load() (array() does not)", "torch"
        ) from None
    kind: torch.dtype = getattr(torch, dtype)
    try:
        flat = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8))
    except MemoryError as error:
        raise UnreadableCapture(f"{name}: {_problem(blob, error)}") from error
    return flat.view(kind).reshape(shape)
