"""A recorded graph run node by node, each operator by the table of what may be called.

Run in the recorded dtypes it is what eager torch makes of the graph; in float64, what is right.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tensorprobe.compiling.compile_records import GraphNode
from tensorprobe.compiling.inductor_operators import FORMULAS, RANDOM
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Special
from tensorprobe.replay.allowed import dtype_named, format_named, function_named
from tensorprobe.replay.rebuild import ReplayPlace
from tensorprobe.store.tree import decode

CPU = torch.device("cpu")
_MAX_DEPTH = 8  # of graphs that call graphs
_LONGEST = 100_000
_LARGEST = 1 << 512  # of whole numbers: seeds and products of sizes are far below
# Python's own functions, on numbers (sizes) and on tensors.
_PYTHON: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "eq",
            "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "invert", "matmul",
            "getitem", "lshift", "rshift", "iadd", "isub", "imul", "itruediv", "ifloordiv", "is_",
            "is_not", "setitem",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "sqrt", "trunc", "prod")},
    "builtins.max": max, "builtins.min": min, "builtins.float": float, "builtins.int": int,
    "torch.sym_max": max, "torch.sym_min": min, "torch.sym_float": float, "torch.sym_int": int,
    "torch.sym_sqrt": math.sqrt, "torch.sym_ite": lambda b, t, f: t if b else f,
    "torch.sym_not": operator.not_, "torch.sym_sum": sum,
}  # fmt: skip
_OF_LISTS = frozenset(
    ("operator.getitem", "operator.setitem", "torch.sym_sum", "math.prod", "operator.eq",
     "operator.ne", "operator.is_", "operator.is_not")
)  # fmt: skip
SIZES = frozenset(("torch.ops.aten.sym_size.int", "torch.ops.aten.sym_stride.int"))
# Operators that run a graph they are given; its other arguments are what it is given.
_CALLS_GRAPH = frozenset(
    f"higher_order.{name}"
    for name in ("tag_activation_checkpoint", "wrap", "invoke_subgraph", "checkpoint",
                 "wrap_activation_checkpoint", "wrap_with_set_grad_enabled", "control_deps")
)  # fmt: skip
_RANDOM = ("dropout", "bernoulli", "rand", "normal", "multinomial", "uniform", "exponential")
_ATTRIBUTES = {
    name: operator.attrgetter(name)
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize",
        "nbytes",
        "T", "mT", "H", "mH", "real", "imag",
    )
}  # fmt: skip


_WITHOUT_EFFECT = frozenset(("torch._log_api_usage_once", "torch._C._log_api_usage_once"))
# a graph has few operators and many nodes, and looking one up takes a millisecond
_function = functools.lru_cache(maxsize=2000)(function_named)


class GraphReplay:
    """Runs a graph in the recorded dtypes, or in `dtype`.

    `values` has what each node gave. `given` has values for nodes that are not run. A node that may
    not be run, or raises, raises NotReplayable with the name of the node.
    """

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        inner: Mapping[str, Sequence[GraphNode]],
        constants: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        given: Mapping[str, Callable[[Any], Any]] | None = None,
        grad: bool = False,
        snapshots: bool = False,
    ) -> None:
        self._snapshots = snapshots
        self.seen: dict[str, torch.Tensor] = {}  # with `snapshots`: as it was when it was made
        self._nodes = nodes
        self._inner = inner
        self._constants = constants
        self._place = ReplayPlace(CPU, dtype)
        self._given = given or {}
        self._grad = grad
        self.values: dict[str, Any] = {}
        self.outputs: list[Any] = []
        self._autocasts: list[torch.autocast] = []  # that are on

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the graph, as one flat list."""
        with torch.set_grad_enabled(self._grad):
            try:
                result = self._run(self._nodes, inputs, self.values, 0)
            finally:
                while self._autocasts:
                    self._autocasts.pop().__exit__(None, None, None)
        self.outputs = list(_flat(result))
        return self.outputs

    def cast(self, value: Any) -> Any:
        """A value as it is here: floating numbers in the dtype of the replay."""
        if not isinstance(value, torch.Tensor):
            return value
        wanted = self._place.cast(value.dtype)
        return value.clone() if wanted == value.dtype else value.to(wanted)

    def _run(
        self,
        nodes: Sequence[GraphNode],
        inputs: Sequence[Any],
        values: dict[str, Any],
        depth: int,
    ) -> Any:
        if depth > _MAX_DEPTH:
            raise NotReplayable("graphs that call graphs too deeply")
        names = [node.name for node in nodes if node.kind == "input"]
        if len(names) != len(inputs):
            raise NotReplayable(f"the graph has {len(names)} inputs, {len(inputs)} were given")
        values.update(zip(names, inputs, strict=True))
        for node in nodes:
            if node.kind == "input":
                continue
            draws = is_random(node) and self._place.dtype is not None
            args, kwargs = self._arguments(node, values, as_recorded=draws)
            if node.kind == "output":
                return args[0] if args else None
            made = self._value(node, args, kwargs, depth)
            values[node.name] = _nested_map(self.cast, made) if draws else made
            if self._snapshots and isinstance(made, torch.Tensor):
                self.seen[node.name] = made.detach().clone()
        return None

    def _value(self, node: GraphNode, args: Any, kwargs: dict[str, Any], depth: int) -> Any:
        given = None if depth else self._given.get(node.name)  # names of the outermost graph
        try:
            if given is not None:
                return given(args)
            if node.kind == "graph":
                return Special("graph", node.target)
            if node.kind == "constant":
                if node.target not in self._constants:
                    raise NotReplayable("its content was not recorded")
                return self.cast(self._constants[node.target])
            if node.target in _CALLS_GRAPH:
                return self._call_graph(args, depth)
            return self._call(node, args, kwargs)
        except NotReplayable as error:
            raise NotReplayable(f"node {node.name}: {error}") from error
        except Exception as error:  # replaying one node
            text = str(error).strip().partition("\n")[0][:160]
            raise NotReplayable(
                f"node {node.name} ({node.target[:80]}): {type(error).__name__}: {text}"
            ) from error

    def _call_graph(self, args: Any, depth: int) -> Any:
        at = next((i for i, arg in enumerate(args) if _is_graph(arg)), None)
        if at is None or args[at].text not in self._inner:
            raise NotReplayable("the graph that it calls was not recorded")
        rest = args[at + 1 :]
        if rest and isinstance(rest[0], str):  # invoke_subgraph has a name there
            rest = rest[1:]
        return self._run(self._inner[args[at].text], rest, {}, depth + 1)

    def _call(self, node: GraphNode, args: Any, kwargs: dict[str, Any]) -> Any:
        target = node.target
        formula = FORMULAS.get(target)
        if formula is not None:
            return formula(*args, **kwargs)
        if target == "builtins.getattr":
            attribute = _ATTRIBUTES.get(str(args[1])) if len(args) == 2 else None
            if attribute is None:
                raise NotReplayable(f"not run: the attribute {str(args[1:])[:60]}")
            return attribute(args[0])
        python = _PYTHON.get(target)
        if python is not None:
            return _checked(target, python, args, kwargs)
        if target.endswith(("_set_grad_enabled", "set_grad_enabled")):
            if self._grad:
                torch.set_grad_enabled(bool(args[0]))
            return None
        if "_enter_autocast" in target or "_exit_autocast" in target:
            return self._autocast(node, args)
        if target.startswith("torch._assert") or "_check" in target or "assert_" in target:
            return None
        if target in SIZES:
            tensor, axis = args[0], args[1]
            return tensor.shape[axis] if "size" in target else tensor.stride(axis)
        if node.kind == "method" and target in ("torch.Tensor.size", "torch.Tensor.dim"):
            return args[0].dim() if target.endswith("dim") else args[0].size(*args[1:])
        if target in _WITHOUT_EFFECT:
            return None
        if "_attention" in target:  # kernels that read other layouts than eager's wrongly
            args = tuple(each.contiguous() if _is_strided(each) else each for each in args)
        if target == "torch.ops.aten.view.default":  # other kernels lay their results out otherwise
            return torch.reshape(*args, **kwargs)
        return _function(target)(*args, **kwargs)

    def _autocast(self, node: GraphNode, args: Any) -> Any:
        """Autocast lowers float32; numbers in float64 stay as they are."""
        if "_exit" in node.target:
            if args and any(args[0] is each for each in self._autocasts):
                self._autocasts.remove(args[0])
                args[0].__exit__(None, None, None)
            return None
        kind, dtype, enabled = args[0], args[1], bool(args[2]) if len(args) > 2 else True
        wanted = dtype if isinstance(dtype, torch.dtype) else None
        if self._place.dtype is not None:
            return None
        mode = torch.autocast("cpu", dtype=wanted, enabled=enabled and bool(kind))
        mode.__enter__()
        self._autocasts.append(mode)
        return mode

    def _arguments(
        self, node: GraphNode, values: Mapping[str, Any], *, as_recorded: bool
    ) -> tuple[Any, dict[str, Any]]:
        try:
            args = decode(node.args, "", _no_tensor)
            kwargs = decode(node.kwargs, "", _no_tensor)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotReplayable(f"node {node.name}: its arguments are damaged: {error}") from error
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise NotReplayable(f"node {node.name}: its arguments are damaged")
        if as_recorded:  # other dtypes would draw other numbers
            place, self._place = self._place, ReplayPlace(CPU)
            values = {key: _lowered(value, node.dtype) for key, value in values.items()}
        try:
            return (
                self._live(args, values, node),
                {str(key): self._live(value, values, node) for key, value in kwargs.items()},
            )
        finally:
            if as_recorded:
                self._place = place

    def _live(self, value: Any, values: Mapping[str, Any], node: GraphNode) -> Any:
        if isinstance(value, Special):
            return self._special(value, values, node)
        if isinstance(value, tuple):
            return tuple(self._live(item, values, node) for item in value)
        if isinstance(value, list):
            return [self._live(item, values, node) for item in value]
        if isinstance(value, dict):
            return {key: self._live(item, values, node) for key, item in value.items()}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return slice(*(self._live(part, values, node) for part in parts))
        return value

    def _special(self, special: Special, values: Mapping[str, Any], node: GraphNode) -> Any:
        if special.kind == "node":
            if special.text not in values:
                raise NotReplayable(f"node {node.name} reads {special.text!r}, which comes later")
            return values[special.text]
        if special.kind == "dtype":
            return self._place.cast(dtype_named(special.text))
        if special.kind == "device":
            return CPU
        if special.kind in ("layout", "memory_format"):
            return format_named(special.text)
        raise NotReplayable(f"node {node.name}: an argument is a {special.text[:60]}")


