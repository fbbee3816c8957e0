"""What a pickle says, by its opcodes. Nothing is imported, called or made: calls and globals stay
placeholders with the names that the pickle gives."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

MOST_OPCODES = 5_000_000  # each may make an object of some 60 bytes, and takes a microsecond
_MAX_KEY_PARTS = 64
_MAX_OUTLINE = 80


class GlobalName(NamedTuple):
    """A global that the pickle names: its module and its name, with a space between."""

    name: str


class StorageName(NamedTuple):
    """A storage that the pickle refers to."""

    description: Any


class PickledCall:
    """What the pickle would make by calling `function`, and what it would do to it then."""

    __slots__ = ("arguments", "function", "items", "pairs", "state")

    def __init__(self, function: Any, arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def calls(self, name: str) -> bool:
        """Whether it is a call of that global."""
        return isinstance(self.function, GlobalName) and self.function.name == name


def outline(node: Any) -> str:
    """A part of a tree in a few words, for an error. `str` would not end with tuples of tuples, of
    which each is there twice."""
    if isinstance(node, GlobalName):
        return node.name[:_MAX_OUTLINE]
    if isinstance(node, int):
        return str(node) if node.bit_length() < 256 else f"a number of {node.bit_length()} bits"
    if isinstance(node, str | float) or node is None:
        return str(node)[:_MAX_OUTLINE]
    if isinstance(node, tuple | list | dict | bytes) and not isinstance(node, StorageName):
        return f"a {type(node).__name__} of {len(node)}"
    if isinstance(node, PickledCall):
        return f"a call of {outline(node.function)}"
    return f"a {type(node).__name__}"


class _Damaged(ValueError):
    """What the pickle says cannot be."""


_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_SIMPLE: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset(("BINPUT", "LONG_BINPUT", "PUT"))
_GETS = frozenset(("BINGET", "LONG_BINGET", "GET"))
_NO_EFFECT = frozenset(("PROTO", "FRAME"))


def read_opcodes(pickled: bytes | BinaryIO, most: int = MOST_OPCODES) -> Any:
    """The value that a pickle describes; ValueError says why it describes none.

    A file is read up to the end of its pickle.
    """
    reader = _Reader()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if number > most:
                raise _Damaged(f"its pickle has more than {most} opcodes")
            if opcode.name == "STOP":
                return reader.pop()
            reader.step(opcode.name, argument)
    except _Damaged:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"its pickle is damaged: {type(error).__name__}: {error}"[:300]) from error
    raise ValueError("its pickle has no end")


class _Reader:
    """The stack and the memo that a pickle works with."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise _Damaged("its pickle takes what it has not put there")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _SIMPLE:
            stack.append(_SIMPLE[name])
        elif name in _PUTS:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self.memo[int(argument)])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "BINPERSID":
            stack.append(StorageName(self.pop()))
        elif name == "PERSID":
            stack.append(StorageName(argument))
        elif name not in _NO_EFFECT:
            self._make(name, argument)

    def _make(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "GLOBAL":
            stack.append(GlobalName(str(argument)))
        elif name == "STACK_GLOBAL":
            word = self.pop()
            stack.append(GlobalName(f"{self.pop()} {word}"))
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "LIST":
            stack.append(self.since_mark())
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            items = self.since_mark()
            made: dict[Any, Any] = {}
            _set_items(made, items)
            stack.append(made)
        elif name == "EMPTY_SET":
            stack.append([])
        elif name == "FROZENSET":
            stack.append(self.since_mark())
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = self.pop()
            stack.append(PickledCall(self.pop(), arguments))
        elif name == "NEWOBJ_EX":
            named, arguments = self.pop(), self.pop()
            stack.append(PickledCall(self.pop(), (*arguments, named)))
        elif name == "OBJ":
            function, *arguments = self.since_mark()
            stack.append(PickledCall(function, tuple(arguments)))
        elif name == "INST":
            stack.append(PickledCall(GlobalName(str(argument)), tuple(self.since_mark())))
        else:
            self._change(name)

    def _change(self, name: str) -> None:
        stack = self.stack
        if name == "APPEND":
            item = self.pop()
            _extend(stack[-1], [item])
        elif name in ("APPENDS", "ADDITEMS"):
            items = self.since_mark()
            _extend(stack[-1], items)
        elif name == "SETITEM":
            value = self.pop()
            key = self.pop()
            _set_items(stack[-1], [key, value])
        elif name == "SETITEMS":
            items = self.since_mark()
            _set_items(stack[-1], items)
        elif name == "BUILD":
            state = self.pop()
            if not isinstance(stack[-1], PickledCall):
                raise _Damaged(f"its pickle sets fields of a {type(stack[-1]).__name__}")
            stack[-1].state = state
        elif name == "POP":
            if self.marks and len(stack) == self.marks[-1]:
                self.marks.pop()
            else:
                stack.pop()
        elif name == "POP_MARK":
            self.since_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            raise _Damaged(f"its pickle has {name}, which no file of torch has")


def _extend(target: Any, items: Iterable[Any]) -> None:
    if isinstance(target, PickledCall):
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise _Damaged(f"its pickle appends to a {type(target).__name__}")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise _Damaged("its pickle has a key without a value")
    pairs = target.pairs if isinstance(target, PickledCall) else target
    if not isinstance(pairs, dict):
        raise _Damaged(f"its pickle sets items of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _check_key(key)
        pairs[key] = value


def _check_key(key: Any) -> None:
    """Refuse what has no hash, and what has many parts: hashing tuples of tuples may not end."""
    left, count = [key], 0
    while left:
        part = left.pop()
        count += 1
        if isinstance(part, (GlobalName, PickledCall, str, int, float, bytes)) or part is None:
            continue
        if not isinstance(part, tuple) or isinstance(part, StorageName):
            raise _Damaged(f"its pickle has a {type(part).__name__} as a key")
        if count + len(left) + len(part) > _MAX_KEY_PARTS:
            raise _Damaged("its pickle has a tuple of many parts as a key")
        left += part
