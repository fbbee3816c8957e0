"""The library made of tally.c: statistics and digests at the speed of memory. No torch.

It is built when the package is, or by `python -m tensorprobe.tensors.build_tally`. Where it is not
there, or of another version, LIBRARY is None and numpy does the work, in `host` and
`digest`.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

from tensorprobe.tensors.summary import TensorSummary

VERSION = 4  # as in tally.c
PATH = Path(__file__).with_name("libtally.so")

# From here on a call lets go of the interpreter. What takes a few microseconds does not: another
# thread would take the interpreter and keep it for up to 5 ms.
RELEASE_NBYTES = 1 << 16
# A thread helps for each of these: waking it takes some 20 us, in which one alone reads 300 KB.
SHARE_NBYTES = 1 << 20

# dtypes as tally.c numbers them
_NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint32 uint16 uint8 uint64 bool"
KINDS = {name: kind for kind, name in enumerate(_NAMES.split())}
_ITEMSIZES = dict(zip(KINDS, (8, 4, 2, 2, 8, 4, 2, 1, 4, 2, 1, 8, 1), strict=True))
_STATS, _DIGEST = 1, 2
_BOUNDED, _FINITE, _USUAL, _OUT_OF_RANGE = 1, 2, 3, 4
# Wanted, kind, bytes, repeat, threads, the address of a layout.
_QUESTION = struct.Struct("<6q")
# The answer after it: low, high, mean, norm; nan, inf, zero; the digest, the state, the sketch.
_REALS, _WHOLES, _NATURALS = (struct.Struct(f"<2{kind}2d3qQq128s") for kind in "dqQ")
_THREADS_AT = 32
MOST_DIMS = 64

Outcome = tuple["TensorSummary | None", "str | None"]
# Of elements that do not lie in one piece: how many, and the steps between them in elements.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Reader:
    """Reads memory of one dtype and size; for one thread, as it has one place for an answer."""

    __slots__ = (
        "_answer",
        "_at",
        "_call",
        "_digest",
        "_dtype",
        "_has_sketch",
        "_layout",
        "_request",
        "_stats",
        "_unpack",
        "itemsize",
        "most_threads",
        "nbytes",
    )

    def __init__(
        self,
        library: TallyLibrary,
        dtype: str,
        nbytes: int,
        repeat: int,
        *,
        stats: bool,
        digest: bool,
        layout: Layout | None = None,
    ) -> None:
        self.nbytes, self.itemsize = nbytes, _ITEMSIZES[dtype]
        self._dtype, self._stats, self._digest = dtype, stats, digest
        self._has_sketch = repeat == 1
        self._unpack = _unpacking(dtype)
        self._request = request = bytearray(_QUESTION.size + _REALS.size)
        wanted = _STATS * stats + _DIGEST * digest
        self._layout = None if layout is None else _layout(layout, self.itemsize)
        layout_at = 0 if self._layout is None else ctypes.addressof(self._layout)
        _QUESTION.pack_into(request, 0, wanted, KINDS[dtype], nbytes, repeat, 1, layout_at)
        self._answer = memoryview(request)[_QUESTION.size :]
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(request))
        self.most_threads = nbytes // SHARE_NBYTES
        self._call = library.read_held if nbytes <= RELEASE_NBYTES else library.read

    def read(self, address: int, threads: int = 1) -> Outcome | None:
        """What was asked for of the memory at an address; None where numpy has to look at it."""
        if self.most_threads > 1:
            some = min(threads, self.most_threads)
            struct.pack_into("<q", self._request, _THREADS_AT, some)
        if not self._call(self._at, address):
            return None
        low, high, mean, norm, nan, inf, zero, digest, state, sums = self._unpack(self._answer)
        summary = None
        if self._stats:
            if not self._has_sketch:
                sums = None
            if state == _USUAL:
                summary = TensorSummary(low, high, mean, norm, nan, inf, zero, True, sums)
            else:
                summary = _unusual(self._dtype, low, high, mean, norm, nan, inf, zero, state, sums)
                if summary is None:
                    return None
        return summary, f"{digest:016x}" if self._digest else None


def _layout(layout: Layout, itemsize: int) -> Any:
    """The layout as tally.c has it."""
    shape, strides = layout
    numbers = (ctypes.c_int64 * (1 + 2 * MOST_DIMS))()
    numbers[0] = len(shape)
    for dim, (length, step) in enumerate(zip(shape, strides, strict=True)):
        numbers[1 + dim], numbers[1 + MOST_DIMS + dim] = length, step * itemsize
    return numbers


def _unpacking(dtype: str) -> Any:
    if dtype == "uint64":
        return _NATURALS.unpack
    return (_WHOLES if dtype.startswith(("int", "uint", "bool")) else _REALS).unpack


def _unusual(
    dtype: str, low: float, high: float, mean: float, norm: float,
    nan: int, inf: int, zero: int, state: int, sums: bytes | None,
) -> TensorSummary | None:  # fmt: skip
    """The summary of booleans, of no or no finite numbers; None if a sum left its range."""
    if state & _OUT_OF_RANGE:
        return None
    if dtype == "bool":
        return TensorSummary(bool(low), bool(high), None, None, 0, 0, zero, True, sums)
    bounded, finite = state & _BOUNDED, state & _FINITE
    return TensorSummary(
        low if bounded else None,
        high if bounded else None,
        mean if finite else None,
        norm if finite else None,
        nan,
        inf,
        zero,
        True,
        sums,
    )


class TallyLibrary:
    """The functions of tally.c."""

    def __init__(self, path: Path) -> None:
        releasing, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        version = releasing.tally_version()
        if version != VERSION:
            raise OSError(f"{path} is of version {version}, not {VERSION}")
        self.path = path
        number, size, address = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.read = _declared(releasing.tally_memory, number, address, address)
        self.read_held = _declared(holding.tally_memory, number, address, address)
        self.mixed = _declared(releasing.tally_mixed, ctypes.c_uint64, address, size, size)
        self.use = _declared(holding.tally_use, number, number)


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


def load(path: Path = PATH) -> TallyLibrary | None:
    """The library, where there is one that fits this machine and this version."""
    if sys.byteorder != "little":
        return None
    try:
        return TallyLibrary(path)
    except (OSError, AttributeError):
        return None


LIBRARY = load()
