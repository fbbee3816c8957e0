"""How the program wrote a call: `a + b` or `a.add(b)`, which torch does not tell apart."""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from tensorprobe.follow.naming import DUNDERS_OF_NATIVE, ApiName
from tensorprobe.follow.tracebacks import is_stand_in
from tensorprobe.operators import NATIVE_NAMES, OPERATORS

# The first of several wins: "/" is __truediv__, which Python 3 calls, and not __div__.
_OF_SYMBOL = {
    operator.symbol: operator.dunder
    for operator in reversed(OPERATORS)
    if "div__" not in operator.dunder or "truediv" in operator.dunder or "floor" in operator.dunder
}
_UNARY = {"UNARY_NEGATIVE": "__neg__", "UNARY_POSITIVE": "__pos__", "UNARY_INVERT": "__invert__"}
# Python 3.10 has an opcode for each operator, later versions one for all.
_SYMBOLS_OF_OLD = {
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/", "FLOOR_DIVIDE": "//",
    "MODULO": "%", "POWER": "**", "MATRIX_MULTIPLY": "@", "AND": "&", "OR": "|", "XOR": "^",
    "LSHIFT": "<<", "RSHIFT": ">>",
}  # fmt: skip
# x ** 2 and a few others go through functions of torch's own
_TORCH_FILES = (torch._tensor.__file__, torch.overrides.__file__)
_LIMIT = 100_000  # instructions remembered


class _Written(NamedTuple):
    """An operator in the source; the operands are known where they are constants or names."""

    dunder: str
    left: ast.expr | None
    right: ast.expr | None


class Spelling:
    """Gives calls of operators the name of their dunder, by the instruction that made them."""

    def __init__(self, caller: str) -> None:
        self._between = {caller, *_TORCH_FILES}  # files between the program and here
        self._known: dict[tuple[CodeType, int], _Written | None] = {}

    def __call__(
        self, api: ApiName, func: Any, args: tuple[Any, ...], frame: FrameType | None
    ) -> ApiName:
        name = getattr(func, "__name__", "")
        if NATIVE_NAMES.get(name) == api.api:  # torch says so itself: 1 - x, x // 2
            return api._replace(api=_in_use(name))
        while frame is not None and self._is_between(frame.f_code):
            frame = frame.f_back
        if frame is None or api.api not in DUNDERS_OF_NATIVE:
            return api
        written = self._look(frame)
        if written is None or NATIVE_NAMES.get(written.dunder) != api.api:
            return api
        dunder = written.dunder
        reverse = f"__r{dunder[2:]}"
        if NATIVE_NAMES.get(reverse) == api.api and _is_reversed(written, args, frame):
            dunder = reverse
        return api._replace(api=dunder)

    def _is_between(self, code: CodeType) -> bool:
        return code.co_filename in self._between or is_stand_in(code)

    def _look(self, frame: FrameType) -> _Written | None:
        key = (frame.f_code, frame.f_lasti)
        if key not in self._known:
            if len(self._known) > _LIMIT:
                self._known.clear()
            self._known[key] = _read(frame.f_code, frame.f_lasti)
        return self._known[key]


def _in_use(dunder: str) -> str:
    """Python 3 has no __div__; torch's Tensor still does."""
    return {"__div__": "__truediv__", "__idiv__": "__itruediv__"}.get(dunder, dunder)


def _read(code: CodeType, offset: int) -> _Written | None:
    instruction = next((i for i in dis.get_instructions(code) if i.offset == offset), None)
    if instruction is None:
        return None
    dunder = _dunder(instruction)
    if dunder is None:
        return None
    left, right = _operands(code, instruction)
    return _Written(dunder, left, right)


def _dunder(instruction: dis.Instruction) -> str | None:
    name = instruction.opname
    if name in _UNARY:
        return _UNARY[name]
    if name in ("BINARY_OP", "COMPARE_OP"):
        return _OF_SYMBOL.get(instruction.argrepr.removeprefix("bool(").removesuffix(")"))
    kind, _, old = name.partition("_")
    if kind in ("BINARY", "INPLACE") and old in _SYMBOLS_OF_OLD:
        return _OF_SYMBOL.get(_SYMBOLS_OF_OLD[old] + ("=" if kind == "INPLACE" else ""))
    return None


def _operands(
    code: CodeType, instruction: dis.Instruction
) -> tuple[ast.expr | None, ast.expr | None]:
    """What is left and right of the operator, where the source can be read."""
    place = getattr(instruction, "positions", None)  # from Python 3.11 on
    if place is None or place.lineno is None or place.col_offset is None:
        return None, None
    lines = [
        linecache.getline(code.co_filename, n) for n in range(place.lineno, place.end_lineno + 1)
    ]
    text = _cut(lines, place.col_offset, place.end_col_offset)
    try:
        found: Any = ast.parse(f"({text})", mode="eval").body
    except (SyntaxError, ValueError):
        return None, None
    return getattr(found, "left", None), getattr(found, "right", None)


def _cut(lines: Iterable[str], start: int, end: int) -> str:
    raw = [line.encode() for line in lines]  # columns are in bytes
    if not raw:
        return ""
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][start:]
    return b"".join(raw).decode(errors="replace")


def _is_reversed(written: _Written, args: tuple[Any, ...], frame: FrameType) -> bool:
    """Whether the tensor was on the right: torch gives it first all the same."""
    if len(args) < 2 or isinstance(args[1], torch.Tensor):
        return False
    if isinstance(written.left, ast.Constant):
        return True
    for node, when_tensor in ((written.left, False), (written.right, True)):
        if isinstance(node, ast.Name):
            scope = frame.f_locals if node.id in frame.f_locals else frame.f_globals
            value = scope.get(node.id)
            if isinstance(value, torch.Tensor):
                return when_tensor
            if isinstance(value, bool | int | float | complex):
                return not when_tensor
    return False
