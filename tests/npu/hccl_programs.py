"""What check_npu_ranks.py runs on two ranks of HCCL: hccl_programs.py NAME FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)


def start() -> tuple[int, int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch_npu.npu.set_device(rank)
    dist.init_process_group("hccl")
    return rank, world


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(*shape, generator=generator).mul(8).sub(4)
    return (x > 0 if dtype == torch.bool else x.to(dtype)).npu()


def joined(op: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.bool:
        return a & b if op == dist.ReduceOp.MIN else a | b
    if op == dist.ReduceOp.SUM:
        return (a.float() + b.float()).to(a.dtype)
    return torch.maximum(a, b) if op == dist.ReduceOp.MAX else torch.minimum(a, b)


def collectives(folder: Path) -> None:
    """Every collective, in every kind of number, against what it should give."""
    rank, world = start()
    wrong: list[str] = []

    def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(actual.cpu(), expected.cpu()):
            wrong.append(f"{name} on rank {rank}")

    for dtype in KINDS:
        all_of = [numbers(r, dtype, 6, 5).cpu() for r in range(world)]
        x = numbers(rank, dtype, 6, 5)
        is_bool = dtype == torch.bool
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            y = x.clone()
            dist.all_reduce(y, op=op)
            same(f"all_reduce {op} {dtype}", y, joined(op, *all_of))
        y = x.clone()
        dist.broadcast(y, 1)
        same(f"broadcast {dtype}", y, all_of[1])
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        for r, part in enumerate(parts):
            same(f"all_gather {dtype}", part, all_of[r])
        whole = torch.empty(6 * world, 5, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(whole, x)
        same(f"all_gather_into_tensor {dtype}", whole, torch.cat(all_of))
        y = torch.empty(6 // world, 5, dtype=dtype, device="npu")
        dist.all_to_all_single(z := torch.empty_like(x), x)
        same(f"all_to_all_single {dtype}", z, torch.cat([a.chunk(world)[rank] for a in all_of]))
        dist.scatter(y, list(x.chunk(world)) if rank == 0 else None, 0)
        same(f"scatter {dtype}", y, all_of[0].chunk(world)[rank])
        if not is_bool:
            dist.reduce_scatter_tensor(y, x)
            summed = sum(a.float() for a in all_of).to(dtype)
            same(f"reduce_scatter_tensor {dtype}", y, summed.chunk(world)[rank])
            y = x.clone()
            dist.reduce(y, 0)
            same(f"reduce {dtype}", y, summed if rank == 0 else y)
        y = torch.empty_like(x)
        other = 1 - rank
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
        else:
            dist.recv(y, 0)
            dist.send(x, 0)
        same(f"send and recv {dtype}", y, all_of[other])
        y = torch.empty_like(x)
        both = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        same(f"batch_isend_irecv {dtype}", y, all_of[other])
    # larger than what goes at a time
    x = numbers(rank, torch.float32, 1000, 1000)
    dist.all_reduce(y := x.clone())
    same("a large all_reduce", y, sum(numbers(r, torch.float32, 1000, 1000).cpu() for r in (0, 1)))
    sizes = [[100_000, 3], [7, 200_000]]
    parts = [torch.full((n,), float(rank), device="npu") for n in sizes[rank]]
    got = [torch.empty(sizes[r][rank], device="npu") for r in range(world)]
    dist.all_to_all(got, parts)
    for r, part in enumerate(got):
        same("all_to_all of several sizes", part, torch.full((sizes[r][rank],), float(r)))
    dist.barrier()
    pair = dist.new_group([0, 1])
    dist.all_reduce(one := torch.ones(3, device="npu"), group=pair)
    same("a second group", one, torch.full((3,), 2.0))
    (folder / f"collectives{rank}.json").write_text(json.dumps(wrong))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.norm(self.up(x))))


def train(rank: int, step_done: Callable[[], Any] = lambda: None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().npu(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5, 8, generator=generator).npu()
        loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 3, 0]).npu())
        loss.backward()
        optimizer.step()
        kept += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters())]
        optimizer.zero_grad()
        step_done()
    return kept + [p.detach().cpu() for p in model.parameters()]


def ddp(folder: Path) -> None:
    """Training with DDP: what every rank has at the end."""
    rank, _ = start()
    torch.save(train(rank), folder / f"ddp{rank}.pt")
    dist.destroy_process_group()


def recorded(folder: Path) -> None:
    """The same, bare and recorded: no bit differs."""
    import tensorprobe as tp

    rank, _ = start()
    bare = train(rank)
    with tp.Recorder(folder / "capture", level="mix", keep="tensors") as recorder:
        seen = train(rank, recorder.step)
    assert all(map(torch.equal, bare, seen))
    dist.destroy_process_group()


def dead(folder: Path) -> None:
    """Rank 1 leaves without a word; rank 0 waits for it, and says what it is told in the end."""
    rank, _ = start()
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch_npu.npu.synchronize()
    if rank == 1:
        os._exit(0)  # torchrun would end the others at once, if this were a failure
    began = time.monotonic()
    try:
        dist.all_reduce(x)
        torch_npu.npu.synchronize()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    took = time.monotonic() - began
    (folder / "dead.json").write_text(json.dumps({"said": said, "took_s": took}))
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
