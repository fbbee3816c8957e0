"""Extents of tensors: what is not finite is found in every dtype, layout and wrapper."""

from __future__ import annotations

import math

import pytest
import torch

from tensorprobe.tensors.finiteness import (
    LIMITS,
    NAN,
    NEGATIVE,
    POSITIVE,
    TorchFlags,
    extent_now,
    is_plain,
    readable,
)

INF, NOT = math.inf, math.nan
CASES = [
    ([1.0, -2.0], 0),
    ([NOT, 1.0], NAN),
    ([INF, 1.0], POSITIVE),
    ([-INF, 1.0], NEGATIVE),
    ([INF, -INF], POSITIVE | NEGATIVE),
    ([3e4] * 9, 0),  # their sum does not fit in half
]


def made(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    x = torch.tensor(values, dtype=torch.float64)
    return (torch.complex(x, torch.zeros_like(x)) if dtype.is_complex else x).to(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("values", "bits"), CASES)
def test_bits(values: list[float], bits: int, dtype: torch.dtype) -> None:
    tensor = made(values, dtype)
    content = readable(tensor)
    assert content is not None
    wide = content.to(torch.float64)  # 8-bit floats have no infinity: as they hold it
    expected = (
        (NAN if wide.isnan().any() else 0)
        | (POSITIVE if (wide == INF).any() else 0)
        | (NEGATIVE if (wide == -INF).any() else 0)
    )
    if dtype.itemsize > 1 and values != [3e4] * 9:
        assert expected == bits
    flags = TorchFlags()
    assert flags.submit(content) == 0
    for found in (extent_now(content), *flags.fetch()):
        assert found.bits == expected or (found.bits & expected & NAN)


def test_magnitude_near_the_limit() -> None:
    assert extent_now(torch.tensor([-60000.0, 3.0], dtype=torch.float16)).top == 60000
    assert extent_now(torch.tensor([3e38, -1.0])).top == pytest.approx(3e38)
    assert extent_now(torch.tensor([3e38, 3e38])) == (0, pytest.approx(3e38))


def test_layouts() -> None:
    x = torch.zeros(8, 8)
    x[3, 5] = INF
    for view in (
        x.t(),
        x[:, 5:6].expand(8, 9),
        x[3:4],
        x[::3, 5:],
        torch.view_as_complex(x[:, 4:6]),
    ):
        content = readable(view)
        assert content is not None
        assert extent_now(content).bits == POSITIVE


def test_what_has_no_numbers() -> None:
    assert readable(torch.ones(3, dtype=torch.int32)) is None
    assert readable(torch.ones(0)) is None
    assert readable(torch.ones(3, device="meta")) is None
    assert readable(torch.eye(3).to_sparse()) is None


def test_freed_storages_are_not_read() -> None:
    """As sharding libraries free parameters: of a view even the address is one."""
    whole = torch.ones(100)
    view = whole[4:]
    assert is_plain(view)
    whole.untyped_storage().resize_(0)
    assert view.data_ptr()
    for tensor in (whole, view):
        assert not is_plain(tensor)
        assert readable(tensor) is None
