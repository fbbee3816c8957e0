"""Fused ops of a vendor have no CPU kernel: their formula is the reference, also in a repro."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded import run_script

PROGRAM = """
import runpy, sys, torch
from tensorprobe.devices import sim_npu
sim_npu.install()
import torch_npu, tensorprobe as tp

def tensor(*shape):
    return torch.randn(shape).npu().requires_grad_()

torch.manual_seed(0)
with tp.Recorder("run", level="L1", keep="tensors"):
    torch_npu.npu_rms_norm(tensor(4, 8), tensor(8))[0].square().sum().backward()
    torch_npu.npu_swiglu(tensor(4, 8)).square().sum().backward()
    q = tensor(1, 2, 4, 8)
    torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.3)[0].square().sum().backward()

open("npu.py", "w").write(
    "from tensorprobe.devices import sim_npu\\n"
    "sim_npu.install()\\n"
    "sim_npu.plant('npu_swiglu', effect='scale:1.001')\\n"
)
done = tp.check("run", "out", device="npu", references="npu.py", only=["npu_*"])
for row in sorted(done.rows, key=lambda row: row.name):
    print(row.name, row.verdict, row.reference)
tp.repro("run", "NPU.npu_rms_norm.0", "repro")
sys.argv = ["repro.py", "--device", "npu"]
runpy.run_path("repro/repro.py", run_name="__main__")
"""


@pytest.mark.slow
def test_fused_ops_of_the_npu(tmp_path: Path) -> None:
    done = run_script(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "NPU.npu_fusion_attention.0.forward pass formula of npu_fusion_attention in float64",
        "NPU.npu_rms_norm.0.forward pass formula of npu_rms_norm in float64",
        "NPU.npu_swiglu.0.forward fail formula of npu_swiglu in float64",
        "torch 2.13.0+cpu, device npu, against the stored float64 reference".replace(
            "2.13.0+cpu", lines[3].split()[1].rstrip(",")
        ),
    ]
    assert lines[-1] == "PASS"
