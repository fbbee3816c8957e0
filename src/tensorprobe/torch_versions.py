"""What differs between versions of torch. Nothing else asks which version it is.

Each difference is found by asking torch for the feature, and says why it is here. The names are
those of the newest torch; FLOOR is the oldest that has what cannot be done in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import CodeType
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from tensorprobe.errors import UnsupportedTorch

FLOOR = "2.1"

# 2.0 has no _current_graph_task_id: nobody could tell whether a call is made inside of backward.
if not hasattr(torch._C, "_current_graph_task_id"):
    raise UnsupportedTorch(
        f"torch {torch.__version__} is too old: tensorprobe records with torch {FLOOR} and newer. "
        "Captures are read, shown and compared without torch"
    )


# ---- the entry to the backward engine ------------------------------------------------------------


class _Engine(torch._C._ImperativeEngine):
    """An engine whose entry is a function of ours; all else is torch's."""

    run_backward: Any


_Entry = Callable[..., Any]


def _engine_of_old() -> tuple[Callable[[], _Entry], Callable[[_Entry], None], set[CodeType]]:
    # 2.1: torch.autograd calls a method of an object in C, and no function that could be replaced.
    variable: Any = torch.autograd.Variable
    original = variable._execution_engine
    method = original.run_backward

    def get() -> _Entry:
        engine = variable._execution_engine
        entry: _Entry = method if engine is original else engine.run_backward
        return entry

    def put(function: _Entry) -> None:
        engine = original
        if function is not method:
            engine = _Engine()
            engine.run_backward = function
        variable._execution_engine = engine

    frames = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
    return get, put, frames


def _engine_of_new() -> tuple[Callable[[], _Entry], Callable[[_Entry], None], set[CodeType]]:
    graph: Any = torch.autograd.graph
    package: Any = torch.autograd

    def get() -> _Entry:
        entry: _Entry = graph._engine_run_backward
        return entry

    def put(function: _Entry) -> None:
        graph._engine_run_backward = function
        package._engine_run_backward = function

    return get, put, {graph._engine_run_backward.__code__}


# The function that every backward goes through; how to put another in its place; and the code of
# the frames that are left when the engine is.
engine_entry, put_engine_entry, ENGINE_FRAMES = (
    _engine_of_new() if hasattr(torch.autograd.graph, "_engine_run_backward") else _engine_of_old()
)


# ---- the graph -----------------------------------------------------------------------------------


def gradient_edge(tensor: torch.Tensor) -> tuple[Any, int]:
    """The node that the gradient of a tensor comes by at, and its number there."""
    # 2.1 has no get_gradient_edge. A leaf shows its node to whoever uses it, as there.
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    with torch.enable_grad():
        user: Any = tensor.view_as(tensor).grad_fn
    return user.next_functions[0][0], 0


# The functions of torch.utils.checkpoint that run a region without reentry: 2.15 renamed it. Both
# are here because the program may not have imported that file yet.
CHECKPOINT_RUNNERS = ("checkpoint", "_checkpoint_impl")


# ---- kinds of tensors ----------------------------------------------------------------------------

# Functionalities that make a tensor something else than its strided memory.
_KINDS = (
    *("FuncTorchBatched", "FuncTorchGradWrapper", "Functionalize", "Quantized", "NestedTensor"),
    *("SparseCsr", "Sparse", "Meta", "Python", "Conjugate", "Negative", "ZeroTensor"),
)


def _raw_bit(kind: str) -> int:
    """The bit of a functionality alone: the key of one backend is its bit plus the backend's."""

    def bits(name: str) -> int:
        key = getattr(DispatchKey, name, None)
        return 0 if key is None else int(DispatchKeySet(key).raw_repr())

    cpu = bits("CPU") & bits("AutogradCPU")
    if kind == "Meta":
        return bits("Meta") & ~(bits("CPU") & ~cpu)
    return bits(kind) or bits(f"{kind}CPU") & ~cpu


