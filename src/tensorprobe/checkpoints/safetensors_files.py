"""A safetensors file: what its header says, checked against the file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tensorprobe.checkpoints.stored_weights import StoredWeight, whole
from tensorprobe.errors import BadArtefact
from tensorprobe.store.shard import SAFETENSORS_DTYPES
from tensorprobe.tensors.layouts import itemsize_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.tensor_files import Stored

_MAX_HEADER_NBYTES = 32 << 20  # some 300,000 tensors
_MAX_BRACKETS = 2_000_000
_MOST_DIMENSIONS = 64
_DTYPES = {
    **{name: dtype for dtype, (name, _) in SAFETENSORS_DTYPES.items()},
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def is_safetensors(beginning: bytes, nbytes: int) -> bool:
    """Whether a file of this size that begins so can be one."""
    length = int.from_bytes(beginning[:8], "little")
    return len(beginning) > 8 and beginning[8:9] == b"{" and 8 + length <= nbytes


def read_safetensors(path: Path) -> dict[str, StoredWeight]:
    """The tensors of a file, in the order in which they lie in it."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_NBYTES, size - 8):
                raise BadArtefact(f"'{path}' is no safetensors file: a header of {length} bytes")
            text = file.read(length)
            if text.count(b"[") + text.count(b"{") > _MAX_BRACKETS:
                raise ValueError(f"more than {_MAX_BRACKETS} objects and lists")
            header = json.loads(text, object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise BadArtefact(f"'{path}' is missing") from error
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise BadArtefact(f"'{path}': its header is damaged: {reason}") from None
    if not isinstance(header, dict):
        raise BadArtefact(f"'{path}': its header is a {type(header).__name__}, not an object")
    begin = 8 + length
    rows = [
        (key, _entry(path, key, entry, begin, size - begin))
        for key, entry in header.items()
        if key != "__metadata__"
    ]
    rows.sort(key=lambda row: row[1].start)
    return {key: whole(key, stored) for key, stored in rows}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has {twice[:80]!r} twice")
    return made


def _entry(path: Path, key: str, entry: Any, start: int, nbytes: int) -> Stored:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype = _DTYPES.get(str(fields.get("dtype")))
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if dtype is None:
        raise BadArtefact(
            f"'{path}': {key[:120]}: {str(fields.get('dtype'))[:40]!r} is no dtype that is known"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise BadArtefact(f"'{path}': {key[:120]}: its shape or its place is no list of numbers")
    if len(shape) > _MOST_DIMENSIONS:
        raise BadArtefact(f"'{path}': {key[:120]}: a shape of {len(shape)} dimensions")
    begin, end = offsets
    wanted = math.prod(shape) * itemsize_of(dtype)
    if not begin <= end <= nbytes or end - begin != wanted:
        raise BadArtefact(
            f"'{path}': {key[:120]}: {dtype} {str(shape)[:80]} takes {wanted} bytes; the header "
            f"gives it {begin} to {end} of {nbytes}"
        )
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return Stored(path, start + begin, wanted, dtype, tuple(shape), 0, tuple(reversed(strides)))


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
