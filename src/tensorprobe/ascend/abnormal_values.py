"""What is abnormal about the values of an array, with counts and the first places."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np

from tensorprobe.ascend.artefact_files import open_file
from tensorprobe.ascend.dump import DumpTensor
from tensorprobe.ascend.element_types import decode, kind_of, widened
from tensorprobe.errors import BadArtefact

Array = np.ndarray[Any, Any]
Problem = Literal[
    "nan", "+inf", "-inf", "saturated", "near the limit", "uninitialised", "subnormal", "constant"
]
# These happen in healthy tensors too (a zero bias, tiny gradients): told, but no alarm.
HARMLESS: frozenset[str] = frozenset({"subnormal", "constant"})

# 32-bit words that debug allocators and canaries leave behind.
FILL_WORDS = (
    0xA5A5A5A5, 0x5A5A5A5A, 0xCDCDCDCD, 0xCCCCCCCC, 0xFDFDFDFD, 0xDDDDDDDD, 0xDEADBEEF, 0xBAADF00D,
    0xFEEEFEEE, 0xABABABAB, 0xEFBEADDE,
)  # fmt: skip
# A few such words may be data; from this many in a row on they are memory nobody wrote.
_FILL_RUN = 4
_FIRST = 5
# Elements at a time: a chunk and its float64 copy stay in cache, and below the size from which
# malloc maps fresh pages for each temporary (2.5 times as slow).
_CHUNK = 1 << 13
_KEPT = 1 << 24


class AbnormalValues(msgspec.Struct, frozen=True):
    """One kind of abnormal value: how many, and where the first ones are."""

    problem: Problem
    count: int
    first: tuple[tuple[int, ...], ...]
    note: str = ""

    @property
    def is_alarm(self) -> bool:
        return self.problem not in HARMLESS

    def __str__(self) -> str:
        places = ", ".join(f"[{', '.join(map(str, place))}]" for place in self.first)
        text = f"{self.problem} x{self.count}" if self.count else self.problem
        return text + (f" first at {places}" if places else "") + (self.note and f" ({self.note})")


class Statistics(msgspec.Struct, frozen=True):
    """The numbers of one array. All but counts are over finite values; None when there are none."""

    count: int
    finite_count: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    abs_max: float | int | None
    abs_min_nonzero: float | int | None
    zero_count: int
    findings: tuple[AbnormalValues, ...]

    @property
    def alarms(self) -> tuple[AbnormalValues, ...]:
        return tuple(finding for finding in self.findings if finding.is_alarm)


def analyse(array: Array) -> Statistics:
    """Statistics and abnormal values of an array of any dtype, in chunks: memory stays small."""
    if array.dtype.kind not in "biufcV" and array.dtype.isbuiltin == 1:
        raise TypeError(f"values of {array.dtype} are not numbers")
    return _Analysis(array.reshape(-1), array.shape).result()


def analyse_tensor(tensor: DumpTensor) -> Statistics:
    """The same of a tensor in a dump, decoded in chunks too: a byte may hold eight elements."""
    if kind_of(tensor.dtype).is_view:
        return analyse(tensor.array())
    shape = tensor.shape if tensor.fits else (tensor.size,)
    return _Analysis(_Decoded(tensor), shape).result()


def _forget(array: Array) -> None:
    """Give back the pages of a mapped file that were read: they count as memory of this process."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if isinstance(base, mmap.mmap) and advice is not None:
        base.madvise(advice)


