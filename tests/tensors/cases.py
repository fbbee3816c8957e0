"""Tensors of every dtype, content and layout, and what is true of them by exact arithmetic."""

import math
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction

import torch

from tensorprobe.records import TensorSummary

INF, NAN = float("inf"), float("nan")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def dtypes_named(names: str) -> list[torch.dtype]:
    """Those of these dtypes that this torch has."""
    return [getattr(torch, name) for name in names.split() if hasattr(torch, name)]


FLOAT8 = dtypes_named("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu")
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
UNSIGNED = dtypes_named("uint16 uint32 uint64")
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
DTYPES = [*FLOATS, *FLOAT8, *INTS, *UNSIGNED, torch.bool, *COMPLEX]


def title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Any bit pattern there is: NaN, infinities, subnormals, extremes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def ordinary(dtype: torch.dtype, count: int, seed: int = 1) -> torch.Tensor:
    """Numbers around zero, some of them zero, all of them finite."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 3
    numbers[::7] = 0
    if dtype in COMPLEX:
        other = numbers.roll(3) * 0.5
        return torch.complex(numbers, other).to(dtype)
    if dtype in UNSIGNED or dtype in dtypes_named("uint8 float8_e8m0fnu"):
        numbers = numbers.abs()
    return numbers.to(dtype)


def special(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Small tensors with the values that go wrong."""
    if dtype in FLOATS:
        info = torch.finfo(dtype)
        tiny = info.smallest_normal
        sub = torch.tensor([1], dtype=_bits_of(dtype)).view(dtype)
        yield "nan", torch.tensor([NAN, NAN], dtype=dtype)
        yield "some nan", torch.tensor([1.5, NAN, -2.0, 0.0], dtype=dtype)
        yield "inf", torch.tensor([INF, -INF], dtype=dtype)
        yield "inf and nan", torch.tensor([INF, NAN, 0.0, -0.0, 3.0], dtype=dtype)
        yield "only inf and nan", torch.tensor([-INF, NAN, -INF], dtype=dtype)
        yield "zeros", torch.tensor([0.0, -0.0, 0.0], dtype=dtype)
        yield "extremes", torch.tensor([info.max, info.min, info.max], dtype=dtype)
        yield "maxima", torch.full((5,), info.max, dtype=dtype)
        yield "subnormals", torch.cat([sub, sub * 3, torch.tensor([tiny / 2, -tiny], dtype=dtype)])
        yield "subnormals alone", torch.cat([sub, sub * 3, -sub])
        yield "wide", torch.tensor([info.max, tiny, 1.0, -tiny], dtype=dtype)
    if dtype in COMPLEX:
        parts = [(3.0, -4.0), (0.0, -0.0), (NAN, 1.0), (INF, 1.0), (INF, NAN), (-1.0, -INF)]
        whole = torch.tensor(parts, dtype=torch.float64)
        yield "complex", torch.view_as_complex(whole).to(dtype)
        yield "complex nan", torch.view_as_complex(whole[2:3]).to(dtype)
        yield "complex inf", torch.view_as_complex(whole[3:4]).to(dtype)
    if dtype is torch.complex128:
        yield "large", torch.tensor([complex(1e300, -1e300), complex(2e200, 0)], dtype=dtype)
        yield "small", torch.tensor([complex(1e-300, -1e-310), complex(5e-324, 0)], dtype=dtype)
    if dtype in INTS + UNSIGNED:
        limits = torch.iinfo(dtype)
        yield "limits", torch.tensor([limits.min, limits.max, 0, 1], dtype=dtype)
        yield "maxima", torch.tensor([limits.max] * 3, dtype=dtype)
    if dtype in FLOAT8:
        yield "every value", torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype == torch.bool:
        yield "true", torch.ones(3, dtype=torch.bool)
        yield "false", torch.zeros(3, dtype=torch.bool)
        yield "both", torch.tensor([True, False, True])


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    size = torch.empty(0, dtype=dtype).element_size()
    return {8: torch.int64, 4: torch.int32, 2: torch.int16}[size]