@functools.cache
def _bits_of_text(text: str) -> int:
    names = text.partition("(")[2].rstrip(")").split(", ")
    bits = 0
    for number, kind in enumerate(_KINDS):
        exact = kind in ("Meta", "Python")  # not PythonTLSSnapshot, nor AutogradMeta
        if any(name == kind if exact else name.startswith(kind) for name in names):
            bits |= 1 << number
    return bits


# 2.1 to 2.5: a set of dispatch keys does not tell its bits, but its names.
if hasattr(DispatchKeySet, "raw_repr"):
    _keys_of = torch._C._dispatch_keys

    def key_bits(tensor: torch.Tensor) -> int:
        """The dispatch keys of a tensor as bits: one look tells plain tensors from all others."""
        bits: int = _keys_of(tensor).raw_repr()
        return bits

    def bit_of(kind: str) -> int:
        """The bit of a kind of tensors in `key_bits`: Quantized, Python..."""
        return _raw_bit(kind)

else:

    def key_bits(tensor: torch.Tensor) -> int:
        """The dispatch keys of a tensor as bits: one look tells plain tensors from all others."""
        return _bits_of_text(repr(torch._C._dispatch_keys(tensor)))

    def bit_of(kind: str) -> int:
        """The bit of a kind of tensors in `key_bits`: Quantized, Python..."""
        return 1 << _KINDS.index(kind)


# ---- dispatch modes ------------------------------------------------------------------------------


def dispatch_modes_off() -> AbstractContextManager[Any]:
    """Inside, this thread's dispatch modes do not see what is run."""
    # Some versions, 2.2, 2.4 and 2.7 among them, free a mode that nothing but the stack holds while
    # they take it off, and crash.
    off: AbstractContextManager[Any] = _disable_current_modes()
    vars(off)["held"] = _get_current_dispatch_mode_stack()
    return off


# ---- memory --------------------------------------------------------------------------------------


# 2.1 to 2.3: a storage does not tell whether it can be resized, so all memory of the host is looked
# at again at each use.
def _is_on_device(storage: torch.UntypedStorage) -> bool:
    return storage.device.type != "cpu"


# Whether a storage is torch's own: numpy may have, and write to, what cannot be resized. Not a
# function of ours if that can be: it is asked for every tensor of a call.
is_own: Callable[[torch.UntypedStorage], bool] = getattr(
    torch.UntypedStorage, "resizable", _is_on_device
)


# ---- compilers -----------------------------------------------------------------------------------


def _is_compiling_in_old() -> bool:
    # Modes stay on while dynamo compiles, which only its own notes tell.
    if torch._utils.is_compiling():
        return True
    for notes in (torch._guards.CompileContext, torch._guards.TracingContext):
        # 2.2 has try_get, as `get` raises there where nothing is compiled
        get: Callable[[], Any] = getattr(notes, "try_get", notes.get)
        if get():
            return True
    return False


# 2.1 and 2.2 have no compiler.is_compiling.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", _is_compiling_in_old)
# True of the code that dynamo reads, never of ours. 2.1 and 2.2 have it under another name, which
# dynamo knows.
is_dynamo_compiling: Callable[[], bool] = (
    torch.compiler.is_dynamo_compiling
    if hasattr(torch.compiler, "is_dynamo_compiling")
    else torch._utils.is_compiling
)
# What C++ reads of torch.compiler. Where the flag is not False, it asks the function.
COMPILER: dict[str, Any] = (
    vars(torch.compiler)
    if hasattr(torch.compiler, "_is_compiling_flag")
    else {"_is_compiling_flag": None, "is_compiling": is_compiling}
)


# ---- devices -------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """Where a tensor is made that is asked for without a device."""
    # 2.1 and 2.2 have no get_default_device, and those of 2.3 and 2.4 do not see `with device:`.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return torch.device("cpu")


