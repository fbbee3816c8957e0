"""Seeds that must be equal, or must differ, as far as each way of recording shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tensorprobe as tp
from tensorprobe.comparing.replicas import Replicas, in_words


def replicas(folder: Path, keep: str, seeds: list[int], *, same_data: bool = True) -> Replicas:
    """What ranks with these seeds would have recorded of a dropout."""
    found = Replicas()
    for rank, seed in enumerate(seeds):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1 if same_data else rank))
        torch.manual_seed(seed)
        with tp.Recorder(folder / str(rank), keep=keep, log=lambda text: None):  # type: ignore[arg-type]
            F.dropout(data, 0.5)
        found.add(rank, tp.load(folder / str(rank)).calls)
    return found


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_the_odd_seed_is_named(tmp_path: Path, keep: str) -> None:
    odd, notes = replicas(tmp_path, keep, [3, 3, 4, 3]).random_states()
    assert notes == []
    assert [in_words([each]) for each in odd] == [
        "rank 2 has another random state at Functional.dropout.0.forward than ranks 0, 1, 3"
    ]


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_other_seeds_on_all_ranks_are_no_finding(tmp_path: Path, keep: str) -> None:
    assert replicas(tmp_path, keep, [3, 4, 5, 6]).random_states() == ([], [])


def test_what_statistics_do_not_tell_is_a_note(tmp_path: Path) -> None:
    odd, notes = replicas(tmp_path, "stats", [3, 3, 4], same_data=False).random_states()
    assert odd == []
    assert notes == [
        "Functional.dropout.0.forward (step 0) is given other data on each rank, and its random "
        'state was not recorded (keep="tensors" has it): seeds were not compared'
    ]


def test_the_gradients_of_shards_are_not_held_against_each_other(tmp_path: Path) -> None:
    """Modules have whole weights, as FSDP gathers them; each optimizer steps a piece of them."""
    found = Replicas()
    for rank in range(2):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        piece = torch.nn.Parameter(layer.weight.detach()[2 * rank : 2 * rank + 2].clone())
        optimizer = torch.optim.SGD([piece], lr=0.1)
        with tp.Recorder(tmp_path / str(rank), keep="stats", level="mix", log=lambda text: None):
            layer(torch.ones(2, 4)).sum().backward()
            piece.grad = torch.full_like(piece, float(rank + 1))
            optimizer.step()
        found.add(rank, tp.load(tmp_path / str(rank)).calls)
    assert found.sets() == [(0, 1)]
    assert found.odd_ones() == []
