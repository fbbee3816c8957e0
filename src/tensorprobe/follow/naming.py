"""Same call, same name: how functions, operators and modules are called in a capture. Pure."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tensorprobe.operators import NATIVE_NAMES
from tensorprobe.records import Direction


class ApiName(NamedTuple):
    """What a call calls: `Functional` + `linear`, torch's own name for it being `op`.

    `op` is the name to import or look up ("torch.nn.functional.linear",
    "torch.ops.aten.addmm.default", "torch.linalg.norm").
    """

    prefix: str
    api: str
    op: str

    @property
    def stem(self) -> str:
        """The name of the call without its number and direction."""
        return f"{self.prefix}.{self.api}"

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator of ATen."""
        return self.prefix == "Aten"


class CallNames(msgspec.Struct, frozen=True, gc=False):
    """One call with everything a selection may know it by."""

    api: ApiName
    name: str  # as call_name() gives it
    module: str = ""  # path of the module the call runs in; of the module itself for its own calls
    direction: Direction = "forward"
    wanted: bool = True  # False: only the backward of this call is

    def but(self, **changes: Any) -> CallNames:
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


def writes_in_place(api: ApiName) -> bool:
    """Whether calls of this API write to a tensor they are given, as its name says."""
    name = api.api
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith(("_", ".__set__")) or name == "copy"


# `a + b` and `a.add(b)` are one op; which of the two names reaches a function mode is decided
# inside torch and has changed between versions.
DUNDERS_OF_NATIVE: dict[str, tuple[str, ...]] = {
    native: tuple(dunder for dunder, n in NATIVE_NAMES.items() if n == native)
    for native in dict.fromkeys(NATIVE_NAMES.values())
}

# Views of a tensor that are written as properties: calls like transpose() and real() are.
_VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")

# Recurrent kernels that torch.nn reaches through torch._VF; torch.lstm is the same object.
_VF = frozenset(
    f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")
)
# Different names of one C function, which compare equal: resolve_name gives whichever it met last.
_ONE_FUNCTION = {
    "torch.spmm": "torch.mm",
    "torch.dsmm": "torch.mm",
    "torch.hsmm": "torch.hspmm",
    "torch.saddmm": "torch.sspaddmm",
}
# c10d's operators by the name users know; the functional ones already have it.
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "recv",
    "recv_any_source_": "recv_any_source",
}
_OPERATOR_PREFIXES = {"aten": "Aten", "npu": "NPU"}
_COLLECTIVE_NAMESPACES = (
    "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
)  # fmt: skip

# Private homes of public functions: the home, its public name, what the private names begin with.
_PRIVATE_HOMES = (
    ("torch._C._nn.", "torch.nn.functional.", ""),
    ("torch._C._linalg.", "torch.linalg.", "linalg_"),
    ("torch._C._fft.", "torch.fft.", "fft_"),
    ("torch._C._special.", "torch.special.", "special_"),
    ("torch._C._sparse.", "torch.sparse.", "_sparse_"),
    ("torch._C._VariableFunctions.", "torch.", ""),
    ("torch._C._distributed_c10d.", "torch.distributed.", ""),
    ("torch.distributed.distributed_c10d.", "torch.distributed.", ""),
    ("torch._tensor.Tensor.", "torch.Tensor.", ""),
    ("torch._C.TensorBase.", "torch.Tensor.", ""),
    ("torch._C._TensorBase.", "torch.Tensor.", ""),  # its name in torch 2.1
    ("torch._C.", "torch.", ""),
    ("torch._VF.", "torch.", ""),
    ("torch.functional.", "torch.", ""),
    ("torch.utils.backend_registration.", "torch.Tensor.", ""),  # x.npu(), made for its device
)


