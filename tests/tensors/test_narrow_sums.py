"""Statistics on a device that has no float64 are those of the host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors import torch_ops
from tensorprobe.tensors.backends import HostBackend, TorchBackend
from tensorprobe.tensors.result import Result

GENERATOR = torch.Generator().manual_seed(1)


def cases() -> dict[str, torch.Tensor]:
    normal = torch.randn(10_001, generator=GENERATOR)
    return {
        "one": torch.tensor([3.0]),
        "normal": normal,
        "cancels": torch.cat([normal * 1e6, -normal * 1e6, torch.ones(1)]),
        "large": normal * 1e25,
        "largest": torch.full((999,), 3e38),
        "tiny": normal * 1e-30,
        "subnormal": torch.full((77,), 1e-44),
        "all at once": torch.cat([normal * 1e30, normal, normal * 1e-25]),
        "masked": torch.cat([normal, torch.tensor([math.inf, -math.inf, math.nan, 0.0])]),
        "rising": torch.arange(100_000, dtype=torch.float32) + 0.1,
        "bfloat16": normal.bfloat16(),
        "float16": normal.half(),
        "pieces": torch.randn(torch_ops.BLOCK + 3, generator=GENERATOR) + 1000,
    }


@pytest.mark.parametrize("case", cases())
def test_sums_are_those_of_float64(case: str) -> None:
    tensor = cases()[case]
    floats, ints = torch_ops.tally_narrow(tensor)
    assert floats.dtype == torch.float32
    row = torch_ops.narrow_row(floats.tolist(), ints.tolist())
    found = rows.decode(row, "float32", tensor.numel())
    numbers = tensor.double().numpy()
    finite = numbers[np.isfinite(numbers)]
    assert (found.nan_count, found.inf_count) == (
        np.isnan(numbers).sum(),
        np.isinf(numbers).sum(),
    )
    assert found.zero_count == (numbers == 0).sum()
    assert (found.min, found.max) == (np.nanmin(numbers), np.nanmax(numbers))
    norm = math.sqrt(math.fsum((finite * finite).tolist()))
    if norm == 0:  # squares of the smallest vanish in float64 as well
        norm = float(np.linalg.norm(finite * 2.0**100) * 2.0**-100)
    assert found.norm == pytest.approx(norm, rel=1e-12, abs=0)
    size = math.fsum(np.abs(finite).tolist()) / len(finite)
    mean = math.fsum(finite.tolist()) / len(finite)
    assert abs(found.mean - mean) <= 1e-12 * size


def test_a_device_that_makes_float32_of_float64() -> None:
    """Floats are summed there, other numbers on the host, which is said."""
    backend = TorchBackend(torch.device("cpu"), stats=True, digest=True)
    backend._is_wide = False  # as torch_ops.has_float64 says of such a device
    whole, numbers = torch.randn(99) * 1e25, torch.arange(9)
    floats, ints = Result(), Result()
    backend.submit(floats, whole, "float32")
    backend.submit(ints, numbers, "int64")
    backend.flush()
    backend.land()
    expected = HostBackend(stats=True, digest=True)
    for tensor, name, found in ((whole, "float32", floats), (numbers, "int64", ints)):
        result = Result()
        expected.submit(result, tensor, name)
        assert found.digest == result.digest
        assert found.summary.norm == pytest.approx(result.summary.norm, rel=1e-12)
        assert found.summary.mean == pytest.approx(result.summary.mean, rel=1e-12)
    assert floats.note is None
    assert ints.note == "copied to the host, cpu cannot summarise int64: it has no float64"


def test_the_host_has_float64_and_digests_as_itself() -> None:
    assert torch_ops.has_float64(torch.device("cpu"))
    assert torch_ops.digests_agree(torch.device("cpu"))
