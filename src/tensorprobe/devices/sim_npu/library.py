"""How the NPU's own ops enter PyTorch: schema, kernel and backward, under torch.ops.npu.

On a real NPU `torch_npu.npu_linear` is `torch.ops.npu.npu_linear`, an op the dispatcher knows. So
it is here: a function mode sees one call, a dispatch mode one kernel, and one more in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tensorprobe.devices.sim_npu.chip import CHIP
from tensorprobe.devices.sim_npu.dispatch import KERNELS, execute
from tensorprobe.replay.npu_op_table import Body, NpuOp, differentiate


def _get_float_status(status: torch.Tensor, mode: int = 0) -> torch.Tensor:
    # Scripts read the flag from the result or from the argument; the kernel writes to both.
    status[0] = float(CHIP.status.raised)
    return status.clone()


def _clear_float_status(status: torch.Tensor, mode: int = 0) -> torch.Tensor:
    CHIP.status.raised = False
    return torch.zeros_like(status)


# What depends on the chip's state, in place of the formulas.
_OF_THIS_CHIP: dict[str, Body] = {
    "npu_get_float_status": _get_float_status,
    "npu_clear_float_status": _clear_float_status,
}


def register(ops: Iterable[NpuOp], library: Any) -> None:
    """Define every op in `library`, whose namespace is npu."""
    for op in ops:
        tags = (torch.Tag.nondeterministic_seeded,) if op.is_random else ()
        library.define(op.schema, tags=tags)
        overload = _overload(op.name)
        KERNELS[overload] = _OF_THIS_CHIP.get(op.name, op.body)
        if not any("Tensor" in str(argument.type) for argument in overload._schema.arguments):
            # Without a tensor to go by, the dispatcher asks this key which backend is meant.
            library.impl(op.name, _on_npu(overload), "BackendSelect")
        if op.is_differentiable:
            _register_backward(library, op, overload)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, packet), overload or "default")


def _on_npu(overload: Any) -> Body:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return execute(overload, args, {**kwargs, "device": kwargs.get("device") or "npu"})

    return kernel


def _register_backward(library: Any, op: NpuOp, forward: Any) -> None:
    """Define `{name}_backward` and tell autograd to call it.

    The backward kernel runs the formula again, with autograd on, and differentiates it. It is an op
    of its own so that it can be seen, and broken, by name.
    """
    drawn = "int" if op.drawn is None else str(forward._schema.returns[op.drawn].type)
    library.define(
        f"{op.backward_name}(Tensor?[] grads, bool[] wanted, {_positional(op.schema)}, *, "
        f"{drawn}? drawn=None) -> Tensor[]"
    )
    backward = _overload(op.backward_name)
    KERNELS[backward] = _differentiated(op)

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None
    ) -> None:
        ctx.set_materialize_grads(False)
        ctx.n_positional = len(inputs)
        inputs = (*inputs, *(keyword_only_inputs or {}).values())
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
        ctx.others = [None if isinstance(value, torch.Tensor) else (value,) for value in inputs]
        ctx.drawn = None if op.drawn is None else output[op.drawn]

    def run_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        # Arguments the caller left to their defaults are among the inputs but not counted here.
        wanted = list(ctx.needs_input_grad) + [False] * len(inputs)
        wanted = wanted[: len(inputs)]
        with torch._C.DisableTorchFunction():  # a real NPU's autograd is no Python either
            tensors = [g if isinstance(g, torch.Tensor) else None for g in grads]
            found = iter(backward(tensors, wanted, *inputs, drawn=ctx.drawn))
        return tuple(next(found) if want else None for want in wanted[: ctx.n_positional])

    torch.library.register_autograd(
        f"npu::{op.name}", run_backward, setup_context=setup_context, lib=library
    )


def _positional(schema: str) -> str:
    """The arguments of a schema without defaults, all positional: backward gives every one."""
    inside = schema[schema.index("(") + 1 : schema.index(") ->")]
    parts = [part.partition("=")[0].strip() for part in _split(inside)]
    return ", ".join(part for part in parts if part != "*")


def _split(arguments: str) -> Iterator[str]:
    """Split at commas that are outside brackets: a default may be a list."""
    depth, start = 0, 0
    for position, sign in enumerate(arguments):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield arguments[start:position]
            start = position + 1
    yield arguments[start:]


def _differentiated(op: NpuOp) -> Body:
    def kernel(grads: Any, wanted: Any, *inputs: Any, drawn: Any = None) -> list[torch.Tensor]:
        body = op.body if op.drawn is None else functools.partial(op.body, drawn=drawn)
        return differentiate(body, inputs, grads, wanted)

    return kernel
