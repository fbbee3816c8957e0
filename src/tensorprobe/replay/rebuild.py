"""A recorded call as a live one: the function, its arguments as they were, and their gradients."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.records import Call, Fields, Special, TensorRecord
from tensorprobe.replay.allowed import dtype_named, format_named, function_named, type_named
from tensorprobe.replay.decompositions import is_vendor_op
from tensorprobe.replay.dtype_defaults import keep_eps, keep_eps_of_module

# Where the content of a recorded tensor comes from: its file, or a generator.
Source = Callable[[TensorRecord], torch.Tensor]

DOUBLE: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


class ReplayPlace(NamedTuple):
    """Where a call is run, and in which precision; a dtype of None is the recorded one."""

    device: torch.device
    dtype: torch.dtype | None = None

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """What `dtype` becomes here: floating ones are raised, all others stay."""
        if self.dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        if dtype.is_complex:
            return DOUBLE[dtype] if self.dtype is torch.float64 else dtype
        return self.dtype


class LiveCall:
    """A call that can be run: `leaves` are the inputs whose gradients backward asks for."""

    def __init__(
        self,
        call: Call,
        place: ReplayPlace,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.call = call
        self.place = place
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tensors: dict[str, torch.Tensor] = {}  # what the function is given, by "input.0"
        self.leaves: dict[str, torch.Tensor] = {}  # where gradients arrive, by "input.0"

    def run(self) -> dict[str, torch.Tensor]:
        """Every tensor that comes out, by the name it has in a capture ("output.0")."""
        before = {name: tensor._version for name, tensor in self.tensors.items()}
        result = self.function(*self.args, **self.kwargs)
        mutated = {name: t for name, t in self.tensors.items() if t._version != before[name]}
        outputs = dict(tensors_in(result, "output"))
        if not outputs:  # the arguments after the call, as in `x[0] = y`
            return {f"output.{name.partition('.')[2]}": tensor for name, tensor in mutated.items()}
        returned = {id(tensor) for tensor in outputs.values()}
        written = {f"buffers.{name}": t for name, t in mutated.items() if id(t) not in returned}
        return {**outputs, **written}


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a result with the names a recorder gives them; a lone one is number 0."""
    if isinstance(value, torch.Tensor):
        yield f"{name}.0", value
    else:
        yield from _nested(value, name)


