"""A small training in a layout: layouts.py LAYOUT OUT LEVEL KEEP; OUT "-" records nothing.

Prints the losses, and digests of gradients and parameters, bit for bit.
"""

import contextlib
import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

warnings.simplefilter("ignore")
layout, out, level, keep = sys.argv[1:5]
dist.init_process_group("gloo", os.environ["MEET"])
rank, world = dist.get_rank(), dist.get_world_size()
told = []


def tell(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            local = getattr(tensor, "_local_tensor", tensor).detach()
            told.append(hashlib.sha256(local.contiguous().numpy().tobytes()).hexdigest()[:16])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def tensor_parallel(net: Net, mesh: object, *, sequence: bool = False) -> Net:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in (net.first, net.second):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "": PrepareModuleInput(
                    input_layouts=(Shard(0) if block is net.second else None,),
                    desired_input_layouts=(Shard(0) if block is net.second else None,),
                ),
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }
            plan.pop("")
        parallelize_module(block, mesh, plan)
    return net


def made() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if layout == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    if layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in (net.first, net.second):
            fully_shard(block)
        return fully_shard(net)
    if layout in ("tp", "sp"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return tensor_parallel(net, mesh, sequence=layout == "sp")
    if layout == "2d":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(net, mesh["tp"])
        for block in (net.first, net.second):
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(net, mesh=mesh["dp"])
    return net


def train(step: object) -> None:
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    whole = layout in ("tp", "sp", "2d")
    torch.manual_seed(1 + (0 if layout in ("tp", "sp") else rank // (world // 2)))
    for _ in range(2):
        x = torch.randn(4, 8)
        if layout == "sp":
            x = x.chunk(world)[rank]
        loss = net(x).pow(2).mean()
        loss.backward()
        if layout == "functional":
            for parameter in net.parameters():
                summed = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)
                parameter.grad.copy_(summed / world)
        tell(loss, *(parameter.grad for parameter in net.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not whole)
        step()
    tell(*net.parameters())


def train_pipeline(step: object) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(0)
    net = Net()
    part = net.first if rank == 0 else nn.Sequential(net.second, net.head)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    kind = ScheduleGPipe if layout == "gpipe" else Schedule1F1B
    schedule = kind(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).pow(2).mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(2):
        x, target = torch.randn(4, 8), torch.randn(4, 4)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        tell(*losses, *(parameter.grad for parameter in part.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        step()
    tell(*part.parameters())


run = train_pipeline if layout in ("gpipe", "1f1b") else train
if out == "-":
    run(lambda: None)
else:
    import tensorprobe as tp

    with tp.Recorder(out, level=level, keep=keep, log=lambda text: None) as recorder:
        run(recorder.step)
sys.stdout.write(" ".join(told) + "\n")
with contextlib.suppress(RuntimeError):
    dist.destroy_process_group()
