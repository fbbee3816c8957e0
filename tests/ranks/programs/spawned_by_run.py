"""Ranks that one process spawns; nothing here knows of a recorder."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank: int, port: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    total = torch.full((2,), rank + 1.0)
    dist.all_reduce(total)
    sys.stdout.write(f"rank {rank}: {total.tolist()}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(sys.argv[1],), nprocs=2)
