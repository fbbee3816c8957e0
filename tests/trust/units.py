"""Healthy pairs that do the same by other operators, and faults planted in such pairs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trust.harness import Case, Start
from trust.kernels import gain, one_row, other_kernels, wrong_kernel
from trust.programs import (
    Attention,
    Mlp,
    adamw,
    built,
    sgd,
    token_loss,
    tokens,
    training,
    vectors,
)

UNITS = "other operators"
MODES = "modes and scalers"
SHAPES = "accumulation and cache"
WITH_L0 = ("tensors mix", "stats mix", "digest mix", "tensors L0", "stats L0")
EVERY = (*WITH_L0, "tensors L2")
TEXT = {"net": Attention, "data": tokens, "loss": token_loss, "steps": 3}


class Rms(Mlp):
    """RMS norm by torch's function or written out; `gain` is a fault in it."""

    def __init__(self, fused: bool = True, eps: float = 1e-6, gain: float = 1.0) -> None:
        super().__init__()
        self.fused, self.eps, self.gain = fused, eps, gain

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.normed(self.first(x))))

    def normed(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.rms_norm(x, (24,), self.norm.weight, self.eps)
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide * self.gain * self.norm.weight if self.gain != 1 else wide * self.norm.weight


class Written(Mlp):
    """A layer norm and a gelu written out."""

    def __init__(self, eps: float = 1e-5, correction: int = 0) -> None:
        super().__init__()
        self.eps, self.correction = eps, correction

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        centred = x - x.mean(-1, keepdim=True)
        scale = x.var(-1, keepdim=True, correction=self.correction).add(self.eps).rsqrt()
        x = centred * scale * self.norm.weight + self.norm.bias
        return self.second(0.5 * x * (1 + torch.erf(x / 2**0.5)))


class Wrapped(Mlp):
    """The middle of the net under checkpointing."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))

    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


class ByHand(Mlp):
    """A linear as a matmul and a sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(x @ self.first.weight.T + self.first.bias))
        return self.second(x)


class Wrong(Attention):
    """Attention written out with one mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__(written_out=True)
        self.mistake = mistake

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = q.shape[-1] if self.mistake != "scale" else q.shape[-1] + 1
        scores = q @ k.transpose(-1, -2) / size**0.5
        diagonal = 2 if self.mistake == "mask" else 1
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
        scores = scores.masked_fill(hidden, float("-inf"))
        return F.softmax(scores, dim=-2 if self.mistake == "dim" else -1) @ v


class Masked(Attention):
    """Attention with a mask that is added."""

    def __init__(self, low: float) -> None:
        super().__init__()
        self.low = low

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, self.low)
        return F.softmax(q @ k.transpose(-1, -2) / 4 + mask, dim=-1) @ v


class MaskedSdpa(Masked):
    """The same, with the mask given to sdpa."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, self.low)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


SDPA = functools.partial(Attention, True)
FUSED = functools.partial(adamw, fused=True)
LOWEST = torch.finfo(torch.float32).min
# Which unit holds the mistake; attention has no module of its own in these nets.
IN_ATTENTION = (
    "Tensor.transpose.0.*|Tensor.matmul.*|Tensor.div.0.*|Tensor.masked_fill.0.*|"
    "Functional.softmax.0*|Functional.scaled_dot*"
)

