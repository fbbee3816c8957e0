"""The simulated NPU's ACL dumps are read back as what its kernels saw."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorprobe.ascend.dump import read_dump
from tensorprobe.ascend.operator_references import check_outputs
from tensorprobe.cli.main import main

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import torch
from tensorprobe.devices import sim_npu

sim_npu.install()
torch.manual_seed(0)
folder = Path(sys.argv[1])
x, w = torch.randn(5, 3, device="npu"), torch.randn(3, 4, device="npu")
h = x.to(torch.bfloat16)
torch.npu.init_dump()
torch.npu.set_dump(str(folder / "dump.json"))
y = torch.softmax(x @ w, -1)
z = h * 2
torch.npu.finalize_dump()
np.savez(folder / "seen.npz", x=x.cpu().numpy(), w=w.cpu().numpy(), y=y.cpu().numpy(),
         z=z.float().cpu().numpy())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("tensorprobe.devices.sim_npu") is None:
        pytest.skip("this tree has no simulated NPU")
    folder = tmp_path_factory.mktemp("acl")
    dump = {"dump_list": [], "dump_path": str(folder / "dumps"), "dump_mode": "all"}
    (folder / "dump.json").write_text(json.dumps({"dump": {**dump, "dump_op_switch": "on"}}))
    # A device is registered once a process and for good: not in this one.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def by_type(folder: Path) -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in (folder / "dumps").rglob("*.*.*.*.*")}


def test_each_kernel_is_read_back(folder: Path) -> None:
    seen = np.load(folder / "seen.npz")
    files = by_type(folder)
    product = read_dump(files["MatMulV2"])
    np.testing.assert_array_equal(product.tensors[0].array(), seen["x"])
    np.testing.assert_array_equal(product.tensors[1].array(), seen["w"])
    softmax = read_dump(files["SoftmaxV2"])
    np.testing.assert_array_equal(softmax.role("output")[0].array(), seen["y"])
    doubled = read_dump(files["Mul"]).role("output")[0]
    assert doubled.dtype == "bfloat16"
    np.testing.assert_array_equal(doubled.array().astype(np.float32), seen["z"])


def test_references_agree_with_its_kernels(folder: Path) -> None:
    files = by_type(folder)
    for op_type in ("MatMulV2", "SoftmaxV2"):
        dump = read_dump(files[op_type])
        check = check_outputs(
            op_type,
            [t.array() for t in dump.role("input")],
            [t.array() for t in dump.role("output")],
            [t.dtype for t in dump.role("output")],
            {},
        )
        assert check.agrees, check.text


def test_the_tree_converts(folder: Path, tmp_path: Path) -> None:
    assert main(["ascend", "convert", str(folder / "dumps"), "-o", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").rglob("SoftmaxV2.*.output.0.npy")
    np.testing.assert_array_equal(np.load(path), np.load(folder / "seen.npz")["y"])
