"""Trees of arguments and outputs: how they are written in JSON, and what their tensors are named.

Null, booleans, 64-bit integers, finite floats, strings and lists stand for themselves. All else is
an object with one key: int, float, complex, tuple, dict, slice, ellipsis, special, fields, tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tensorprobe.records import Fields, Special, TensorRecord
from tensorprobe.tensors.json_files import MAX_DEPTH, TOO_DEEP

OnTensor = Callable[[str, dict[str, Any]], Any]


def child(name: str, key: object) -> str:
    """The name of what is at `key` in what is called `name`: an index, a key or a field."""
    return f"{name}.{key}"


def is_container(tree: Any) -> bool:
    """Whether an encoded tree has parts with names of their own."""
    if isinstance(tree, dict):
        return not tree.keys().isdisjoint(("tuple", "dict", "fields"))
    return isinstance(tree, list)


def output_root(call: str, outputs: Any) -> str:
    """The name of a call's whole output: a lone value is named as if it were the first of one."""
    return f"{call}.output" if is_container(outputs) else f"{call}.output.0"


def encode_scalar(value: bool | int | float | complex | str | None) -> Any:
    """A Python scalar as JSON that gives the same scalar back."""
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is int:
        return value if -(2**63) <= value < 2**64 else {"int": str(value)}
    if type(value) is complex:
        return {"complex": [encode_scalar(value.real), encode_scalar(value.imag)]}
    return value


def encode(value: Any, on_tensor: Callable[[TensorRecord], Any]) -> Any:
    """What `decode` gives, as a tree again; each tensor in it is what `on_tensor` makes of it."""
    if isinstance(value, TensorRecord):
        return {"tensor": on_tensor(value)}
    if isinstance(value, list | tuple):
        items = [encode(item, on_tensor) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[encode(k, on_tensor), encode(v, on_tensor)] for k, v in pairs]}
    if isinstance(value, Special):
        return {"special": [value.kind, value.text]}
    if isinstance(value, Fields):
        fields = {key: encode(item, on_tensor) for key, item in value.fields.items()}
        return {"fields": [value.kind, value.type, fields]}
    if isinstance(value, slice):
        return {"slice": [encode(v, on_tensor) for v in (value.start, value.stop, value.step)]}
    return {"ellipsis": True} if value is ... else encode_scalar(value)


def decode(tree: Any, name: str, on_tensor: OnTensor, depth: int = 0) -> Any:
    """The tree as Python values, each tensor in it what `on_tensor(its name, its line)` gives."""
    if depth > MAX_DEPTH:  # a recorder writes 12 at most, a peer's dump is read down to 60
        raise ValueError(TOO_DEEP)
    if type(tree) is list:
        return _items(tree, name, on_tensor, depth)
    if type(tree) is not dict:
        return tree
    ((kind, body),) = tree.items()
    if kind == "tensor":
        return on_tensor(name, body)
    if kind == "tuple":
        return tuple(_items(body, name, on_tensor, depth))
    return _DECODERS[kind](body, name, on_tensor, depth)


def _items(body: list[Any], name: str, on_tensor: OnTensor, depth: int) -> list[Any]:
    return [decode(item, f"{name}.{i}", on_tensor, depth + 1) for i, item in enumerate(body)]


def _dict(body: list[list[Any]], name: str, on_tensor: OnTensor, depth: int) -> dict[Any, Any]:
    items = {}
    for key_tree, tree in body:
        key = decode(key_tree, name, on_tensor, depth + 1)
        items[key] = decode(tree, child(name, key), on_tensor, depth + 1)
    return items


def _fields(body: list[Any], name: str, on_tensor: OnTensor, depth: int) -> Fields:
    kind, type_name, fields = body
    values = {k: decode(tree, child(name, k), on_tensor, depth + 1) for k, tree in fields.items()}
    if kind not in ("namedtuple", "dataclass", "mapping"):
        raise ValueError(f"{str(kind)[:40]!r} is no kind of container with fields")
    return Fields(kind, _text(type_name), values)


def _slice(body: list[Any], name: str, on_tensor: OnTensor, depth: int) -> slice:
    return slice(*_items(body, name, on_tensor, depth))


def _complex(body: list[Any], name: str, on_tensor: OnTensor, depth: int) -> complex:
    real, imag = _items(body, name, on_tensor, depth)
    return complex(real, imag)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected text, found a {type(value).__name__}")
    return value


_DECODERS: dict[str, Callable[[Any, str, OnTensor, int], Any]] = {
    "int": lambda body, name, on_tensor, depth: int(body),
    "float": lambda body, name, on_tensor, depth: float(body),
    "complex": _complex,
    "dict": _dict,
    "slice": _slice,
    "ellipsis": lambda body, name, on_tensor, depth: ...,
    "special": lambda body, name, on_tensor, depth: Special(*map(_text, body)),
    "fields": _fields,
}
