"""How a module was made, as notes on its call: what a replay needs to make it again."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from tensorprobe.follow.quiet import Quiet
from tensorprobe.records import REDUCES_GRADIENTS
from tensorprobe.store.collective_lines import pack_ranks
from tensorprobe.trouble import OnTrouble

_OPAQUE = object()
_LONGEST = 200  # characters of one attribute
_MOST = 4000  # characters of a note
_NOT_ITS_OWN = frozenset(nn.Module().__dict__)
# These only hold other modules and are not called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_ASKED = {"training", "_parameters", "_buffers", "_modules"}  # scripted ones may lack them
# Parameters that a signature does not name, and attributes that have another name.
_UNNAMED: dict[str, dict[str, Any]] = {"RNN": {"nonlinearity": "tanh"}}
_KEPT_AS = {("PairwiseDistance", "p"): "norm"}
# Modules of torch.nn that use the parameters of a Linear they hold, but never call it.
_UNCALLED = {"MultiheadAttention": "out_proj", "LinearCrossEntropyLoss": "linear"}
_REDUCERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_ATOMS = frozenset([type(None), bool, int, float, str, torch.dtype, torch.device])
_CONSTANT = _ATOMS | {tuple, type, FunctionType, BuiltinFunctionType}


def notes_on(module: nn.Module) -> list[str]:
    """`made as` for torch.nn's own without children, `made with` for all others; and `eval`."""
    note = None
    with OnTrouble(lambda error: None), Quiet():  # a user's repr that raises is no gap of the call
        if module._modules or not type(module).__module__.startswith("torch.nn.modules."):
            note = _made_with(module)
        else:
            note = _made_as(module)
    reduced = _reduces(module)
    if note is None:
        return reduced
    notes = [*reduced, note] if len(note) <= _MOST else reduced
    return notes if module.training else [*notes, "eval"]


def _reduces(module: nn.Module) -> list[str]:
    """What a wrapper that reduces gradients outside of any call, in C++ or in hooks, says of it."""
    if type(module).__name__ not in _REDUCERS:
        return []
    with OnTrouble(lambda error: None), Quiet():
        group: Any = module.process_group
        ranks = pack_ranks(tuple(torch.distributed.get_process_group_ranks(group)))
        hooks = [hook for hook, _ in getattr(module, "_comm_hooks", ())]
        hooks += filter(None, [getattr(module, "_comm_hook", None)])
        named = ", ".join(f"{hook.__module__}.{hook.__qualname__}" for hook in hooks)
        return [f"{REDUCES_GRADIENTS}{ranks}, group {group.group_name}, hook {named or 'none'}"]
    return []


class MadeNotes:
    """The notes on modules, each worked out anew only when what it says may have changed."""

    _LIMIT = 20_000  # modules made anew for every call would fill the table without end

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, module: nn.Module) -> list[str]:
        """The notes on a module, as `notes_on` gives them."""
        known = self._known.get(id(module))
        if known is not None and known.holds_for(module):
            return known.notes
        notes = notes_on(module)
        if _can_be_kept(module) and type(module).__name__ not in _REDUCERS:
            if len(self._known) >= self._LIMIT:
                self._known.clear()
            self._known[id(module)] = _Known(module, notes)
        return notes

    def told(self, module: nn.Module) -> tuple[Any, ...] | None:
        """What `of` keeps of a module, for C++ to ask the same; None where it keeps nothing."""
        known = self._known.get(id(module))
        return known.told() if known is not None and known.holds_for(module) else None


