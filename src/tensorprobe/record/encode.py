"""Live arguments to the trees of a call log: each leaf a value, a tensor, or what it was."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tensorprobe.follow.plain_arguments import PLAIN_TENSORS, POSITIONS
from tensorprobe.record.collectives import group_of, reduction_name

# How to turn one live tensor, met at a path such as ("1", "0"), into its line.
TensorEncoder = Callable[[torch.Tensor, tuple[str, ...]], Any]

MAX_DEPTH = 12  # nests deeper than this are almost always an object graph, not arguments
MAX_ITEMS = 2000  # a longer list of plain numbers is data (torch.tensor([...])), not an argument
MAX_TEXT = 2000

_INT_BOUND = 1 << 63


def encode(
    value: Any, tensor: TensorEncoder, path: tuple[str, ...] = (), around: tuple[int, ...] = ()
) -> Any:
    """The tree of one value; `tensor` is called for every tensor in it, with its path.

    `around` are the containers it is in, by identity.
    """
    kind = type(value)
    if kind in PLAIN_TENSORS:
        return tensor(value, path)
    if kind in PLAIN:
        return value
    atom = ATOMS.get(kind)
    if atom is not None:
        return atom(value)
    is_sequence = kind is tuple or kind is list
    if not is_sequence and isinstance(value, torch.Tensor):
        return tensor(value, path)
    if len(path) > MAX_DEPTH:
        return _special("unsupported", f"nested deeper than {MAX_DEPTH}: {_type_name(kind)}")
    if id(value) in around:
        return _special("unsupported", f"{_type_name(kind)} inside itself")
    if is_sequence:
        return _sequence(value, tensor, path, around)
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return _named(value, tensor, path, around)
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            pairs = zip(value._fields, value, strict=True)
            fields = _fields(pairs, tensor, path, (*around, id(value)))
            return {"fields": ["namedtuple", _type_name(kind), fields]}
        return _sequence(value, tensor, path, around)  # torch.return_types.max and its like
    return _other(value)


def map_tensors(value: Any, visit: Callable[[torch.Tensor, tuple[str, ...]], None]) -> None:
    """Call `visit` for every tensor that `encode` would meet, with the same path."""
    if isinstance(value, torch.Tensor):
        visit(value, ())
    elif type(value) not in PLAIN:
        encode(value, visit)


def nest(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """A tree from paths: {("1", "0"): x} is {"dict": [["1", {"dict": [["0", x]]}]]}."""
    if not leaves:
        return None
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        level = tree
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = (leaf,)
    return _as_dict_tree(tree)


def nest_gradients(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """The tree of `nest`, quicker for gradients of plain arguments; an empty dict for none."""
    pairs = []
    for path, leaf in leaves.items():
        if len(path) != 1:
            return nest(leaves)
        pairs.append([path[0], leaf])
    return {"dict": pairs}


def _as_dict_tree(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "dict": [
            [key, item[0] if isinstance(item, tuple) else _as_dict_tree(item)]
            for key, item in tree.items()
        ]
    }


def as_arguments(leaves: Mapping[tuple[str, ...], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Gradients by the path of their output, as positional and keyword arguments."""
    if len(leaves) == 1 and POSITIONS[0] in leaves:
        return [leaves[POSITIONS[0]]], {}
    tops: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, leaf in leaves.items():
        tops.setdefault(path[0], {})[path[1:]] = leaf
    trees = {top: below[()] if () in below else nest(below) for top, below in tops.items()}
    numbers = [int(top) for top in trees if top.isdigit()]
    if max(numbers, default=0) > MAX_ITEMS:  # keys of a dict, not positions
        return [], trees
    args = [trees.get(str(i)) for i in range(max(numbers, default=-1) + 1)]
    return args, {top: tree for top, tree in trees.items() if not top.isdigit()}


def _sequence(
    value: Any, tensor: TensorEncoder, path: tuple[str, ...], around: tuple[int, ...]
) -> Any:
    if len(value) > MAX_ITEMS and not isinstance(value[0], torch.Tensor):
        return _special("unsupported", f"{type(value).__name__} of {len(value)} items")
    around = (*around, id(value))
    items: list[Any] = []
    for item in value:  # most are numbers: sizes, dimensions, an index
        kind = type(item)
        if kind in PLAIN:
            items.append(item)
        elif kind in ATOMS:
            items.append(ATOMS[kind](item))
        else:
            items.append(encode(item, tensor, (*path, str(len(items))), around))
    return items if type(value) is list else {"tuple": items}