def api_name(qualified: str) -> ApiName:
    """The name of a function or operator from torch's own name for it.

    Takes what `torch.overrides.resolve_name` or `qualified_name` gives, and operators in any
    spelling: "aten.addmm.default", "torch.ops.ns.op", "ns::op".

        api_name("torch.Tensor.__add__").stem     # "Tensor.add"
    """
    if "::" in qualified:
        return _operator_name(qualified.replace("::", "."))
    if qualified.startswith("torch.ops."):
        return _operator_name(qualified.removeprefix("torch.ops."))
    if qualified.partition(".")[0] in ("aten", "npu", *_COLLECTIVE_NAMESPACES):
        return _operator_name(qualified)
    qualified = _public_home(qualified)
    qualified = _ONE_FUNCTION.get(qualified, qualified)
    if qualified.startswith("torch.Tensor."):
        return _method_name(qualified.removeprefix("torch.Tensor."))
    if qualified.startswith("torch.nn.functional."):
        return ApiName("Functional", qualified.removeprefix("torch.nn.functional."), qualified)
    if qualified.startswith("torch.distributed."):
        return ApiName("Distributed", qualified.removeprefix("torch.distributed."), qualified)
    if qualified.startswith("torch_npu."):
        return ApiName("NPU", qualified.rpartition(".")[2], qualified)
    if qualified.startswith("torch."):
        api = qualified.removeprefix("torch.")
        return ApiName("VF" if api in _VF else "Torch", api, qualified)
    return ApiName("Ops", qualified, qualified)


def operator_name(namespace: str, name: str, overload: str = "") -> ApiName:
    """The name of an operator of torch.ops: aten's are Aten, collectives Distributed, torch_npu's
    NPU, all others Ops.{namespace}.{name}."""
    op = f"torch.ops.{namespace}.{name}" + (f".{overload}" if overload else "")
    if namespace in _OPERATOR_PREFIXES:
        return ApiName(_OPERATOR_PREFIXES[namespace], name, op)
    if namespace in _COLLECTIVE_NAMESPACES:
        return ApiName("Distributed", _COLLECTIVES.get(name, name), op)
    return ApiName("Ops", f"{namespace}.{name}", op)


def module_name(path: str, class_name: str, qualified: str = "") -> ApiName:
    """The name of a module's own call: Module.{path}.{Class}."""
    api = f"{path}.{class_name}" if path else class_name
    return ApiName("Module", api, qualified or class_name)


def optimizer_name(class_name: str, qualified: str = "") -> ApiName:
    """The name of an optimizer's step: Optimizer.{Class}.step."""
    return ApiName("Optimizer", f"{class_name}.step", qualified or f"{class_name}.step")


def call_name(api: ApiName, number: int, direction: Direction = "forward") -> str:
    """The full name of the `number`-th call of `api` in its step."""
    before, after = name_parts(api, direction)
    return f"{before}{number}{after}"


def name_parts(api: ApiName, direction: Direction) -> tuple[str, str]:
    """What stands before and after the number in the name of a call."""
    prefix, name, _ = api
    if prefix == "Module":
        return f"Module.{name}.{direction}.", ""
    if prefix == "Optimizer":
        return f"Optimizer.{name}.", ""
    return f"{prefix}.{name}.", f".{direction}"