UNIT_CASES = [
    Case("sdpa-eager", UNITS, training(TEXT, net=SDPA), runs=EVERY, quick=True),
    Case(
        "sdpa-eager-fused-adam",
        UNITS,
        training({**TEXT, "optimizer": FUSED}, net=SDPA),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "sdpa-eager-sgd-other-kernels",
        UNITS,
        training({**TEXT, "optimizer": sgd}, net=SDPA, inside=other_kernels),
        runs=EVERY,
    ),
    Case(
        "rms-norm-written-out",
        UNITS,
        training({"net": Rms, "steps": 3}, net=functools.partial(Rms, False)),
        runs=EVERY,
    ),
    Case("layer-norm-and-gelu-written-out", UNITS, training({"steps": 3}, net=Written), runs=EVERY),
    Case("linear-written-out", UNITS, training({"steps": 3}, net=ByHand), runs=EVERY),
    Case("checkpointed", UNITS, training({"steps": 3}, net=Wrapped), runs=EVERY, quick=True),
    Case(
        "checkpointed-reentrant",
        UNITS,
        training({"steps": 3}, net=functools.partial(Wrapped, True)),
        runs=EVERY,
    ),
    Case(
        "checkpointed-other-kernels",
        UNITS,
        training({"steps": 3}, net=Wrapped, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "mask-infinite-or-large",
        UNITS,
        training(
            {**TEXT, "net": functools.partial(Masked, float("-inf"))},
            net=functools.partial(Masked, LOWEST),
        ),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "mask-infinite-or-large-sdpa",
        UNITS,
        training(
            {**TEXT, "net": functools.partial(MaskedSdpa, float("-inf"))},
            net=functools.partial(MaskedSdpa, LOWEST),
        ),
        runs=EVERY,
    ),
    Case(
        "mask-infinite-or-ten-thousand",
        UNITS,
        training(
            {**TEXT, "net": functools.partial(Masked, float("-inf"))},
            net=functools.partial(Masked, -1e4),
        ),
        runs=WITH_L0,
    ),
    # faults
    Case(
        "eager-with-other-scale",
        UNITS,
        training(TEXT, net=lambda: Wrong("scale")),
        at=IN_ATTENTION,
        cause="result|argument|structure",
        quick=True,
    ),
    Case(
        "eager-with-other-mask",
        UNITS,
        training(TEXT, net=lambda: Wrong("mask")),
        at=IN_ATTENTION,
        cause="result|argument|structure",
    ),
    Case(
        "eager-with-other-dim",
        UNITS,
        training(TEXT, net=lambda: Wrong("dim")),
        at=IN_ATTENTION,
        cause="result|argument|structure",
    ),
    Case(
        "eager-with-other-scale-fused-adam",
        UNITS,
        training({**TEXT, "optimizer": FUSED}, net=lambda: Wrong("scale")),
        at=IN_ATTENTION,
        cause="result|argument|structure",
    ),
    Case(
        "rms-norm-written-out-wrong",
        UNITS,
        training({"net": Rms}, net=functools.partial(Rms, False, gain=1.01)),
        at="Functional.rms_norm.0*|Tensor.mul.*|Tensor.pow.0.*",
        cause="result|argument|structure",
    ),
    Case(
        "rms-norm-written-out-other-eps",
        UNITS,
        training({"net": Rms}, net=functools.partial(Rms, False, eps=1e-2)),
        at="Functional.rms_norm.0*|Tensor.add.0.*|Tensor.mul.*|Torch.rsqrt.0.*|Tensor.pow.0.*",
        cause="result|argument|structure",
    ),
    Case(
        "layer-norm-written-out-unbiased",
        UNITS,
        training(net=functools.partial(Written, correction=1)),
        at="Functional.layer_norm.0*|Tensor.var.0.*|Tensor.m*|Module.norm*|Tensor.add.*|Tensor.sub.*",
        cause="result|argument|structure",
    ),
    Case(
        "fault-beside-eager-attention",
        UNITS,
        training(TEXT, net=SDPA, inside=lambda: wrong_kernel("native_layer_norm", gain(1.01))),
        at="Functional.layer_norm.0.forward",
        cause="result",
        step=0,
        quick=True,
    ),
    Case(
        "fault-beside-checkpoint",
        UNITS,
        training({"steps": 3}, net=Wrapped, inside=lambda: wrong_kernel("gelu", gain(1.01))),
        at="Functional.gelu.0.*",
        cause="result",
        step=0,
    ),
    Case(
        "fault-in-recomputation",
        UNITS,
        training(
            {"steps": 2},
            net=Wrapped,
            # not gelu's: recomputation stops before the kernel of the last call
            inside=lambda: wrong_kernel("native_layer_norm", gain(1.01), nth=1),
        ),
        at="Functional.layer_norm.1.*|Functional.gelu.0.backward",
        cause="result|structure",
        step=0,
    ),
]


@contextlib.contextmanager
def _counting_flops() -> Iterator[None]:
    with FlopCounterMode(display=False):
        yield


def _flops_and(inner: Any) -> Any:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with inner(), FlopCounterMode(display=False):
            yield

    return both


def _scaled(
    start: Start,
    *,
    enabled: bool = True,
    clip: bool = True,
    scale: float = 1024.0,
    steps: int = 3,
    loss_factor: float = 1.0,
    unscale: bool = True,
    dtype: Any = None,
    optimizer: Any = sgd,
) -> None:
    """A loop with a GradScaler, as AMP recipes have it."""
    net = built(Mlp)
    optim = optimizer(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    with start() as recorder:
        for step in range(steps):
            x, y = vectors(step)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.mse_loss(net(x), y) * loss_factor
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optim)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            recorder.step()


def scaling(both: dict[str, Any] | None = None, **changes: Any) -> Any:
    return lambda start, is_actual: _scaled(
        start, **{**(both or {}), **(changes if is_actual else {})}
    )


# At L0 gelu is no call: the module around it, or the one after it, which gets its result.
AROUND_GELU = "Module.Mlp.forward.0|Module.second.*.forward.0|Module.norm.*.forward.0"
FOREACH = functools.partial(adamw, foreach=True)
MODE_CASES = [
    Case(
        "flops-counted",
        MODES,
        training({"steps": 3, "optimizer": FOREACH}, inside=_counting_flops),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "flops-counted-on-both-sides",
        MODES,
        training({"steps": 3, "optimizer": FOREACH, "inside": _counting_flops}),
        runs=EVERY,
    ),
    Case(
        "flops-counted-fused",
        MODES,
        training({"steps": 3, "optimizer": FUSED}, inside=_counting_flops),
        runs=EVERY,
    ),
    Case("flops-counted-loop", MODES, training({"steps": 3}, inside=_counting_flops), runs=EVERY),
    Case(
        "flops-counted-sgd-foreach-clipped",
        MODES,
        training(
            {
                "steps": 3,
                "optimizer": functools.partial(sgd, foreach=True),
                "before_step": lambda net, step: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
            },
            inside=_flops_and(other_kernels),
        ),
        runs=WITH_L0,
    ),
    Case("scaler-on-both-sides", MODES, scaling(), runs=EVERY, quick=True),
    Case("scaler-on-or-off", MODES, scaling(enabled=False), runs=WITH_L0),
    Case("scaler-of-another-scale", MODES, scaling(scale=4096.0), allowed="argument", runs=WITH_L0),
    # faults
    Case(
        "scaler-not-unscaled-before-clipping",
        MODES,
        scaling(unscale=False),
        at="Torch._foreach_norm.0.*|Torch._amp*|Ops.*|*unscale*|Tensor.*|Torch.*",
        cause="structure|boundary",
        step=0,
    ),
    Case(
        "scaler-and-loss-halved",
        MODES,
        scaling(loss_factor=0.5),
        at="Tensor.mul.0.forward",
        cause="argument",
        step=0,
        quick=True,
    ),
    Case(
        "scaler-and-not-clipped",
        MODES,
        scaling(clip=False),
        at="Torch._foreach_norm.0.*|Tensor*mul*|Torch._foreach_mul*",
        cause="structure",
        step=0,
    ),
    Case(
        "flops-counted-and-gelu-wrong",
        MODES,
        training(
            {"steps": 3, "optimizer": FOREACH, "inside": _counting_flops},
            inside=_flops_and(lambda: wrong_kernel("gelu", gain(1.01))),
        ),
        at={"*": "Functional.gelu.0.forward", "L0": AROUND_GELU, "L2": "Aten.gelu.0.*"},
        cause="result|boundary",
        step=0,
        runs=EVERY,
        quick=True,
    ),
    Case(
        "flops-counted-and-one-row-of-a-linear-wrong",
        MODES,
        training(
            {"optimizer": FOREACH},
            inside=_flops_and(lambda: wrong_kernel("addmm", one_row(gain(1.1)), nth=1)),
        ),
        at={"*": "Functional.linear.1.forward", "L0": "Module.second.*", "L2": "Aten.addmm.1.*"},
        cause="result",
        step=0,
        runs=EVERY,
    ),
    Case(
        "flops-counted-and-adam-with-other-betas",
        MODES,
        training(
            {"steps": 3, "optimizer": FOREACH, "inside": _counting_flops},
            optimizer=functools.partial(FOREACH, betas=(0.8, 0.999)),
        ),
        at="Optimizer.AdamW.step.0|Torch._foreach_*",
        cause="argument",
        runs=WITH_L0,
    ),
]


def _accumulated(
    start: Start,
    parts: int,
    *,
    factor: float | None = None,
    inside: Any = contextlib.nullcontext,
    optimizer: Any = adamw,
    steps: int = 2,
) -> None:
    """A batch of eight in so many parts; the loss of a part is divided by their number."""
    net = built(Mlp)
    optim = optimizer(net.parameters())
    batches = [vectors(step) for step in range(steps)]
    with inside(), start() as recorder:
        for x, y in batches:
            for some, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.mse_loss(net(some), wanted) / (factor or parts)).backward()
            optim.step()
            optim.zero_grad()
            recorder.step()


