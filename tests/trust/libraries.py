"""Healthy pairs of two libraries or settings, long chaotic runs, compiled parts; faults in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import ALL_KEEPS, Case, Start
from trust.kernels import gain, one_row, other_kernels, through, wrong_kernel
from trust.programs import (
    Attention,
    BatchNormed,
    Mlp,
    adamw,
    built,
    images,
    inferring,
    sgd,
    token_loss,
    tokens,
    training,
    vectors,
)

LIBRARIES = "other libraries and settings"
LONG = "long runs"
COMPILED = "compiled parts"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")
EVERY = (*WITH_L0, "tensors L2")
NORMED = {"net": BatchNormed, "data": images, "steps": 2}
TEXT = {"net": Attention, "data": tokens, "loss": token_loss, "steps": 2}


class Convolved(nn.Module):
    """Convolutions of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.depthwise(self.conv(x))))
        return self.head(F.max_pool2d(self.up(x), 2).mean((2, 3)))


CONVOLVED = {"net": Convolved, "data": images, "steps": 2}


@contextlib.contextmanager
def _no_mkldnn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _math_attention() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """The switch of oneDNN, and products with the bits of TF32: CPUs have no such kernel."""
    with contextlib.ExitStack() as stack:
        flags = torch.backends.mkldnn.flags(enabled=True, fp32_precision="tf32")
        stack.enter_context(flags)
        for op in ("mm", "addmm", "bmm"):
            stack.enter_context(wrong_kernel(op, through(torch.float16), every=True, nth=-1))
        yield


def _with(outer: Any, *faulty: Any, **more: Any) -> Any:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with outer(), wrong_kernel(*faulty, **more):
            yield

    return both


def _channels_last(net: nn.Module, *_: Any) -> None:
    net.to(memory_format=torch.channels_last)


LIBRARY_CASES = [
    Case(
        "without-mkldnn", LIBRARIES, training(CONVOLVED, inside=_no_mkldnn), runs=EVERY, quick=True
    ),
    Case("without-mkldnn-batch-norm", LIBRARIES, training(NORMED, inside=_no_mkldnn), runs=EVERY),
    Case("two-threads", LIBRARIES, training(CONVOLVED, inside=_two_threads), runs=WITH_L0),
    Case("deterministic-or-not", LIBRARIES, training(TEXT, inside=_deterministic), runs=EVERY),
    Case(
        "math-or-flash-attention",
        LIBRARIES,
        training(TEXT, inside=_math_attention),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "math-or-flash-attention-fused-adam",
        LIBRARIES,
        training(
            {**TEXT, "optimizer": functools.partial(adamw, fused=True)}, inside=_math_attention
        ),
        runs=WITH_L0,
    ),
    Case(
        "channels-last",
        LIBRARIES,
        training(CONVOLVED, prepare=_channels_last),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "channels-last-in-eval",
        LIBRARIES,
        inferring({"net": Convolved, "data": images}, prepare=_channels_last),
        runs=EVERY,
    ),
    Case(
        "tf32-or-not",
        LIBRARIES,
        training({"steps": 3}, inside=_tf32),
        allowed="flag",
        says="TF32",
        runs=EVERY,
        quick=True,
    ),
    Case(
        "tf32-or-not-attention",
        LIBRARIES,
        training({**TEXT, "optimizer": sgd}, inside=_tf32),
        allowed="flag",
        says="TF32",
        runs=EVERY,
    ),
    # faults
    Case(
        "tf32-and-gelu-wrong",
        LIBRARIES,
        training(inside=_with(_tf32, "gelu", gain(1.5))),
        at={"*": "Functional.gelu.0.forward", "L2": "Aten.gelu.0.*"},
        cause="result",
        step=0,
        runs=(*ALL_KEEPS, "tensors L2"),
    ),
    Case(
        "without-mkldnn-and-conv-bias-lost",
        LIBRARIES,
        training(
            CONVOLVED, prepare=lambda net, _: nn.init.zeros_(net.conv.bias), inside=_no_mkldnn
        ),
        at={
            "*": "Functional.conv2d.0.forward|Torch.conv2d.0.forward|Module.conv.*",
            "L0": "Module.conv.*",
        },
        cause="weights",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "without-mkldnn-and-group-norm-wrong",
        LIBRARIES,
        training(CONVOLVED, inside=_with(_no_mkldnn, "native_group_norm", gain(1.01))),
        at={
            "*": "Functional.group_norm.0.forward",
            "L0": "Module.norm.*",
            "L2": "Aten.native_group*",
        },
        cause="result",
        step=0,
        runs=EVERY,
        quick=True,
    ),
    Case(
        "math-attention-and-softmax-wrong",
        LIBRARIES,
        training(TEXT, inside=_with(_math_attention, "_softmax", one_row(gain(1.2)))),
        at={
            "*": "Functional.scaled_dot_product_attention.0.forward",
            "L2": "Aten._softmax.0.*|Aten._safe_softmax.0.*|*scaled_dot*",
        },
        cause="result",
        step=0,
        runs=(*ALL_KEEPS, "tensors L2"),
    ),
    Case(
        "channels-last-and-silu-wrong",
        LIBRARIES,
        training(
            CONVOLVED,
            prepare=_channels_last,
            inside=functools.partial(wrong_kernel, "silu", gain(1.01)),
        ),
        at={"*": "Functional.silu.0.forward", "L2": "Aten.silu.0.*"},
        cause="result",
        step=0,
        runs=(*ALL_KEEPS, "tensors L2"),
        quick=True,
    ),
    Case(
        "channels-last-and-pool-wrong",
        LIBRARIES,
        training(
            CONVOLVED,
            prepare=_channels_last,
            inside=functools.partial(wrong_kernel, "max_pool2d_with_indices", gain(1.01)),
        ),
        at="Functional.max_pool2d.0.forward|Torch.max_pool2d.0.forward",
        cause="result",
        step=0,
    ),
    Case(
        "two-threads-and-loss-halved",
        LIBRARIES,
        training(
            {**CONVOLVED, "edit_loss": lambda loss: loss / 4},
            inside=_two_threads,
            edit_loss=lambda loss: loss / 2,
        ),
        at="Tensor.div.0.forward",
        cause="argument",
        step=0,
    ),
]