def qualified_name(func: object) -> str:
    """A dotted name for any function object, where torch's resolve_name knows none."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__", "__delete__") and owner is not None:  # a property's accessor
        return f"torch.Tensor.{getattr(owner, '__name__', '?')}.{name}"
    module = getattr(func, "__module__", None) or type(func).__module__
    qualname = getattr(func, "__qualname__", None) or name
    if qualname.startswith(("TensorBase.", "_TensorBase.")):
        return f"torch.Tensor.{name}"
    if qualname.startswith("_VariableFunctionsClass.") or "<locals>" in qualname:
        return f"{module}.{name}"
    return f"{module}.{qualname}"


class Namer:
    """Names of function objects, each worked out once. `resolve` is torch.overrides.resolve_name.

    api = Namer(torch.overrides.resolve_name)(torch.relu)
    """

    # Functions made anew for every call would fill the table without end.
    _LIMIT = 20_000

    def __init__(self, resolve: Callable[[object], str | None]) -> None:
        self._resolve = resolve
        self._names: dict[object, ApiName] = {}

    def __call__(self, func: object) -> ApiName:
        try:
            found = self._names.get(func)
        except TypeError:  # a callable without a hash
            return self._work_out(func)
        if found is None:
            if len(self._names) >= self._LIMIT:
                self._names.clear()
            found = self._names[func] = self._work_out(func)
        return found

    def _work_out(self, func: object) -> ApiName:
        operator = _operator_parts(func)
        if operator is not None:
            return operator_name(*operator)
        return api_name(self._resolve(func) or qualified_name(func))


class Counter:
    """How often each API was called in this step; calls that are not recorded count too."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], itertools.count[int]] = {}
        # the same, several may share one, with a forward call's name around its number
        self._by_api: dict[ApiName, tuple[itertools.count[int], str, str]] = {}

    def next(self, api: ApiName) -> int:
        """The number of this call, from 0. Safe in several threads."""
        return next((self._by_api.get(api) or self._new(api))[0])

    def next_name(self, api: ApiName) -> str:
        """The name of this forward call, which has the next number."""
        count, before, after = self._by_api.get(api) or self._new(api)
        return f"{before}{next(count)}{after}"

    def _new(self, api: ApiName) -> tuple[itertools.count[int], str, str]:
        # setdefault: of two threads that come here at once, both get the one that stays
        count = self._counts.setdefault((api.prefix, api.api), itertools.count())
        found = self._by_api[api] = (count, *name_parts(api, "forward"))
        return found

    def reset(self) -> None:
        """Begin a new step."""
        self._counts, self._by_api = {}, {}


# Calls that make no tensor content. They come through a function mode by the dozen for each real
# call and would only bury those. What moves or reads content (item, tolist, numpy, __bool__, to,
# cpu) and what makes a view or an alias (view, detach, contiguous, T) is a call and stays.
_NOISE_GROUPS = {
    "shape, layout and place of a tensor": """
        Tensor.size Tensor.dim Tensor.ndimension Tensor.numel Tensor.nelement Tensor.stride
        Tensor.storage_offset Tensor.element_size Tensor.get_device Tensor.__len__ Tensor.dim_order
        Tensor.sparse_dim Tensor.dense_dim Tensor._nnz Tensor._dimI Tensor._dimV Tensor.has_names
        Tensor.__dlpack_device__ Torch.numel Torch.get_device""",
    "storage and address: the content behind them is the tensor's own": """
        Tensor.data_ptr Tensor.const_data_ptr Tensor.mutable_data_ptr Tensor.storage
        Tensor._typed_storage Tensor.untyped_storage Tensor.storage_type Tensor.share_memory_""",
    "how a tensor is quantised": """
        Tensor.qscheme Tensor.q_scale Tensor.q_zero_point Tensor.q_per_channel_axis
        Torch.q_scale Torch.q_zero_point Torch.q_per_channel_axis""",
    "questions about dtypes, devices and sizes": """
        Torch.can_cast Torch.result_type Torch.promote_types Torch.get_default_dtype Torch.device
        Torch.broadcast_shapes Torch.set_default_device Functional._sym_int
        Functional._parse_to""",
    "text for people; the values shown are read inside, where no mode sees it": """
        Tensor.__repr__ Tensor.__format__ Tensor.__hash__ Tensor.__dir__
        NPU._npu_private_format_repr""",
    "bookkeeping of autograd; backward shows as the backward calls it runs": """
        Tensor.requires_grad_ Tensor.register_hook Tensor.register_post_accumulate_grad_hook
        Tensor.retain_grad Tensor.backward Torch.autograd.backward Torch.autograd.grad
        Torch._set_grad_enabled Torch.set_grad_enabled Torch._set_fwd_grad_enabled
        Torch._set_view_replay_enabled""",
    "pickling: the content goes through the storage": """
        Tensor.__reduce_ex__ Tensor._reduce_ex_internal Tensor.__setstate__""",
}
_NOISE = frozenset(stem for stems in _NOISE_GROUPS.values() for stem in stems.split())
# is_* answers about the kind of a tensor, but is_nonzero reads its value; sym_* work on sizes.
_NOISE_PATTERN = re.compile(
    r"(Tensor|Torch|Aten)\._?is_(?!nonzero)\w+|(Torch|Aten)\._?sym_\w+"
    r"|Ops\.(profiler|prim|streams)\..*"  # markers for profilers, questions asked of subclasses
)
# `x.data = y` and writes to .real and .imag replace content and no other call shows it. `.grad =`
# does not count: the optimizer step and the parameter gradients show the value, and zero_grad
# would add one call for each parameter and step. `.data` and `.grad` when read hand out a tensor
# whose content is known already.
_CONTENT_SETTERS = frozenset(f"Tensor.{name}.__set__" for name in ("data", "real", "imag"))


