"""Programs of four ranks in the layouts of large models: FSDP, sequence, expert and context
parallel, two of them at once, and pipelines in schedules. Each may have a fault.

They are functions of a Run, as those of rank_programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from ranks.rank_programs import Run

STEPS = 2
ODD = 2  # the rank that a fault is on


class Coarse(TorchDispatchMode):
    """Within it matrix products round what they are given to the ten bits of TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in ("mm", "addmm", "bmm"):
            args = tuple(_ten_bits(x) if isinstance(x, torch.Tensor) else x for x in args)
        return func(*args, **(kwargs or {}))


def _ten_bits(x: torch.Tensor) -> torch.Tensor:
    part = getattr(x, "_local_tensor", None)
    if part is not None:
        from torch.distributed.tensor import DTensor

        return DTensor(_ten_bits(part), x._spec, requires_grad=x.requires_grad)  # type: ignore[attr-defined]
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@contextlib.contextmanager
def recording(run: Run, op: str = "tanh", nth: int = 0, phase: str = "forward") -> Iterator[Any]:
    """Record a program, with the fault of a kernel or in TF32 on one rank where the run has it."""
    kernel = run.kernel(ODD, op, nth, phase=phase)
    coarse: Any = contextlib.nullcontext()
    if run.has("tf32") and run.rank == ODD:
        torch.backends.cuda.matmul.allow_tf32 = True  # the recorder writes it down
        coarse = Coarse()
    try:
        with coarse, run.recording(kernel) as recorder:
            yield recorder
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _spoil(run: Run, *parameters: torch.Tensor) -> None:
    """A replica, or a part, that never got the weights it should have."""
    if run.has("stale") and run.rank == ODD:
        with torch.no_grad():
            for parameter in parameters:
                getattr(parameter, "_local_tensor", parameter).mul_(1.5)


