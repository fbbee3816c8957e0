"""How people really use msprobe and ptdbg_ascend: a small script for each kind, written anew.

Each script is run unedited, in a folder that has `config.json` with the fields given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """A script of one kind, and what it has to leave behind."""

    script: str
    dumps: tuple[str, ...] = ()  # folders of steps, and how often each has a dump.json
    says: tuple[str, ...] = ()  # in what it prints
    status: int = 0
    config: Mapping[str, Any] = MappingProxyType({})
    quick: bool = False  # one of each family is in the fast set


_HEAD = """\
import os, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.ones(3, 4)
"""
_LOOP = """
for step in range(2):
    debugger.start(model=model)
    model(batch).sum().backward()
    optimizer.step()
    debugger.stop()
    debugger.step()
"""
_BOTH = ("dump/step0", "dump/step1")

MSPROBE = {
    "01 a guide of a cloud vendor, with a seed": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger(config_path='config.json')\n"
        + "drawn = torch.rand(3)\ntorch.manual_seed(1234)\n"
        + "assert torch.equal(drawn, torch.rand(3))\n"
        + _LOOP,
        _BOTH,
        ("seed: every generator was seeded with 1234",),
        config={"seed": 1234, "is_deterministic": False, "level": "mix"},
        quick=True,
    ),
    "02 the model in the constructor": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger(config_path='config.json', model=model)\n"
        + _LOOP.replace("model=model", "")
        + "debugger = PrecisionDebugger('config.json', None, None, None, model)\n",
        _BOTH,
        ("PrecisionDebugger(model=...) is of releases before 26: start() uses it",),
        config={"level": "L0"},
    ),
    "03 a profiler that sets a folder for each stage": Usage(
        _HEAD
        + """
from msprobe.pytorch import PrecisionDebugger
debugger = None
for global_step in (5, 6):
    for stage in ("old_log_prob", "ref", "update_actor"):
        path = os.path.join("dump", f"step_{global_step}", stage)
        os.makedirs(path, exist_ok=True)
        if debugger is None:
            debugger = PrecisionDebugger(config_path="config.json", dump_path=path)
        if hasattr(debugger, "service") and hasattr(debugger.service, "config"):
            debugger.service.config.dump_path = path
        debugger.start(model)
        model(batch)
        debugger.stop()
        if stage == "update_actor":
            debugger.step()
""",
        tuple(
            f"dump/step_{5 + i}/{stage}/step{i}"
            for i in range(2)
            for stage in ("old_log_prob", "ref", "update_actor")
        ),
        quick=True,
    ),
    "04 rollout and training of one step, reset in between": Usage(
        _HEAD
        + """
from msprobe.pytorch import PrecisionDebugger, seed_all
seed_all(mode=True)
debugger = PrecisionDebugger(task="statistics", level="L0", step=[0, 1], dump_path="dump")
prefix = debugger.config.dump_path
for step in range(3):
    debugger.service.config.dump_path = os.path.join(prefix, "generate")
    debugger.start(model=model, token_range=[0, 0])
    with torch.no_grad():
        for _ in range(3):
            model(batch)
    debugger.stop()
    debugger.service._reset_status()
    debugger.service.config.dump_path = os.path.join(prefix, "train")
    debugger.start(model=model)
    model(batch).sum().backward()
    debugger.stop()
    debugger.step()
    assert debugger.service.current_iter == step
""",
        tuple(f"dump/{stage}/step{i}" for stage in ("generate", "train") for i in range(2)),
    ),
    "04 a training worker that logs each step that is recorded": Usage(
        _HEAD
        + """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
debugger.service.config.dump_path = os.path.join(debugger.config.dump_path, "worker")
logged = []
for _ in range(4):
    debugger.start(model=model)
    model(batch).sum().backward()
    if not debugger.service.should_stop_service:
        logged.append(debugger.service.current_iter)
    debugger.stop()
    debugger.step()
assert logged == [0, 1], logged
""",
        ("dump/worker/step0", "dump/worker/step1"),
        config={"level": "L0", "step": [0, 1]},
    ),
    "05 a serving engine that asks for the level": Usage(
        _HEAD
        + """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger("config.json")
with torch.inference_mode():
    for _ in range(2):
        if debugger.config.level in ("L0", "mix"):
            debugger.start(model=model)
        model(batch)
        debugger.stop()
        debugger.step()
""",
        _BOTH,
        config={"level": "mix"},
    ),
    "05 its bridge, which switches dumps in the file and has it read at once": Usage(
        _HEAD
        + """
