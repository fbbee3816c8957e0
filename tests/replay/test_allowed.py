"""What a name in a file may call: the one table, built from torch and from what the user names."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorprobe.errors import BadUsage, NotReplayable
from tensorprobe.replay import allowed
from tensorprobe.replay.allowed import (
    allow,
    dtype_named,
    format_named,
    function_named,
    module_named,
    type_named,
    value_named,
)
from tensorprobe.replay.references import bring_in

# Entries of the table that take text, and what that text is. One that is new here has to be looked
# at: text that is a file, a command, a host or code must not come from a capture.
WITH_TEXT = Path(__file__).parent / "functions_with_text.txt"
# What arguments that are callables are called in torch.
TAKES_CALLABLES = ("callable", "distance_function", "tracker", "hook", "fn", "func")


@pytest.fixture(autouse=True)
def nothing_more_allowed() -> Iterator[None]:
    lists = (allowed._ALLOWED, allowed._ALLOWED_NAMESPACES)
    before = [set(each) for each in lists]
    yield
    for each, names in zip(lists, before, strict=True):
        each.clear()
        each.update(names)


@pytest.mark.parametrize(
    "op",
    [
        "torch.nn.functional.linear", "torch.nn.functional.gelu", "torch.nn.functional.max_pool2d",
        "torch.nn.functional.grouped_mm", "torch.nn.init.kaiming_uniform_", "torch.Tensor.add_",
        "torch.Tensor.__getitem__", "torch.Tensor.__setitem__", "torch.Tensor.T.__get__",
        "torch.Tensor.new_tensor", "torch.Tensor.data.__set__", "torch.zeros", "torch.tensor",
        "torch.einsum", "torch.lstm", "torch.rsub", "torch._foreach_add_", "torch._fused_adamw_",
        "torch.linalg.norm", "torch.fft.rfft", "torch.special.erf", "torch.sparse.mm",
        "torch.ops.aten.addmm.default", "torch.ops.aten.add.Tensor", "torch.ops.aten.relu",
        "torch.ops.prims.add.default",
    ],
)  # fmt: skip
def test_operators_of_torch_are_found(op: str) -> None:
    assert callable(function_named(op))


@pytest.mark.parametrize(
    "op",
    [
        # from an allowed beginning to anything
        "torch.nn.functional.torch.os.system", "torch.nn.functional.torch.builtins.exec",
        "torch.nn.functional.torch.load", "tqdm.utils.os.system", "torch.Tensor.__class__",
        "torch.Tensor.__init_subclass__", "torch.Tensor.add.__globals__", "torch.relu.__self__",
        "torch.functional.torch.os.system", "torch.linalg.torch.load",
        # files, processes, libraries, code
        "torch.load", "torch.save", "torch.from_file", "torch.ops.aten.from_file.default",
        "torch.ops.aten.from_file", "torch.hub.load", "torch.compile", "torch.jit.load",
        "torch.ops.load_library", "torch.classes.load_library", "torch.import_ir_module",
        "torch.utils.cpp_extension.load", "torch.package.PackageImporter", "torch.export.load",
        "torch.ops.debugprims.load_tensor.default", "torch.ops.profiler._record_function_enter",
        "torch.ops.inductor._alloc_from_pool.default", "torch.ops.aten._print.default",
        "torch.multiprocessing.spawn", "torch.distributed.init_process_group",
        "torch.ops.c10d.allreduce_.default", "torch.ops._c10d_functional.all_reduce.default",
        "torch.ops.higher_order.cond", "torch.ops.symm_mem.one_shot_all_reduce.default",
        # callables and memory
        "torch.Tensor.apply_", "torch.Tensor.map_", "torch.Tensor.map2_", "torch.vmap",
        "torch.Tensor.register_hook", "torch.Tensor.__reduce_ex__", "torch.Tensor.__setstate__",
        "torch.nn.functional.triplet_margin_with_distance_loss", "torch.cond", "torch.lobpcg",
        "torch.Tensor.numpy", "torch.Tensor.data_ptr", "torch.Tensor.set_", "torch.frombuffer",
        "torch.ops.aten.set_.source_Storage", "torch.ops.aten.record_stream.default",
        "torch.fbgemm_linear_fp16_weight", "torch.ops.aten.fbgemm_linear_fp16_weight.default",
        # switches of the process
        "torch.set_default_device", "torch.manual_seed", "torch.use_deterministic_algorithms",
        # no names at all
        "", ".", "torch", "torch.", "torch.ops", "torch.ops.aten", "torch.ops.aten.add.Tensor.x",
        "torch.ops.aten.add.__class__", "torch.relu\n", "torch.rel\u0443", "os.system",
        "builtins.exec", "subprocess.Popen", "numpy.save", "__main__.run", "torch..relu",
    ],
)  # fmt: skip
def test_nothing_else_is(op: str) -> None:
    for look_up in (function_named, module_named, type_named, value_named):
        with pytest.raises(NotReplayable, match="not run: "):
            look_up(op)


def test_what_would_allow_a_name_is_said() -> None:
    def refused(op: str) -> str:
        with pytest.raises(NotReplayable) as caught:
            function_named(op)
        return str(caught.value)

    asked = "is not an operator of torch (allow its package with `imports="
    assert refused("torch.ops.mylib.fused.default") == (
        f"not run: torch.ops.mylib.fused.default {asked}'mylib'`)"
    )
    assert refused("mylib.ops.fused") == f"not run: mylib.ops.fused {asked}'mylib.ops'`)"
    assert refused("torch.hub.load") == "not run: torch.hub.load is not an operator of torch"
    assert refused("my lib; rm -rf.x") == "not run: my lib; rm -rf.x is not an operator of torch"
    assert refused("torch.Tensor.numpy") == (
        "not run: torch.Tensor.numpy reaches outside of its tensors"
    )


@pytest.mark.parametrize("begin", ["torch.", "torch.ops.aten.", "mylib.", "torch_npu."])
def test_a_name_of_megabytes_is_refused_in_one_short_line(begin: str) -> None:
    """Matching it as a dotted name would take a hundred times its size in memory."""
    name = begin + "a." * 100_000 + "b"
    tracemalloc.start()
    for look_up in (function_named, module_named, type_named, value_named):
        with pytest.raises(NotReplayable) as caught:
            look_up(name)
        assert f"({len(name)} characters) is not an operator of torch" in str(caught.value)
        assert len(str(caught.value)) < 200
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(name)


def _takes_text(function: object) -> list[str]:
    """The arguments of a Python function that may be text, by annotation or default."""
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if "str" in str(parameter.annotation) or isinstance(parameter.default, str)
    ]


def _is_undescribed(name: str, function: object) -> bool:
    """Whether a function in C is no operator of aten, whose schema would say what it takes."""
    home, _, last = name.rpartition(".")
    begins = {"torch.linalg": "linalg_", "torch.fft": "fft_", "torch.special": "special_"}
    operators = allowed._registered()
    if f"aten::{begins.get(home, '')}{last}" in operators:
        assert allowed._is_operator(begins.get(home, "") + last, operators), name
        return False
    try:
        inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    return False


def test_every_entry_that_takes_text_is_known() -> None:
    found = set()
    for name, function in allowed._functions().items():
        if words := _takes_text(function):
            found.add(f"{name}: {' '.join(words)}")
        elif _is_undescribed(name, function):
            found.add(f"{name}: nothing says what it takes")
    for operator, overloads in allowed._registered().items():
        namespace, _, name = operator.partition("::")
        if namespace not in allowed.NAMESPACES or namespace == "npu":
            continue
        for overload in overloads:
            if not allowed._may_run(namespace, name, overload):
                continue
            schema = torch._C._get_schema(operator, overload)
            words = [each.name for each in schema.arguments if "str" in str(each.type)]
            assert set(words) <= allowed.WORDS
            if words:
                found.add(f"{operator}: {' '.join(words)}")
    known = set(WITH_TEXT.read_text().splitlines())
    assert sorted(found - known) == []


def test_no_entry_takes_a_callable() -> None:
    for name, function in allowed._functions().items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        for parameter in parameters:
            assert parameter.name not in TAKES_CALLABLES, (name, parameter)
            assert "Callable" not in str(parameter.annotation), (name, parameter)


def test_modules_are_those_of_torch_nn() -> None:
    assert module_named("torch.nn.Linear") is torch.nn.Linear
    assert module_named("torch.nn.modules.linear.Linear") is torch.nn.Linear
    for name in (
        "torch.nn.DataParallel", "torch.nn.parallel.DistributedDataParallel", "torch.nn.Parameter",
        "torch.jit.ScriptModule", "torch.fx.GraphModule", "torch.nn.modules.linear.torch",
    ):  # fmt: skip
        with pytest.raises(NotReplayable, match="not run: "):
            module_named(name)


def test_types_dtypes_and_layouts_are_closed_lists() -> None:
    assert type_named("torch.nn.utils.rnn.PackedSequence") is torch.nn.utils.rnn.PackedSequence
    assert dtype_named("torch.bfloat16") is dtype_named("bfloat16") is torch.bfloat16
    assert format_named("torch.strided") is torch.strided
    assert value_named("torch.float16") is torch.float16
    for look_up, name in ((dtype_named, "load"), (format_named, "hub"), (dtype_named, "float32 ")):
        with pytest.raises(NotReplayable, match=r"this torch .* has no "):
            look_up(name)


LIBRARY = """
import os
import torch
from os import system