def _train(run: Run, model: nn.Module, rows: Callable[[int], torch.Tensor], **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=options.pop("foreach", None))
    with recording(run, **options) as recorder:
        for step in range(STEPS):
            model(rows(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def fsdp1(run: Run, hook: bool = False) -> None:
    """FullyShardedDataParallel: each rank has a flat part of all parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    net = Net()
    cpu = torch.device("cpu")
    net.first = FullyShardedDataParallel(net.first, device_id=cpu)
    model = FullyShardedDataParallel(net, device_id=cpu)
    _spoil(run, *model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hook:
        model.register_comm_hook(None, _Reducing(run))
    with recording(run) as recorder:
        for step in range(STEPS):
            model(batch(10 * step + run.rank, 4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def fsdp1_hook(run: Run) -> None:
    """The same with a hook that reduces gradients."""
    fsdp1(run, hook=True)


class _Reducing:
    """A hook of FSDP1 that may reduce its first bucket by the maximum, or not at all."""

    def __init__(self, run: Run) -> None:
        self.run, self.n = run, 0

    def __call__(self, state: Any, given: torch.Tensor, piece: torch.Tensor) -> None:
        self.n += 1
        if self.n == 1 and self.run.has("lost bucket"):
            piece.copy_(given.chunk(self.run.world)[self.run.rank])
            return
        wrong = self.n == 1 and self.run.has("reduce op")
        op = dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(piece, given, op=op)
        piece.div_(self.run.world)


def fsdp2(run: Run) -> None:
    """fully_shard: each rank has some rows of each parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (run.world,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _spoil(run, *model.first.parameters())
    if run.has("reduce op"):
        model.first.set_gradient_divide_factor(1.0)
        model.first.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(run) as recorder:
        for step in range(STEPS):
            model.first.set_requires_gradient_sync(not (run.has("lost bucket") and step == 0))
            model(batch(10 * step + run.rank, 4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; its gradient is summed, and each rank gets its rows back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, mean: bool) -> torch.Tensor:
        ctx.group, ctx.mean = group, mean
        whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        size = dist.get_world_size(ctx.group)
        piece = grad.new_empty(grad.shape[0] // size, *grad.shape[1:])
        op = dist.ReduceOp.MAX if ctx.mean else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(piece, grad.contiguous(), op=op, group=ctx.group)
        return piece, None, None


class _Scattered(torch.autograd.Function):
    """The sum over ranks, of which each gets some rows; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        piece = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(piece, x.contiguous(), group=group)
        return piece

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = grad.new_empty(grad.shape[0] * dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=ctx.group)
        return whole, None


class SequenceMLP(nn.Module):
    """A column-parallel and a row-parallel layer between which rows are whole."""

    def __init__(self, world: int, other: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64 // world), nn.Linear(64 // world, 16, bias=False)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = _Gathered.apply(self.norm(x), None, self.other)
        return x + _Scattered.apply(self.down(F.gelu(self.up(whole))), None)


def sp(run: Run) -> None:
    """Tensor parallel with the sequence split where it is not (Megatron's sequence parallel)."""
    torch.manual_seed(run.rank)
    model = nn.Sequential(*(SequenceMLP(run.world, run.has("reduce op")) for _ in range(2)))
    with torch.no_grad():
        for layer in model:
            layer.norm.weight.fill_(1.25)
    _spoil(run, model[1].norm.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(run, "gelu", 1) as recorder:
        for step in range(STEPS):
            x = batch(step, 8, 3, 16).chunk(run.world)[run.rank]
            model(x).square().mean().backward()
            for n, layer in enumerate(model):  # each rank has seen some rows only
                for parameter in layer.norm.parameters():
                    if not (run.has("lost bucket") and n == 1 and step == 0):
                        dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def _plan(net: nn.Module, mesh: Any, *, sequence: bool) -> nn.Module:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    return parallelize_module(net, mesh, plan)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def dtensor_sp(run: Run) -> None:
    """The same by DTensor: SequenceParallel between a column-wise and a row-wise layer."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = _plan(Block(), init_device_mesh("cpu", (run.world,)), sequence=True)
    _spoil(run, model.up.weight)
    _train(run, model, lambda step: batch(step, 8, 16).chunk(run.world)[run.rank], foreach=False)


def two_d(run: Run) -> None:
    """FSDP2 over two groups, tensor parallel within each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, run.world // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(_plan(Block(), mesh["tp"], sequence=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    _spoil(run, model[1].up.weight)
    if run.has("reduce op"):
        model[1].set_gradient_divide_factor(1.0)
        model[1].set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with recording(run, nth=1) as recorder:
        for step in range(STEPS):
            model[1].set_requires_gradient_sync(not (run.has("lost bucket") and step == 0))
            model(batch(10 * step + run.rank // 2, 4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


class _Exchanged(torch.autograd.Function):
    """Piece n of the rows goes to rank n; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        there = torch.empty_like(x)
        dist.all_to_all_single(there, x.contiguous())
        return there

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(grad)
        dist.all_to_all_single(back, grad.contiguous())
        return back


class Experts(nn.Module):
    """Two experts on each rank; each rank sends every expert as many rows (expert choice)."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.router = nn.Linear(16, 2 * world, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x), -1)
        weight, rows = scores.topk(2, dim=0)  # [2, experts]
        sent = x[rows.t().reshape(-1)]  # by expert, so by rank
        there = _Exchanged.apply(sent).reshape(self.world, 2, 2, 16)
        made = [torch.tanh(expert(there[:, n])) for n, expert in enumerate(self.experts)]
        back = _Exchanged.apply(torch.stack(made, 1).reshape(sent.shape))
        scaled = back * weight.t().reshape(-1, 1)
        return x.index_add(0, rows.t().reshape(-1), scaled)


def ep(run: Run) -> None:
    """Expert parallel: rows go to the ranks of their experts, and come back; the rest is data
    parallel."""
    torch.manual_seed(0)
    experts = Experts(run.world)
    torch.manual_seed(10 + run.rank)
    with torch.no_grad():
        for expert in experts.experts:
            expert.weight.normal_(std=0.3)
    head = nn.Linear(16, 4)
    with torch.no_grad():
        head.weight.copy_(batch(1, 4, 16))
        head.bias.zero_()
    model = nn.Sequential(experts, head)
    if run.has("expert") and run.rank == ODD:
        one, other = experts.experts
        with torch.no_grad():
            kept = one.weight.clone()
            one.weight.copy_(other.weight)
            other.weight.copy_(kept)
    _spoil(run, head.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = [experts.router.weight, head.weight, head.bias]
    with recording(run, nth=1) as recorder:
        for step in range(STEPS):
            model(batch(10 * step + run.rank, 8, 16)).square().mean().backward()
            for n, parameter in enumerate(shared):
                if run.has("lost bucket") and n == 1 and step == 0:
                    continue
                wrong = run.has("reduce op") and n == 1 and step == 0
                dist.all_reduce(parameter.grad, dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)
                parameter.grad.div_(run.world)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


class ContextAttention(nn.Module):
    """Causal attention of which each rank has the queries of some positions."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.other = other

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        k, v = (_Gathered.apply(each, None, self.other) for each in (k, v))
        scores = q @ k.t() / 4
        own, all_ = torch.arange(len(q)) + first, torch.arange(len(k))
        scores = scores.masked_fill(all_[None, :] > own[:, None], float("-inf"))
        return x + self.out(torch.softmax(scores, -1) @ v)


class ContextNet(nn.Module):
    def __init__(self, length: int, other: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(length, 16)
        self.layers = nn.ModuleList(ContextAttention(other) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, first: int) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, first)
        return self.head(torch.tanh(x))


def cp(run: Run) -> None:
    """Context parallel: each rank has a piece of the sequence, and gathers keys and values."""
    length = 8 * run.world
    torch.manual_seed(0)
    model = ContextNet(length, run.has("reduce op"))
    _spoil(run, model.layers[1].qkv.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = run.rank * 8
    positions = torch.arange(first, first + 8)
    if run.has("positions") and run.rank == ODD:
        positions = torch.arange(8)
    generator = torch.Generator().manual_seed(3)
    with recording(run) as recorder:
        for step in range(STEPS):
            tokens = torch.randint(0, 32, (length,), generator=generator)
            mine, wanted = (t.chunk(run.world)[run.rank] for t in (tokens, tokens.roll(-1)))
            logits = model(mine, positions, first)
            F.cross_entropy(logits, wanted).backward()
            for name, parameter in model.named_parameters():
                if run.has("lost bucket") and name == "layers.1.out.weight" and step == 0:
                    continue
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(run.world)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def _scheduled(run: Run, kind: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(run.rank)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    _spoil(run, part[0].weight)
    stage = pipelining.PipelineStage(part, run.rank, run.world, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(
        stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean()
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    with recording(run, nth=1) as recorder:
        for step in range(STEPS):
            x, target = batch(step, 8, 16), batch(100 + step, 8, 16)
            if run.rank == 0:
                schedule.step(x)
            elif run.rank == run.world - 1:
                schedule.step(target=target, losses=[])
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def gpipe(run: Run) -> None:
    """torch's GPipe: all micro-batches forward, then all backward."""
    _scheduled(run, "ScheduleGPipe")


def one_f_one_b(run: Run) -> None:
    """torch's 1F1B: forward and backward of micro-batches take turns."""
    _scheduled(run, "Schedule1F1B")


LAYOUTS: dict[str, Callable[[Run], None]] = {
    "fsdp1": fsdp1, "fsdp1_hook": fsdp1_hook, "fsdp2": fsdp2, "sp": sp, "dtensor_sp": dtensor_sp,
    "2d": two_d, "ep": ep, "cp": cp, "gpipe": gpipe, "1f1b": one_f_one_b,
}  # fmt: skip
