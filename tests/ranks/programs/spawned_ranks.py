"""Ranks that one process spawns and that meet by TCP, the last one as rank 0."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tensorprobe as tp

RANKS = 2


def train(rank: int) -> None:
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    model(torch.full((1, 2), float(rank))).sum().backward()


def worker(process: int, port: str, when: str) -> None:
    rank = RANKS - 1 - process
    where = {"init_method": f"tcp://localhost:{port}", "rank": rank, "world_size": RANKS}
    if when == "first":
        recorder = tp.Recorder("runs", keep="tensors", log=lambda text: None).start()
        torch.ones(2)  # recorded by a process that does not know its rank yet
        dist.init_process_group("gloo", **where)
        train(rank)
    else:
        dist.init_process_group("gloo", **where)
        recorder = tp.Recorder("runs", keep="tensors", log=lambda text: None).start()
        train(rank)
    dist.barrier()
    dist.destroy_process_group()
    recorder.close()


if __name__ == "__main__":
    mp.spawn(worker, args=(sys.argv[1], sys.argv[2]), nprocs=RANKS)