library = torch.library.Library("allowed_ns", "DEF")
library.define("twice(Tensor x, str path='') -> Tensor")
library.impl("twice", lambda x, path="": x * 2, "CPU")

def twice(x):
    return x * 2

class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


def test_a_package_is_allowed_by_its_name(tmp_path: Path) -> None:
    """In a process of its own: an operator stays registered."""
    (tmp_path / "allowed_lib.py").write_text(LIBRARY)
    code = """
        from tensorprobe.errors import NotReplayable
        from tensorprobe.replay.allowed import allow, function_named, module_named
        import sys

        def refused(look_up, name):
            try:
                return look_up(name) and False
            except NotReplayable:
                return True

        names = ["torch.ops.allowed_ns.twice.default", "torch.ops.allowed_ns.twice"]
        assert all(refused(function_named, name) for name in [*names, "allowed_lib.twice"])
        path = list(sys.path)
        allow("allowed_lib")
        assert sys.path == path  # the folder it works in is no place to import from
        for name in [*names, "allowed_lib.twice"]:
            function_named(name)
        module_named("allowed_lib.Scale")
        # what it has imported is not its own
        for name in ("os.system", "system", "torch.load", "os", "library", "library.impl"):
            assert refused(function_named, f"allowed_lib.{name}"), name
            assert refused(module_named, f"allowed_lib.{name}"), name
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_operators_of_a_namespace_do_not_open_the_package_of_that_name(tmp_path: Path) -> None:
    """As those of transformers, which every model of it registers."""
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "__init__.py").write_text("from . import files")
    (tmp_path / "wide" / "files.py").write_text("def fetch(path):\n    return path\n")
    (tmp_path / "wide" / "model.py").write_text(LIBRARY.replace("allowed_ns", "wide"))
    code = """
        from tensorprobe.errors import NotReplayable
        from tensorprobe.replay.allowed import allow, function_named

        allow("wide.model")
        function_named("torch.ops.wide.twice")
        function_named("wide.model.twice")
        try:
            function_named("wide.files.fetch")
        except NotReplayable as error:
            assert "imports='wide.files'" in str(error)
        else:
            raise AssertionError("wide.files was not allowed")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os", "holds no operators"),
        ("torch", "holds no operators"),
        ("torch.hub", "holds no operators"),
        ("c10d", "holds no operators"),
        ("debugprims", "holds no operators"),
        ("no_such_package_at_all", "no package and no namespace of that name"),
        ("a b", "expected the name of a package"),
        ("../evil", "expected the name of a package"),
    ],
)
def test_what_cannot_be_allowed_is_said(name: str, reason: str) -> None:
    with pytest.raises(BadUsage, match=reason):
        allow(name)


def test_a_package_that_ends_the_program_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a command would end with its status, 0 perhaps, and nothing done."""
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    for name in ("leaving", "leaving.py"):
        with pytest.raises(BadUsage, match=f"imports='{name}': it ends the program"):
            bring_in([name])
