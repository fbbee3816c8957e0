"""The one table of what a name in a file may call: operators and modules of torch, and what the
user allows.

A capture may come from anybody. A name in it is a key of this table and nothing else: it is never
followed attribute by attribute, imported or evaluated. The keys come from torch itself and from the
packages that the user names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import keyword
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from tensorprobe.errors import BadUsage, NotReplayable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Namespaces of torch's dispatcher whose operators compute.
NAMESPACES = ("aten", "prims", "quantized", "quantized_decomposed", "mkldnn", "npu")
# Those that touch files, processes and other ranks, take graphs or callables, or are for tests.
_TORCH_INSIDE = _words(
    """_c10d_functional _c10d_functional_autograd _dtensor _inductor_test _native _quantized _test
    bases c10d c10d_functional cuda debug_mode_ops debugprims dist_autograd export flex_lib fsdp
    higher_order inductor inductor_prims mkl mkldnn_prepacked onednn onnx onnx_symbolic prim
    profiler quantization rngprims rpc sparse static_runtime streams symm_mem xnnpack"""
)
# What an argument of an operator may be. Storages, streams, packed weights and objects of classes
# are addresses to a kernel.
_ARGUMENT = re.compile(
    r"(Optional\[|List\[)*(Tensor|int|float|bool|number|complex|Device|Generator|str)\]*"
)
# Arguments that are words. A file name, a format or a message is none of these.
WORDS = _words(
    """activation algorithm approximate attr binary_attr driver equation indexing interpolation mode
    norm ord p pad_mode padding padding_mode padding_side reduce reduction rounding_mode side
    unary_algorithm unary_attr UPLO
    input_layout softmax_layout actual_seq_qlen_layout rotate rotary_mode"""
)
# Operators that read or write outside of their tensors, run what they are given, or take a tensor
# for the address of packed weights.
_NOT_RUN = re.compile(
    r"fbgemm_\w+|quantized_\w+_cell\w*|_?pin_memory|record_stream|set_|set_data|_test_\w+|"
    r"share_memory_|apply_|map_|map2_|register_hook|register_post_accumulate_grad_hook|backward|"
    r"_backward|requires_grad_|retain_grad|storage|untyped_storage|_typed_storage|storage_type|"
    r"data_ptr|const_data_ptr|numpy|module_load|as_subclass|is_shared|_wrapped_\w+|lobpcg|"
    r"inductor_\w+|triplet_margin_with_distance_loss|as_sparse_gradcheck|"  # these take a function
    r"__array\w*__|__dlpack\w*__|__reduce_ex__|__setstate__|__deepcopy__|__format__|__repr__|"
    r"__dir__|__hash__|__class__|__new__|__init\w*__|__subclass\w*__|_make_\w*subclass|_reduce_\w+|"
    r"from_file|frombuffer|from_numpy|_nested_view_from_\w+|_clear_non_serializable_cached_data|"
    r"handle_torch_function|has_torch_function\w*|boolean_dispatch|assert_int_or_pair"
)
# Methods that aten has no operator for, and torch does not count as overridable.
_METHODS = ("new_tensor", "__iter__")
# Functions that make tensors from plain values: torch lets nobody override them.
_MAKERS = _words(
    """arange as_strided as_tensor asarray bartlett_window blackman_window empty empty_permuted
    empty_strided eye fill full hamming_window hann_window kaiser_window linspace logspace normal
    ones rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor
    sparse_csr_tensor tensor tril_indices triu_indices vander zeros"""
)
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # properties that are calls
_SET = ("data", "real", "imag")
# Where torch keeps the functions behind its public names: the place, the public name, what the
# names begin with there.
_C: Any = torch._C
_PRIVATE_HOMES = (
    (_C._nn, "torch.nn.functional.", ""),
    (_C._linalg, "torch.linalg.", "linalg_"),
    (_C._fft, "torch.fft.", "fft_"),
    (_C._special, "torch.special.", "special_"),
    (_C._sparse, "torch.sparse.", "_sparse_"),
    (_C._VariableFunctions, "torch.", ""),
)
# Homes of functions that torch's list of overridable ones leaves out.
_PUBLIC_HOMES = (torch.sparse, torch.nested, torch.signal.windows, torch.masked, torch.nn.init)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_LONGEST = 400  # characters of a name; matching one of millions takes as much memory


# What torch has


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """torch's functions and methods by the name that captures have for them."""
    found: dict[str, Callable[..., Any]] = {}
    overridable = get_overridable_functions()
    known = {id(function) for functions in overridable.values() for function in functions}
    operators = _registered()
    for home, public, begin in _PRIVATE_HOMES:
        for name, function in _members(home):
            if _is_operator(name, operators):
                found[public + name.removeprefix(begin)] = function
    for module in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        for name, function in _members(module):
            if id(function) in known or _is_public(module, name, function):
                found[f"{module.__name__}.{name}"] = function
    for module in _PUBLIC_HOMES:
        public_names = getattr(module, "__all__", ())
        for name, function in _members(module):
            if name in public_names or (module is torch.nn.init and name.endswith("_")):
                found[f"{module.__name__}.{name}"] = function
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name)
        listed = id(method) in known or name in _METHODS or _is_operator(name, operators)
        if callable(method) and listed:
            found[f"torch.Tensor.{name}"] = method
    for name in _VIEWS:
        found[f"torch.Tensor.{name}.__get__"] = getattr(torch.Tensor, name).__get__
    for name in _SET:
        found[f"torch.Tensor.{name}.__set__"] = getattr(torch.Tensor, name).__set__
    return {name: f for name, f in found.items() if not _NOT_RUN.fullmatch(name.split(".")[-1])}


