"""Overflow on the NPU by the guide, and what is refused before training starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from npu_program import end, run, start

import tensorprobe as tp
from tensorprobe.cli.main import main

TRAIN = """\
import sys
import torch
from torch import nn
from ptdbg_ascend import *

device, options = sys.argv[1], eval(sys.argv[2])
seed_all()
set_dump_path("./found/npu.pkl", dump_tag="overflow")
if device == "npu":
    import torch_npu
model = nn.Linear(4, 4).half().to(device)
register_hook(model, overflow_check, **options)
print("training")
for step in range(6):
    y = model(torch.ones(2, 4).half().to(device))
    if step % 2:
        y = y * 60000 * 60000
    else:
        y = y * 0.01
    y = torch.sqrt(y * 0) if step == 4 else y  # its gradient is infinite at 0
    y.sum().backward()
    model.zero_grad()
"""
AS_IT_IS = ["run", "--sim-npu", "--as", "ptdbg_ascend", "train.py", "npu"]
CONFIG = {"dump_list": [], "dump_path": "./dump/output", "dump_op_switch": "on"}
ACL = {"dump_mode": "acl", "dump_config": "./dump.json"}
STOP = r"ValueError: \[overflow 3 times\]: dump file is saved in '(.*\.pkl)'\."
OVERFLOWS = ["Tensor.__mul__.0.forward", "Tensor.__mul__.0.forward", "Torch.sqrt.0.backward"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "dump.json").write_text(json.dumps({"dump": CONFIG}))
    return tmp_path


@pytest.mark.slow
def test_overflows_are_counted_and_dumped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, acl = (
        start(folder, *AS_IT_IS, repr({"overflow_nums": 3, **more}), TASK_QUEUE_ENABLE="0")
        for more in ({}, ACL)
    )
    done = end(api)
    assert done.returncode == 1
    stop = re.search(STOP, done.stderr)
    assert stop is not None, done.stderr
    indexes = sorted((folder / "found" / "overflow_v2.3" / "rank0").glob("Overflow_info_*.pkl"))
    assert Path(stop[1]) == indexes[-1]
    assert [tp.load(index).calls[0].name for index in indexes] == OVERFLOWS
    # What autograd no longer had is had by a second run.
    again = re.search(r"as `tensorprobe run` with (.*)", done.stderr)
    assert again is not None
    verb, *words = AS_IT_IS
    run(folder, verb, *again[1].split(), *words, repr({"overflow_nums": 3}))
    second = tp.load(folder / "again")
    assert [call.name for call in second.calls] == ["Torch.sqrt.0.forward", OVERFLOWS[2]]
    assert np.isinf(second.call(OVERFLOWS[2]).tensor("output.0").array()).all()

    # With ACL data it is not set_dump_path but dump.json that says where; the calls that were run
    # again for it are none of the program's.
    done = end(acl)
    assert done.returncode == 1
    assert re.search(STOP, done.stderr)
    assert done.stderr.count("set_dump_path is not used") == 1
    assert done.stderr.count("was run again under ACL dump: 1 files") == 2
    monkeypatch.chdir(folder)
    assert main(["ascend", "convert", "dump/output", "-o", "arrays"]) == 0
    assert len(list(Path("arrays").rglob("Mul.*.output.0.npy"))) == 2


@pytest.mark.slow
def test_acl_is_refused_before_training(folder: Path) -> None:
    queued = start(folder, *AS_IT_IS, repr(ACL), TASK_QUEUE_ENABLE="1")
    without = run(folder, "run", "--as", "ptdbg_ascend", "train.py", "cpu", repr(ACL))
    for done, text in (
        (end(queued), "export TASK_QUEUE_ENABLE=0"),
        (without, "needs torch_npu, which is not here"),
    ):
        assert done.returncode == 1
        assert text in done.stderr
        assert done.stdout == ""  # it did not get as far as "training"
    # What the refusal names works there.
    (command,) = re.findall(r"tensorprobe (run --level L2) SCRIPT", without.stderr)
    (folder / "plain.py").write_text(
        "import torch\ntorch.ones(2, requires_grad=True).exp().sum().backward()\n"
    )
    done = run(folder, *command.split(), "-o", "kernels", "plain.py")
    assert done.returncode == 0, done.stderr
    assert "Aten.exp.0.forward" in {call.name for call in tp.load(folder / "kernels").calls}
