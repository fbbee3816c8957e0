"""One training of each model, on one process and in layouts of several, with the faults of those.

Each is a function of a Run that does the same on any number of ranks, unless it has a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks.layout_programs import ContextNet, batch

if TYPE_CHECKING:
    from ranks.rank_programs import Run

STEPS = 2
ROWS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            block.norm.weight.uniform_(0.5, 1.5)
    return model


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Column(nn.Module):
    """Some output features of a linear layer."""

    def __init__(self, whole: nn.Linear, piece: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(n)[piece].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(n)[piece].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copied.apply(x), self.weight, self.bias)


class Row(nn.Module):
    """Some input features of a linear layer, whose results are summed over ranks."""

    def __init__(self, run: Run, whole: nn.Linear, piece: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(n, 1)[piece].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.reduces = not run.has("no reduce")
        self.has_bias_in_parts = run.has("double bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, self.weight, self.bias if self.has_bias_in_parts else None)
        whole = _Summed.apply(part) if self.reduces else part
        return whole if self.has_bias_in_parts else whole + self.bias


class _Reducing(nn.Module):
    """A linear layer without a reduction; what is around it reduces."""

    def __init__(self, run: Run, block: Block, piece: int, n: int) -> None:
        super().__init__()
        self.norm, self.up = block.norm, Column(block.up, piece, n)
        self.down = nn.Linear(32 // n, 16, bias=False)
        self.down.weight = nn.Parameter(block.down.weight.detach().chunk(n, 1)[piece].clone())
        self.reduces = not run.has("no reduce")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (_Summed.apply(part) if self.reduces else part)


def train(run: Run, model: nn.Module, rows: Callable[[int], torch.Tensor],
          reduce: Callable[[int], None] | None = None, **options: Any) -> None:  # fmt: skip
    optimizer: Any = torch.optim.AdamW if run.has("adam") else torch.optim.SGD
    lr = 0.101 if run.has("lr") and run.rank == 1 else 0.1
    stepping = optimizer(model.parameters(), lr=lr, **options)
    with run.recording(run.kernel(1, "tanh", 1), noise=run.has("noise")) as recorder:
        for step in range(STEPS):
            model(rows(step)).square().mean().backward()
            if reduce is not None:
                reduce(step)
            stepping.step()
            stepping.zero_grad()
            recorder.step()


def all_rows(step: int) -> torch.Tensor:
    return batch(step, ROWS, 16)


def one_tp(run: Run) -> None:
    """Tensor parallel by hand: columns of `up`, rows of `down`."""
    model = made()
    if run.world > 1:
        for n, block in enumerate(model.blocks):
            piece = run.rank
            swapped = (run.rank + 1) % run.world if run.has("shard order") and n == 1 else piece
            block.up = Column(block.up, swapped, run.world)
            block.down = Row(run, block.down, piece, run.world)
    if run.has("stale") and run.rank == 1:
        with torch.no_grad():
            model.blocks[1].norm.weight.mul_(1.1)
    train(run, model, all_rows)


def one_outside(run: Run) -> None:
    """Tensor parallel whose blocks reduce what their layers give."""
    model = made()
    for block in model.blocks:
        block.down.bias = None
    if run.world > 1:
        model.blocks = nn.ModuleList(
            _Reducing(run, block, run.rank, run.world) for block in model.blocks
        )
    train(run, model, all_rows)


def one_dp(run: Run) -> None:
    """Data parallel by the program's own all_reduce, two micro-batches at a time."""
    model = made()
    mine = [ROWS // run.world * run.rank + n for n in range(ROWS // run.world)]

    def reduce(step: int) -> None:
        for parameter in model.parameters():
            if run.world > 1 and not run.has("not reduced"):
                dist.all_reduce(parameter.grad)
            if not run.has("summed"):
                parameter.grad.div_(run.world)
            if run.has("averaged twice"):
                parameter.grad.div_(run.world)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.recording(noise=False) as recorder:
        for step in range(STEPS):
            pieces = all_rows(step)[mine].chunk(2 if run.world > 1 else 1)
            for rows in pieces:
                (model(rows).square().mean() / len(pieces)).backward()
            if run.world > 1:
                reduce(step)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def one_ddp(run: Run) -> None:
    """The same by DistributedDataParallel, with every other row."""
    model: nn.Module = made()
    if run.world > 1:
        model = DistributedDataParallel(model)
    first = 0 if run.has("same rows") else run.rank
    train(run, model, lambda step: all_rows(step)[first :: run.world])


def one_fsdp2(run: Run) -> None:
    """fully_shard."""
    model: nn.Module = made()
    if run.world > 1:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    train(run, model, lambda step: all_rows(step).chunk(run.world)[run.rank])


def one_fsdp1(run: Run) -> None:
    """FullyShardedDataParallel."""
    model: nn.Module = made()
    if run.world > 1:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    train(run, model, lambda step: all_rows(step).chunk(run.world)[run.rank])


def one_dtensor(run: Run) -> None:
    """Tensor parallel, or with four ranks FSDP2 over it, by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model: nn.Module = made()
    dp = 2 if run.world == 4 else 1
    if run.world > 1:
        mesh = init_device_mesh("cpu", (dp, run.world // dp), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if dp > 1:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    train(run, model, lambda step: all_rows(step).chunk(dp)[run.rank // (run.world // dp)],
          foreach=False)  # fmt: skip


def one_cp(run: Run) -> None:
    """Context parallel: pieces of a sequence."""
    torch.manual_seed(0)
    model = ContextNet(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 32 // run.world
    first = run.rank * size
    positions = torch.arange(size) + (0 if run.has("positions") else first)
    generator = torch.Generator().manual_seed(3)
    with run.recording(noise=False) as recorder:
        for _ in range(STEPS):
            tokens = torch.randint(0, 32, (32,), generator=generator)
            mine, wanted = (t[first : first + size] for t in (tokens, tokens.roll(-1)))
            F.cross_entropy(model(mine, positions, first), wanted).backward()
            if run.world > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(run.world)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        piece = grad.new_empty(grad.shape[0] // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(piece, grad.contiguous())
        return piece


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        piece = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(piece, x.contiguous())
        return piece

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        whole = grad.new_empty(grad.shape[0] * dist.get_world_size(), *grad.shape[1:])
        dist.all_gather_into_tensor(whole, grad.contiguous())
        return whole


class SequenceBlock(nn.Module):
    """Rows are split but between the two linear layers."""

    def __init__(self, block: Block, piece: int, n: int) -> None:
        super().__init__()
        self.norm = block.norm
        self.up, self.down = nn.Linear(16, 32 // n), nn.Linear(32 // n, 16, bias=False)
        self.up.weight = nn.Parameter(block.up.weight.detach().chunk(n)[piece].clone())
        self.up.bias = nn.Parameter(block.up.bias.detach().chunk(n)[piece].clone())
        self.down.weight = nn.Parameter(block.down.weight.detach().chunk(n, 1)[piece].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = _Gathered.apply(self.norm(x))
        return x + _Scattered.apply(self.down(torch.tanh(self.up(whole))))


def one_sp(run: Run) -> None:
    """Sequence parallel: each rank has some rows where it has all features."""
    model = made()
    for block in model.blocks:
        block.down.bias = None
    if run.world > 1:
        model.blocks = nn.ModuleList(SequenceBlock(b, run.rank, run.world) for b in model.blocks)

    def reduce(step: int) -> None:
        for name, parameter in model.named_parameters():
            if run.world == 1:
                continue
            if "norm" in name or "head" in name:  # each rank has seen its rows only
                if not run.has("not reduced"):
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(run.world)
            else:
                parameter.grad.div_(run.world)

    train(run, model, lambda step: all_rows(step).chunk(run.world)[run.rank], reduce)


class Experts(nn.Module):
    """Every row goes to its best expert; a rank has some of them, and all rows."""

    def __init__(self, run: Run, n: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(16, n, bias=False)
        every = [nn.Linear(16, 16) for _ in range(n)]
        each = n // run.world
        self.first = each * run.rank
        if run.has("expert") and run.rank == 1:
            every[self.first], every[self.first + 1] = every[self.first + 1], every[self.first]
        self.experts = nn.ModuleList(every[self.first : self.first + each])
        self.world = run.world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = _Gathered.apply(x) if self.world > 1 else x
        scores = _Gathered.apply(torch.softmax(self.router(x), -1)) if self.world > 1 else (
            torch.softmax(self.router(x), -1))  # fmt: skip
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for n, expert in enumerate(self.experts):
            chosen = (best == self.first + n).nonzero()[:, 0]
            weight = scores[chosen, self.first + n, None]
            out = out.index_add(0, chosen, torch.tanh(expert(rows[chosen])) * weight)
        return x + (_Scattered.apply(out) if self.world > 1 else out)


def one_ep(run: Run) -> None:
    """Expert parallel over data parallel ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(Experts(run), nn.Linear(16, 4))
    torch.manual_seed(5)
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].bias.normal_()

    def reduce(step: int) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if run.world > 1 and "experts" not in name:
                dist.all_reduce(parameter.grad)
            parameter.grad.div_(run.world)

    train(run, model, lambda step: batch(step, 32, 16).chunk(run.world)[run.rank], reduce)


