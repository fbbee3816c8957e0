"""Stored bytes back to arrays and tensors, exact in every dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tensorprobe.errors import MissingDependency, UnreadableCapture

if TYPE_CHECKING:
    import torch

    from tensorprobe.records import TensorRecord

# torch's dtype names to numpy's; everything not named here is spelt the same in both.
_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype for torch's name of it, little-endian."""
    dtype: np.dtype[Any]
    if name in _ML_DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name))
        return dtype
    if name == "complex32":  # numpy has none: pairs of halves
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    if name in ("float4_e2m1fn_x2", "bits8", "quint8", "quint4x2", "quint2x4"):
        return np.dtype(np.uint8)
    if name in ("bits16", "qint32", "qint8"):
        return np.dtype({"bits16": "<u2", "qint32": "<i4", "qint8": "i1"}[name])
    dtype = np.dtype(name).newbyteorder("<")
    return dtype


def read_blob(record: TensorRecord) -> np.ndarray[Any, Any]:
    """The stored content of a tensor, memory-mapped and read-only."""
    if record.blob is None:
        why = record.gap or "the capture keeps no tensors; record with keep='tensors'"
        raise UnreadableCapture(f"{record.name} has no stored content: {why}")
    blob = record.blob
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