def _nested(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(item, f"{name}.{key}")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, item in zip(value._fields, value, strict=True):
            yield from _nested(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _nested(item, f"{name}.{i}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _nested(getattr(value, field.name, None), f"{name}.{field.name}")


def load(record: TensorRecord) -> torch.Tensor:
    """The recorded content, or the reason why there is none."""
    if record.blob is None:
        why = record.gap or "the capture keeps no tensors: record with keep='tensors'"
        raise NotReplayable(f"{record.name} has no stored content: {why}")
    try:
        return record.load()
    except UnreadableCapture as error:
        why = str(error).removeprefix(f"{record.name}: ")
        raise NotReplayable(f"{record.name} cannot be read: {why}") from error


def remember(source: Source) -> Source:
    """A source that reads each tensor once."""
    known: dict[str, torch.Tensor] = {}

    def remembered(record: TensorRecord) -> torch.Tensor:
        if record.name not in known:
            known[record.name] = source(record)
        return known[record.name]

    return remembered


def rebuild(
    call: Call,
    place: ReplayPlace,
    *,
    grad: bool = False,
    source: Source = load,
    function: Callable[..., Any] | None = None,
) -> LiveCall:
    """The live call for a forward call of a capture; raises NotReplayable with the reason."""
    refuse(call)
    builder = _Builder(call, place, grad, source)
    try:
        if call.name.startswith("Module."):
            function = builder.module()
        elif function is None:
            function = _function_at(place, call.op)
        args = tuple(builder.value(arg, f"argument {i}") for i, arg in enumerate(call.args))
        kwargs = {key: builder.value(value, key) for key, value in call.kwargs.items()}
        args, kwargs = keep_eps(call, args, kwargs)
    except NotReplayable:
        raise
    except Exception as error:  # replaying one call: what its record says cannot be made
        raise cannot_run(call, error) from error
    live = LiveCall(call, place, function, args, kwargs)
    live.tensors, live.leaves = builder.tensors, builder.leaves
    return live


def cannot_run(call: Call, error: Exception) -> NotReplayable:
    """What a call raised as the reason why it has no replay; a line of it."""
    text = str(error).strip().partition("\n")[0][:160]
    return NotReplayable(f"{call.name} does not run on the CPU: {type(error).__name__}: {text}")


# Functions

_REFUSED_PREFIXES = {
    "Distributed": "a collective needs the other ranks",
    "Optimizer": "an optimizer step is many calls; those inside it can be replayed",
    "Saved": "a saved value is no call",
    "Function": "of a custom autograd.Function only the graph node is seen, not its inputs",
}
_TRANSFERS = frozenset(f"torch.Tensor.{name}" for name in ("cpu", "cuda", "npu", "xpu"))


def refuse(call: Call) -> None:
    """Raise where no replay of this call can mean anything."""
    reason = _REFUSED_PREFIXES.get(call.name.partition(".")[0])
    if reason is None and ".parameters_grad." in call.name:
        reason = "these are the gradients of parameters, not a call"
    if reason is None and any(note.startswith("compiled:") for note in call.notes):
        reason = "it is a compiled region: the calls inside are not visible"
    if reason is None and call.status == "begun" and not call.tensors:
        reason = "the run ended before its inputs were written"
    if reason is not None:
        raise NotReplayable(f"{call.name} cannot be run alone: {reason}")


def check_callable(op: str) -> None:
    """NotReplayable unless a call of this op may be run here, or where its vendor's library is."""
    if op not in _TRANSFERS and not is_vendor_op(op):
        function_named(op)


def _function_at(place: ReplayPlace, op: str) -> Callable[..., Any]:
    """Transfers (`.cuda()`) go to where the call is run: the copy is all there is to them."""
    if op not in _TRANSFERS:
        return function_named(op)

    def transfer(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.to(place.device, copy=True)

    return transfer


# Arguments

_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|privateuseone)(:[0-9]{1,4})?")


def is_device(text: str) -> bool:
    """Whether a text names a device: cuda, npu:1."""
    return _DEVICE.fullmatch(text) is not None


def device_type(text: str) -> str:
    """The kind of a recorded device; cpu for what is none."""
    return text.partition(":")[0] if is_device(text) else "cpu"


def numpy_number(text: str) -> int | float | None:
    """The number that a scalar of numpy was recorded as; None for what is none."""
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return None


class _Builder:
    """Turns the trees of one call into values on one place."""

    def __init__(self, call: Call, place: ReplayPlace, grad: bool, source: Source) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self._call = call
        self._place = place
        self._grad = grad
        self._source = source

    def value(self, tree: Any, where: str) -> Any:
        if isinstance(tree, TensorRecord):
            return self.tensor(tree)
        if isinstance(tree, list):
            return [self.value(item, where) for item in tree]
        if isinstance(tree, tuple):
            return tuple(self.value(item, where) for item in tree)
        if isinstance(tree, dict):
            return {key: self.value(item, where) for key, item in tree.items()}
        if isinstance(tree, slice):
            parts = (self.value(part, where) for part in (tree.start, tree.stop, tree.step))
            return slice(*parts)
        if isinstance(tree, Special):
            return self._special(tree, where)
        if isinstance(tree, Fields):
            return self._fields(tree, where)
        if isinstance(tree, str) and self._is_device(tree, where):
            return self._place.device
        return tree

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The live tensor of a record; the same object where the record says so."""
        name = record.name.removeprefix(self._call.name + ".")
        same = (record.alias_of or "").removeprefix(self._call.name + ".")
        if same in self.tensors:
            return self.tensors[same]
        content = self._source(record)
        dtype = self._place.cast(content.dtype)
        moved = content.to(self._place.device, dtype)
        if moved is content:  # the source may hand it out again, and this call may write to it
            moved = content.clone()
        tensor = with_stride(moved, record.stride)
        floats = tensor.is_floating_point() or tensor.is_complex()
        if self._grad and record.requires_grad and floats:
            leaf = tensor.requires_grad_()
            self.leaves[name] = leaf
            tensor = _writable(leaf)
        self.tensors[name] = tensor
        return tensor

    def module(self) -> Callable[..., Any]:
        """A module call: the module made anew, given the recorded parameters and buffers."""
        from tensorprobe.replay.modules import build_module

        module = build_module(self._call)
        keep_eps_of_module(self._call, module)
        if self._place.dtype is not None:
            module = module.to(self._place.dtype)
        module = module.to(self._place.device)
        state = {}
        for record in self._call.tensors:
            name = record.name.removeprefix(self._call.name + ".")
            section, _, inner = name.partition(".")
            if section == "parameters" or (section == "buffers" and _is_of_module(inner)):
                state[inner] = self.tensor(record)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, state, args, kwargs)

        return forward

    def _special(self, special: Special, where: str) -> Any:
        kind, text = special.kind, special.text
        if kind == "dtype":
            return self._place.cast(dtype_named(text))
        if kind == "device":
            return self._place.device
        if kind in ("layout", "memory_format"):
            return format_named(text)
        if kind == "generator":
            return None  # the default generator, at the recorded state where there is one
        if kind == "numpy" and (number := numpy_number(text)) is not None:
            return number
        raise NotReplayable(
            f"{self._call.name} cannot be run alone: {where} is a {kind} ({text}), "
            "of which only the name was recorded"
        )

    def _fields(self, fields: Fields, where: str) -> Any:
        values = {key: self.value(item, where) for key, item in fields.fields.items()}
        if fields.kind == "mapping":
            return values
        kind = type_named(fields.type)
        if hasattr(kind, "n_fields"):  # torch.return_types
            return kind(tuple(values.values()))
        return kind(**values)

    def _is_device(self, text: str, where: str) -> bool:
        named = where == "device" or self._call.op == "torch.Tensor.to"
        return named and is_device(text)


def _is_of_module(buffer: str) -> bool:
    """The recorder keeps more under that name: random state, written arguments, and what the
    call left in the module's own buffers."""
    return buffer != "rng_state" and not buffer.startswith("input.") and buffer[-6:] != ".after"


_WIDEST = 4096  # memory that a view may reach over, in elements for each that it has


def with_stride(content: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """The same numbers laid out in memory as they were: transposed, expanded, with gaps.

    Numbers that were moved, each for itself, can share no memory: they stay as they are.
    """
    if stride is None or stride == content.stride() or content.numel() == 0:
        return content
    shape = content.shape
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if span > _WIDEST * max(content.numel(), 1 << 20):
        raise NotReplayable(f"a stride of {stride} for the shape {tuple(shape)} cannot be laid out")
    memory = content.new_zeros(span)
    laid = memory.as_strided(shape, stride)
    if not _overlaps(laid):
        laid.copy_(content)
        return laid
    place = torch.zeros(
        (), dtype=torch.int64, device=content.device
    )  # elements share memory: write each to its place
    for axis, (n, step) in enumerate(zip(shape, stride, strict=True)):
        along = torch.arange(n, device=content.device) * step
        place = place + along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    memory[place.expand(shape).reshape(-1)] = content.reshape(-1)
    if content.dtype == torch.float64 and not torch.equal(laid, content):
        return content
    return laid


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: a step is not longer than all the steps below it."""
    reach = 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for step, n in sorted((step, n) for step, n in steps if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _writable(leaf: torch.Tensor) -> torch.Tensor:
    """What a call may write to in place and still send its gradient to the leaf; same layout."""
    if _overlaps(leaf):
        return leaf  # shares memory with itself: torch lets nobody write to it
    copy = leaf.clone()
    if copy.stride() == leaf.stride() or leaf.numel() == 0:
        return copy
    span = 1 + sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.as_strided((span,), (1,)).clone().as_strided(leaf.shape, leaf.stride())
