"""Each kind of collective once, recorded at the level that is asked for; rank 0 sends to rank 1."""

import os
import sys
import warnings

import torch
import torch.distributed as dist

import tensorprobe as tp

warnings.simplefilter("ignore")  # of names that torch has deprecated
level = sys.argv[1]
dist.init_process_group("gloo", os.environ["MEET"])
rank = dist.get_rank()
pair = dist.new_group([0, 1])
mine = torch.full((4,), rank + 1.0)
with tp.Recorder(level, level=level, keep="tensors", log=lambda text: None):
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.all_reduce(x, group=pair)
    dist.broadcast(x, 1)
    dist.reduce(x, 1, op=dist.ReduceOp.PRODUCT)
    parts = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(parts, mine)
    dist.all_gather_into_tensor(torch.zeros(8), mine)
    dist.reduce_scatter_tensor(torch.zeros(2), mine)
    dist.all_to_all_single(torch.zeros(4), mine)
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    dist.scatter(torch.zeros(4), parts if rank == 0 else None, src=0)
    y = mine.clone()
    dist.all_reduce(y, async_op=True).wait()
    y.mul_(10)
    if rank == 0:
        dist.send(x, 1)
        dist.isend(y, 1, tag=5).wait()
    else:
        dist.recv(x, 0)
        dist.irecv(y, 0, tag=5).wait()
    y = y * 10
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    y.mul_(10)
    there = torch.zeros(2)
    messages = [
        dist.P2POp(dist.isend, mine[:2], 1 - rank, tag=7),
        dist.P2POp(dist.irecv, there, 1 - rank, tag=7),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    there.mul_(10)
dist.destroy_process_group()