class Tied(nn.Module):
    """A stage, or all, of a model whose first and last weights are one."""

    def __init__(self, whole: Tied | None = None, stage: int = 0, n: int = 1) -> None:
        super().__init__()
        if whole is None:
            self.tokens = nn.Embedding(32, 16)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.tokens.weight
        else:
            self.tokens = whole.tokens if stage == 0 else None
            size = 2 // n
            self.blocks = nn.ModuleDict(
                {str(i): whole.blocks[i] for i in range(stage * size, stage * size + size)}
            )
            self.head = None
            if stage == n - 1:
                self.head = nn.Linear(16, 32, bias=False)
                self.head.weight = nn.Parameter(whole.tokens.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        values = self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks
        for block in values:
            x = block(x)
        return self.head(x) if self.head is not None else x


def one_pp(run: Run) -> None:
    """Two stages in torch's GPipe, two micro-batches; the first and the last weight are tied."""
    torch.manual_seed(0)
    model = Tied()
    wanted = torch.randint(0, 32, (ROWS,), generator=torch.Generator().manual_seed(9))
    schedule: Any = None
    if run.world > 1:
        from torch.distributed import pipelining

        model = Tied(model, run.rank, run.world)
        stage = pipelining.PipelineStage(model, run.rank, run.world, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.recording(noise=False) as recorder:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 32, (ROWS,), generator=generator)
            if schedule is None:
                F.cross_entropy(model(tokens), wanted).backward()
            elif run.rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=wanted, losses=[])
            if run.world > 1 and not run.has("tied"):
                shared = model.tokens.weight if run.rank == 0 else model.head.weight
                dist.all_reduce(shared.grad)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


