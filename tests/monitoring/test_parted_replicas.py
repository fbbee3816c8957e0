"""Two ranks of DDP, one of which keeps old weights: named, with the rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from torch import multiprocessing as mp
from torch import nn

import tensorprobe as tp
from tensorprobe.monitoring.series_reading import read_steps, read_trends

AT = 30


def train(rank: int, port: int, folder: str, stale: bool) -> None:
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    with tp.Monitor(folder, log=lambda text: None):
        for step in range(AT + 20):
            optimizer.zero_grad()
            ddp(torch.randn(8, 6)).square().mean().backward()
            before = model[2].bias.detach().clone()
            optimizer.step()
            if stale and rank == 1 and step == AT:
                with torch.no_grad():
                    model[2].bias.copy_(before)  # this replica has missed an update
            torch.distributed.barrier()  # rank 0 has written what it has
    torch.distributed.destroy_process_group()


def spawned(folder: Path, stale: bool) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(train, (port, str(folder), stale), nprocs=2)


def test_a_stale_replica_is_named(tmp_path: Path) -> None:
    spawned(tmp_path, True)
    first, second = read_trends(tmp_path)
    assert first.alarms == []
    assert [(alarm.rule, alarm.kind) for alarm in second.alarms] == [("replicas", "parameter")]
    (alarm,) = second.alarms
    assert alarm.name == "module.2.bias"
    assert AT < alarm.since <= AT + 5
    assert alarm.step <= AT + 20
    assert alarm.rank == 1
    assert "the replicas have parted" in alarm.reason
    # gradients before the reduction are those of each rank, after it they are the same
    steps = [[*read_steps(tmp_path / f"rank{rank}", lambda text: None)][9] for rank in (0, 1)]
    local, reduced = (
        [step.tables[kind].column("norm") for step in steps]
        for kind in ("gradient.local", "gradient")
    )
    assert (local[0] != local[1]).all()
    assert (reduced[0] == reduced[1]).all()


@pytest.mark.slow
def test_replicas_that_agree_are_silent(tmp_path: Path) -> None:
    spawned(tmp_path, False)
    assert [rank.alarms for rank in read_trends(tmp_path)] == [[], []]