class _Known:
    """Notes on a module, with all they say: values that cannot change, of others the type.

    It is asked at every call, so it is asked in C. Values are held against each other by identity:
    `==` of a tensor would be a call of the program, and 1 == True.
    """

    __slots__ = (
        "_constants",
        "_holders",
        "_kind",
        "_kinds",
        "_n_names",
        "_names",
        "_others",
        "_reference",
        "_values",
        "notes",
    )

    def __init__(self, module: nn.Module, notes: list[str]) -> None:
        held = module.__dict__
        own = _own(module)
        constants = [name for name, value in own if type(value) in _CONSTANT]
        others = [name for name, value in own if type(value) not in _CONSTANT]
        self.notes = notes
        self._reference = weakref.ref(module)
        self._kind = type(module)
        self._n_names = len(held)
        self._names = ("training", "training", *constants), tuple(others)
        # two names at least, or an itemgetter gives no tuple
        self._constants = itemgetter("training", "training", *constants)
        self._values = self._constants(held)
        self._others = itemgetter("_parameters", "_buffers", "_modules", *others)
        self._holders = [name for name, _ in _holders_in(module)]
        self._kinds = self._kinds_of(held)

    def holds_for(self, module: nn.Module) -> bool:
        """Whether they are what `notes_on` would give now."""
        held = module.__dict__
        if self._reference() is not module or type(module) is not self._kind:
            return False
        try:
            return (
                len(held) == self._n_names
                and all(map(is_, self._constants(held), self._values))
                and self._kinds_of(held) == self._kinds
            )
        except KeyError:  # one attribute is gone, and another new
            return False

    def told(self) -> tuple[Any, ...]:
        """The notes and all that `holds_for` compares, in the order that native/making.h has."""
        names, others = self._names
        holders = tuple(self._holders)
        return self.notes, self._n_names, names, self._values, others, self._kinds, holders

    def _kinds_of(self, held: dict[str, Any]) -> tuple[Any, ...]:
        """The types of attributes, and of parameters, buffers and children; None has one too."""
        parameters, buffers, children, *others = self._others(held)
        return (
            (*parameters, *map(type, parameters.values())) if parameters else None,
            (*buffers, *map(type, buffers.values())) if buffers else None,
            (*children, *map(type, children.values())) if children else None,
            [*map(type, others)] if others else None,
            [_kinds_in(children.get(name)) for name in self._holders] if self._holders else None,
        )


def _kinds_in(holder: Any) -> list[Any]:
    return [] if holder is None else [*holder._modules, *map(type, holder._modules.values())]


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that not every module has."""
    return [item for item in module.__dict__.items() if item[0] not in _NOT_ITS_OWN]


def _holders_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    held = module._modules.items()
    return [(name, child) for name, child in held if isinstance(child, _HOLDERS)]


def _can_be_kept(module: nn.Module) -> bool:
    """Whether `_Known` sees every change of what the notes say."""
    held = module.__dict__.keys()
    if type(module).__name__ in _UNCALLED or "extra_repr" in held or not held >= _ASKED:
        return False
    if any(_holders_in(holder) for _, holder in _holders_in(module)):
        return False
    return all(_shows_change(value) for _, value in _own(module))


def _shows_change(value: Any) -> bool:
    """Whether a note says something else of an attribute only when its identity or type changes."""
    kind = type(value)
    if kind is tuple:
        return all(type(item) in _ATOMS for item in value)
    if kind is FunctionType and value.__closure__:
        return False  # held here, it would hold what it closes over: the module itself, perhaps
    return kind in _CONSTANT or not (kind is list or callable(value))


def uses_uncalled(module: nn.Module) -> bool:
    """Whether this module uses the parameters of a child without calling it."""
    return type(module).__name__ in _UNCALLED


def uncalled_parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a child that its parent uses without calling it."""
    name = _UNCALLED.get(type(module).__name__)
    child = module._modules.get(name) if name is not None else None
    if child is None:
        return []
    held = child._parameters.items()
    return [(f"{name}.{key}", tensor) for key, tensor in held if tensor is not None]