def layouts(flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The 720 elements of a tensor in every kind of layout."""
    yield "flat", flat
    cube = flat.view(6, 10, 12)
    yield "transposed", cube.transpose(0, 2)
    yield "sliced", cube[1:5, ::3, 2:9]
    yield "columns", cube[..., 3]
    yield "halves of rows", flat.view(3, 15, 16)[..., 8:].transpose(0, 1)
    yield "offset", flat[7:]
    yield "expanded", cube[:, :1].expand(6, 5, 12)
    yield "expanded outside", cube[0, 0].expand(3, 2, 12)
    yield "expanded slice", cube[::2, :1, ::5].expand(3, 4, 3)
    yield "scalar", flat[3]
    yield "scalar expanded", flat[3].expand(4, 4)
    yield "one", flat[5:6].view(1, 1, 1)
    yield "empty", flat[:0].view(0, 3)
    yield "windows", flat[:20].unfold(0, 5, 2)


def elements(tensor: torch.Tensor) -> list[float] | list[int] | list[bool] | list[complex]:
    """All elements as exact Python numbers."""
    tensor = tensor.contiguous().reshape(-1)
    if tensor.dtype in (*FLOAT8, torch.bfloat16, torch.float16):
        tensor = tensor.float()
    if tensor.dtype is torch.complex32:
        tensor = torch.view_as_complex(torch.view_as_real(tensor).float())
    return tensor.tolist()


def true_summary(tensor: torch.Tensor) -> TensorSummary:
    """The summary by exact arithmetic, from the definition alone."""
    values = elements(tensor)
    nan = inf = zero = 0
    known: list[float] = []
    finite: list[Fraction] = []
    squares: list[Fraction] = []
    for value in values:
        parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
        if any(part != part for part in parts):
            nan += 1
            continue
        zero += not any(parts)
        if any(math.isinf(part) for part in parts if isinstance(part, float)):
            inf += 1
            known.append(INF if isinstance(value, complex) else value)
            continue
        square = sum((Fraction(part) ** 2 for part in parts), Fraction(0))
        squares.append(square)
        size = root(square) if isinstance(value, complex) else Fraction(value)
        finite.append(size)
        known.append(as_float(size) if isinstance(value, complex) else value)
    mean = norm = None
    if finite and tensor.dtype != torch.bool:
        mean = as_float(sum(finite, Fraction(0)) / len(finite))
        norm = as_float(root(sum(squares, Fraction(0))))
    low, high = (min(known), max(known)) if known else (None, None)
    return TensorSummary(low, high, mean, norm, nan, inf, zero)


def root(square: Fraction) -> Fraction:
    with localcontext() as context:
        context.prec = 60
        number = Decimal(square.numerator) / Decimal(square.denominator)
        return Fraction(number.sqrt())


def as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return INF


def assert_summary(actual: TensorSummary | None, tensor: torch.Tensor) -> None:
    expected = true_summary(tensor)
    assert actual is not None
    counts = (actual.nan_count, actual.inf_count, actual.zero_count)
    assert counts == (expected.nan_count, expected.inf_count, expected.zero_count)
    for bound, wanted in ((actual.min, expected.min), (actual.max, expected.max)):
        assert type(bound) is type(wanted)
        if tensor.dtype in COMPLEX and wanted is not None:
            assert math.isclose(bound, wanted, rel_tol=1e-15, abs_tol=5e-324)
        else:
            assert bound == wanted
    assert_close(actual.norm, expected.norm, 1e-13)
    # A sum that cancels is as exact as the size of what was added.
    scale = 0.0
    if expected.mean is not None and expected.norm is not None:
        finite = tensor.numel() - actual.nan_count - actual.inf_count
        scale = expected.norm / math.sqrt(finite)
    assert_close(actual.mean, expected.mean, 1e-13, scale)


def assert_close(actual: float | None, wanted: float | None, rel: float, scale: float = 0) -> None:
    if wanted is None or actual is None:
        assert actual is wanted
        return
    tolerance = scale * rel if math.isfinite(scale) else 0.0
    assert math.isclose(actual, wanted, rel_tol=rel, abs_tol=tolerance + 5e-324), (actual, wanted)


def all_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every content in every layout."""
    for content, flat in (("bits", random_bits(dtype, 720)), ("ordinary", ordinary(dtype, 720))):
        for layout, tensor in layouts(flat):
            yield f"{content}, {layout}", tensor
    yield from special(dtype)
