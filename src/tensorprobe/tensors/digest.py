"""The digest: 64 bits that are equal for equal bytes on every device, and see every position.

The bytes are those of the tensor in row-major order, zero-padded to little-endian 64-bit words
`q`. Every word is mixed, `m = q ^ (q >> 29)`: without that an even number of sign flips would
cancel, since the top bit times any odd weight is 2**63. A chunk of CHUNK_WORDS words gives
`p = sum(m[i] * weight[i])`, and the chunks give `fmix(sum(fmix(p[c] + (c+1)*GOLD)) + nbytes*GOLD)`,
all modulo 2**64. Sums commute, so devices may add in any order. Dtype and shape are not part of it:
compare them beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorprobe.tensors import tally

if TYPE_CHECKING:
    import torch

CHUNK_WORDS = 8192
CHUNK_NBYTES = CHUNK_WORDS * 8
GOLD = 0x9E3779B97F4A7C15
MIX_SHIFT = 29  # no multiple of 8: a shift by whole elements would cancel for x -> -x
MASK = (1 << 64) - 1

Array = np.ndarray[Any, Any]


def splitmix64(index: Array) -> Array:
    """The well-mixed 64-bit number that belongs to a position."""
    z = (index + np.uint64(1)) * np.uint64(GOLD)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fmix(value: int) -> int:
    """A bijection of 64 bits in which every bit of the result depends on every bit given."""
    value &= MASK
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return value ^ (value >> 33)


# Odd, so that no two words of one position give the same product.
WEIGHTS: Array = splitmix64(np.arange(CHUNK_WORDS, dtype=np.uint64)) | np.uint64(1)
WEIGHTS.flags.writeable = False


def finish(mixed_sum: int, nbytes: int) -> str:
    """The digest from the sum of all chunks' `fmix(p + (c+1)*GOLD)`."""
    return f"{fmix(mixed_sum + nbytes * GOLD):016x}"


def finish_all(mixed_sums: Array, sizes: Sequence[int]) -> list[str]:
    """The digests of many, from their sums as int64 and their numbers of bytes."""
    value = mixed_sums.view(np.uint64) + np.array(sizes, np.uint64) * np.uint64(GOLD)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        value = (value ^ (value >> np.uint64(33))) * np.uint64(factor)
    text = value.astype(">u8").tobytes().hex()
    return [text[at : at + 16] for at in range(0, len(text), 16)]


class Digester:
    """Digests bytes that arrive in pieces; holds its own buffers, so one per thread."""

    def __init__(self) -> None:
        self._products = np.empty(CHUNK_WORDS, np.uint64)
        self._tail = np.zeros(CHUNK_WORDS, np.uint64)
        self._held = 0  # bytes waiting in _tail for their chunk to fill
        self._chunks = 0
        self._sum = 0
        self._nbytes = 0

    def reset(self) -> None:
        """Begin anew."""
        self._held = self._sum = self._nbytes = self._chunks = 0

    def whole(self, data: Array) -> str:
        """The digest of one array of uint8 that is all there is."""
        if tally.LIBRARY is not None and data.size:
            return finish(tally.LIBRARY.mixed(data.ctypes.data, data.size, 0), data.size)
        self.reset()
        if 0 < data.size <= CHUNK_NBYTES and data.size % 8 == 0:
            self._chunk(data.view(np.uint64))
            return finish(self._sum, data.size)
        self.update(data)
        return self.hexdigest()

    def update(self, piece: Array) -> None:
        """Add a one-dimensional array of uint8."""
        self._nbytes += piece.size
        if self._held:
            piece = self._fill(piece)
        rest = piece.size % CHUNK_NBYTES
        if piece.size > rest:
            self._chunks_of(piece[: piece.size - rest])
        if rest:
            self._fill(piece[piece.size - rest :])

    def hexdigest(self) -> str:
        if self._held:
            words = -(-self._held // 8)
            self._tail.view(np.uint8)[self._held : words * 8] = 0
            self._chunk(self._tail[:words])
            self._held = 0
        return finish(self._sum, self._nbytes)

    def _fill(self, piece: Array) -> Array:
        taken = min(piece.size, CHUNK_NBYTES - self._held)
        self._tail.view(np.uint8)[self._held : self._held + taken] = piece[:taken]
        self._held += taken
        if self._held == CHUNK_NBYTES:
            self._chunk(self._tail)
            self._held = 0
        return piece[taken:]

    def _chunks_of(self, piece: Array) -> None:
        if tally.LIBRARY is not None:
            self._sum += tally.LIBRARY.mixed(piece.ctypes.data, piece.size, self._chunks)
            self._chunks += piece.size // CHUNK_NBYTES
            return
        for start in range(0, piece.size, CHUNK_NBYTES):
            self._chunk(piece[start : start + CHUNK_NBYTES].view(np.uint64))

    def _chunk(self, words: Array) -> None:
        products = self._products[: words.size]
        np.right_shift(words, MIX_SHIFT, out=products)
        np.bitwise_xor(products, words, out=products)
        np.multiply(products, WEIGHTS[: words.size], out=products)
        self._chunks += 1
        self._sum += fmix(int(np.add.reduce(products)) + self._chunks * GOLD)


class _ThreadDigester(threading.local):
    def __init__(self) -> None:
        self.digester = Digester()


_LOCAL = _ThreadDigester()


def digest_bytes(data: bytes | bytearray | memoryview | Array) -> str:
    """The digest of bytes that lie in one piece, as 16 hexadecimal digits."""
    return _LOCAL.digester.whole(np.frombuffer(data, np.uint8))


def digest_array(array: Array) -> str:
    """The digest of an array's content in row-major order, whatever its layout in memory."""
    return digest_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of any tensor that can be read; raises ValueError with the reason otherwise."""
    from tensorprobe.tensors.summarizer import Summarizer

    summarizer = Summarizer(stats=False, digest=True)
    result = summarizer.submit(tensor)
    summarizer.wait()
    if result.digest is None:
        raise ValueError(result.error)
    return result.digest
