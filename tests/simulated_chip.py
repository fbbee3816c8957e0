"""For the conftest of a folder of checks on the simulated NPU, which run in a process of their own.

An ordinary run of the tests passes through such a folder too, and must not get another device by
it: the device comes when a file of the folder is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorprobe.devices import sim_npu


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    if parent.session.isinitpath(file_path):
        sim_npu.install()


@pytest.fixture(autouse=True)
def _healthy_chip() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    sim_npu.clear_faults()
    sim_npu.set_overflow_mode("inf-nan")
    torch.npu.finalize_dump()
