"""The Triton kernels and the banks, interpreted on CPU: what CUDA runs, without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensors import cases

HERE = Path(__file__).parent
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tensorprobe.tensors import launch
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors import triton_kernels as kernels

READS = {"bfloat16": "*i16", "float16": "*fp16", "float32": "*fp32"}
PLACES = {"table": "*i64", "weights": "*i64", "rows": "*i64", "meta": "*i32", "digests": "*i64"}
PLACES |= {"flags": "*i32", "out": "*i64"}
RUNS = ["run", "n1", "n2", "s0", "s1", "s2"]
NUMBERS = dict.fromkeys(["n", "words", "units", "row", "slot", *RUNS], "i32")
SKETCHED = {"FIELDS": rows.FIELDS, "SKETCHED": True, "EARLY": True}
SAME = {"LANES": launch.LANES, **SKETCHED}

def ptx(function, pointers, constants):
    types = {**pointers, **PLACES, **NUMBERS}
    names = function.arg_names
    source = ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types.get(name, "")[:1] == "*"
        },
    )
    target = GPUTarget("cuda", 90, 32)
    done = triton.compile(source, target=target, options={"num_warps": launch.LANES // 32})
    text = done.asm["ptx"]
    begins = text.index("griddepcontrol.wait")  # for the kernels before it, and then it reads
    assert begins < min(text.index(word) for word in ("ld.global", "st.global") if word in text)
    return text

for name, read in READS.items():
    kind, unit = launch.READS[name][1], 4 if name == "float32" else 2
    tally = ptx(
        kernels.tally_floats,
        {"x": read},
        {"KIND": kind, "WIDE": False, "VECTOR": 16 // unit, **SAME},
    )
    assert "ld.global.v4.b32" in tally, name
    runs = ptx(kernels.tally_runs, {"x": read}, {"KIND": kind, "VECTOR": 16 // unit, **SAME})
    assert "ld.global.v4.b32" in runs, name
    flag = ptx(
        kernels.flag_floats,
        {"x": read},
        {"KIND": kind, "WIDE": False, "VECTOR": 16 // unit, "LANES": launch.LANES, "EARLY": True},
    )
    assert "ld.global.v4.b32" in flag, name
    for kernel in (kernels.digest_and_tally_floats, kernels.digest_and_tally_runs):
        both = ptx(
            kernel, {"x": "*i64", "elements": read}, {"KIND": kind, "UNIT": unit, **SAME}
        )
        assert "ld.global.v2.b64" in both, name
ptx(kernels.tally_integers, {"x": "*i64"}, {"KIND": 3, "BLOCK": launch.BLOCK, **SKETCHED})
ptx(kernels.digest_chunks, {"x": "*i64"}, {"UNIT": 8, "BLOCK": launch.BLOCK, "EARLY": True})
ptx(kernels.reduce_rows, {}, {"BLOCK": 128, **SKETCHED})
print("passed")
"""
# Triton's own layer and ours, each before a function that notes what it is given.
STARTED = """
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from tensorprobe.tensors import launch

triton.runtime.driver.set_active(object())
seen = []
run = object.__new__(CudaLauncher)
vars(run).update(
    num_ctas=1, global_scratch_size=0, profile_scratch_size=0, gsan_enabled=False,
    global_scratch_align=1, profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False, arg_annotations=["a"], kernel_signature=b"s",
    launch=lambda *given: seen.append(given),
)

class Compiled:
    function, packed_metadata = 77, (8, 1, 256)

Compiled.run = run
kernel = launch.Kernel(None, torch.device("cpu"), 8)
kernel._compiled["key"] = launch._form_of(Compiled, (1, False))
assert kernel.start("key", 5, 99, 1001, 1002, 3)
run(5, 1, 1, 99, 77, (8, 1, 256), None, None, None, 1001, 1002, 3, 1, False)
ours, theirs = seen
assert ours == theirs, seen
vars(run).update(global_scratch_size=8)
assert launch._form_of(Compiled, ())[0] is run, "which allocates that"
print("passed")
"""
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def interpret(*arguments: str) -> None:
    paths = [str(HERE.parent.parent / "src"), str(HERE.parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "interpreted.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "passed\n"


def test_every_way_of_reading_and_the_banks() -> None:
    # One dtype for each way; test_every_dtype_and_layout has the others.
    interpret("banks", "float64", "bfloat16", "float8_e4m3fn", "uint64", "bool", "complex64")


def test_what_is_usual_starts_by_a_compiled_form() -> None:
    interpret("usual", "bfloat16", "int64")


@pytest.mark.slow
def test_what_is_usual_of_other_dtypes() -> None:
    interpret("usual", "float32", "float8_e5m2", "bool", "complex64")


def test_pieces_with_gaps_between_them() -> None:
    interpret("runs", "bfloat16")
    interpret("digested", "bfloat16")


@pytest.mark.slow
def test_pieces_of_float32_with_gaps_between_them() -> None:
    interpret("runs", "float32")
    interpret("digested", "float32")


def test_flags_of_what_is_not_finite() -> None:
    interpret("flags")


@pytest.mark.parametrize("script", [COMPILED, STARTED], ids=["compiled", "started"])
def test_without_a_gpu(script: str) -> None:
    """Compiled for an H100 they read floats 16 bytes at a time (a mask in the wrong place costs a
    third of the speed), and they are started as Triton starts them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_every_dtype_and_layout(dtype: object) -> None:
    interpret("layouts", str(dtype).removeprefix("torch."))
