"""How the NPU's own ops are written down: schema, formula on CPU tensors, and its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Body = Callable[..., Any]

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.ADInplaceOrView,
)


@dataclass(frozen=True)
class NpuOp:
    """One op: its schema, the formula on CPU tensors, and how it is differentiated."""

    schema: str
    body: Body
    is_differentiable: bool
    is_random: bool
    drawn: int | None  # which result says what random numbers the forward pass drew
    backward_name: str

    @property
    def name(self) -> str:
        """With its overload: npu_linear, npu_max.dim."""
        return self.schema.partition("(")[0]


class OpTable:
    """Collects ops by decorator: `@OPS.op()`, or `@OPS.op("npu_max.dim(Tensor self, ...) -> ...")`.

    Without a schema it is that of the function: its name, annotations and defaults.
    """

    def __init__(self) -> None:
        self.ops: list[NpuOp] = []

    def op(
        self,
        schema: str | None = None,
        *,
        grad: bool = False,
        random: bool = False,
        drawn: int | None = None,
        backward_name: str = "",
    ) -> Callable[[Body], Body]:
        def add(body: Body) -> Body:
            text = schema or schema_of(body)
            name = backward_name or f"{text.partition('(')[0].replace('.', '_')}_backward"
            self.ops.append(NpuOp(text, body, grad, random, drawn, name))
            return body

        return add


_WORDS = {"torch.dtype": "ScalarType", "torch.layout": "Layout", "torch.device": "Device"}


def schema_of(body: Body) -> str:
    """What torch.library calls a function by; `drawn` is for its backward alone."""
    signature = inspect.signature(body)
    arguments = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        default = "" if each.default is each.empty else f"={each.default!r}"
        arguments.append(f"{_schema_type(each.annotation)} {each.name}{default}")
    found = signature.return_annotation.removeprefix("tuple[").removesuffix("]")
    returns = f"({found})" if "," in found else found
    given = ", ".join(each for each in arguments if " drawn=" not in each)
    return f"{body.__name__}({given}) -> {returns}"


def _schema_type(annotation: str) -> str:
    word = annotation.removesuffix(" | None")
    listed = word.removeprefix("list[").removesuffix("]")
    kind = f"{listed}[]" if listed != word else _WORDS.get(word, word)
    return kind if word == annotation else f"{kind}?"


def differentiate(
    body: Body, inputs: Sequence[Any], grads: Sequence[Any], wanted: Sequence[bool]
) -> list[torch.Tensor]:
    """Gradients of `body(*inputs)` for the wanted inputs, zeros where nothing arrives."""
    with _autograd_on():
        leaves = [
            value.detach().requires_grad_(want) if isinstance(value, torch.Tensor) else value
            for value, want in zip(inputs, wanted, strict=True)
        ]
        outputs = body(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaf for leaf, want in zip(leaves, wanted, strict=True) if want],
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        return list(found)


@contextmanager
def _autograd_on() -> Iterator[None]:
    """Autograd for the CPU tensors inside a kernel, where the dispatcher has switched it off."""
    is_off, set_off = (
        torch._C._dispatch_tls_is_dispatch_key_excluded,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    before = [(key, is_off(key)) for key in _AUTOGRAD_KEYS]
    with torch.enable_grad():
        try:
            for key, _ in before:
                set_off(key, False)
            yield
        finally:
            for key, off in before:
                set_off(key, off)
