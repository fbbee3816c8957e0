"""The same start for two runs: weights, buffers, random states and the first batches.

What is saved is a capture like any other: `tensorprobe show DIR` lists it.
"""

from __future__ import annotations

import abc
import copy
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tensorprobe import torch_versions
from tensorprobe.config import RecordConfig, format_numbers
from tensorprobe.devices import current_rank, device_layer, device_types
from tensorprobe.errors import (
    BadUsage,
    NothingRecorded,
    RecordingStopped,
    TensorprobeError,
    UnreadableCapture,
    WriteFailed,
)
from tensorprobe.follow.function_mode import name_of
from tensorprobe.follow.mode_stack import add_mode, remove_mode
from tensorprobe.follow.naming import ApiName, CallNames, Namer, call_name
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.stand_ins import StandIns, is_tracing
from tensorprobe.follow.tracebacks import clean
from tensorprobe.record.encode import map_tensors
from tensorprobe.record.facts import environment_facts
from tensorprobe.record.recorder import Recorder, say
from tensorprobe.record.selection import Selection
from tensorprobe.record.tape import Tape
from tensorprobe.record.values import Values
from tensorprobe.records import Call, Capture, TensorRecord
from tensorprobe.store.claim import run_identity
from tensorprobe.store.loading import load
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.summarizer import Summarizer
from tensorprobe.trouble import OnTrouble

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module"}
_WRAPPERS["OptimizedModule"] = "_orig_mod"  # what torch.compile makes
_RNG = "rng"
_OF_THE_HOST = ("python", "numpy", "torch")  # whose random states are always there
_NAMES_SHOWN = 6


class _Depth(threading.local):
    modules = 0


class StartState(abc.ABC):
    """Meets the program where its data enters: calls of root modules, and calls outside of modules
    that bring data together with what was computed (a loss and its targets).

    Everything a program feeds in passes there, so no data loader is touched.
    """

    def __init__(self) -> None:
        self.problem: BadUsage | None = None  # that ends the program
        self.failed: TensorprobeError | None = None  # nothing of it is the program's trouble
        self._depth = _Depth()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._counts: dict[str, int] = {}
        self._outputs: dict[int, StorageWeakRef] = {}
        self._mode = _MeetingMode(self)
        self._handles = [
            register_module_forward_pre_hook(self._enter),  # type: ignore[arg-type]
            register_module_forward_hook(self._leave, always_call=True),
        ]
        add_mode(self._mode)

    def close(self) -> None:
        """Leave the program alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        remove_mode(self._mode)

    # What a run does with what it meets

    @abc.abstractmethod
    def _first_call(self) -> None:
        """Called before the first module of the program computes anything."""

    @abc.abstractmethod
    def _over(self) -> bool:
        """Whether nothing more is to be met."""

    @abc.abstractmethod
    def _root_called(self, api: ApiName, number: int, module: nn.Module, data: _Data) -> None:
        """A root module is about to be called with this data."""

    @abc.abstractmethod
    def _data_met(self, api: ApiName, number: int, data: _Data) -> None:
        """A call outside of modules brings this data."""

    # Where it is met

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._depth.modules += 1
        if self._depth.modules > 1 or _is_followed() or not self._handles:
            return None
        try:
            return self._enter_root(module, args, sys._getframe(1).f_locals.get("kwargs") or {})
        except BadUsage as error:
            self.problem = error  # said at the end; the program must not be able to catch it
            raise SystemExit(2) from None

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth.modules = max(0, self._depth.modules - 1)
        if self._depth.modules == 0 and not _is_followed():
            with Quiet():
                map_tensors(result, lambda tensor, _: self._remember(tensor))

    def _enter_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        if not self._roots:
            with Quiet():
                self._first_call()
        if self._over():
            self.close()
            return None
        if _get_current_function_mode_stack()[-1:] != [self._mode]:
            # the recorder's came later: data must be met before it is recorded
            remove_mode(self._mode)
            add_mode(self._mode)
        inner = unwrapped(module)
        kind = type(inner)
        place = f"{self._root(inner)}.{kind.__name__}"
        api = ApiName("Start", place, f"{kind.__module__}.{kind.__qualname__}")
        with Quiet():
            data = _Data(args, kwargs, self._is_computed)
            self._root_called(api, self._next(api), inner, data)
        return data.args if data.replaced else None

    def call_met(self, api: ApiName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Data | None:
        """A torch call of the program, made outside of modules; None when it brings no data."""
        if self._depth.modules or not self._roots or not torch.is_grad_enabled():
            return None
        with Quiet():
            data = _Data(args, kwargs, self._is_computed)
            if not data.computed or not data.found:
                return None
            self._data_met(api, self._next(api), data)
        return data

    def _root(self, module: nn.Module) -> int:
        for number, reference in enumerate(self._roots):
            if reference() is module:
                return number
        self._roots.append(weakref.ref(module))
        return len(self._roots) - 1

    def _next(self, api: ApiName) -> int:
        number = self._counts.get(api.stem, 0)
        self._counts[api.stem] = number + 1
        return number

    def _remember(self, tensor: torch.Tensor) -> None:
        """This storage holds a result: `fake.detach()` is none of the program's data."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._outputs[storage._cdata] = StorageWeakRef(storage)

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return True
        if tensor.layout is not torch.strided:
            return True  # carried as it is: only plain tensors can be replaced
        known = self._outputs.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()