OTHER_LAYOUTS: dict[str, Callable[[Run], None]] = {
    f.__name__: f
    for f in (one_tp, one_outside, one_dp, one_ddp, one_fsdp1, one_fsdp2, one_dtensor, one_cp,
              one_sp, one_ep, one_pp)
}  # fmt: skip

# What is planted on two ranks, with the rank, the cause, and words that the reason must have.
FAULTS = {
    "one_tp/no reduce": (0, "structure", "missing all-reduce: blocks.0.down gives a part"),
    "one_tp/shard order": (0, "structure", "wrong shard order: rank 0 has piece 1 of 2"),
    "one_tp/double bias": (0, "structure", "double bias: blocks.0.down.bias is added on each"),
    "one_tp/stale": (1, "weights", "parameter blocks.1.norm.weight is not"),
    "one_tp/kernel": (1, "result", "what blocks.1.down is given on rank 1 (its features) is off"),
    "one_tp/lr": (1, "result", "the optimizer makes another"),
    "one_outside/no reduce": (0, "structure", "missing all-reduce: blocks.0.down gives a part"),
    "one_outside/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_dp/not reduced": (0, "structure", "is not reduced: it differs between ranks 0, 1"),
    "one_dp/summed": (0, "structure", "times too large: summed over ranks"),
    "one_dp/averaged twice": (0, "structure", "times too small: averaged once too often"),
    "one_ddp/same rows": (0, "data", "no rank gives the model rows 1, 3, 5, 7"),
    "one_ddp/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_fsdp1/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_fsdp2/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_dtensor/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_cp/positions": (1, "data", "position ids are not offset"),
    "one_sp/not reduced": (0, "structure", "is not reduced: it differs between ranks 0, 1"),
    "one_sp/kernel": (1, "result", "what blocks.1.down is given on rank 1"),
    "one_ep/expert": (1, "weights", "weights are swapped: on rank 1 0.experts.0 has those of"),
    "one_pp/tied": (0, "structure", "tied weights are not synchronised"),
}
