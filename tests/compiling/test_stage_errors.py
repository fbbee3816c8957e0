"""How far a value of one stage is from that of another."""

from __future__ import annotations

import pytest
import torch

from tensorprobe.compiling.stage_errors import LIMIT, value_error


@pytest.mark.parametrize("size", [1e155, 1e200, 1e300])
def test_numbers_whose_squares_overflow_never_agree_by_accident(size: float) -> None:
    wide = torch.full((4,), size, dtype=torch.float64)
    actual = wide * torch.tensor([1.0, 1.0, 1.0, -3.0])
    assert value_error(actual, wide, wide * (1 + 1e-15), wide, 1e-16) > LIMIT


def test_rounding_is_explained_and_a_wrong_number_is_not() -> None:
    wide = torch.linspace(1, 2, 64, dtype=torch.float64)
    u = torch.finfo(torch.float32).eps / 2
    rounded = wide.float()
    assert value_error(rounded, wide, wide.float() * (1 + u), wide, u) <= LIMIT
    wrong = rounded.clone()
    wrong[7] *= 1.001
    assert value_error(wrong, wide, rounded, wide, u) > LIMIT