class _Decoded:
    """A row of elements, of which only the slice asked for is ever decoded."""

    def __init__(self, tensor: DumpTensor) -> None:
        self.raw = tensor.raw()
        self.name = tensor.dtype
        self.bits = kind_of(tensor.dtype).bits
        self.size = tensor.size
        self.dtype = decode(np.zeros(8, np.uint8), tensor.dtype, 1).dtype

    def __getitem__(self, part: slice) -> Array:
        # Slices begin at multiples of a chunk, which is a whole number of bytes at any width.
        stop = min(part.stop, self.size)
        return decode(self.raw[part.start * self.bits // 8 :], self.name, stop - part.start)


def read_npy(path: Path) -> Array:
    """An npy file of numbers, mapped; nothing in it is unpickled."""
    open_file(path).close()  # numpy opens it by its name, and would wait for a pipe
    try:
        array = np.lib.format.open_memmap(path, "r")
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python: any error may come out of it
        raise BadArtefact(f"{path}: {error}; expected an npy file of numbers") from error
    if array.dtype.kind not in "biufc":
        raise BadArtefact(f"{path}: elements of {array.dtype}; expected an npy file of numbers")
    return array


class _Limits(msgspec.Struct, frozen=True):
    """The edges of a type; None where a value there is no sign of anything."""

    largest: float | None
    near: float | None
    smallest_normal: float | None


def _limits(dtype: np.dtype[Any]) -> _Limits:
    if dtype.kind == "c":
        return _limits(np.dtype(f"f{dtype.itemsize // 2}"))
    if dtype.kind == "f" or dtype.isbuiltin != 1:
        try:
            info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        except ValueError:  # int4 and its like
            return _Limits(None, None, None)
        largest = float(info.max)
        # Small floats live near their limits by design: for them only the limit itself counts.
        near = 0.9 * largest if dtype.itemsize > 1 else None
        return _Limits(largest, near, float(info.smallest_normal))
    if dtype.kind in "iu" and dtype.itemsize > 1:  # 8-bit integers use their whole range
        largest = float(np.iinfo(dtype).max)
        return _Limits(largest, 0.9 * largest, None)
    return _Limits(None, None, None)


class _Analysis:
    def __init__(self, flat: Array | _Decoded, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.shape = shape
        self.limits = _limits(flat.dtype)
        self.found: dict[Problem, tuple[int, list[int]]] = {}
        self.count = self.finite = self.zeros = 0
        self.total = self.squares = 0.0
        self.low: list[Any] = []
        self.high: list[Any] = []
        self.abs_low: list[Any] = []
        self.abs_high: list[Any] = []
        self.center: float | None = None

    def result(self) -> Statistics:
        for at in range(0, self.flat.size, _CHUNK):
            self._take(at, self.flat[at : at + _CHUNK])
            if at % _KEPT == 0:
                _forget(self.flat.raw if isinstance(self.flat, _Decoded) else self.flat)
        mean = std = None
        if self.finite and self.center is not None:
            shifted = self.total / self.finite
            mean = self.center + shifted
            std = math.sqrt(max(self.squares / self.finite - shifted * shifted, 0.0))
        return Statistics(
            self.count, self.finite, _plain(self.low, min), _plain(self.high, max), mean, std,
            _plain(self.abs_high, max), _plain(self.abs_low, min), self.zeros, self._findings(),
        )  # fmt: skip

    def _take(self, at: int, part: Array) -> None:
        values = widened(part)
        if values.dtype == np.float16:  # numpy computes in halves one by one
            values = values.astype(np.float32)
        elif values.dtype == np.bool_:
            values = values.view(np.uint8)
        self.count += part.size
        with np.errstate(all="ignore"):
            finite = values
            if values.dtype.kind == "c" or not np.isfinite(values.min() + values.max()):
                finite = self._take_nonfinite(at, values)
            if finite.size:
                magnitude = np.abs(finite) if finite.dtype.kind != "u" else finite
                self._sum(magnitude if finite.dtype.kind == "c" else finite)
                self._edges(at, values, finite, magnitude)

    def _take_nonfinite(self, at: int, values: Array) -> Array:
        is_finite = np.isfinite(values)
        if is_finite.all():
            return values
        is_nan = np.isnan(values)
        self._mark("nan", at, is_nan)
        real = values.real
        infinite = ~is_finite & ~is_nan
        self._mark("-inf", at, infinite & (real == -np.inf))
        self._mark("+inf", at, infinite & ~(real == -np.inf))
        finite: Array = values[is_finite]
        return finite

    def _sum(self, finite: Array) -> None:
        self.finite += finite.size
        low, high = finite.min(), finite.max()
        self.low.append(low)
        self.high.append(high)
        if self.center is None:  # against cancellation in the variance
            self.center = float(low) / 2 + float(high) / 2
        shifted = finite.astype(np.float64)
        shifted -= self.center
        self.total += float(shifted.sum())
        self.squares += float(np.dot(shifted, shifted))

    def _edges(self, at: int, values: Array, finite: Array, magnitude: Array) -> None:
        nonzero = int(np.count_nonzero(magnitude))
        self.zeros += magnitude.size - nonzero
        if not nonzero:
            return
        if nonzero < magnitude.size:
            magnitude = magnitude[magnitude != 0]
        least: Any = magnitude.min()
        self.abs_low.append(abs(int(least)) if _is_int(finite) else least)
        self.abs_high.append(_abs_max(finite))
        limits = self.limits
        if limits.largest is None:
            return
        top = float(self.abs_high[-1])
        if limits.near is not None and top > limits.near:
            size = np.abs(values.astype(np.float64) if _is_int(values) else values)
            saturated = (size >= limits.largest) & np.isfinite(size)
            self._mark("saturated", at, saturated)
            near = (size > limits.near) & np.isfinite(size) & ~saturated
            self._mark("near the limit", at, near)
        elif limits.near is None and top >= limits.largest:
            self._mark("saturated", at, np.abs(values) == limits.largest)
        smallest = limits.smallest_normal
        if smallest is not None and float(least) < smallest:
            size = np.abs(values)
            self._mark("subnormal", at, (size > 0) & (size < smallest))

    def _mark(self, problem: Problem, at: int, where: Array) -> None:
        count = int(np.count_nonzero(where))
        if not count:
            return
        before, places = self.found.get(problem, (0, []))
        if len(places) < _FIRST:
            places = places + [at + int(i) for i in np.flatnonzero(where)[: _FIRST - len(places)]]
        self.found[problem] = before + count, places

    def _findings(self) -> tuple[AbnormalValues, ...]:
        findings = [
            AbnormalValues(problem, count, tuple(self._place(i) for i in places))
            for problem, (count, places) in self.found.items()
        ]
        fill = self._fill()
        if fill is not None:
            findings.append(fill)
        elif self.count > 1 and self.finite == self.count and self.low:
            low, high = _plain(self.low, min), _plain(self.high, max)
            if low == high and self.flat.dtype.kind != "c":
                findings.append(AbnormalValues("constant", 0, (), f"every element is {low:g}"))
        return tuple(findings)

    def _place(self, index: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(index, self.shape))

    def _fill(self) -> AbnormalValues | None:
        """Runs of one of the words that allocators fill memory with."""
        if isinstance(self.flat, _Decoded):  # these never were words
            return None
        if self.flat.dtype == np.bool_ or not self.flat.flags.c_contiguous:
            return None
        raw = self.flat.view(np.uint8)
        words = raw[: raw.size // 4 * 4].view("<u4")
        for at in range(0, words.size, _CHUNK):
            if at % _KEPT == 0:
                _forget(words)
            part = words[at : at + _CHUNK + _FILL_RUN]
            same = part[1:] == part[:-1]
            run = same[:-2] & same[1:-1] & same[2:]  # four in a row
            if not run.any():
                continue
            for word in FILL_WORDS:
                hits = np.flatnonzero(run & (part[:-3] == np.uint32(word)))
                if hits.size:
                    return self._fill_finding(words, word, at + int(hits[0]))
        return None

    def _fill_finding(self, words: Array, word: int, first: int) -> AbnormalValues:
        count = sum(
            int(np.count_nonzero(words[at : at + _CHUNK] == np.uint32(word)))
            for at in range(0, words.size, _CHUNK)
        )
        place = self._place(first * 4 // self.flat.dtype.itemsize)
        return AbnormalValues("uninitialised", count, (place,), f"words 0x{word:08x}")


def _is_int(array: Array) -> bool:
    return array.dtype.kind in "iu"


def _abs_max(finite: Array) -> Any:
    """The largest magnitude, also of the smallest integer, whose own type cannot hold it."""
    if _is_int(finite):
        return max(abs(int(finite.min())), abs(int(finite.max())))
    return np.abs(finite).max()


def _plain(values: list[Any], pick: Any) -> float | int | None:
    if not values:
        return None
    value = pick(values)
    return int(value) if isinstance(value, int | np.integer) else float(value)
