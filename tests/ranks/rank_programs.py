"""Small programs of several ranks, in the layouts that torch.distributed offers, with faults.

Each is a function of a Run. It computes the same on every launch; the Run says where a fault is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensorprobe as tp
from comparing.planting import Device, Fault

STEPS = 2


class RankDevice(Device):
    """A Device that also works on a rank's part of a DTensor."""

    def _with_noise(self, x: torch.Tensor) -> torch.Tensor:
        part = getattr(x, "_local_tensor", None)
        if part is None:
            return super()._with_noise(x)
        part.copy_(super()._with_noise(part))
        return x

    def _strike(self, result: Any, fault: Fault, in_place: bool) -> Any:
        part = getattr(result, "_local_tensor", None)
        if part is None:
            return super()._strike(result, fault, in_place)
        super()._strike(part, fault, in_place=True)
        return result


class Run:
    """One recording of a program on this rank, with at most one fault in it."""

    def __init__(self, folder: str, fault: str = "", seed: int = 7, keep: str = "tensors") -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.folder, self.fault, self.keep = folder, fault, keep
        self._seed = seed

    def has(self, fault: str) -> bool:
        """Whether this fault is planted in this run; a program asks, and does it."""
        return self.fault == fault

    @contextlib.contextmanager
    def recording(self, kernel: Fault | None = None, noise: bool = True) -> Iterator[tp.Recorder]:
        """Record what is inside, with rounding noise of its own on every rank."""
        device = RankDevice(noise, kernel, seed=self._seed + self.rank)
        with device, tp.Recorder(self.folder, keep=self.keep, log=lambda text: None) as recorder:
            yield recorder
        assert kernel is None or device.struck, f"{kernel.op} was not called"

    def kernel(self, rank: int, op: str, nth: int = 0, factor: float = 1.01,
               phase: str = "forward") -> Fault | None:  # fmt: skip
        """The fault of a kernel that multiplies its result, on one rank of a run named "kernel"."""
        if self.rank != rank or not self.fault.startswith("kernel"):
            return None
        return Fault(op, nth, lambda x: x * factor, phase=phase)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(torch.tanh(self.first(x))))


