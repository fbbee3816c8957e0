"""What torch_versions.py promises, in whichever torch is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe import torch_versions

SRC = Path(tp.__file__).parents[1]


def test_every_backward_goes_through_the_entry_and_it_is_put_back() -> None:
    before, calls = torch_versions.engine_entry(), []

    def entry(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    torch_versions.put_engine_entry(entry)
    try:
        (x * 2).sum().backward()
        torch.autograd.grad((x * 3).sum(), x)
        torch.autograd.backward((x * 4).sum())
    finally:
        torch_versions.put_engine_entry(before)
    (x * 5).sum().backward()
    assert len(calls) == 3
    assert torch_versions.engine_entry() == before
    assert x.grad is not None
    assert x.grad.tolist() == [11, 11]


def test_the_edge_of_a_leaf_and_of_a_result() -> None:
    leaf = torch.ones(2, requires_grad=True)
    node, number = torch_versions.gradient_edge(leaf)
    assert (node.variable is leaf, number) == (True, 0)
    parts = (leaf * 1).split(1)
    assert torch_versions.gradient_edge(parts[1]) == (parts[1].grad_fn, 1)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("Conjugate", lambda: torch.ones(2, dtype=torch.complex64).conj()),
        ("Negative", lambda: torch.ones(2, dtype=torch.complex64).conj().imag),
        ("Sparse", lambda: torch.ones(2, 2).to_sparse()),
        ("SparseCsr", lambda: torch.eye(2).to_sparse_csr()),
        ("Meta", lambda: torch.empty(2, device="meta")),
        ("Quantized", lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)),
        ("ZeroTensor", lambda: torch._efficientzerotensor(2)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors_are_told_apart(kind: str, make: Any) -> None:
    bit = torch_versions.bit_of(kind)
    assert torch_versions.key_bits(make()) & bit
    plain = (torch.ones(2), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2)))
    assert [torch_versions.key_bits(tensor) & bit for tensor in plain] == [0, 0, 0]


def test_the_accelerator_of_the_build_is_told_without_a_device() -> None:
    is_cuda = torch_versions.accelerator_type() == "cuda"
    assert is_cuda == (torch.version.cuda is not None)


def test_memory_that_numpy_has_is_not_torchs_own() -> None:
    array = np.zeros(3)
    assert not torch_versions.is_own(torch.from_numpy(array).untyped_storage())


# A mode that the program enters and forgets: nothing but torch's stack holds it.
_FORGOTTEN = """
import torch, sys
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
import tensorprobe as tp
class Doubling(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.factor = 2
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func.__name__.startswith("relu") else result
def program():
    Doubling().__enter__()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for parameter in net.parameters():
        torch.nn.init.ones_(parameter)
    (loss := net(torch.ones(2, 4)).sum()).backward()
    print(loss.item(), net[0].weight.grad.sum().item(), len(_get_current_dispatch_mode_stack()))
with tp.Recorder(sys.argv[1], level=sys.argv[2], keep="tensors", log=lambda text: None):
    program()
"""


@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_a_mode_that_only_torch_holds_lives_on(level: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORGOTTEN, str(tmp_path / "c"), level]
    done = subprocess.run(command, cwd=SRC, capture_output=True, text=True, check=False)
    modes = 1 + (level == "L2")
    assert done.stdout == f"80.0 32.0 {modes}\n", done.stderr[-500:]


def test_autocast_and_the_default_device() -> None:
    assert torch_versions.autocast_dtype("cpu") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch_versions.autocast_dtype("cpu") == torch.bfloat16
    assert torch_versions.default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert torch_versions.default_device() == torch.device("meta")


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
@pytest.mark.parametrize("keep", ["structure", "stats", "digest", "tensors"])
def test_a_training_is_recorded_and_not_disturbed(level: Any, keep: Any, tmp_path: Path) -> None:
    def train(recorder: tp.Recorder | None = None) -> list[nn.Parameter]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            if recorder is not None:
                recorder.step()
        return list(model.parameters())

    with tp.Recorder(tmp_path, level=level, keep=keep, log=lambda text: None) as recorder:
        recorded = train(recorder)
    bare = train()
    assert all(map(torch.equal, recorded, bare))
    capture = tp.load(tmp_path)
    assert not capture.gaps
    assert {call.step for call in capture.calls} == {0, 1}
    if level != "L2" and keep != "structure":
        gradients = [call for call in capture.calls if call.direction == "backward"]
        assert gradients
        assert all(call.status == "complete" for call in gradients)


def test_a_torch_that_is_too_old_gets_a_sentence(tmp_path: Path) -> None:
    code = (
        "import torch; del torch._C._current_graph_task_id; torch.__version__ = '1.13.1'\n"
        "import tensorprobe as tp\n"
        "try: tp.Recorder\n"
        "except tp.TensorprobeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True, check=False
    )
    assert done.stdout == (
        "torch 1.13.1 is too old: tensorprobe records with torch 2.1 and newer. "
        "Captures are read, shown and compared without torch\n"
    ), done.stderr


def test_a_version_without_the_simulated_device_says_which_has_it() -> None:
    if torch_versions.can_simulate():
        pytest.skip("this one has it")
    code = "from tensorprobe.devices import device_layer; device_layer('npu').simulate()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        "the simulated NPU needs torch 2.10 or newer. Everything else works with this torch"
    )


def test_a_version_that_hides_its_graphs_says_which_shows_them(tmp_path: Path) -> None:
    if torch_versions.can_see_compiling():
        pytest.skip("this one shows them")
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    for words, status, said in (
        (
            ("run", "--compiled", "graphs", "-o", "run", "train.py"),
            0,
            f"compiled='graphs': torch {torch.__version__} does not show what it compiles, torch "
            "2.6 and newer do. A compiled part is one call here",
        ),
        (
            ("bisect", "--compile", "--", "train.py"),
            1,
            f"torch {torch.__version__} cannot switch passes of torch.compile off one by one; "
            "torch 2.6 and newer can",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_every_file_can_be_imported() -> None:
    """But for the simulated device, and for the kernels where Triton is missing or too old."""
    root = SRC / "tensorprobe"
    left_out = ("__main__.py", "train_npu.py", "simulation.py", "triton_kernels.py")
    names = [
        ".".join(("tensorprobe", *path.relative_to(root).with_suffix("").parts))
        for path in sorted(root.rglob("*.py"))
        if "sim_npu" not in path.parts and path.name not in left_out
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        '        if not str(error).startswith("No module named \'triton"): raise\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=SRC, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert len(names) > 200
