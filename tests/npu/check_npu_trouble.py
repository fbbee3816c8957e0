"""What goes wrong on an NPU, on the real torch_npu, and what the product says of it.

Operators that are missing, errors of the device, overflow with and without saturation; dumps, the
doors, bisect, the errors watch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu

import tensorprobe as tp
from tensorprobe.ascend.dump import read_dump
from tensorprobe.devices import device_layer

pytestmark = pytest.mark.filterwarnings("default")

TRAIN = """\
import torch, torch_npu
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

torch.manual_seed(0)
net = nn.Sequential(Block()).npu()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    loss = net(torch.ones(5, 8).npu()).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}", flush=True)
"""


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def tensorprobe(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "tensorprobe", *words, **environment)


def test_an_operator_that_is_missing_raises_with_its_name() -> None:
    def run_it() -> None:
        torch.linalg.qr(torch.eye(3, device="npu"))
        torch_npu.npu.synchronize()

    with pytest.raises(RuntimeError, match="has no operator"):
        run_it()


# ---- errors of the device ------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["0", "1", "2"])
@pytest.mark.parametrize(("blocking", "line"), [("0", "loss.item()"), ("1", "functional.gelu")])
def test_an_error_surfaces_late_and_at_its_call_where_launches_block(
    queue: str, blocking: str, line: str, tmp_path: Path
) -> None:
    done = run(
        tmp_path,
        "train.py",
        CANN_FAULTS="Gelu@1=error:507015",
        TASK_QUEUE_ENABLE=queue,
        ASCEND_LAUNCH_BLOCKING=blocking,
    )
    assert done.returncode == 1, done.stderr
    assert "507015" in done.stderr
    trace = done.stderr.partition("RuntimeError")[0]
    assert line in trace.splitlines()[-2 if "^^" in trace.splitlines()[-1] else -1], trace


@pytest.mark.parametrize("keep", ["stats", "tensors", "structure"])
def test_a_recording_ends_though_the_device_has_failed(keep: str, tmp_path: Path) -> None:
    """torch_npu answers "not yet" for ever to who asks for results behind the error."""
    fault = "Gelu@1=error:507015"
    done = tensorprobe(
        tmp_path, "run", "--keep", keep, "-o", "run", "train.py",
        CANN_FAULTS=fault, ASCEND_LAUNCH_BLOCKING="0",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    assert "RuntimeError" in done.stderr
    assert "tensorprobe: recorded" in done.stderr
    capture = tp.load(tmp_path / "run")
    assert {call.step for call in capture.calls} >= {0, 1}
    if keep == "stats":
        lost = [call for call in capture.calls if call.step == 1 and call.tensors]
        assert "values did not come back from the device (RuntimeError: " in done.stderr
        assert any("507015" in (t.gap or "") for call in lost for t in call.tensors)


def test_the_errors_watch_names_the_call(tmp_path: Path) -> None:
    done = tensorprobe(
        tmp_path, "run", "--guard", "errors", "-o", "run", "train.py",
        CANN_FAULTS="Gelu@1=error:507015",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    (finding,) = json.loads((tmp_path / "guard" / "findings.json").read_text())["findings"]
    assert finding["name"] == "Functional.gelu.0.forward"
    assert finding["step"] == 1
    assert "507015" in str(finding)


# ---- overflow ------------------------------------------------------------------------------------


def test_overflow_where_the_chip_saturates(tmp_path: Path) -> None:
    """No infinity is left to find; the float status tells of it."""
    program = (
        "import torch, torch_npu, tensorprobe as tp\n"
        "with tp.Guard('guard', log=print, overflow_nums=-1) as guard:\n"
        "    x = torch.full((4,), 300.0).half().npu()\n"
        "    x.mul(2)\n"
        "    y = x.exp()\n"
        "    print(y.cpu().tolist())\n"
        "print([finding.name for finding in guard.findings])\n"
    )
    for disabled, values in (("0", "[inf, "), ("1", "[65504.0, ")):
        done = run(tmp_path, "-c", program, INF_NAN_MODE_FORCE_DISABLE=disabled)
        assert done.returncode == 0, done.stderr[-3000:]
        assert values in done.stdout, done.stdout
        assert "['Tensor.exp.0.forward']" in done.stdout, done.stdout


# ---- dumps, doors, bisect ------------------------------------------------------------------------


def test_an_acl_dump_has_what_the_operators_read_and_wrote(tmp_path: Path) -> None:
    config = tmp_path / "dump.json"
    dump = {"dump_path": str(tmp_path / "out"), "dump_mode": "all", "dump_op_switch": "on"}
    config.write_text(json.dumps({"dump": dump}))
    x = torch.arange(6.0).view(2, 3).npu()
    with device_layer("npu").kernel_dump(config):
        y = x.half() + 1
        torch_npu.npu.synchronize()
    x.neg()
    files = sorted((tmp_path / "out").rglob("*.*.*.*.*"), key=lambda f: int(f.name.split(".")[2]))
    kinds = [file.name.split(".")[0] for file in files]
    assert kinds == ["Copy", "Adds"], kinds
    added = read_dump(files[1])
    (before,), (after,) = added.role("input"), added.role("output")
    assert before.shape == after.shape == (2, 3)
    assert (after.array() == y.cpu().numpy()).all()
    assert (before.array() == x.half().cpu().numpy()).all()


def test_the_acl_mode_of_ptdbg_ascend_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(
        json.dumps({"dump": {"dump_path": "acl", "dump_mode": "all", "dump_op_switch": "on"}})
    )
    script = TRAIN.replace(
        "optimizer = ",
        "from ptdbg_ascend import *\n"
        "set_dump_path('dump', 'tag')\n"
        "register_hook(net, acc_cmp_dump, dump_mode='acl', dump_config='dump.json')\n"
        "set_dump_switch('ON', mode='acl', scope=['Functional_gelu_1_forward'])\n"
        "optimizer = ",
    )
    (tmp_path / "dumped.py").write_text(script)
    done = tensorprobe(tmp_path, "run", "--as", "ptdbg_ascend", "dumped.py", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = {file.name.split(".")[0] for file in (tmp_path / "acl").rglob("*.*.*.*.*")}
    assert kinds == {"Gelu"} or kinds == {"GeluV2"}, kinds


def test_the_doors_dump_on_an_npu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "task": "statistics", "dump_path": "ms", "rank": [], "step": [], "level": "mix",
                "statistics": {"scope": [], "list": [], "data_mode": ["all"]},
            }
        )
    )  # fmt: skip
    script = TRAIN.replace(
        "optimizer = ",
        "from msprobe.pytorch import PrecisionDebugger\n"
        "debugger = PrecisionDebugger('config.json')\n"
        "optimizer = ",
    ).replace("    loss = net", "    debugger.start(net)\n    loss = net")
    script += "    debugger.stop()\n    debugger.step()\n"
    (tmp_path / "dumped.py").write_text(script)
    bare = run(tmp_path, "train.py").stdout
    done = tensorprobe(tmp_path, "run", "--as", "msprobe", "dumped.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert bare
    assert bare in done.stdout
    names = [call.name for call in tp.load(tmp_path / "ms").calls]
    assert "Functional.gelu.0.forward" in names
    assert "Functional.gelu.0.backward" in names


def test_bisect_names_the_operator_that_is_wrong(tmp_path: Path) -> None:
    right = run(tmp_path, "train.py").stdout.splitlines()[-1]
    done = tensorprobe(
        tmp_path, "bisect", "--check", f"grep -q {right}", "--apis", "gelu,square", "-o", "out",
        "--", "train.py", CANN_FAULTS="Gelu=scale:1.5",
    )  # fmt: skip
    assert done.returncode == 3, (done.stdout, done.stderr[-3000:])
    culprits = json.loads((tmp_path / "out" / "bisect.json").read_text())["culprits"]
    assert {culprit["name"].partition(".0")[0] for culprit in culprits} == {"Functional.gelu"}
