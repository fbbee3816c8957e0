"""Python's operators on tensors: the dunder method, the symbol people type, the method it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Operator(NamedTuple):
    """One operator. `native` is the op that does the same, or the dunder itself."""

    dunder: str
    symbol: str
    native: str


_IN_PAIRS = {  # dunder stem: symbol, method; each has a reversed and an in-place form
    "add": ("+", "add"),
    "sub": ("-", "sub"),
    "mul": ("*", "mul"),
    "div": ("/", "div"),
    "truediv": ("/", "div"),
    "floordiv": ("//", "floor_divide"),
    "mod": ("%", "remainder"),
    "pow": ("**", "pow"),
    "matmul": ("@", "matmul"),
    "and": ("&", "bitwise_and"),
    "or": ("|", "bitwise_or"),
    "xor": ("^", "bitwise_xor"),
    "lshift": ("<<", "bitwise_left_shift"),
    "rshift": (">>", "bitwise_right_shift"),
}
# Reversed, only these have a method; torch has none for the argument order of the others.
_REVERSED = {
    "add": "add", "mul": "mul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "sub": "rsub", "div": "__rtruediv__",
}  # fmt: skip
_ALONE = (
    Operator("__eq__", "==", "eq"),
    Operator("__ne__", "!=", "ne"),
    Operator("__lt__", "<", "lt"),
    Operator("__le__", "<=", "le"),
    Operator("__gt__", ">", "gt"),
    Operator("__ge__", ">=", "ge"),
    Operator("__neg__", "-x", "neg"),
    Operator("__pos__", "+x", "positive"),
    Operator("__invert__", "~", "bitwise_not"),
    Operator("__abs__", "abs()", "abs"),
    Operator("__getitem__", "[]", "__getitem__"),
    Operator("__setitem__", "[]=", "__setitem__"),
    Operator("__contains__", "in", "__contains__"),
    Operator("__len__", "len()", "__len__"),
    Operator("__bool__", "bool()", "__bool__"),
    Operator("__nonzero__", "bool()", "__bool__"),
    Operator("__int__", "int()", "__int__"),
    Operator("__long__", "int()", "__int__"),
    Operator("__float__", "float()", "__float__"),
)


def _pairs() -> Iterator[Operator]:
    for stem, (symbol, method) in _IN_PAIRS.items():
        yield Operator(f"__{stem}__", symbol, method)
        reverse = f"__r{stem}__"
        yield Operator(reverse, f"{symbol} reversed", _REVERSED.get(stem, reverse))
        in_place = "matmul" if stem == "matmul" else f"{method}_"  # torch has no matmul_
        yield Operator(f"__i{stem}__", f"{symbol}=", in_place)


OPERATORS: tuple[Operator, ...] = (*_pairs(), *_ALONE)
NATIVE_NAMES: dict[str, str] = {operator.dunder: operator.native for operator in OPERATORS}
# The first of several wins: `add` is "+", not "+ reversed".
_SYMBOLS: dict[str, str] = {
    name: operator.symbol
    for operator in reversed(OPERATORS)
    for name in (operator.native, operator.dunder)
}


def symbol_of(op: str) -> str | None:
    """The symbol for a tensor method: "torch.Tensor.add" gives "+", all other ops None."""
    owner, _, method = op.rpartition(".")
    if owner.rpartition(".")[2] != "Tensor":
        return None
    return _SYMBOLS.get(method)


def native_name(name: str) -> str:
    """A call or op name with any dunder in it replaced: Tensor.__add__.0 is Tensor.add.0."""
    return ".".join(NATIVE_NAMES.get(part, part) for part in name.split("."))