_NEVER_WARN = frozenset(
    (
        "Tensor.shape.__get__",
        "Tensor.dtype.__get__",
        "Tensor.device.__get__",
        "Tensor.requires_grad.__get__",
        "Tensor.ndim.__get__",
        "Tensor.is_cuda.__get__",
        "Tensor.size",
        "Tensor.dim",
        "Tensor.numel",
        "Tensor.stride",
        "Tensor.is_floating_point",
        "Tensor.is_contiguous",
    )
)


@functools.lru_cache(maxsize=20_000)
def is_noise(api: ApiName) -> bool:
    """Whether calls of this API make no tensor content and are left out of a capture."""
    stem = api.stem
    if stem.endswith((".__get__", ".__set__", ".__delete__")):
        return stem not in _CONTENT_SETTERS
    return stem in _NOISE or _NOISE_PATTERN.fullmatch(stem) is not None


def never_warns(api: ApiName) -> bool:
    """Whether torch only looks up what it is asked, and has nothing to warn of. Programs ask for
    these most."""
    return api.stem in _NEVER_WARN


def aliases(api: ApiName) -> frozenset[str]:
    """Every exact name the calls of `api` go by, whichever of them the program used.

    `relu` is also torch.relu, F.relu, Tensor.relu, aten.relu; operators have their dunders too.
    """
    if api.prefix in ("Module", "Optimizer"):
        return own_names(api)
    names = set(own_names(api))
    bare = api.api
    if api.prefix == "Ops":
        namespace, _, name = bare.partition(".")
        names |= {f"{namespace}::{name}", f"torch.ops.{bare}", name}
    elif api.prefix == "Distributed":
        names |= {f"torch.distributed.{bare}", f"dist.{bare}"}
    elif api.prefix == "NPU":
        names |= {f"torch_npu.{bare}", f"torch.ops.npu.{bare}", f"npu::{bare}"}
    else:
        flat = bare.replace(".", "_")  # torch.linalg.norm is aten.linalg_norm
        native = NATIVE_NAMES.get(bare, bare)
        for spelling in {bare, native, *DUNDERS_OF_NATIVE.get(native, ())}:
            names.add(spelling)
            names |= {home + spelling for home in _HOMES}
        names |= {home + flat for home in _OPERATOR_HOMES}
    return frozenset(names)


def own_names(api: ApiName) -> frozenset[str]:
    """The names a pattern is held against: the recorded one, the bare one and torch's own."""
    names = {api.stem, api.api, api.op}
    if api.prefix == "Module":
        path, _, class_name = api.api.rpartition(".")
        names |= {class_name, path} - {""}
    elif api.prefix == "Optimizer":
        names.add(api.api.removesuffix(".step"))
    elif api.prefix == "Functional":
        names.add(f"F.{api.api}")
    elif api.prefix == "Aten":
        names |= {f"aten.{api.api}", api.op.removeprefix("torch.ops.")}
    return frozenset(names)