def _named(
    value: Any, tensor: TensorEncoder, path: tuple[str, ...], around: tuple[int, ...]
) -> Any:
    if isinstance(value, type):
        return _special("unsupported", f"type {_type_name(value)}")
    kind = type(value)
    around = (*around, id(value))
    if kind is dict:
        return {
            "dict": [
                [_key(key), encode(item, tensor, (*path, str(key)), around)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, Mapping):
        how = "dataclass" if dataclasses.is_dataclass(value) else "mapping"
        pairs = [(str(key), item) for key, item in value.items()]
    else:
        how = "dataclass"
        pairs = [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    return {"fields": [how, _type_name(kind), _fields(pairs, tensor, path, around)]}


def _fields(
    pairs: Iterable[tuple[str, Any]],
    tensor: TensorEncoder,
    path: tuple[str, ...],
    around: tuple[int, ...],
) -> dict[str, Any]:
    return {name: encode(item, tensor, (*path, name), around) for name, item in pairs}


def _key(key: Any) -> Any:
    """A key of a dict: a plain value, or its text; a reader must be able to look it up again."""
    if type(key) is tuple:
        return {"tuple": [_key(part) for part in key]}
    if type(key) in PLAIN or type(key) in (int, float, str):
        return encode(key, lambda tensor, _: None)
    return _special("key", str(key))


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _int(value: int) -> Any:
    return value if -_INT_BOUND <= value < _INT_BOUND else {"int": str(value)}


def _bound(part: Any) -> Any:
    """An end or the step of a slice."""
    if part is None:
        return None
    return encode(part, lambda tensor, _: _special("tensor", str(tensor.shape)))


def _special(kind: str, text: str) -> dict[str, list[str]]:
    return {"special": [kind, text[:MAX_TEXT]]}


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _other(value: Any) -> Any:
    """Objects that are neither numbers, containers nor tensors."""
    kind = type(value)
    if isinstance(value, bool | int | float | str):  # subclasses: IntEnum, numpy.float64, SymInt
        if isinstance(value, enum.Enum):
            return _special("enum", str(value))
        if isinstance(value, str):
            return str(value)[:MAX_TEXT]
        return _float(float(value)) if isinstance(value, float) else _int(int(value))
    if isinstance(value, enum.Enum):
        return _special("enum", str(value))
    if kind.__module__ == "numpy" or kind.__module__.startswith("numpy."):
        shape = getattr(value, "shape", None)
        text = f"{value.dtype}{list(shape)}" if shape else str(value)
        return _special("numpy", text)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _special("symbol", str(value))
    if isinstance(value, torch.nn.Module):
        return _special("module", _type_name(kind))
    if isinstance(value, torch.Generator):
        return _special("generator", str(value.device))
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        # The methods of a TypedStorage warn of its end.
        whole = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
        return _special("storage", f"{kind.__name__} of {whole.nbytes()} bytes")
    if kind.__name__.startswith("ProcessGroup"):
        return _special("process_group", _group_text(value))
    if kind.__name__ in ("ReduceOp", "RedOpType"):
        return _special("reduce_op", reduction_name(value))
    if isinstance(value, torch.ScriptObject):
        return _script_object(value)
    if isinstance(value, torch.fx.Proxy):  # to ask it for a name would add to the graph traced
        return _special("unsupported", _type_name(kind))
    if callable(value) and hasattr(value, "__qualname__"):
        return _special("function", f"{getattr(value, '__module__', '')}.{value.__qualname__}")
    return _special("unsupported", _type_name(kind))


def _script_object(value: torch.ScriptObject) -> Any:
    """What c10d's operators are given."""
    name = value._type().qualified_name()
    if name.endswith(".c10d.ReduceOp"):
        return _special("reduce_op", reduction_name(value))
    if name.endswith(".c10d.ProcessGroup") and (group := group_of(value)) is not None:
        return _special("process_group", _group_text(group))
    return _special("unsupported", name)


def _group_text(group: Any) -> str:
    import torch.distributed as dist

    return f"ranks {dist.get_process_group_ranks(group)}"


PLAIN = frozenset([type(None), bool])
# Values without parts, by their exact type.
ATOMS: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    str: lambda value: value[:MAX_TEXT],
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    slice: lambda value: {"slice": [*map(_bound, (value.start, value.stop, value.step))]},
    type(...): lambda value: {"ellipsis": True},
    torch.dtype: lambda value: _special("dtype", str(value)),
    torch.device: lambda value: _special("device", str(value)),
    torch.layout: lambda value: _special("layout", str(value)),
    torch.memory_format: lambda value: _special("memory_format", str(value)),
    torch.Size: lambda value: {"tuple": list(value)},
}