def is_random(node: GraphNode) -> bool:
    """Whether a node draws random numbers."""
    if node.kind not in ("call", "method"):
        return False
    last = node.target.removesuffix(".default").rpartition("aten.")[2]
    name = last.rpartition(".")[2] if "torch.ops" not in node.target else last
    return node.target in RANDOM or any(word in name and "backward" not in name for word in _RANDOM)


def nodes_read(node: GraphNode) -> list[str]:
    """The names of the nodes that a node reads."""
    found: list[str] = []
    todo: list[Any] = [node.args, node.kwargs]
    while todo:
        tree = todo.pop()
        if isinstance(tree, list):
            todo += tree
        elif isinstance(tree, dict):
            special = tree.get("special")
            if isinstance(special, list) and len(special) == 2 and special[0] == "node":
                found.append(str(special[1]))
            else:
                todo += tree.values()
    return found


def _checked(target: str, python: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs:
        raise NotReplayable("named arguments of a Python operator")
    if target in _OF_LISTS:
        if any(isinstance(arg, list | tuple) and len(arg) > _LONGEST for arg in args):
            raise NotReplayable("a list that is too long for sizes")
        return _checked_size(python(*args))
    if not all(isinstance(arg, torch.Tensor | int | float | complex | str) for arg in args):
        raise NotReplayable("a Python operator on what is no number and no tensor")
    if any(isinstance(arg, str) for arg in args):
        raise NotReplayable("a Python operator on text")
    alone = not any(isinstance(arg, torch.Tensor) for arg in args)
    if alone and target in ("operator.pow", "operator.lshift") and abs(args[-1]) > 64:
        raise NotReplayable("numbers too large for a size")
    return _checked_size(python(*args))


def _checked_size(value: Any) -> Any:
    """Whole numbers of a graph are sizes; one that is squared again and again has no end."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise NotReplayable("numbers too large for a size")
    return value


def _lowered(value: Any, dtype: str) -> Any:
    """A number in float64 in the dtype that a random operator was given it in."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float64 and dtype:
        wanted = dtype_named(dtype)
        return value.to(wanted) if wanted.is_floating_point else value.float()
    return value


def _nested_map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_nested_map(function, item) for item in value]
    return function(value)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_graph(value: Any) -> bool:
    return isinstance(value, Special) and value.kind == "graph"


def _no_tensor(name: str, body: Any) -> Any:
    raise ValueError("a tensor as an argument")


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value