def _accumulating(actual: dict[str, Any], expected: dict[str, Any]) -> Any:
    return lambda start, is_actual: _accumulated(start, **(actual if is_actual else expected))


class Cached(Attention):
    """Decodes one token at a time, with or without the keys and values of those before."""

    def decode(self, ids: Tensor, length: int, cached: bool) -> Tensor:
        past: tuple[Tensor, Tensor] | None = None
        while ids.shape[1] < length:
            seen = ids if past is None or not cached else ids[:, -1:]
            x = self.embed(seen)
            n, new, width = x.shape
            parts = self.qkv(self.norm(x)).view(n, new, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind(0)
            if cached and past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=new > 1)
            x = x + self.out(mixed.transpose(1, 2).reshape(n, new, width))
            ids = torch.cat([ids, self.head(x)[:, -1:].argmax(-1)], 1)
        return ids

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


def _decoded(start: Start, is_actual: bool, inside: Any = contextlib.nullcontext) -> None:
    net = built(Cached).eval()
    with inside() if is_actual else contextlib.nullcontext(), start(), torch.no_grad():
        net.decode(torch.arange(8).reshape(2, 4), 9, cached=is_actual)


SHAPE_CASES = [
    Case("accumulated-4-or-2", SHAPES, _accumulating({"parts": 4}, {"parts": 2}), runs=WITH_L0),
    Case(
        "accumulated-2-or-1",
        SHAPES,
        _accumulating({"parts": 2}, {"parts": 1}),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "accumulated-both",
        SHAPES,
        _accumulating({"parts": 2, "inside": other_kernels}, {"parts": 2}),
        runs=WITH_L0,
    ),
    Case(
        "accumulated-2-or-1-sgd",
        SHAPES,
        _accumulating({"parts": 2, "optimizer": sgd}, {"parts": 1, "optimizer": sgd}),
        runs=WITH_L0,
    ),
    Case("cache-or-none", SHAPES, _decoded),
    # faults
    Case(
        "accumulated-and-not-divided",
        SHAPES,
        _accumulating({"parts": 2, "factor": 1}, {"parts": 2}),
        at="Tensor.div.0.forward",
        cause="argument",
        step=0,
        quick=True,
    ),
    Case(
        "accumulated-2-or-1-not-divided",
        SHAPES,
        _accumulating({"parts": 2, "factor": 1, "optimizer": sgd}, {"parts": 1, "optimizer": sgd}),
        at="Tensor.div.*|Module.*parameters_grad*|Optimizer.SGD.step.0|Functional.mse_loss.*",
        cause="argument|boundary|structure",
        step=0,
    ),
    Case(
        "accumulated-2-or-1-divided-by-4",
        SHAPES,
        _accumulating({"parts": 2, "factor": 4, "optimizer": sgd}, {"parts": 1, "optimizer": sgd}),
        at="Tensor.div.*|Module.*parameters_grad*|Optimizer.SGD.step.0|Functional.mse_loss.*",
        cause="argument|boundary|structure",
        step=0,
    ),
    Case(
        "accumulated-with-one-wrong-gelu",
        SHAPES,
        _accumulating(
            {"parts": 2, "inside": lambda: wrong_kernel("gelu", gain(1.01), nth=1)}, {"parts": 2}
        ),
        at="Functional.gelu.1.forward",
        cause="result",
        step=0,
        quick=True,
    ),
    Case(
        "accumulated-2-or-1-with-a-wrong-gelu",
        SHAPES,
        _accumulating(
            {"parts": 2, "inside": lambda: wrong_kernel("gelu", gain(1.1))}, {"parts": 1}
        ),
        at="Functional.gelu.0.*",
        cause="result",
        step=0,
        runs=("tensors mix",),
    ),
    Case(
        "accumulated-2-or-1-with-a-wrong-gelu-unseen",  # without tensors only its effect shows
        SHAPES,
        _accumulating(
            {"parts": 2, "inside": lambda: wrong_kernel("gelu", gain(1.1))}, {"parts": 1}
        ),
        at="Functional.gelu.0.*|Optimizer.AdamW.step.0|Module.*parameters_grad*",
        cause="result|boundary",
        step=0,
        runs=("stats mix", "digest mix"),
    ),
    Case(
        "cache-and-a-wrong-linear",
        SHAPES,
        functools.partial(_decoded, inside=lambda: wrong_kernel("addmm", gain(1.1), nth=4)),
        at="Functional.linear.4.forward|Tensor.__getitem__.2.forward",  # where shapes agree again
        cause="result|boundary",
    ),
]

CASES = [*UNIT_CASES, *MODE_CASES, *SHAPE_CASES]