import json
from msprobe.pytorch import PrecisionDebugger
content = json.load(open("config.json"))
debugger = PrecisionDebugger("config.json")
for step in range(3):
    with open("config.json.tmp", "w") as file:
        json.dump({**content, "dump_enable": step == 1}, file)
    os.replace("config.json.tmp", "config.json")
    reload = getattr(debugger, "_maybe_reload_config", None)
    if callable(reload):
        reload(force=True)
    debugger.start(model)
    model(batch)
    debugger.stop()
    debugger.step()
""",
        ("dump/step1",),
        config={"level": "L0", "dump_enable": False},
    ),
    "06 another one, with a rank": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger(config_path='config.json')\n"
        + "with torch.no_grad():\n"
        + "    debugger.start(model=model, rank_id=None)\n    model(batch)\n    debugger.stop()\n"
        + "    debugger.step()\n",
        ("dump/step0",),
    ),
    "07 parts of a pipeline": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger, seed_all\n"
        + "seed_all(seed=1, mode=True, rm_dropout=True)\n"
        + "debugger = PrecisionDebugger(config_path='config.json')\n"
        + "debugger.start(model=[model[:2], model[2:]])\nmodel[2:](model[:2](batch))\n"
        + "debugger.stop()\ndebugger.step()\n",
        ("dump/step0",),
        config={"level": "L0"},
    ),
    "08 no configuration file": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger(task='tensor', dump_path='dump')\n"
        + _LOOP,
        _BOTH,
    ),
    "09 a debugger made anew in every call": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + _LOOP.replace(
            "    debugger.start",
            "    debugger = PrecisionDebugger('config.json')\n    debugger.start",
        ),
        _BOTH,
    ),
    "10 a monitor": Usage(
        _HEAD
        + "from msprobe.pytorch import TrainerMon\n"
        + "monitor = TrainerMon('config.json', params_have_main_grad=False)\n"
        + "monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)\n"
        + "for step in range(4):\n    model(batch).sum().backward()\n"
        + "    optimizer.step()\n    optimizer.zero_grad()\n",
        says=(
            "stack_info is not measured: stacks: use tensorprobe run",
            "monitor: 4 steps, no alarms. Next: tensorprobe monitor show monitor_output",
        ),
        config={"targets": {}, "wg_distribution": True, "format": "csv", "stack_info": True},
    ),
    "17 the gradient probe": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger('config.json')\ndebugger.monitor(model)\n",
        says=("task='grad_probe' is not supported: use tensorprobe run --monitor DIR",),
        status=1,
        config={"task": "grad_probe", "grad_probe": {"grad_level": "L1", "bounds": [-1, 0, 1]}},
    ),
    "18 imports of all years": Usage(
        """
import msprobe
from msprobe.core.common.exceptions import FileCheckException, MsprobeException
from msprobe.core.common.utils import CompareException
from msprobe.pytorch import PrecisionDebugger, compare, seed_all
from msprobe.pytorch.common import seed_all
from msprobe.pytorch.common.utils import seed_all
from msprobe.pytorch.compare.acc_compare import compare
from msprobe.pytorch.compare.distributed_compare import compare_distributed
from msprobe.pytorch.compare.pt_compare import compare
from msprobe.pytorch.debugger.precision_debugger import PrecisionDebugger
from msprobe.pytorch.dump.debugger.precision_debugger import PrecisionDebugger, module_dump
from msprobe.core.monitor_v2.trainer import TrainerMonitorV2
from msprobe.pytorch.monitor.module_hook import TrainerMon
from msprobe.pytorch.functional.module_dump import module_dump, module_dump_end
assert tuple(map(int, msprobe.__version__.split("."))) >= (26, 2)
try:
    PrecisionDebugger("there_is_no_such.json")
except MsprobeException as error:
    print("caught:", error)
try:
    from msprobe.core.monitor.anomaly_processor import AnomalyAnalyse
except ImportError as error:
    print("caught:", error)
""",
        says=(
            "caught: no configuration can be read from 'there_is_no_such.json'",
            "caught: msprobe.core.monitor is not supported; use tensorprobe run",
        ),
        quick=True,
    ),
    "19 class methods and ranges of steps": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end\n"
        + "PrecisionDebugger('config.json')\n"
        + """
for step in range(4):
    PrecisionDebugger.start(model)
    module_dump(model[2], "head")
    model(batch)
    module_dump_end()
    PrecisionDebugger.forward_backward_dump_end()
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
""",
        ("dump/step1", "dump/step2"),
        config={"step": ["1-2"], "rank": ["0-3"]},
    ),
    "20 nested values saved by hand": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger('config.json')\n"
        + "h = model(batch)\ndebugger.save({'a': [h], 'n': 3}, 'nest')\nh.sum().backward()\n"
        + "debugger.step()\n",
        config={"level": "debug"},
        quick=True,
    ),
    "21 a reset between stages": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + """
