"""The operators' table: complete, and true of torch."""

from __future__ import annotations

import operator

import pytest
import torch

from tensorprobe.operators import NATIVE_NAMES, OPERATORS, native_name, symbol_of

# The magic methods that the guide's FAQ 2.6 explains.
FAQ = """add and bool div eq ge gt iadd iand idiv ifloordiv ilshift imod imul ior irshift isub ixor
lshift matmul mod mul nonzero or radd rmul rshift sub truediv xor"""


@pytest.mark.parametrize("name", FAQ.split())
def test_faq_2_6_every_magic_method_has_its_symbol(name: str) -> None:
    assert symbol_of(f"torch.Tensor.__{name}__")


@pytest.mark.parametrize("native", sorted({entry.native for entry in OPERATORS}))
def test_native_names_are_names_in_torch(native: str) -> None:
    assert callable(getattr(torch.Tensor, native, None) or getattr(torch, native))


@pytest.mark.parametrize(
    ("op", "symbol"),
    [
        ("torch.Tensor.add", "+"),
        ("Tensor.__add__", "+"),
        ("Tensor.__radd__", "+ reversed"),
        ("Tensor.add_", "+="),
        ("torch.Tensor.__rsub__", "- reversed"),
        ("torch.Tensor.rsub", "- reversed"),
        ("torch.Tensor.__rtruediv__", "/ reversed"),
        ("torch.Tensor.div", "/"),
        ("torch.Tensor.matmul", "@"),
        ("torch.Tensor.eq", "=="),
        ("torch.Tensor.__getitem__", "[]"),
        ("torch.Tensor.relu", None),
        ("torch.add", None),
        ("add", None),
    ],
)
def test_symbols(op: str, symbol: str | None) -> None:
    assert symbol_of(op) == symbol


@pytest.mark.parametrize(
    "dunder",
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "eq"],
)
def test_native_name_does_what_the_operator_does(dunder: str) -> None:
    x, y = torch.tensor([6, 5, -3]), torch.tensor([2, 3, 2])
    by_method = getattr(x, NATIVE_NAMES[f"__{dunder}__"])(y)
    by_symbol = getattr(operator, f"__{dunder}__")(x, y)
    assert torch.equal(by_method, by_symbol)
    assert by_method.dtype == by_symbol.dtype


def test_native_name_of_a_call() -> None:
    assert native_name("Tensor.__iadd__.3.forward.input.0") == "Tensor.add_.3.forward.input.0"
    assert native_name("Functional.linear.0.forward") == "Functional.linear.0.forward"
