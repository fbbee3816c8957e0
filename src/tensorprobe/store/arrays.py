"""Stored bytes back to arrays and tensors, exact in every dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensorprobe.errors import BadArtefact, MissingDependency, UnreadableCapture
from tensorprobe.store.dtypes import numpy_dtype
from tensorprobe.store.tensor_files import locate
from tensorprobe.store.widening import narrow as narrowed

if TYPE_CHECKING:
    import torch

    from tensorprobe.records import Blob, TensorRecord


def read_blob(record: TensorRecord) -> np.ndarray[Any, Any]:
    """The stored content of a tensor, memory-mapped and read-only."""
    if record.blob is None:
        why = record.gap or "the capture keeps no tensors; record with keep='tensors'"
        raise UnreadableCapture(f"{record.name} has no stored content: {why}")
    blob = record.blob
    if blob.container != "raw":
        return _read_file(record, blob)
    dtype = numpy_dtype(record.dtype)
    if blob.nbytes != record.numel * dtype.itemsize:
        raise UnreadableCapture(
            f"{record.name} is {record.dtype} of shape {list(record.shape)}, which takes "
            f"{record.numel * dtype.itemsize} bytes; {blob.path} has {blob.nbytes} for it"
        )
    if blob.nbytes == 0:
        return np.empty(record.shape, dtype)
    raw: np.ndarray[Any, Any]
    raw = np.memmap(blob.path, np.uint8, "r", blob.offset, (blob.nbytes,))
    if blob.offset % dtype.alignment:  # shards have no holes; ml_dtypes wants alignment
        raw = np.array(raw)
        raw.flags.writeable = False
    return np.frombuffer(raw, dtype).reshape(record.shape)


def _read_file(record: TensorRecord, blob: Blob) -> np.ndarray[Any, Any]:
    """The tensor of a .npy or .pt file, in the dtype that the record says it had.

    numpy has no bfloat16 and no fp8, so the peers widen those to float32, which loses nothing.
    """
    try:
        stored = locate(blob.path)
        if stored.shape != record.shape:
            raise BadArtefact(
                f"{blob.path} holds shape {list(stored.shape)}; the index says {list(record.shape)}"
            )
        array = stored.array()
    except BadArtefact as error:
        raise UnreadableCapture(f"{record.name}: {error}") from error
    if stored.dtype == record.dtype:
        return array
    narrow = narrowed(array, record.dtype)
    if not np.array_equal(narrow.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc"):
        raise UnreadableCapture(
            f"{record.name} is {record.dtype} by the index, and {blob.path} holds {stored.dtype} "
            "numbers that it has no room for"
        )
    narrow.flags.writeable = False
    return narrow


def read_tensor(record: TensorRecord) -> torch.Tensor:
    """The stored content of a tensor as a CPU tensor of its own."""
    array = read_blob(record)
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            "torch", "TensorRecord.load() (array() does not)", "torch"
        ) from None
    dtype: torch.dtype = getattr(torch, record.dtype)
    flat = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8))
    return flat.view(dtype).reshape(record.shape)