def _batch(seed: int, rows: int = 4, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def manual(run: Run) -> None:
    """Data parallel by the program's own all_reduce of its loss and of its gradients."""
    torch.manual_seed(0)
    model = Net()
    if run.has("stale") and run.rank == 2:  # it never got the weights of the others
        with torch.no_grad():
            model.second.weight.mul_(1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if run.has("two"):  # two origins, neither of which has heard of the other
        kernel = {1: Fault("gelu", 0, lambda x: x * 1.01),
                  3: Fault("tanh", 0, lambda x: x * 1.01)}.get(run.rank)  # fmt: skip
    else:
        kernel = run.kernel(2, "addmm", 1)
    with run.recording(kernel) as recorder:
        for step in range(STEPS):
            y = model(_batch(10 * step + run.rank))
            total = y.square().mean()
            shown = total.detach().clone()
            if (run.has("reduce op") or (run.has("member op") and run.rank == 2)) and step == 0:
                dist.all_reduce(shown, op=dist.ReduceOp.MAX)
            else:
                dist.all_reduce(shown)
            scale = torch.exp(-shown / 100)
            (total * scale).backward()
            for name, parameter in model.named_parameters():
                if run.has("lost bucket") and name == "first.weight" and step == 0:
                    continue
                work = dist.all_reduce(parameter.grad, async_op=True)
                work.wait()
                parameter.grad.div_(run.world)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def ddp(run: Run) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if run.has("hook"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    with run.recording(run.kernel(2, "tanh")) as recorder:
        for step in range(STEPS):
            model(_batch(10 * step + run.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


class _Reduced(torch.autograd.Function):
    """The sum over all ranks; its gradient is passed on, as Megatron's row-parallel layer does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Copied(torch.autograd.Function):
    """What all ranks have; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ParallelMLP(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64 // world), nn.Linear(64 // world, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(F.gelu(self.up(_Copied.apply(self.norm(x)))))
        return x + _Reduced.apply(partial)


def tp_megatron(run: Run) -> None:
    """Tensor parallel as Megatron writes it."""
    torch.manual_seed(100)
    head = nn.Linear(16, 4)
    torch.manual_seed(run.rank)
    layers = nn.Sequential(ParallelMLP(run.world), ParallelMLP(run.world))
    model = nn.Sequential(layers, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.recording(run.kernel(2, "gelu", 1)) as recorder:
        for step in range(STEPS):
            model(_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def dropout(run: Run) -> None:
    """Data parallel with dropout: the seed of rank 1 may be another."""
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(1000 if run.has("seed") and run.rank == 1 else run.rank)
    with run.recording() as recorder:
        for step in range(STEPS):
            y = F.dropout(model(_batch(10 * step + run.rank)), 0.5)
            total = y.square().mean()
            dist.all_reduce(total)
            (total + 1).sqrt()
            recorder.step()


def nan(run: Run) -> None:
    """NaN is born in the log of rank 1 in step 1."""
    is_here = run.has("nan") and run.rank == 1
    fault = Fault("log", 1, lambda x: x * float("nan")) if is_here else None
    with run.recording(fault) as recorder:
        for step in range(STEPS):
            y = torch.log(_batch(10 * step + run.rank).abs() + 0.5).sum(0)
            dist.all_reduce(y)
            (y * 2).tanh()
            recorder.step()


def groups(run: Run) -> None:
    """Two groups of two ranks, then all: damage of rank 3 is in its group before it is in all."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model_group = pairs[run.rank // 2]
    torch.manual_seed(0)
    model = Net()
    with run.recording(run.kernel(3, "gelu")) as recorder:
        for step in range(STEPS):
            y = model(_batch(10 * step + run.rank)).detach()
            dist.all_reduce(y, group=model_group)
            y = torch.tanh(y * 0.1)
            parts = [torch.empty_like(y) for _ in range(run.world)]
            dist.all_gather(parts, y)
            torch.cat(parts).square().sum()
            recorder.step()


def pipeline(run: Run) -> None:
    """Each rank has a stage, and sends what it makes to the next."""
    torch.manual_seed(run.rank)
    stage = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with run.recording(run.kernel(1, "tanh")) as recorder:
        for step in range(STEPS):
            given = _batch(step)
            if run.rank > 0:
                given = torch.empty(4, 16)
                dist.recv(given, run.rank - 1)
            given.requires_grad_(run.rank > 0)
            made = torch.tanh(stage(given))
            if run.rank < run.world - 1:
                dist.send(made.detach(), run.rank + 1)
                back = torch.empty(4, 16)
                dist.recv(back, run.rank + 1)
                made.backward(back)
            else:
                made.square().mean().backward()
            if run.rank > 0:
                dist.send(given.grad, run.rank - 1)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def broken(run: Run) -> None:
    """Collectives of each kind; the result of one of them may be wrong on one rank."""
    with run.recording(noise=False) as recorder:
        for step in range(STEPS):
            x = _batch(10 * step + run.rank)
            total, parts = x.clone(), [torch.empty_like(x) for _ in range(run.world)]
            with contextlib.ExitStack() as stack:
                if run.has("all_reduce") and run.rank == 1 and step == 1:
                    stack.enter_context(_spoilt())
                dist.all_reduce(total)
            (total * 0.5).tanh()
            both = [x + 1, x * 2]
            for each in reversed(both) if run.has("order") and run.rank == 2 else both:
                dist.all_reduce(each)
            (both[0] - both[1]).tanh()
            dist.all_gather(parts, x)
            piece = torch.empty_like(x)
            dist.reduce_scatter(piece, [p.contiguous() for p in parts])
            torch.stack(parts).sum(0).tanh()
            mixed = torch.empty_like(x)
            dist.all_to_all_single(mixed, x)
            dist.broadcast(x, 0)
            (x + mixed + piece).tanh()
            recorder.step()


def fsdp2(run: Run) -> None:
    """Parameters sharded over all ranks, gathered for each module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (run.world,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.recording(run.kernel(2, "tanh")) as recorder:
        for step in range(STEPS):
            model(_batch(10 * step + run.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def dtensor(run: Run) -> None:
    """Tensor parallel by DTensor: a column-wise and a row-wise layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (run.world,))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with run.recording(noise=False) as recorder:
        for step in range(STEPS):
            if step == 0 and run.has("kernel") and run.rank == 2:
                stack = _SpoiltTanh()
            else:
                stack = contextlib.nullcontext()
            with stack:
                y = model(_batch(step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def functional(run: Run) -> None:
    """Functional collectives, whose results are read later than they are called."""
    import torch.distributed._functional_collectives as functional

    torch.manual_seed(0)
    model = Net()
    with run.recording(run.kernel(2, "tanh")) as recorder:
        for step in range(STEPS):
            y = model(_batch(10 * step + run.rank)).detach()
            total = functional.all_reduce(y, "sum", dist.group.WORLD)
            (total * 0.1).tanh()
            parts = functional.all_gather_tensor(y, 0, dist.group.WORLD)
            (parts * 0.1).tanh()
            recorder.step()


def messages(run: Run) -> None:
    """A ring of isend and irecv, and batch_isend_irecv."""
    torch.manual_seed(0)
    model = Net()
    after, before = (run.rank + 1) % run.world, (run.rank - 1) % run.world
    with run.recording(run.kernel(2, "tanh")) as recorder:
        for step in range(STEPS):
            y = model(_batch(10 * step + run.rank)).detach()
            came = torch.empty_like(y)
            works = [dist.isend(y, after), dist.irecv(came, before)]
            for work in works:
                work.wait()
            (came * 0.1).tanh()
            back = torch.empty_like(y)
            ops = [dist.P2POp(dist.isend, came + 1, before), dist.P2POp(dist.irecv, back, after)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            (back * 0.1).tanh()
            recorder.step()


class _SpoiltTanh(torch.utils._python_dispatch.TorchDispatchMode):
    """Within it tanh is off by a hundredth: of what a rank has, of a DTensor too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("tanh."):
            getattr(result, "_local_tensor", result).mul_(1.01)
        return result


@contextlib.contextmanager
def _spoilt() -> Iterator[None]:
    """Within it the result of all_reduce is off by a hundredth."""

    class Spoil(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if "allreduce" in func.__name__:
                result[1].wait()
                for each in args[0]:
                    each.mul_(1.01)
            return result

    with Spoil():
        yield


PROGRAMS: dict[str, Callable[[Run], None]] = {
    "manual": manual, "ddp": ddp, "tp": tp_megatron, "dropout": dropout, "nan": nan,
    "groups": groups, "pipeline": pipeline, "broken": broken, "fsdp2": fsdp2,
    "dtensor": dtensor, "functional": functional, "messages": messages,
}  # fmt: skip