for stage in ("a", "b"):
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger("config.json", dump_path=f"dump/{stage}")
    debugger.start(model)
    model(batch)
    debugger.stop()
    debugger.step()
""",
        ("dump/a/step0", "dump/b/step0"),
    ),
    "22 two owners in one program": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger('config.json')\n"
        + "assert PrecisionDebugger('config.json', dump_path='other', level='L0') is debugger\n"
        + _LOOP,
        _BOTH,
        ("it stays as it is, and config_path='config.json', dump_path='other', level='L0' has no",),
    ),
    "23 a scheduler that says whose rows they are": Usage(
        _HEAD
        + "from msprobe.pytorch import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger('config.json')\n"
        + """
for requests in ({"r1": 2}, {"r2": 1}, {"r1": 1, "r2": 1}):
    debugger.start(model=model, scheduled_tokens=requests)
    model(batch)
    debugger.stop()
    debugger.step()
""",
        ("dump/step0", "dump/step2"),
        (
            "tensors are recorded whole, rows of requests are not told apart",
            "statistics.request_id: tensors are recorded whole",
        ),
        config={"statistics": {"request_id": "r1", "slice": [{"dim": 0, "begin": 1}]}},
        quick=True,
    ),
    "24 a callback of a trainer": Usage(
        _HEAD
        + """
from msprobe.pytorch import PrecisionDebugger

class Callback:
    def __init__(self):
        self.debugger = PrecisionDebugger(config_path="config.json")
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.debugger.start(model=model)
    def on_step_end(self, args, state, control, **kwargs):
        self.debugger.stop()
        self.debugger.step()

callback = Callback()
for step in range(2):
    callback.on_step_begin(None, None, None, model=model, optimizer=optimizer)
    for _ in range(2):  # gradient accumulation
        model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    callback.on_step_end(None, None, None, model=model)
""",
        _BOTH,
        config={"level": "mix"},
    ),
    "25 an overflow check while it runs": Usage(
        "import torch\nfrom msprobe.pytorch import PrecisionDebugger\n"
        "debugger = PrecisionDebugger('config.json')\ndebugger.start()\n"
        "torch.full((2,), 3e38) * 10\ndebugger.stop()\ndebugger.step()\n",
        says=("Tensor.mul.0.forward",),
        config={"task": "overflow_check", "overflow_check": {"overflow_nums": -1}},
    ),
}

PTDBG = {
    "11 release 2.3": Usage(
        _HEAD
        + "from ptdbg_ascend import *\n"
        + "seed_all()\nset_dump_path('./dump', dump_tag='all')\n"
        + "register_hook(model, acc_cmp_dump, rank=0)\n"
        + "set_dump_switch('ON', mode='api_stack', filter_switch='OFF')\n"
        + "model(batch).sum().backward()\nset_dump_switch('OFF')\n",
        says=("tensorprobe run: ptdbg_ascend is tensorprobe.ptdbg_ascend",),
    ),
    "12 release 1": Usage(
        _HEAD
        + "from ptdbg_ascend import *\nset_dump_path('./dump.pkl')\n"
        + "register_hook(model, acc_cmp_dump, dump_mode=1)\n",
        says=("dump_mode",),
        status=1,
    ),
    "13 a list with an optimizer's step": Usage(
        _HEAD.replace("optim.SGD", "optim.Adam")
        + "from ptdbg_ascend import PrecisionDebugger\n"
        + "debugger = PrecisionDebugger(dump_path='./dump', hook_name='dump', step=[0])\n"
        + "debugger.configure_hook(mode='list', scope=['optim_Adam_step'])\n"
        + "debugger.start()\nmodel(batch).sum().backward()\noptimizer.step()\n"
        + "debugger.stop()\ndebugger.step()\n",
        quick=True,
    ),
    "14 seeds before torch": Usage(
        "from ptdbg_ascend import seed_all\nseed_all(mode=True)\nimport torch\ntorch.rand(2)\n",
    ),
    "15 atat": Usage(
        "from atat.pytorch import PrecisionDebugger\n", says=("No module named 'atat'",), status=1
    ),
    "16 api_accuracy_checker": Usage(
        "import api_accuracy_checker.dump as DP\n",
        says=("No module named 'api_accuracy_checker'",),
        status=1,
    ),
}
USAGES = {**MSPROBE, **PTDBG}
