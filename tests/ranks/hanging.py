"""A program of three ranks: rank 1 ends before the second all_reduce, the others wait there."""

import os
import sys
import time

import torch
import torch.distributed as dist

import tensorprobe as tp

rank = int(sys.argv[1])
dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=3)
with tp.Recorder("run", keep="stats", log=lambda text: None):
    x = torch.ones(3) * rank
    dist.all_reduce(x)
    y = torch.exp(x)
    if rank == 1:
        open("gone", "w").close()
        time.sleep(300)
    dist.all_reduce(y)
os._exit(0)