def _made_as(module: nn.Module) -> str:
    """The call of its constructor: what torch prints of it, and what that leaves out."""
    kind: Any = type(module)
    parameters = _parameters_of(kind)
    text = module.extra_repr()
    for name in parameters:
        value = module.__dict__.get(name)
        if isinstance(value, str):  # a convolution prints padding=same
            text = text.replace(f"{name}={value}", f"{name}={value!r}")
    shown, covered = _printed(kind, text)
    left_out = []
    for name, default in {**parameters, **_UNNAMED.get(kind.__name__, {})}.items():
        value = module.__dict__.get(_KEPT_AS.get((kind.__name__, name), name), default)
        if name not in covered and _differs(value, default):
            source = _source(value)
            if source is not _OPAQUE:
                left_out.append(f"{name}={source}")
    return f"made as {kind.__name__}({', '.join([*shown, *left_out])})"


@functools.cache
def _parameters_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """The constructor's parameters and their defaults."""
    parameters = inspect.signature(kind).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


@functools.lru_cache(maxsize=4096)
def _printed(kind: Callable[..., Any], text: str) -> tuple[list[str], frozenset[str]]:
    """The arguments in a printed form, and which parameters of the constructor they are."""
    try:
        call = ast.parse(f"made({text})", mode="eval").body
    except SyntaxError:
        return [], frozenset()
    assert isinstance(call, ast.Call)
    names = list(_parameters_of(kind))
    takes_any = "kwargs" in names  # the recurrent ones
    words = {word.arg: word.value for word in call.keywords if takes_any or word.arg in names}
    shown = [ast.unparse(arg) for arg in call.args]
    shown += [f"{name}={ast.unparse(value)}" for name, value in words.items()]
    return shown, frozenset([*names[: len(call.args)], *filter(None, words)])


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, tuple) and all(item == default for item in value):
        return False  # a convolution keeps dilation=1 as (1, 1)
    plain = isinstance(value, bool | int | float | str | tuple | list | None)
    return plain and (type(value) is not type(default) or value != default)


def _made_with(module: nn.Module) -> str:
    """Its class with attributes and children: made again without its constructor."""
    absent = [*module._parameters.items(), *module._buffers.items()]
    attributes = [f"{name!r}: None" for name, tensor in absent if tensor is None]
    opaque = []
    for name, value in module.__dict__.items():
        if name in _NOT_ITS_OWN or isinstance(value, torch.Tensor):
            continue
        source = _source(value)
        if source is _OPAQUE or len(source) > _LONGEST:
            opaque.append(name)
        else:
            attributes.append(f"{name!r}: {source}")
    parts = [f"{{{', '.join(attributes)}}}", _children(module), repr(opaque)]
    return f"made with {_name_of(type(module))}({', '.join(parts)})"


def _children(module: nn.Module) -> str:
    """{'up': 'torch.nn.modules.linear.Linear', 'layers': {'0': ...}}"""
    shown = []
    uncalled = _UNCALLED.get(type(module).__name__)
    for name, child in module._modules.items():
        if child is None:
            text = "None"
        elif name == uncalled:
            text = repr(f"made as torch.nn.Linear({child.extra_repr()})")
        elif isinstance(child, _HOLDERS):
            kind = _name_of(type(child))
            text = f"{{'': {kind!r}, {_children(child).removeprefix('{')}"
        else:
            text = repr(_name_of(type(child)))
        shown.append(f"{name!r}: {text}")
    return f"{{{', '.join(shown)}}}"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source(value: Any) -> Any:
    """A value as the Python that gives it, or _OPAQUE."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if kind in (tuple, list):
        parts = [_source(item) for item in value]
        if any(part is _OPAQUE for part in parts):
            return _OPAQUE
        inside = ", ".join(parts)
        if kind is list:
            return f"[{inside}]"
        return f"({inside},)" if len(parts) == 1 else f"({inside})"
    if kind in (torch.dtype, torch.device):
        return repr(str(value)) if kind is torch.device else str(value)
    return _function(value) if callable(value) else _OPAQUE


def _function(value: Any) -> Any:
    """A function by its name, where that name leads to it: torch.nn.functional.relu."""
    name = getattr(value, "__name__", "")
    for home in (getattr(value, "__module__", None) or "", "torch", "torch.nn.functional"):
        if name and getattr(sys.modules.get(home), name, None) is value and home != "__main__":
            return f"{home}.{name}"
    return _OPAQUE
