"""One seed makes every generator repeat itself."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorprobe.errors import BadUsage
from tensorprobe.record.seeding import seed_all


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Leave the process as it was: seeds and switches reach far."""
    environ = dict(os.environ)
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cudnn = torch.backends.cudnn
    flags = (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    cudnn.benchmark, cudnn.deterministic = flags[0], flags[1]
    if torch.are_deterministic_algorithms_enabled() != flags[2]:
        torch.use_deterministic_algorithms(flags[2])
    os.environ.clear()
    os.environ.update(environ)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_seed_draws_the_same_numbers() -> None:
    seed_all()
    first = draw()
    seed_all(1234)
    assert draw() == first
    seed_all(5)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_switches() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    enabled = torch.backends.cudnn.enabled
    seed_all(7)
    assert os.environ["PYTHONHASHSEED"] == "7"
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.enabled == enabled
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_algorithms_on_request_only() -> None:
    seed_all(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    seed_all()
    assert torch.are_deterministic_algorithms_enabled(), "what is on is not turned off"


def test_hashes_of_child_processes_are_fixed() -> None:
    seed_all(3)
    code = [sys.executable, "-c", "print(hash('tensor'))"]
    hashes = {subprocess.run(code, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.0, "1234", None])
def test_a_bad_seed_is_refused(seed: Any) -> None:
    with pytest.raises(BadUsage, match=r"seed=.*from 0 to 4294967295"):
        seed_all(seed)


def test_a_bad_switch_is_refused() -> None:
    with pytest.raises(BadUsage, match="deterministic='yes'"):
        seed_all(1, deterministic="yes")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_numbers() -> None:
    seed_all(1)
    first = torch.rand(4, device="cuda")
    seed_all(1)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    with pytest.warns(UserWarning, match="CUDA was in use before seed_all"):
        seed_all(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
