"""The code blocks of the user guide of ptdbg_ascend, and a script that runs them all.

The guide is no part of this project: it is read where it lies beside it.
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

SHARED = Path(os.environ.get("TENSORPROBE_SHARED") or Path(__file__).parents[3] / ".." / "shared")
_BLOCK = re.compile(r"^([ \t]*)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_PROTOTYPE = "**函数原型**"


def guide() -> str:
    """The text of the guide; empty where it is not there."""
    found = sorted((SHARED / "seeds").glob("004_*.txt"))
    return found[0].read_text(encoding="utf-8") if found else ""


def blocks() -> tuple[list[str], list[str]]:
    """The prototypes, and the code that is meant to be run."""
    prototypes, code = [], []
    text = guide()
    for found in _BLOCK.finditer(text):
        block = textwrap.dedent(found[2].replace("\t", "    "))
        before = text[: found.start()].rstrip().rpartition("\n")[2]
        (prototypes if before.strip() == _PROTOTYPE else code).append(block)
    return prototypes, code


# Runs each block in a folder of its own, in which all that the guide names is there.
DRIVER = '''\
import json, os, shutil, sys, traceback
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
import ptdbg_ascend as door
from tensorprobe.peers.ptdbg.ptdbg_functions import _SESSION

def make_model():
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3, padding=1).npu()

def train(model):
    for _ in range(4):
        y = model(torch.randn(2, 3, 6, 6).npu()).abs()
        y = torch.relu(y.permute(0, 2, 3, 1)).transpose(1, 3)
        y.sum().backward()

def fresh():
    _SESSION.close()
    _SESSION.__init__()

def prepare(home, block):
    """Everything that the guide names: a dump.json, a gradient, and where it reads dumps, those."""
    os.chdir(home)
    os.makedirs("acl_dump_xxx", exist_ok=True)
    np.save("acl_dump_xxx/Functional_conv2d_1_backward_input.0.npy",
            np.ones((2, 4, 6, 6), np.float32))
    os.makedirs("output", exist_ok=True)
    Path("dump.json").write_text(json.dumps({"dump": {
        "dump_list": [], "dump_path": "./dump/output", "dump_mode": "all",
        "dump_op_switch": "on"}}))
    if "compare" not in block and "parse(" not in block:
        return
    model = make_model()
    door.set_dump_path("first/npu_dump.pkl")
    door.register_hook(model, door.acc_cmp_dump)
    door.set_dump_switch("ON", mode="api_stack")
    train(model)
    fresh()
    index = Path("first/ptdbg_dump_v2.3/rank0/api_stack_npu_dump.pkl")
    places = ["api_stack_npu_dump", "api_stack_gpu_dump", "npu_dump", ".api_stack_/npu_dump",
              ".api_stack_/gpu_dump", "npu_dump/dump_conv2d_v1.0/rank0/d",
              "gpu_dump/dump_conv2d_v1.0/rank0/d"]
    for place in places:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        text = index.read_text().replace("Torch_relu_1_forward", "Torch_batch_normal_1_forward")
        Path(place + ".pkl").write_text(text if place == "npu_dump" else index.read_text())
        shutil.copytree(index.with_suffix(""), place, dirs_exist_ok=True)

def names_of(model):
    data = torch.utils.data.TensorDataset(torch.ones(4, 3))
    return {"torch": torch, "toech": torch, "model": model, "train_dataset": data,
            "batch_size": 2, "num_workers": 0, "input": torch.ones(3), "train": train}

IMPORT = "from ptdbg_ascend import *\\n"
results = []
here = Path.cwd()
for number, block in enumerate(json.loads(Path("blocks.json").read_text())):
    home = here / f"block{number}"
    home.mkdir()
    prepare(home, block)
    before = {str(path) for path in home.rglob("*")}
    code = block if IMPORT in block else IMPORT + block
    if "set_dump_switch" in block and "register_hook" not in block:
        # An example of one function: what the guide wants before it is not repeated there.
        before_it = "set_dump_path('./d.pkl')\\nregister_hook(model, acc_cmp_dump)\\n"
        code = code.replace(IMPORT, IMPORT + before_it)
    code = "\\n".join(
        "train(model)" if line.strip() == "..." else line for line in code.split("\\n"))
    model = make_model()
    try:
        exec(compile(code, f"block{number}", "exec"), names_of(model))
        train(model)  # what follows in the program
        fresh()
        problem = None
    except Exception:
        problem = traceback.format_exc()
        fresh()
    made = sorted(str(p.relative_to(home)) for p in home.rglob("*") if str(p) not in before)
    results.append({"code": block, "problem": problem, "made": made})
os.chdir(here)
Path("results.json").write_text(json.dumps(results))
'''