def _members(home: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions in a module of torch; no classes, modules or objects that can be called."""
    for name in dir(home):
        function = getattr(home, name)
        if isinstance(function, FunctionType | BuiltinFunctionType):
            yield name, function


def _is_public(module: ModuleType, name: str, function: Callable[..., Any]) -> bool:
    """Whether a function that nobody can override is an operator: torch.zeros, F.grouped_mm."""
    if module is torch:
        return name in _MAKERS
    return function.__module__ == "torch.nn.functional" and not name.startswith("_")


def _is_operator(name: str, operators: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether aten has an operator of this name, and every form of it may be run."""
    forms = operators.get(f"aten::{name}")
    return forms is not None and all(_may_run("aten", name, form) for form in forms)


def _registered() -> dict[str, tuple[str, ...]]:
    """The operators of this process's dispatcher, "aten::add", each with its overloads."""
    return _by_operator(tuple(torch._C._dispatch_get_all_op_names()))


@functools.lru_cache(maxsize=2)
def _by_operator(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        operator, _, overload = name.partition(".")
        found.setdefault(operator, []).append(overload)
    return {operator: tuple(overloads) for operator, overloads in found.items()}


@functools.lru_cache(maxsize=20_000)
def _may_run(namespace: str, name: str, overload: str) -> bool:
    """Whether an operator of torch takes numbers, tensors and known words, and no more."""
    if _NOT_RUN.fullmatch(name):
        return False
    schema = torch._C._get_schema(f"{namespace}::{name}", overload)
    for argument in schema.arguments:
        kind = str(argument.type)
        if not _ARGUMENT.fullmatch(kind) or ("str" in kind and argument.name not in WORDS):
            return False
    return True


@functools.cache
def _modules() -> dict[str, type[torch.nn.Module]]:
    """The classes of torch.nn by their public name and by that of the file they are in."""
    found: dict[str, type[torch.nn.Module]] = {}
    for name, kind in vars(torch.nn).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            continue
        if kind.__module__.startswith("torch.nn.modules."):
            found[f"torch.nn.{name}"] = found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


def _of_type(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(torch).items() if type(value) is kind}


_DTYPES: dict[str, torch.dtype] = _of_type(torch.dtype)
_FORMATS: dict[str, Any] = {**_of_type(torch.layout), **_of_type(torch.memory_format)}
_TYPES: dict[str, Any] = {
    "torch.nn.utils.rnn.PackedSequence": torch.nn.utils.rnn.PackedSequence,
    **{
        f"torch.return_types.{name}": kind
        for name, kind in vars(torch.return_types).items()
        if isinstance(kind, type) and issubclass(kind, tuple)
    },
}


# What the user allows

# The only two lists there are, as that of references: options of a command are for its whole
# process. Apart, because an operator's namespace is often also the name of a large package.
_ALLOWED: set[str] = set()
_ALLOWED_NAMESPACES: set[str] = set()
# Packages that are everywhere and hold no operator.
_NEVER = frozenset({*sys.stdlib_module_names, "torch", "numpy", "pip", "setuptools", "tensorprobe"})


def allow(name: str) -> None:
    """Import a package, and let names in files call its operators, functions and modules.

        allow("mylib")            # torch.ops.mylib.fused, mylib.functional.fused, mylib.nn.Block

    `name` may also be a namespace whose operators are registered already.
    """
    if not _is_name(name):
        raise BadUsage(f"imports={name!r}: expected the name of a package, such as mylib.ops")
    if name.partition(".")[0] in _NEVER | _TORCH_INSIDE:
        raise BadUsage(f"imports={name!r}: it holds no operators that a capture could call")
    before = _namespaces()
    # Packages lie where the user works; the rest of this process looks for nothing there.
    sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise BadUsage(f"imports={name!r}: {error}") from error
        if name not in before:
            raise BadUsage(f"imports={name!r}: no package and no namespace of that name") from error
    except SystemExit as error:
        raise BadUsage(f"imports={name!r}: it ends the program that imports it") from error
    except Exception as error:
        raise failed_import(f"imports={name!r}", error) from error
    finally:
        sys.path.pop()
    allow_operators({*(_namespaces() - before), name})
    _ALLOWED.add(name)


def failed_import(what: str, error: Exception) -> BadUsage:
    """What a user's own code raised, in one line that says where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0]
    return BadUsage(f"{what}: {type(error).__name__}: {text} ({frame.filename}:{frame.lineno})")


def allow_operators(namespaces: set[str]) -> None:
    """Let names in files call the operators of these namespaces."""
    _ALLOWED_NAMESPACES.update(namespaces - _TORCH_INSIDE - set(NAMESPACES))


def _namespaces() -> set[str]:
    return {operator.partition("::")[0] for operator in _registered()}


def allow_imported(op: str) -> None:
    """Let files call the package of this op, which the program itself has imported and called."""
    package = _package_of(op)
    if op.startswith("torch.ops."):
        allow_operators({package} & _namespaces())
    elif package in sys.modules and package.partition(".")[0] not in _NEVER:
        _ALLOWED.add(package)


def _package_of(name: str) -> str:
    """What would have to be allowed for a name: a namespace of operators, or a module."""
    if name.startswith("torch.ops."):
        return name.removeprefix("torch.ops.").partition(".")[0]
    return name.rpartition(".")[0]


class NewOperators:
    """Allows what is registered inside of it: by a file that the user has given."""

    def __enter__(self) -> None:
        self._before = _namespaces()

    def __exit__(self, *error: object) -> None:
        allow_operators(_namespaces() - self._before)


def _is_name(text: str) -> bool:
    return len(text) <= _LONGEST and _NAME.fullmatch(text) is not None


def _home_of(name: str) -> tuple[ModuleType | None, str]:
    """The imported module of an allowed package that a name begins with, and what follows."""
    home, _, last = name.rpartition(".") if _is_name(name) else ("", "", "")
    inside = any(home == package or home.startswith(f"{package}.") for package in _ALLOWED)
    return (sys.modules.get(home) if inside else None), last


def _of_package(name: str) -> Any:
    """A function or class that a package which the user allowed has defined itself; or None."""
    module, last = _home_of(name)
    found = vars(module).get(last) if module is not None else None
    made_in = getattr(found, "__module__", None) or ""
    return found if any(f"{made_in}.".startswith(f"{each}.") for each in _ALLOWED) else None


# Looking up


def function_named(op: str) -> Callable[..., Any]:
    """The function that a call of this op calls; NotReplayable where it may not be run."""
    if op.startswith("torch.ops."):
        return _operator_named(op)
    if op.startswith("torch_npu."):
        return _npu_function(op)
    found = _functions().get(op)
    if found is None:
        found = _of_package(op)
        if not isinstance(found, FunctionType | BuiltinFunctionType):
            raise not_run(op)
    return found


def _operator_named(op: str) -> Callable[..., Any]:
    """An operator, or all its overloads where none is named."""
    if op.count(".") > 4:
        raise not_run(op)
    namespace, name, *rest = [*op.removeprefix("torch.ops.").split("."), ""][:4]
    overloads = _registered().get(f"{namespace}::{name}")
    wanted = rest[0] if rest else ""
    if overloads is None:
        raise not_run(op)
    form = "" if wanted == "default" else wanted
    if wanted and form not in overloads:
        raise not_run(op)
    if namespace in NAMESPACES:
        asked = (form,) if wanted else overloads
        if not all(_may_run(namespace, name, each) for each in asked):
            raise not_run(op)
    elif namespace not in _ALLOWED_NAMESPACES:
        raise not_run(op)
    packet = getattr(getattr(torch.ops, namespace), name)
    found: Callable[..., Any] = getattr(packet, wanted) if wanted else packet
    return found


def _npu_function(op: str) -> Callable[..., Any]:
    """A function of torch_npu that is one of its operators."""
    if "torch_npu" not in sys.modules and hasattr(torch, "npu"):
        importlib.import_module("torch_npu")
    name = op.removeprefix("torch_npu.")
    overloads = _registered().get(f"npu::{name}")
    found = vars(sys.modules["torch_npu"]).get(name) if "torch_npu" in sys.modules else None
    if found is None or overloads is None:
        raise not_run(op)
    if not all(_may_run("npu", name, each) for each in overloads):
        raise not_run(op)
    function: Callable[..., Any] = found
    return function


def module_named(name: str) -> type[torch.nn.Module]:
    """The class of a module; NotReplayable where it may not be made."""
    found = _modules().get(name)
    if found is None:
        found = _of_package(name)
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise not_run(name)
    return found


def public_module(name: str) -> str:
    """torch.nn.modules.linear.Linear is torch.nn.Linear; others have one name."""
    kind = _modules().get(name)
    return name if kind is None else f"torch.nn.{kind.__name__}"


def type_named(name: str) -> Any:
    """A type of named fields that arguments may have; NotReplayable for all others."""
    found = _TYPES.get(name) or _of_package(name)
    named = hasattr(found, "_fields") or hasattr(found, "n_fields")
    if not (isinstance(found, type) and (named or dataclasses.is_dataclass(found))):
        raise not_run(name)
    return found


def value_named(name: str) -> Any:
    """What an attribute of a module may be besides literals: a dtype, a function, a class."""
    if name.startswith("torch.") and name.removeprefix("torch.") in _DTYPES:
        return _DTYPES[name.removeprefix("torch.")]
    for look in (function_named, module_named):
        try:
            return look(name)
        except NotReplayable:
            continue
    raise not_run(name)


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 by "float32" or "torch.float32"; NotReplayable for what is no dtype here."""
    found = _DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise NotReplayable(f"this torch ({torch.__version__}) has no dtype '{name}'")
    return found


def format_named(name: str) -> Any:
    """A layout or memory format, as torch.strided."""
    found = _FORMATS.get(name.removeprefix("torch."))
    if found is None:
        raise NotReplayable(f"this torch ({torch.__version__}) has no layout '{name}'")
    return found


def not_run(name: str) -> NotReplayable:
    """Why a name is not called, and what would allow it."""
    if name.startswith("torch.") and _NOT_RUN.fullmatch(name.rpartition(".")[2]):
        return NotReplayable(f"not run: {name[:_LONGEST]} reaches outside of its tensors")
    if len(name) > _LONGEST:
        name = f"{name[:80]}... ({len(name)} characters)"
    home = _package_of(name)
    never = {*_NEVER, *_TORCH_INSIDE, *NAMESPACES, "torch_npu", "__main__"}
    hint = f" (allow its package with `imports={home!r}`)"
    if home.partition(".")[0] in never or not _is_name(home):
        hint = ""
    return NotReplayable(f"not run: {name} is not an operator of torch{hint}")


def is_word(name: str) -> bool:
    """Whether a name can stand in source as it is. Python takes look-alike letters for plain ones,
    so none but ASCII counts."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
