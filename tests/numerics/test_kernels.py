"""The Triton kernels and the banks, interpreted on CPU: what CUDA runs, without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numerics import cases

HERE = Path(__file__).parent
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


def test_flags_of_what_is_not_finite() -> None:
    interpret("flags")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_every_dtype_and_layout(dtype: object) -> None:
    interpret("layouts", str(dtype).removeprefix("torch."))
