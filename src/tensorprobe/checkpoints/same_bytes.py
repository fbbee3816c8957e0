"""Whether two tensors of checkpoints have the same bits, read piece by piece."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tensorprobe.checkpoints.stored_weights import StoredWeight, WeightPieces
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.digest import Digester

_BLOCK = 1 << 19  # numbers at a time


def have_same_bytes(
    a: StoredWeight, b: StoredWeight, read: Callable[[int], None] | None = None
) -> bool:
    """Of tensors of one dtype and shape; `read` is told how many bytes of each were read."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.parts == b.parts:
        return True
    try:
        mine = WeightPieces(a)
        try:
            theirs = WeightPieces(b)
            try:
                for start in range(0, mine.size, _BLOCK):
                    stop = min(start + _BLOCK, mine.size)
                    x, y = mine.piece(start, stop), theirs.piece(start, stop)
                    words = np.uint64 if x.nbytes % 8 == 0 else np.uint8
                    if not np.array_equal(x.view(words), y.view(words)):
                        return False
                    if read is not None:
                        read(x.nbytes)
            finally:
                theirs.close()
        finally:
            mine.close()
    except (ValueError, OSError) as error:
        raise BadArtefact(f"{a.key[:120]}: {error}") from error
    return True


def digest_of(weight: StoredWeight) -> str:
    """Its digest, which is that of a recording of the same bytes."""
    digester = Digester()
    digester.reset()
    try:
        pieces = WeightPieces(weight)
        try:
            for start in range(0, pieces.size, _BLOCK):
                digester.update(
                    pieces.piece(start, min(start + _BLOCK, pieces.size)).view(np.uint8)
                )
        finally:
            pieces.close()
    except (ValueError, OSError) as error:
        raise BadArtefact(f"{weight.key[:120]}: {error}") from error
    return digester.hexdigest()