class _Data:
    """The arguments of one call, and which tensors in them are data."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_computed: Callable[[torch.Tensor], bool],
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.found: dict[str, torch.Tensor] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self.computed = False
        self.replaced = False

        def visit(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
            if is_computed(tensor):
                self.computed = True
            else:
                name = ".".join(path)
                self.found[name] = tensor
                self._paths[name] = path

        map_tensors([*args], visit)
        map_tensors(kwargs, visit)

    def put(self, name: str, saved: torch.Tensor) -> None:
        """Let the call have this instead; the program's own data is never written to, for it may
        be a file on the disk."""
        live = self.found[name]
        new = saved.to(live.device, live.dtype if live.is_floating_point() else saved.dtype)
        self.replaced = True
        top, *path = self._paths[name]
        if top in self.kwargs:
            self.kwargs[top] = _with(self.kwargs[top], path, new)
        else:
            at = int(top)
            self.args = (*self.args[:at], _with(self.args[at], path, new), *self.args[at + 1 :])


def _is_followed() -> bool:
    """Whether torch compiles or traces the program: whatever is asked of a tensor is part of it."""
    return torch_versions.is_compiling() or is_tracing()


class _MeetingMode(TorchFunctionMode):
    """Shows the calls outside of modules to a StartState."""

    def __init__(self, start: StartState) -> None:
        super().__init__()
        self._start = start
        self._namer = Namer(name_of)
        self._make = StandIns().make

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_versions.is_dynamo_compiling():  # dynamo traces this line
            return func(*args, **kwargs)
        try:
            frame = sys._getframe().f_back
            if _is_followed():
                return self._make(func, args, kwargs, frame)
            data = self._start.call_met(self._namer(func), args, kwargs)
            if data is not None:
                args, kwargs = data.args, data.kwargs
            return self._make(func, args, kwargs, frame)
        except BaseException as error:
            clean(error)
            raise


class SaveStart(StartState):
    """Saves the start of this run. `batches`: of how many calls of the first model the inputs are
    saved; None for those of the steps that `recorder` records, or of the first step."""

    def __init__(self, path: Path, recorder: Recorder, batches: int | None) -> None:
        super().__init__()
        self._path = path
        self._recorder = recorder
        self._batches = batches
        self._last_step = (recorder.config.steps or (0,))[-1]
        self._n_calls = 0
        self._tape: Tape | None = None
        self._writer: CaptureWriter | None = None

    def _enter_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        if self.failed is not None:
            self.close()
            return None
        with OnTrouble(self._stop):
            return super()._enter_root(module, args, kwargs)
        return None

    def call_met(self, api: ApiName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Data | None:
        """A torch call of the program, made outside of modules; nothing of it is changed."""
        with OnTrouble(self._stop):
            super().call_met(api, args, kwargs)
        return None

    def _stop(self, error: Exception) -> None:
        """The program goes on, and its start is not saved."""
        self._fail(RecordingStopped(f"{type(error).__name__}: {error}"))

    def _fail(self, problem: TensorprobeError) -> None:
        """The start cannot be saved: say so, once."""
        if self.failed is None:
            self.failed = problem
            say(f"the start could not be saved to '{self._path}': {problem}")

    def _first_call(self) -> None:
        config = RecordConfig.make(keep="tensors", stacks=False)
        facts = environment_facts()
        summarizer = Summarizer(stats=True, digest=True)
        self._writer = writer = CaptureWriter(
            self._path,
            current_rank(),
            run_identity(os.environ),
            {**facts, "start": True},
            facts,
            results=summarizer,
            on_warning=say,
            on_error=lambda error: self._fail(WriteFailed(str(error))),
        )
        self._tape = Tape(config, Selection(config), writer, Values(writer, summarizer))
        self._tape.begin_step(0, True)
        self._write(ApiName("Start", _RNG, _RNG), 0, (), _random_states())

    def _over(self) -> bool:
        if self._batches is not None:
            return self._n_calls > self._batches or (self._batches == 0 and self._n_calls > 0)
        if self._recorder.is_over:  # also where this rank is not recorded: weights only, then
            return self._n_calls > 0
        return self._recorder.current_step > self._last_step

    def _root_called(self, api: ApiName, number: int, module: nn.Module, data: _Data) -> None:
        self._n_calls += api.api.startswith("0.")
        named = {} if number else {"parameters": parameters(module), "buffers": buffers(module)}
        if self._batches is None or self._n_calls <= self._batches:
            self._write(api, number, (), data.found, **named)
        elif named:
            self._write(api, number, (), {}, **named)

    def _data_met(self, api: ApiName, number: int, data: _Data) -> None:
        if not self._over():
            self._write(_outside(api), number, (), data.found)

    def _write(
        self, api: ApiName, number: int, args: tuple[Any, ...], kwargs: Any, **named: Any
    ) -> None:
        assert self._tape is not None
        call = self._tape.begin(CallNames(api, call_name(api, number)), args, kwargs, **named)
        if call is not None:
            self._tape.end(call, None)

    def close(self) -> None:
        super().close()
        writer, self._writer = self._writer, None
        if writer is None:
            if self._tape is None and self.failed is None:
                self.failed = NothingRecorded(
                    f"no start was saved to '{self._path}': the program called no module"
                )
                say(str(self.failed))
            return
        writer.close()
        if self.failed is not None:
            return
        models = ", ".join(type(m).__name__ for ref in self._roots if (m := ref()) is not None)
        say(
            f"saved the start (weights and inputs of {models or 'the models'}, random states) to "
            f"'{self._path}'. Next, on the other side: tensorprobe run --load-start {self._path}"
        )


class LoadStart(StartState):
    """Lets this run begin as the one that saved its start."""

    def __init__(self, path: Path) -> None:
        self._saved = _read_start(path)
        super().__init__()
        self._path = path
        self._told = False

    def _first_call(self) -> None:
        self._calls = {call.name: call for call in self._saved.calls(rank=current_rank())}
        if not self._calls:
            raise BadUsage(
                f"the start in '{self._path}' has ranks {format_numbers(self._saved.ranks)}, "
                f"this is rank {current_rank()}: save it with as many processes"
            )
        rng = self._calls.get("Start.rng.0.forward")
        if rng is not None:
            _restore_random_states(rng.kwargs)

    def _over(self) -> bool:
        return self._told

    def _root_called(self, api: ApiName, number: int, module: nn.Module, data: _Data) -> None:
        call = self._calls.get(call_name(api, number))
        if call is None:
            self._check_known(api, number)
            return
        if number == 0:
            _load_tensors(module, call, self._path)
        self._put(call, data)

    def _check_known(self, api: ApiName, number: int) -> None:
        place = api.api.partition(".")[0]
        other = next((name for name in self._calls if name.startswith(f"Start.{place}.")), None)
        if number == 0 and other is not None:
            raise BadUsage(
                f"the start in '{self._path}' was saved by another program: there module {place} "
                f"was a {other.split('.')[2]}, here it is a {api.api.partition('.')[2]}"
            )
        if number > 0 and place == "0":
            self._told = True
            say(
                f"the saved start has {number} batch{'' if number == 1 else 'es'}: "
                "from here on this run's own data is used"
            )

    def _data_met(self, api: ApiName, number: int, data: _Data) -> None:
        call = self._calls.get(call_name(_outside(api), number))
        if call is not None:
            self._put(call, data)

    def _put(self, call: Call, data: _Data) -> None:
        for name, saved in call.kwargs.items():
            if isinstance(saved, TensorRecord) and name in data.found:
                data.put(name, saved.load())


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, DataParallel and torch.compile's module."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        module = getattr(module, attribute)
    return module


def parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters, tied ones under each of their names."""
    return list(module.named_parameters(remove_duplicate=False))


def buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All buffers, those that a state_dict leaves out too."""
    return list(module.named_buffers(remove_duplicate=False))


def _outside(api: ApiName) -> ApiName:
    return ApiName("Start", f"outside.{api.stem}", api.op)


def _read_start(path: Path) -> Capture:
    if not path.exists():
        raise BadUsage(
            f"--load-start: there is no '{path}'. To save one: tensorprobe run --save-start {path}"
        )
    try:
        saved = load(path)
    except UnreadableCapture as error:
        raise BadUsage(f"--load-start: {error}") from error
    if not saved.facts.get("start"):
        raise BadUsage(f"'{path}' is a capture, but no start: make one with --save-start")
    return saved


def _load_tensors(module: nn.Module, call: Call, path: Path) -> None:
    """Copy weights and buffers in place: optimizers hold the same tensors."""
    prefix = {
        "parameter": f"{call.name}.parameters.",
        "buffer": f"{call.name}.buffers.",
    }
    saved = {
        record.name.removeprefix(prefix[record.role]): record
        for record in call.tensors
        if record.role in prefix
    }
    live = dict([*parameters(module), *buffers(module)])
    problems = [
        *_named("only in the saved start", saved.keys() - live.keys()),
        *_named("only in this model", live.keys() - saved.keys()),
        *_named(
            "of another shape",
            {
                f"{name} {list(saved[name].shape)} saved, {list(live[name].shape)} here"
                for name in saved.keys() & live.keys()
                if saved[name].shape != tuple(live[name].shape)
            },
        ),
    ]
    if problems:
        raise BadUsage(
            f"the start in '{path}' does not fit this {type(module).__name__}: "
            + "; ".join(problems)
        )
    for name, record in saved.items():
        live[name].copy_(record.load())


def _named(what: str, names: set[str]) -> Iterator[str]:
    if names:
        shown = sorted(names)[:_NAMES_SHOWN]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        yield f"{what}: {', '.join(shown)}{more}"


def _random_states() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = state
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    for name in filter(_in_use, device_types()):
        states[name] = list(getattr(torch, name).get_rng_state_all())
    return states


def _restore_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(states["torch"].load())
    saved = [name for name in states if name not in _OF_THE_HOST]
    here = list(filter(_in_use, device_types()))
    for name in here:
        if name in saved:
            getattr(torch, name).set_rng_state_all([record.load() for record in states[name]])
    if saved != here:
        say(
            f"the start was saved on {', '.join(saved) or 'cpu'}, this run is on "
            f"{', '.join(here) or 'cpu'}: what is drawn on the device (dropout) differs, "
            "all else begins equal"
        )


def _in_use(device_type: str) -> bool:
    module = device_layer(device_type).find_module()  # None for the host
    return module is not None and hasattr(module, "is_initialized") and module.is_initialized()


def _with(value: Any, path: list[str], new: torch.Tensor) -> Any:
    """A nest of arguments, copied on the way down, with one tensor replaced."""
    if not path:
        return new
    key, *rest = path
    if hasattr(value, "_fields"):  # a namedtuple
        return value._replace(**{key: _with(getattr(value, key), rest, new)})
    if isinstance(value, list | tuple):
        items = [_with(v, rest, new) if i == int(key) else v for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    copied = copy.copy(value)
    if isinstance(value, Mapping):
        real = next(k for k in value if str(k) == key)
        copied[real] = _with(value[real], rest, new)
    else:
        object.__setattr__(copied, key, _with(getattr(value, key), rest, new))
    return copied
