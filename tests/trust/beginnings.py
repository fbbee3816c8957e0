"""Faults that are there before the first call of the model: seeds, weights, buffers, data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import Case, Start
from trust.kernels import dirty_memory, other_kernels
from trust.programs import (
    Attention,
    Batch,
    BatchNormed,
    Mlp,
    built,
    calling,
    images,
    inferring,
    sgd,
    token_loss,
    tokens,
    training,
    vectors,
)

WITH_L0 = ("tensors mix", "stats mix", "digest mix", "tensors L0", "stats L0")
WITH_L2 = ("tensors mix", "stats mix", "digest mix", "tensors L2", "digest L2")

SEEDS = "seeds"
WEIGHTS = "weights at the start"
BUFFERS = "buffers"
DATA = "data"


class Dropped(Mlp):
    """With dropout between the linears."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.norm(self.first(x))), 0.3, self.training))


def _seeded_late(start: Start, is_actual: bool) -> None:
    """Another seed after the weights are made: only dropout differs."""
    net = built(Dropped)
    optimizer = sgd(net.parameters())
    with start() as recorder:
        torch.manual_seed(3 if is_actual else 4)
        for step in range(2):
            x, y = vectors(step)
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def _one_draw_more(start: Start, is_actual: bool) -> None:
    """One side draws a number that nobody uses, and every later draw is another one."""
    net = built(Dropped)
    with start():
        torch.manual_seed(3)
        if is_actual:
            torch.rand(1)
        F.mse_loss(net(vectors(0)[0]), vectors(0)[1]).backward()


def _drawn_and_seeded_again(start: Start, is_actual: bool) -> None:
    """One side draws more, but both are seeded before what counts."""
    net = built(Dropped)
    with start():
        if is_actual:
            torch.rand(3)
        torch.manual_seed(3)
        F.mse_loss(net(vectors(0)[0]), vectors(0)[1]).backward()


def _draws(make: Any) -> Any:
    """A tensor drawn by `make` under another seed, and something that is done with it."""

    def program(is_actual: bool) -> None:
        torch.manual_seed(1 if is_actual else 2)
        (make() * 2 + 1).sum()

    return calling(program)


def _numpy_seed(is_actual: bool) -> None:
    import numpy as np

    drawn = np.random.RandomState(1 if is_actual else 2).randn(4, 12).astype("float32")
    built(Mlp)(torch.from_numpy(drawn)).sum()


# What memory holds before a weight is drawn differs from run to run.
RECORDED = {"build_recorded": True, "inside": lambda: dirty_memory(-7.0)}


def _dirty(inside: Any = contextlib.nullcontext) -> Any:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with dirty_memory(1000.0), inside():
            yield

    return both


