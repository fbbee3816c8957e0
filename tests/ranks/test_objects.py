"""Objects that ranks send each other are no numbers of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tensorprobe as tp
from ranks.gloo_ranks import needs_gloo

pytestmark = needs_gloo


def record(folder: Path, keep: str, told: dict[str, float], factor: float = 1.0) -> Path:
    """A step that gathers what is logged."""
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with tp.Recorder(folder, keep=keep, log=lambda text: None):  # type: ignore[arg-type]
        y = torch.tanh(data)
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, told)
        (y * factor).sum()
    return folder


@pytest.fixture
def group(tmp_path: Path):  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.usefixtures("group")
def test_objects_that_differ_are_a_note(tmp_path: Path, keep: str) -> None:
    a = record(tmp_path / "a", keep, {"seconds": 1.5})
    b = record(tmp_path / "b", keep, {"seconds": 2.5, "more": 1})
    verdict = tp.compare(b, a, timeout=0).verdict
    assert verdict.verdict == "match", str(verdict)
    assert any("Python objects" in note for note in verdict.notes), verdict.notes
    same = tp.compare(record(tmp_path / "c", keep, {"seconds": 1.5}), a, timeout=0).verdict
    assert not any("Python objects" in note for note in same.notes), same.notes
    wrong = tp.compare(record(tmp_path / "d", keep, {"seconds": 9.5}, 1.01), a, timeout=0).verdict
    assert wrong.culprits[0].name == "Tensor.mul.0.forward", str(wrong)