class Recurrent(nn.Module):
    """A map that is iterated: two neighbours part by a factor in each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(self.mix(x) * 6)
        return x


def _steep(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _sixteen(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


CHAOS = {"optimizer": _steep, "steps": 200}
SHORT = {"optimizer": _steep, "steps": 40}
TURNED = {"net": Recurrent, "data": _sixteen, "steps": 5, "optimizer": sgd}


def _late(op: str, nth: int) -> Any:
    return functools.partial(wrong_kernel, op, gain(1.05), nth=nth)


def _learning_rate_at(at: int) -> Any:
    def after(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == at:
            optimizer.param_groups[0]["lr"] *= 1.5

    return after


def _weight_at(at: int) -> Any:
    def after(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == at:
            net.second.weight.detach().numpy()[0, 0] += 1e-3

    return after


def _data_at(at: int) -> Any:
    return lambda step: vectors(step + (1000 if step == at else 0))


LONG_CASES = [
    Case(
        "chaos-of-200-steps",
        LONG,
        training(CHAOS, inside=other_kernels),
        runs=("tensors mix", "stats mix", "stats L0"),
    ),
    Case("chaos-of-a-map", LONG, training(TURNED, inside=other_kernels), runs=EVERY, quick=True),
    Case(
        "chaos-of-40-steps-adam", LONG, training({"steps": 40}, inside=other_kernels), runs=WITH_L0
    ),
    Case(
        "chaos-of-40-steps-fused",
        LONG,
        training(
            {"steps": 40, "optimizer": functools.partial(adamw, fused=True)}, inside=other_kernels
        ),
        runs=WITH_L0,
    ),
    # faults
    Case(
        "chaos-and-a-late-gelu",
        LONG,
        training(SHORT, inside=_late("gelu", 30)),
        step=30,
        at="Functional.gelu.0.forward",
        cause="result",
        quick=True,
    ),
    Case(
        "chaos-and-a-late-gradient",
        LONG,
        training(SHORT, inside=_late("gelu_backward", 25)),
        step=25,
        at="Functional.gelu.0.backward",
        cause="result",
    ),
    Case(
        "chaos-and-a-late-learning-rate",
        LONG,
        training(SHORT, after_step=_learning_rate_at(20)),
        step=21,
        at="Optimizer.SGD.step.0|Tensor.add_.*|Torch._foreach*",
        cause="argument",
        runs=WITH_L0,
    ),
    Case(
        "chaos-and-a-weight-changed-in-numpy",
        LONG,
        training(SHORT, after_step=_weight_at(20)),
        step=21,
        at="Functional.linear.1.forward|Module.*",
        cause="boundary|weights",
        runs=WITH_L0,
    ),
    Case(
        "chaos-and-other-data-once",
        LONG,
        training(SHORT, data=_data_at(20)),
        step=20,
        culprits=2,
        at="Module.Mlp.forward.0|Functional.linear.0.forward|Module.first.*",
        cause="data",
        runs=WITH_L0,
    ),
    Case(
        "chaos-and-one-linear-of-a-map",
        LONG,
        training(TURNED, inside=functools.partial(wrong_kernel, "mm", gain(1.05), nth=7)),
        step=0,
        at={"*": "Functional.linear.7.forward", "L0": "Module.mix.*.7"},
        cause="result",
        runs=WITH_L0,
    ),
]


def _compiled(
    start: Start,
    is_actual: bool,
    *,
    backend: str,
    wrong: Any = contextlib.nullcontext,
    eps: float = 1e-5,
    steps: int = 2,
    both: bool = False,
) -> None:
    """The actual side is compiled by torch.compile."""
    torch._dynamo.reset()
    net = built(functools.partial(Mlp, eps=eps if is_actual else 1e-5))
    optim = sgd(net.parameters())
    model = torch.compile(net, backend=backend) if is_actual or both else net
    try:
        with wrong() if is_actual else contextlib.nullcontext(), start() as recorder:
            for step in range(steps):
                x, y = vectors(step)
                F.mse_loss(model(x), y).backward()
                optim.step()
                optim.zero_grad()
                recorder.step()
    finally:
        torch._dynamo.reset()


def _compile(
    name: str, backend: str = "aot_eager", quick: bool = False, runs: Any = WITH_L0, **more: Any
) -> Case:
    program = functools.partial(_compiled, backend=backend, **more.pop("run", {}))
    return Case(f"compiled-{name}", COMPILED, program, quick=quick, runs=runs, **more)


# Nothing inside a compiled part is recorded: the fault is in it, or its result appears after it.
AT_PART = (
    "Compiled*|Function.CompiledFunction*|Module.OptimizedModule*|Module.Mlp*|Functional.mse_loss*"
)
PART = {"at": AT_PART, "cause": "result|structure|boundary|argument"}

COMPILED_CASES = [
    _compile("or-eager", quick=True),
    _compile("or-eager-by-inductor", "inductor", runs=("tensors mix", "stats L0")),
    _compile("on-both-sides", run={"both": True}),
    _compile("or-eager-by-dynamo", "eager"),
    # faults
    _compile("and-other-eps", run={"eps": 0.1}, **PART),
    _compile(
        "and-gelu-wrong", run={"wrong": functools.partial(wrong_kernel, "gelu", gain(1.2))}, **PART
    ),
    _compile(
        "and-gelu-wrong-on-both-sides",
        run={"wrong": functools.partial(wrong_kernel, "gelu", gain(1.2)), "both": True},
        **PART,
    ),
    _compile(
        "and-linear-wrong",
        run={"wrong": functools.partial(wrong_kernel, "addmm", gain(1.2))},
        **PART,
    ),
    _compile(
        "and-gradient-wrong-on-both-sides",
        run={"wrong": functools.partial(wrong_kernel, "gelu_backward", gain(1.2)), "both": True},
        # at L0 the first that is seen of a gradient of a compiled part is what an optimizer gets
        at={
            "*": AT_PART + "|Module.*parameters_grad*",
            "L0": AT_PART + "|Module.*parameters_grad*|Optimizer.SGD.step.0",
        },
        cause="result|structure|boundary",
    ),
]

CASES = [*LIBRARY_CASES, *LONG_CASES, *COMPILED_CASES]