SEED_CASES = [
    Case(
        "seed-of-everything",
        SEEDS,
        training(RECORDED, seed=1, inside=_dirty()),
        cause="seed",
        at="*uniform_*|*normal_*",
        quick=True,
        runs=WITH_L2,
    ),
    Case(
        "seed-of-everything-not-recorded",
        SEEDS,
        training(seed=1),
        cause="weights|seed",
        at={"*": "Functional.linear.0.forward|Module.first.*|Module.Mlp.*", "L0": "Module.*"},
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "seed-of-batch-norm-net",
        SEEDS,
        training({**RECORDED, "net": BatchNormed, "data": images}, seed=1, inside=_dirty()),
        cause="seed",
        at="*uniform_*",
    ),
    Case(
        "seed-of-embedding-net",
        SEEDS,
        training(
            {**RECORDED, "net": Attention, "data": tokens, "loss": token_loss},
            seed=1,
            inside=_dirty(),
        ),
        cause="seed",
        at="*normal_*",
    ),
    Case(
        "seed-of-everything-other-kernels",
        SEEDS,
        training(RECORDED, seed=1, inside=_dirty(other_kernels)),
        cause="seed",
        at="*uniform_*",
    ),
    Case(
        "seed-of-dropout",
        SEEDS,
        _seeded_late,
        cause="seed|boundary",
        at={"*": "Functional.dropout.0.forward", "L0": "Module.*"},
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "seed-one-draw-more",
        SEEDS,
        _one_draw_more,
        cause="seed|structure",
        at="Functional.dropout.0.forward|Torch.rand.0.forward",
    ),
    Case(
        "seed-of-randn",
        SEEDS,
        _draws(lambda: torch.randn(50)),
        cause="seed",
        at={"*": "Torch.randn.0.forward", "L2": "Aten.randn.0.forward|Aten.normal*"},
        runs=WITH_L2,
    ),
    Case(
        "seed-of-randint",
        SEEDS,
        _draws(lambda: torch.randint(0, 99, (50,))),
        cause="seed",
        at="Torch.randint.0.forward",
    ),
    Case(
        "seed-of-bernoulli",
        SEEDS,
        _draws(lambda: torch.bernoulli(torch.full((50,), 0.5))),
        cause="seed",
        at="Torch.bernoulli.0.forward",
    ),
    Case(
        "seed-of-randperm",
        SEEDS,
        _draws(lambda: torch.randperm(30)),
        cause="seed",
        at="Torch.randperm.0.forward",
    ),
    Case(
        "seed-of-numpy",
        SEEDS,
        calling(_numpy_seed),
        cause="data",
        at="Torch.from_numpy.0.forward|Module.Mlp.forward.0",
    ),
    # healthy
    Case(
        "built-while-recorded", SEEDS, training(RECORDED, inside=_dirty()), runs=WITH_L2, quick=True
    ),
    Case(
        "built-while-recorded-other-kernels",
        SEEDS,
        training(RECORDED, inside=_dirty(other_kernels)),
    ),
    Case(
        "same-dropout-other-kernels",
        SEEDS,
        training({"net": Dropped}, inside=other_kernels),
        quick=True,
        runs=WITH_L0,
    ),
    Case("draw-more-and-seeded-again", SEEDS, _drawn_and_seeded_again),
]