def accelerator_type() -> str | None:
    """The kind of device that this build of torch is for, whether or not one is there."""
    # 2.1 to 2.5 have no torch.accelerator: cuda, or the device that a package has registered. That
    # of 2.6 raises where no such device is there.
    if hasattr(torch, "accelerator"):
        try:
            found = torch.accelerator.current_accelerator()
        except RuntimeError:
            pass
        else:
            return None if found is None else found.type
    private = torch._C._get_privateuse1_backend_name()
    if hasattr(torch, private):
        return private
    if torch.backends.cuda.is_built():
        return "cuda"
    return "mps" if torch.backends.mps.is_built() else None


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype that autocast computes in on a kind of device; None where it is off."""
    # 2.1 to 2.3 have a function for each kind of device, and a package brings its own.
    if hasattr(torch, "get_autocast_dtype"):
        try:
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        except RuntimeError:  # no such device in this build
            return None
    if kind == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    module: Any = getattr(torch, kind, None)
    is_on = getattr(module, "is_autocast_enabled", None)
    return module.get_autocast_dtype() if is_on is not None and is_on() else None


# ---- collectives ---------------------------------------------------------------------------------


class _BoxedWork:
    """A Work that cannot be asked."""

    def is_completed(self) -> bool:
        raise RuntimeError("torch gives out the Work of c10d's operators from 2.4 on")


def unboxed_work(box: torch.ScriptObject) -> Any:
    """The Work in what c10d's operators return."""
    # 2.1 to 2.3 have no Work.unbox.
    unbox = getattr(torch.distributed.Work, "unbox", None)
    return _BoxedWork() if unbox is None else unbox(box)


# ---- what a version cannot do ------------------------------------------------------------------

# The simulated NPU is a device written in Python, which takes a door that 2.10 has first.
SIMULATED_FROM = "2.10"


def can_simulate() -> bool:
    """Whether this torch can have a device that is written in Python."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


# ---- torch.compile -----------------------------------------------------------------------------

# The structured log from which graphs are taken, and the class through whose call they run.
COMPILED_FROM = "2.6"


def can_see_compiling() -> bool:
    """Whether this torch shows the graphs that it compiles, and lets their runs be seen."""
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:  # up to 2.5 it is elsewhere, and its call goes by other ways
        return False
    has_log = hasattr(torch._logging, "trace_structured")
    return has_log and "__call__" in vars(CompiledFxGraph)


def compile_caches_off() -> AbstractContextManager[Any]:
    """Inside, what is compiled comes from no cache: a graph that does has only its text."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    off = ExitStack()
    for config, names in (
        (inductor_config, ("fx_graph_cache", "fx_graph_remote_cache")),
        (functorch_config, ("enable_autograd_cache", "enable_remote_autograd_cache")),
    ):
        known = {name: False for name in names if hasattr(config, name)}
        off.enter_context(config.patch(known))
    return off


class CompiledGraphCalls:
    """Stands around each run of a graph that inductor has compiled: `around(graph, inputs, call)`.

    Python looks up `__call__` in a class, so it is the class whose method is replaced, while this
    is installed.
    """

    def __init__(self, around: Callable[[Any, Any, Callable[[], Any]], Any]) -> None:
        self._around = around
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def install(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph

        original = CompiledFxGraph.__call__

        def called(graph: Any, inputs: Any) -> Any:
            if self._original is None:  # taken away, below one that another has put around it
                return original(graph, inputs)
            return self._around(graph, inputs, lambda: original(graph, inputs))

        self._original, self._ours = original, called
        CompiledFxGraph.__call__ = called  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph

        if self._original is not None and CompiledFxGraph.__call__ is self._ours:
            CompiledFxGraph.__call__ = self._original  # type: ignore[method-assign]
        self._original = self._ours = None


def compiler_bisector() -> Any:
    """torch's own module that switches parts of its compiler off; None where it has none."""
    try:
        from torch._inductor import compiler_bisector as bisector
    except ImportError:  # up to 2.5
        return None
    return bisector if hasattr(bisector, "BACKENDS") else None
