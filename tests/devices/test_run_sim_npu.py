"""`tensorprobe run --sim-npu`, and what `tensorprobe run` says about device mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import SRC

TRAIN = """\
import torch_npu
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).npu()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    hidden = torch_npu.npu_rms_norm(model(torch.ones(3, 4).npu()), model[0].bias.detach() + 1)[0]
    torch_npu.fast_gelu(hidden).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(model[0].weight.sum().item())
"""


def run(folder: Path, text: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_script_for_the_npu_is_recorded(tmp_path: Path) -> None:
    first, second = (
        run(
            tmp_path,
            TRAIN,
            "--sim-npu",
            "--steps",
            "0-1",
            "--seed",
            "3",
            "-o",
            name,
            NPU_ASD_ENABLE="1",
        )
        for name in ("a", "b")
    )
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("NPU_ASD_ENABLE is on") == 1
    assert first.stdout == second.stdout  # --seed reaches the device too
    capture = tp.load(tmp_path / "a")
    assert capture.gaps == ()
    assert capture.steps == (0, 1)
    assert {c.name for c in capture.calls(name="NPU", step=0)} >= {
        f"NPU.{op}.0.{direction}"
        for op in ("npu_rms_norm", "fast_gelu")
        for direction in ("forward", "backward")
    }
    linear = capture.calls(name="Functional.linear", step=1)
    assert {tensor.device for call in linear for tensor in call.tensors} == {"npu:0"}
    (optimizer,) = capture.calls(name="Optimizer.AdamW", step=1)
    # the step counters of AdamW are on the host
    assert {t.device for t in optimizer.tensors if t.role != "state"} == {"npu:0"}


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import torch\nraise RuntimeError('aclrtGetDevice failed, error code 107002')",
         "no NPU is set for this thread"),
        ("import torch\ntorch.npu_linear", "write torch_npu.npu_linear(...)"),
    ],
    ids=["107002", "mixed up"],
)  # fmt: skip
def test_a_device_mistake_is_explained_after_its_traceback(
    tmp_path: Path, text: str, advice: str
) -> None:
    done = run(tmp_path, text, "-o", "out")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    (place,) = [number for number, line in enumerate(lines) if advice in line]
    assert lines[place].startswith("tensorprobe run: ")
    assert lines[place - 1].startswith(("RuntimeError: ", "AttributeError: "))


def test_a_fault_that_hits_nothing_is_told(tmp_path: Path) -> None:
    program = "import torch_npu, torch\nx = torch.ones(3, device='npu')\nprint(x.exp() + x.exp())\n"
    faults = (
        '[{"op": "expm1", "effect": "nan"}, {"op": "exp", "effect": "nan", "calls": [7]},'
        ' {"op": "add", "effect": "scale:2"}]'
    )
    done = run(tmp_path, program, "--sim-npu", "-o", "a", TENSORPROBE_SIM_NPU_FAULTS=faults)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "tensorprobe run: the fault planted in 'expm1' has spoilt nothing: no such kernel ran. "
        "Near names that ran: exp. A recording at L2 shows those that do",
        "tensorprobe run: the fault planted in 'exp' has spoilt nothing: the kernel ran 2 times, "
        "numbered from 0",
    ]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("exp:nan", "TENSORPROBE_SIM_NPU_FAULTS is not JSON: "),
        ('{"op": "exp"}', "TENSORPROBE_SIM_NPU_FAULTS: expected a list of faults. For example"),
        ('[{"op": "exp", "kind": "nan"}]', "'kind': 'nan'} is no fault. For example"),
    ],
)
def test_faults_that_cannot_be_read_are_one_line(tmp_path: Path, faults: str, said: str) -> None:
    done = run(tmp_path, TRAIN, "--sim-npu", "-o", "a", TENSORPROBE_SIM_NPU_FAULTS=faults)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