def _weight(change: Any) -> Any:
    def prepare(net: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            change(net)

    return prepare


def _w(name: str, change: Any, at: str, quick: bool = False, **both: Any) -> Case:
    return Case(
        f"weight-{name}",
        WEIGHTS,
        training(both, prepare=_weight(change)),
        at=at,
        cause="weights",
        runs=WITH_L0,
        quick=quick,
    )


def _w_inferred(name: str, change: Any, at: Any, **both: Any) -> Case:
    return Case(
        f"weight-{name}",
        WEIGHTS,
        inferring(both, prepare=_weight(change)),
        at=at,
        cause="weights",
        runs=(*WITH_L0, "tensors L2", "stats L2", "digest L2"),
    )


WEIGHT_CASES = [
    _w(
        "scaled",
        lambda net: net.second.weight.mul_(1.01),
        "Functional.linear.1.forward|Module.second.*",
        quick=True,
    ),
    _w(
        "one-element",
        lambda net: net.second.weight[1, 2].add_(0.01),
        "Functional.linear.1.forward|Module.second.*",
    ),
    _w(
        "bias-missing",
        lambda net: net.first.bias.zero_(),
        "Functional.linear.0.forward|Module.first.*",
    ),
    _w(
        "norm-weight",
        lambda net: net.norm.weight.mul_(1.1),
        "Functional.layer_norm.0.forward|Module.norm.*",
        quick=True,
    ),
    _w(
        "rows-swapped",
        lambda net: net.first.weight.copy_(net.first.weight.flip(0)),
        "Functional.linear.0.forward|Module.first.*",
    ),
    _w(
        "through-bf16",
        lambda net: net.first.weight.copy_(net.first.weight.bfloat16()),
        "Functional.linear.0.forward|Module.first.*",
    ),
    _w(
        "transposed-projection",
        lambda net: net.out.weight.copy_(net.out.weight.T.clone()),
        "Functional.linear.1.forward|Module.out.*",
        net=Attention,
        data=tokens,
        loss=token_loss,
    ),
    _w_inferred(
        "scaled-in-eval",
        lambda net: net.second.weight.mul_(1.01),
        {"*": "Functional.linear.1.forward|Module.second.*", "L2": "Aten.t.1.*|Aten.addmm.1.*"},
    ),
    _w_inferred(
        "bias-in-eval",
        lambda net: net.first.bias.add_(0.1),
        {"*": "Functional.linear.0.forward|Module.first.*", "L2": "Aten.addmm.0.*"},
    ),
    _w_inferred(
        "embedding-row",
        lambda net: net.embed.weight[3].mul_(2),
        {"*": "Functional.embedding.0.forward|Module.embed.*", "L2": "Aten.embedding.0.*"},
        net=Attention,
        data=tokens,
    ),
    # healthy
    Case(
        "weights-cast-there-and-back",
        WEIGHTS,
        training(prepare=lambda net, _: net.double().float()),
        runs=WITH_L0,
    ),
    Case(
        "weights-loaded",
        WEIGHTS,
        training(
            prepare=lambda net, _: net.load_state_dict(
                {k: v.clone() for k, v in net.state_dict().items()}
            )
        ),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "weights-equal-in-eval-other-kernels",
        WEIGHTS,
        inferring(inside=other_kernels),
        runs=(*WITH_L0, "tensors L2", "stats L2", "digest L2"),
    ),
]


NORMED = {"net": BatchNormed, "data": images, "steps": 3}
AT_NORM = {
    "*": "Functional.batch_norm.0.forward|Module.norm.*",
    "L0": "Module.norm.*",
    "L2": "Aten.*batch_norm*",
}


def _buffer(name: str, cause: str, program: Any, quick: bool = False, **more: Any) -> Case:
    return Case(
        f"buffer-{name}",
        BUFFERS,
        program,
        at=AT_NORM,
        cause=cause,
        runs=(*WITH_L0, "tensors L2"),
        quick=quick,
        **more,
    )


def _set(**values: float) -> Any:
    def prepare(net: nn.Module, *_: Any) -> None:
        for name, value in values.items():
            getattr(net.norm, name).add_(value)

    return prepare


def _frozen(net: nn.Module, *_: Any) -> None:
    net.norm.eval()


BUFFER_CASES = [
    _buffer(
        "momentum",
        "argument",
        training(NORMED, net=functools.partial(BatchNormed, momentum=0.01)),
        quick=True,
        step=0,
    ),
    _buffer(
        "momentum-a-little",
        "argument",
        training(NORMED, net=functools.partial(BatchNormed, momentum=0.101)),
        step=0,
    ),
    _buffer(
        "running-mean",
        "weights",
        training(NORMED, prepare=_set(running_mean=0.1)),
        quick=True,
        step=0,
    ),
    _buffer("running-var", "weights", training(NORMED, prepare=_set(running_var=0.1)), step=0),
    _buffer(
        "running-mean-in-eval",
        "weights",
        inferring({"net": BatchNormed, "data": images}, prepare=_set(running_mean=0.1)),
    ),
    _buffer(
        "running-var-in-eval",
        "weights",
        inferring({"net": BatchNormed, "data": images}, prepare=_set(running_var=0.2)),
        quick=True,
    ),
    _buffer("norm-in-eval", "argument|structure", training(NORMED, prepare=_frozen), step=0),
    _buffer(
        "running-mean-other-kernels",
        "weights",
        training(NORMED, prepare=_set(running_mean=0.1), inside=other_kernels),
        step=0,
    ),
    # healthy
    Case("batch-norm-twice", BUFFERS, training(NORMED), runs=(*WITH_L0, "tensors L2"), quick=True),
    Case(
        "batch-norm-other-kernels",
        BUFFERS,
        training(NORMED, inside=other_kernels),
        runs=(*WITH_L0, "tensors L2"),
    ),
    Case(
        "batch-norm-in-eval-other-kernels",
        BUFFERS,
        inferring({"net": BatchNormed, "data": images}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "batch-norm-channels-last",
        BUFFERS,
        training(NORMED, prepare=lambda net, _: net.to(memory_format=torch.channels_last)),
        runs=WITH_L0,
    ),
]


def _shifted(step: int) -> Batch:
    return vectors(step + 1)


def _reordered(step: int) -> Batch:
    return tuple(part.flip(0) for part in vectors(step))  # type: ignore[return-value]


def _scaled(step: int) -> Batch:
    x, y = vectors(step)
    return x * 1.001, y


def _one_number(step: int) -> Batch:
    x, y = vectors(step)
    if step == 1:
        x[3, 4] += 0.5
    return x, y


def _other_labels(step: int) -> Batch:
    x, y = vectors(step)
    return x, y.roll(1, 0)


def _other_tokens(step: int) -> Batch:
    ids, labels = tokens(step)
    ids[0, 3] = (ids[0, 3] + 1) % 20
    return ids, labels


def _padding(left: bool, mask_too: bool = True) -> Any:
    """Two prompts padded to one length, on the left or on the right, through a block."""

    def program(start: Start, is_actual: bool) -> None:
        net = built(Attention).eval()
        prompt = torch.arange(1, 7)
        with start(), torch.no_grad():
            pad = torch.zeros(4, dtype=torch.long)
            parts = [prompt, pad] if is_actual else [pad, prompt]
            net(torch.cat(parts)[None])

    return program


def _swapped_cat(make: Any) -> Any:
    def program(is_actual: bool) -> None:
        torch.manual_seed(0)
        a, b = torch.randn(3, 4), torch.randn(3, 4)
        make(*((a, b) if is_actual else (b, a)))

    return calling(program)


AT_ROOT = "Module.Mlp.forward.0|Functional.linear.0.forward|Module.first.*"

DATA_CASES = [
    Case(
        "data-other-batch",
        DATA,
        training(data=_shifted),
        at=AT_ROOT,
        cause="data",
        culprits=2,
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "data-rows-in-other-order",
        DATA,
        training(data=_reordered),
        at=AT_ROOT,
        cause="data",
        culprits=2,
        runs=WITH_L0,
        quick=True,
    ),
    Case("data-scaled", DATA, training(data=_scaled), at=AT_ROOT, cause="data", runs=WITH_L0),
    Case(
        "data-one-number-in-step-1",
        DATA,
        training({"steps": 3}, data=_one_number),
        at=AT_ROOT,
        cause="data",
        step=1,
        runs=WITH_L0,
    ),
    Case(
        "data-other-labels",
        DATA,
        training(data=_other_labels),
        step=0,
        at={
            "*": "Functional.mse_loss.0.forward",
            "L0": "Module.Mlp.backward.0|Module.second.Linear.backward.0",
        },
        cause="data|boundary",
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "data-other-token",
        DATA,
        training({"net": Attention, "data": tokens, "loss": token_loss}, data=_other_tokens),
        at="Module.Attention.forward.0|Functional.embedding.0.forward|Module.embed*",
        cause="data",
        runs=WITH_L0,
    ),
    Case(
        "data-padded-on-the-other-side",
        DATA,
        _padding(True),
        at="Torch.cat.0.forward",
        cause="data|structure|argument",
        quick=True,
    ),
    Case(
        "data-cat-swapped",
        DATA,
        _swapped_cat(lambda a, b: torch.cat([a, b]).sum(0)),
        at="Torch.cat.0.forward",
        cause="data|structure|argument",
        quick=True,
    ),
    Case(
        "data-stack-swapped",
        DATA,
        _swapped_cat(lambda a, b: torch.stack([a, b]).prod(0)[1:].sum()),
        at="Torch.stack.0.forward",
        cause="data|structure|argument",
    ),
    Case(
        "data-subtracted-the-other-way",
        DATA,
        _swapped_cat(lambda a, b: (a - b).exp().sum()),
        at="Tensor.sub.0.forward",
        cause="data|structure|argument",
    ),
    Case(
        "data-matmul-swapped",
        DATA,
        _swapped_cat(lambda a, b: (a @ b.T).exp().sum()),
        at="Tensor.matmul.0.forward|Tensor.T.0.forward",
        cause="data|structure|argument",
    ),
    Case(
        "data-other-batch-other-kernels",
        DATA,
        training(data=_shifted, inside=other_kernels),
        at=AT_ROOT,
        cause="data",
        culprits=2,
        runs=WITH_L0,
    ),
    # healthy
    Case("data-sum-swapped", DATA, _swapped_cat(lambda a, b: (a + b).exp().sum())),
    Case(
        "data-copied",
        DATA,
        training(data=lambda step: tuple(p.clone() for p in vectors(step))),
        runs=WITH_L0,
    ),
    Case(
        "data-not-contiguous",
        DATA,
        training(data=lambda step: (vectors(step)[0].T.contiguous().T, vectors(step)[1])),
        runs=WITH_L0,
    ),
]

CASES = [*SEED_CASES, *WEIGHT_CASES, *BUFFER_CASES, *DATA_CASES]
