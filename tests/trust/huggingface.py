"""One wrong kernel, forward or backward, in tiny Hugging Face models among healthy ones."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tiny_models import MODELS
from trust.harness import ALL_KEEPS, PLANTED, Case, Program, Start
from trust.kernels import (
    Alter,
    gain,
    one_row,
    one_value,
    other_kernels,
    swapped_rows,
    through,
    wrong_kernel,
    zeros,
)
from trust.programs import adamw

FORWARD = "a wrong kernel, forward"
BACKWARD = "a wrong kernel, backward"


def _run(
    model: str,
    op: str | None = None,
    alter: Alter = zeros,
    nth: int = 0,
    output: int = 0,
    *,
    noise: bool = True,
    steps: int = 1,
    optimizer: Any = adamw,
    prepare: Any = None,
) -> Program:
    """Steps of a model; on the actual side with a wrong kernel among other healthy ones."""

    def program(start: Start, is_actual: bool, alone: bool = False) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        net, loss = MODELS[model]()
        net.train()
        if prepare is not None and is_actual:
            prepare(net)
        optim = optimizer(net.parameters())
        torch.manual_seed(1)
        with contextlib.ExitStack() as stack:
            if is_actual and noise and not alone:
                stack.enter_context(other_kernels())
            if is_actual and op is not None:
                stack.enter_context(wrong_kernel(op, alter, nth=nth, output=output))
            recorder = stack.enter_context(start())
            for _ in range(steps):
                loss(net).backward()
                optim.step()
                optim.zero_grad()
                recorder.step()

    return program


def _fault(
    family: str,
    model: str,
    op: str,
    alter: Alter,
    nth: int = 0,
    *,
    what: str = "",
    quick: bool = False,
    runs: tuple[str, ...] = ALL_KEEPS,
    **more: Any,
) -> Case:
    short = op.replace("_scaled_dot_product_flash_attention_for_cpu", "sdpa").strip("_")
    name = f"{model}-{short.replace('_', '-')}{nth or ''}{what}"
    return Case(
        name,
        family,
        _run(model, op, alter, nth, **more),
        at=PLANTED,
        cause="result",
        runs=runs,
        quick=quick,
    )


def _forward(*args: Any, **more: Any) -> Case:
    return _fault(FORWARD, *args, **more)


def _backward(*args: Any, **more: Any) -> Case:
    return _fault(BACKWARD, *args, **more)


SMALL = gain(1.001)
WITH_L2 = (*ALL_KEEPS, "tensors L2", "tensors L1")
SDPA = "_scaled_dot_product_flash_attention_for_cpu"

CASES = [
    _forward("llama", "silu", SMALL, 1, quick=True, runs=WITH_L2),
    _forward("llama", "mm", SMALL, 5),
    _forward("llama", "cos", SMALL),
    _forward("gpt2", "addmm", one_row(gain(1.05)), 3, quick=True),
    _forward("gpt2", "native_layer_norm", SMALL, 2, runs=WITH_L2),
    _forward("gpt2", "tanh", SMALL, 1),
    _forward("bert", "gelu", through(torch.bfloat16), 1),
    _forward("bert", "native_layer_norm", swapped_rows, 3, runs=WITH_L2),
    _forward("bert", "addmm", zeros, 7),
    _forward("t5", "mm", SMALL, 9),
    _forward("t5", "_softmax", one_row(gain(1.05)), 3),
    _forward("vit", "gelu", SMALL, 1),
    _forward("vit", "addmm", one_value(3.0), 6),
    _forward("mixtral", "mm", SMALL, 4),
    _forward("mixtral", "silu", gain(0.99), 0),
    _forward("whisper", "gelu", SMALL, 1),
    _forward("llama", SDPA, one_row(gain(1.05)), 1, what="-row"),
    # healthy
    *(
        Case(
            f"{model}-other-kernels",
            FORWARD,
            _run(model, steps=2),
            runs=(*ALL_KEEPS, "tensors L0", "stats L0", "tensors L2"),
            quick=model == "llama",
        )
        for model in ("llama", "gpt2", "bert", "t5", "vit", "mixtral", "whisper")
    ),
    _backward("llama", "silu_backward", SMALL, 0, quick=True, runs=WITH_L2),
    _backward("llama", "embedding_dense_backward", SMALL),
    _backward("gpt2", "native_layer_norm_backward", SMALL, 1, runs=WITH_L2),
    _backward("gpt2", "native_layer_norm_backward", SMALL, 2, output=1, what="-weight"),
    _backward("bert", "gelu_backward", zeros, 1, quick=True),
    _backward("bert", "native_layer_norm_backward", gain(-1.0), 0, what="-negated"),
    _backward("t5", "threshold_backward", SMALL, 1),
    _backward("vit", "gelu_backward", one_row(gain(1.05)), 1),
    _backward("mixtral", "silu_backward", SMALL, 1),
    _backward("llama", f"{SDPA}_backward", SMALL, 0),
    _backward("llama", f"{SDPA}_backward", SMALL, 1, output=1, what="-key"),
    *(
        Case(
            f"{model}-fused-adam-other-kernels",
            BACKWARD,
            _run(model, steps=3, optimizer=lambda p: adamw(p, fused=True)),
            runs=(*ALL_KEEPS, "stats L0"),
            quick=model == "gpt2",
        )
        for model in ("llama", "gpt2", "bert")
    ),
    Case(
        "llama-checkpointed",
        BACKWARD,
        _run("llama", steps=2, prepare=lambda net: net.gradient_checkpointing_enable()),
        runs=(*ALL_KEEPS, "tensors L0", "tensors L2"),
    ),
    Case(
        "gpt2-eager-attention",
        BACKWARD,
        _run("gpt2", steps=2, prepare=lambda net: net.set_attn_implementation("eager")),
        runs=(*ALL_KEEPS, "tensors L0", "tensors L2"),
    ),
    Case(
        "llama-eager-attention",
        BACKWARD,
        _run("llama", steps=2, prepare=lambda net: net.set_attn_implementation("eager")),
        runs=(*ALL_KEEPS, "tensors L0"),
        quick=True,
    ),
]
