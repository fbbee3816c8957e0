"""One call computed somewhere else: its tensors go there by differentiable copies, and come back.

So autograd records the copies and the call as it ran, and the backward of the call runs there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._device import _device_constructors

from tensorprobe.devices import autocast_dtypes, device_layer
from tensorprobe.devices.autocast_lists import FLOAT32, FLOAT32_BY_DTYPE, LOW
from tensorprobe.follow.hidden_state import silently_written
from tensorprobe.follow.mode_stack import function_modes_off
from tensorprobe.follow.naming import ApiName, writes_in_place
from tensorprobe.follow.warning_filters import warnings_ignored
from tensorprobe.nests import leaves_of
from tensorprobe.replay.decompositions import vendor_op_formula
from tensorprobe.replay.references import find, registered
from tensorprobe.rerouting.targets import Target
from tensorprobe.torch_versions import default_device

VIEW = "it is a view, which computes nothing"
_MOVES = "it moves a tensor between devices, or hands it out, and computes nothing"
_SHAPES = "it changes a tensor's shape or memory in place, and computes nothing"
_REASONS = {
    _MOVES: """cpu cuda npu xpu hpu mps pin_memory numpy __array__ item tolist __deepcopy__ __bool__
        __int__ __float__ __complex__ __index__ __iter__ __reversed__ __dlpack__ record_stream
        is_nonzero save load from_numpy as_tensor asarray frombuffer from_dlpack""",
    _SHAPES: """t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ set_
        resize_as_ detach_ rename_ data.__set__ real.__set__ imag.__set__ _make_subclass""",
}
_AT_HOME = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_MAY_MOVE = ("to", "type", "type_as", "_to_copy")

_LOW = frozenset(name.partition(".")[0] for name in LOW.split())
_FLOAT32 = frozenset(
    [name.partition(".")[0] for name in (FLOAT32 + FLOAT32_BY_DTYPE).split()] + ["cross_entropy"]
)
# What a function can say when it is tried on tensors without content.
_META_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


def _run(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return func(*args, **kwargs)


class Call(NamedTuple):
    """A call that is about to be made."""

    api: ApiName
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run: Callable[[Any, tuple[Any, ...], Any], Any] = _run

    def make(self) -> Any:
        return self.run(self.func, self.args, self.kwargs)


def run_elsewhere(
    call: Call, target: Target, writes: frozenset[str] | None = None
) -> tuple[Any, str | None]:
    """The result of the call, computed at `target`; and the reason if it was computed at home.

    `writes`, below autograd where versions do not move, are the arguments that the op writes to.
    """
    reason = _why_at_home(call, target)
    if reason is not None:
        return call.make(), reason
    journey = _Journey(call, target)
    with function_modes_off():
        args, kwargs = journey.away()
    with journey.autocast():
        result = call.run(_formula(call, target) or call.func, args, kwargs)
    with function_modes_off():
        if journey.is_view_of_copies(result):
            return call.make(), VIEW
        journey.write_back(result, writes)
        return journey.home(result), None


def _formula(call: Call, target: Target) -> Callable[..., Any] | None:
    """What to call on another device for an op that has a kernel on its own only."""
    if target.device is None:
        return None
    op = call.api.op
    return find(op, registered()) or vendor_op_formula(op, call.kwargs)


def _why_at_home(call: Call, target: Target) -> str | None:
    if call.api.prefix == "Distributed":
        return "a collective belongs to the devices of its group"
    name = call.api.api.rpartition(".")[2]
    reason = _AT_HOME.get(name) or _AT_HOME.get(call.api.api)
    if reason is not None:
        return reason
    given = [*call.args[1:], *call.kwargs.values()]
    if name in _MAY_MOVE and any(
        isinstance(v, (torch.device, str, int, torch.Tensor)) and not isinstance(v, bool)
        for v in given
    ):
        return _MOVES
    for value in given:
        if isinstance(value, torch.Generator) and target.device not in (None, value.device.type):
            return f"it draws from a generator of {value.device}"
    return None


class _Copy(NamedTuple):
    """A tensor and its copy at the target; the same object if no copy was needed."""

    original: torch.Tensor
    there: torch.Tensor
    version: int | None  # None: the copy keeps none
    node: Any  # the copy's place in the graph before the call


class _Journey:
    """The way of one call's tensors to the target, and of its results back."""

    def __init__(self, call: Call, target: Target) -> None:
        self._call = call
        self._device = torch.device(target.device) if target.device else None
        self._dtype: torch.dtype | None = getattr(torch, target.dtype) if target.dtype else None
        self._makes_tensors = call.func in _constructors()
        self._home = self._find_home()
        self._autocast = autocast_dtypes()
        self._copies: dict[int, _Copy] = {}

    def _find_home(self) -> torch.device | None:
        """The device that the results go back to."""
        call = self._call
        asked = call.kwargs.get("device")
        if asked is not None:
            return torch.device(asked)
        found = [value for value in call.args if isinstance(value, torch.device)]
        found += [tensor.device for tensor in _tensors((call.args, call.kwargs))]
        if not found and self._makes_tensors:
            return default_device()
        # a number on the host may go with tensors of any device
        first = found[0] if found else None
        return next((device for device in found if not device_layer(device).is_host), first)

    # There

    def away(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call with."""
        args = tuple(map(self._send, self._call.args))
        kwargs = {name: self._send(value) for name, value in self._call.kwargs.items()}
        if self._device is not None and (kwargs.get("device") is not None or self._makes_tensors):
            kwargs["device"] = self._device
        dtype_is_free = self._makes_tensors and kwargs.get("dtype") is None
        # where it would make integers, the dtype is not ours to say
        if self._dtype is not None and dtype_is_free and self._plain_dtypes(1)[0] in _FLOATS:
            kwargs["dtype"] = self._dtype
        return args, kwargs

    def _send(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._send_tensor(value)
        if isinstance(value, torch.dtype):
            return self._raised(value)
        if isinstance(value, torch.device):
            return self._device or value
        if type(value) in (list, tuple, dict) or hasattr(value, "_fields"):
            return _map(value, self._send)
        return value

    def _send_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._copies.get(id(tensor))
        if known is not None:
            return known.there
        there = tensor
        if not tensor.is_meta:
            if self._device is not None and not _same_device(tensor.device, self._device):
                there = there.to(self._device)
            # the cast comes second: it is a kernel too, and belongs where the call runs
            there = there.to(self._raised(tensor.dtype))
        version = None if there.is_inference() else there._version
        self._copies[id(tensor)] = _Copy(tensor, there, version, there.grad_fn)
        return there

    def _raised(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in; never a narrower one."""
        wanted = self._dtype
        if wanted is None:
            return dtype
        if dtype.is_floating_point and dtype.itemsize < wanted.itemsize:
            return wanted
        if dtype.is_complex and dtype.itemsize < 2 * wanted.itemsize:
            return torch.complex128 if wanted is torch.float64 else torch.complex64
        return dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast would undo a higher precision; on another device it has to go on as it was."""
        if not self._autocast:
            return nullcontext()
        stack = ExitStack()
        if self._dtype is not None:
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
        elif self._device is not None and self._home is not None:
            low = self._autocast.get(self._home.type)
            stack.enter_context(
                torch.autocast(self._device.type, dtype=low, enabled=low is not None)
            )
        return stack

    # And back

    def is_view_of_copies(self, result: Any) -> bool:
        """Whether all that was returned is memory of copies, to which nothing was written."""
        found = list(_tensors(result))
        moved = [copy for copy in self._copies.values() if copy.there is not copy.original]
        if not found or not moved or "out" in self._call.kwargs:
            return False
        if writes_in_place(self._call.api) or any(
            copy.version is not None and copy.there._version != copy.version for copy in moved
        ):
            return False
        memory = {_storage(copy.there) for copy in moved} - {None}
        return all(_storage(tensor) in memory for tensor in found)

    def write_back(self, result: Any, writes: frozenset[str] | None) -> None:
        """Copy what the call wrote to its arguments back to the originals."""
        call = self._call
        silent = silently_written(call.api, call.args, call.kwargs) if writes is None else writes
        given = {**{str(i): arg for i, arg in enumerate(call.args)}, **call.kwargs}
        named = {id(t) for name in silent & given.keys() for t in _tensors(given[name])}
        returned = {id(tensor) for tensor in _tensors(result)}
        for original, there, version, node in list(self._copies.values()):
            if there is original:
                continue
            if version is not None:
                was_written = there._version != version
            else:
                was_written = id(there) in returned or self._is_named_as_written(original)
            if id(original) in named or (was_written and writes is None):
                # written without a trace in the graph, as torch.nn.init does: so be it here
                with torch.set_grad_enabled(there.grad_fn is not node and torch.is_grad_enabled()):
                    _write(original, there)

    def _is_named_as_written(self, tensor: torch.Tensor) -> bool:
        call = self._call
        where = [call.kwargs.get("out")]
        if writes_in_place(call.api):
            where.append(call.args[:1])
        return any(tensor is each for each in _tensors(where))

    def home(self, result: Any) -> Any:
        """The result on the home device, in the dtypes that the call gives there."""
        originals = {id(copy.there): copy.original for copy in self._copies.values()}
        found = list(_tensors(result))
        dtypes = iter(self._result_dtypes(len(found)))

        def bring(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                dtype = next(dtypes)
                known = originals.get(id(value))
                return known if known is not None else self._bring(value, dtype)
            if _is_container(value):
                return _map(value, bring)
            return value

        return bring(result)

    def _bring(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is None or not (
            (dtype.is_floating_point and tensor.is_floating_point())
            or (dtype.is_complex and tensor.is_complex())
        ):
            dtype = tensor.dtype
        device = tensor.device
        if self._device is not None and _same_device(device, self._device):
            device = self._home or device
        if device == tensor.device and dtype == tensor.dtype:
            return tensor
        if tensor.requires_grad and tensor.is_leaf:  # made by torch.zeros(requires_grad=True)
            return tensor.detach().to(dtype).to(device).requires_grad_()
        return tensor.to(dtype).to(device)

    def _result_dtypes(self, count: int) -> list[torch.dtype | None]:
        """The dtypes that the call returns at home, in order; None keeps the dtype it has."""
        low = self._autocast.get(self._home.type) if self._home is not None else None
        if low is None and not (self._makes_tensors or self._was_raised()):
            return [None] * count
        asked = [v for v in (*self._call.args, *self._call.kwargs.values())
                 if isinstance(v, torch.dtype)]  # fmt: skip
        if asked:
            return [asked[0]] * count
        if low is not None and self._home is not None:
            name = self._call.api.api.replace(".", "_")
            if name in _LOW:
                return [low] * count
            # the host's list is another one
            if name in _FLOAT32 and not device_layer(self._home).is_host:
                return [torch.float32] * count
        return self._plain_dtypes(count)

    def _was_raised(self) -> bool:
        """Whether a tensor or a dtype argument went there in another dtype."""
        return any(
            copy.there.dtype != copy.original.dtype for copy in self._copies.values()
        ) or any(
            isinstance(value, torch.dtype) and self._raised(value) != value
            for value in (*self._call.args, *self._call.kwargs.values())
        )

    def _plain_dtypes(self, count: int) -> list[torch.dtype | None]:
        """The dtypes that the call gives on tensors without content."""
        call = self._call
        with ExitStack() as stack:
            stack.enter_context(warnings_ignored())
            stack.enter_context(torch.no_grad())
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
            try:
                args, kwargs = _map(call.args, _hollow), _map(dict(call.kwargs), _hollow)
                if self._makes_tensors or kwargs.get("device") is not None:
                    kwargs["device"] = "meta"
                found = [tensor.dtype for tensor in _tensors(call.func(*args, **kwargs))]
            except _META_ERRORS:  # a kernel that needs content, or dtypes that only autocast joins
                found = []
        return [*found] if len(found) == count else [self._widest()] * count

    def _widest(self) -> torch.dtype | None:
        widest = None
        for tensor in _tensors((self._call.args, self._call.kwargs)):
            if tensor.is_floating_point() or tensor.is_complex():
                dtype = tensor.dtype
                widest = dtype if widest is None else torch.promote_types(widest, dtype)
        return widest


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _constructors() -> set[Any]:
    return _device_constructors()  # type: ignore[no-any-return]


def _same_device(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and wanted.index in (None, device.index)


def _write(original: torch.Tensor, there: torch.Tensor) -> None:
    if original.shape != there.shape:  # out= takes on the shape of the result
        original.resize_(there.shape)
    original.copy_(there.to(original.dtype))


def _hollow(value: Any) -> Any:
    """The argument with its tensors on the meta device, without content."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return _map(value, _hollow) if _is_container(value) else value


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and type(value) is not torch.Size


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with its items changed; the container itself when none is."""
    if isinstance(value, dict):
        items = {key: change(item) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value if type(value) is not dict else items
        return items if type(value) is dict else _same_kind_of_dict(value, items)
    items_list = [change(item) for item in value]
    if all(new is old for new, old in zip(items_list, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items_list)
    return type(value)(items_list)  # list, tuple, and torch.return_types.max and its like


def _same_kind_of_dict(value: Any, items: dict[Any, Any]) -> Any:
    twin = value.copy()
    twin.update(items)
    return twin


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, nested, wrappers
        return None