_HOMES = (
    "torch.",
    "Torch.",
    "torch.Tensor.",
    "Tensor.",
    "torch.nn.functional.",
    "nn.functional.",
    "F.",
    "Functional.",
    "VF.",
    "torch._VF.",
)
_OPERATOR_HOMES = ("aten.", "Aten.", "aten::", "torch.ops.aten.")

_UNDERSCORED = re.compile(
    r"(Tensor|Torch|Functional|VF|NPU|Aten|Distributed)_(.+)_(\d+)(?:_(forward|backward))?"
)
_DUNDER_METHOD = re.compile(r"Tensor\.(__\w+?__)(?=\.|$)")


def native_call_name(name: str) -> str:
    """A call's name as the peers write it, in ours.

    ptdbg's underscores become dots ("Tensor_permute_1_forward") and a dunder its native op, with
    the number kept: msprobe counts `a + b` and `a.add(b)` apart, we do not, so in a program that
    uses both spellings the numbers can differ.
    """
    name = dotted_call_name(name)
    found = _DUNDER_METHOD.match(name)
    if found:
        name = f"Tensor.{NATIVE_NAMES.get(found[1], found[1])}{name[found.end() :]}"
    return name


def dotted_call_name(name: str) -> str:
    """A call's name with ptdbg's underscores as dots; dunders stay."""
    found = _UNDERSCORED.fullmatch(name)
    return ".".join(part for part in found.groups() if part) if found else name


def split_direction(name: str) -> tuple[str, Direction | None]:
    """A call's name without its direction, and that direction when it has one."""
    head, _, tail = name.rpartition(".")
    if tail in ("forward", "backward"):
        return head, "forward" if tail == "forward" else "backward"
    if name.startswith("Module."):
        middle, _, direction = head.rpartition(".")
        if direction in ("forward", "backward"):
            return f"{middle}.{tail}", "forward" if direction == "forward" else "backward"
    return name, None


def with_direction(stem: str, direction: Direction) -> str:
    """The inverse of split_direction."""
    head, _, number = stem.rpartition(".")
    if stem.startswith("Module.") and number.isdigit():
        return f"{head}.{direction}.{number}"
    return f"{stem}.{direction}"


def _operator_name(dotted: str) -> ApiName:
    namespace, _, rest = dotted.partition(".")
    name, _, overload = rest.partition(".")
    return operator_name(namespace, name, overload)


def _operator_parts(func: object) -> tuple[str, str, str] | None:
    """Namespace, name and overload of an OpOverload or its packet, told without importing torch."""
    full = getattr(func, "_qualified_op_name", None)  # "aten::addmm"; both kinds have it
    if not isinstance(full, str):
        schema = getattr(func, "_schema", None)
        full = getattr(schema, "name", None)
    if not isinstance(full, str) or "::" not in full:
        return None
    namespace, _, name = full.partition("::")
    overload = getattr(func, "_overloadname", None)
    return namespace, name, overload if isinstance(overload, str) else ""


def _public_home(qualified: str) -> str:
    for private, public, begin in _PRIVATE_HOMES:
        if qualified.startswith(private):
            return public + qualified.removeprefix(private).removeprefix(begin)
    return qualified


def _method_name(method: str) -> ApiName:
    prop, _, accessor = method.rpartition(".")
    if accessor == "__get__" and prop in _VIEW_PROPERTIES:
        return ApiName("Tensor", prop, f"torch.Tensor.{method}")
    native = NATIVE_NAMES.get(method, method)
    # rsub is a function of torch but no method of its tensors
    op = "torch.rsub" if native == "rsub" else f"torch.Tensor.{native}"
    return ApiName("Tensor", native, op)
