"""Functional collectives, used at once, later, through views, or never; and a slow rank 1."""

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tensorprobe as tp

warnings.simplefilter("ignore")  # of names that torch has deprecated
level = sys.argv[1]
dist.init_process_group("gloo", os.environ["MEET"])
rank, world = dist.get_rank(), dist.group.WORLD
mine = torch.full((4,), rank + 1.0)


def slowly() -> None:
    """Nothing can have been reduced before the other rank comes."""
    if rank == 1:
        time.sleep(0.1)


def program() -> list[torch.Tensor]:
    slowly()
    used = functional.all_reduce(mine, "sum", world) + 1
    slowly()
    waited = functional.all_reduce(mine, "max", world).wait()
    slowly()
    first = functional.all_reduce(mine, "sum", world)
    second = functional.all_gather_tensor(mine, 0, world)
    seen = first.view(2, 2).sum() + second.reshape(2, 4).sum()
    slowly()
    written = functional.all_reduce(mine, "sum", world)
    written.mul_(10)
    slowly()
    both = functional.all_reduce_coalesced([mine, mine * 2], "sum", world)
    total = both[1] - both[0]
    slowly()
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, world) * 1
    raw = mine.clone()
    slowly()
    torch.ops._c10d_functional.all_reduce_(raw, "sum", world.group_name)
    shape = raw.view(2, 2)  # not waited for yet
    torch.ops._c10d_functional.wait_tensor(raw)
    raw.add_(1)
    slowly()
    never = functional.all_reduce(mine, "sum", world)
    return [used, waited, seen, written + 0, total, scattered, raw, shape, never]


bare = program()
with tp.Recorder(level, level=level, keep="tensors", log=lambda text: None):
    recorded = program()
for one, other in zip(bare, recorded, strict=True):
    assert torch.equal(one + 0, other + 0)
dist.destroy_process_group()
