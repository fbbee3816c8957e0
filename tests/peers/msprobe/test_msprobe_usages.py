"""Scripts as people have them run unedited under `run --as`, and leave the files that they should.

`usages.py` has one for each kind of script that public repositories and guides have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msprobe_making import ROOT
from usages import USAGES

import tensorprobe as tp


def run(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    usage = USAGES[name]
    content = {"task": "statistics", "dump_path": "./dump", "rank": [], "step": [], "level": "L1"}
    (folder / "config.json").write_text(json.dumps({**content, **usage.config}))
    (folder / "train.py").write_text(usage.script)
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", "--as", "ptdbg_ascend,msprobe", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if use.quick else pytest.mark.slow)
        for name, use in USAGES.items()
    ],
)
def test_every_kind_of_script(tmp_path: Path, name: str) -> None:
    usage = USAGES[name]
    done = run(tmp_path, name)
    printed = done.stdout + done.stderr
    assert done.returncode == usage.status, printed
    for text in usage.says:
        assert text in printed
    if usage.status == 0:
        assert "Traceback" not in printed
    found = sorted(str(p.parents[1].relative_to(tmp_path)) for p in tmp_path.rglob("dump.json"))
    assert found == sorted(usage.dumps)
    if found:
        assert not tp.load(tmp_path / found[0]).gaps
    if name.startswith("13"):
        (index,) = tmp_path.rglob("*.pkl")
        assert '["Optimizer_Adam.step_0_forward_parameters.0.weight"' in index.read_text()
    if name.startswith("20"):
        (path,) = tmp_path.rglob("debug.json")
        saved = json.loads(path.read_text())["data"]
        assert list(saved) == ["nest.0.debug", "nest_grad.0.debug"]
        assert saved["nest_grad.0.debug"]["a"][0]["Max"] == 1
        assert saved["nest_grad.0.debug"]["n"] is None


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
{door}

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        ids = torch.arange(8) + i
        return {{"input_ids": ids, "labels": ids}}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=64,
))
arguments = TrainingArguments(
    output_dir="out", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks={callbacks})
trainer.train()
print([log["loss"] for log in trainer.state.log_history if "loss" in log])
print([p.double().sum().item() for p in model.parameters()])
"""
DOOR = """
from msprobe.pytorch import PrecisionDebugger

class Dumps(TrainerCallback):
    def __init__(self, path):
        self.debugger = PrecisionDebugger(config_path=path)
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.debugger.start(model=model)
    def on_step_end(self, args, state, control, **kwargs):
        self.debugger.stop()
        self.debugger.step()
"""


@pytest.mark.slow
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    """It needs accelerate, which is fetched for this test alone."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    fetched = [*command, str(tmp_path / "packages"), "accelerate==1.15.0", "psutil==7.2.2"]
    if subprocess.run(fetched, capture_output=True).returncode:
        pytest.skip("accelerate cannot be had from the index")
    content = {"task": "statistics", "dump_path": "./dump", "level": "mix"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    packages = f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'packages'}"
    printed = []
    for words, door, callbacks in (
        ([], "", "[]"),
        (["-m", "tensorprobe", "run", "--as", "msprobe"], DOOR, "[Dumps('config.json')]"),
    ):
        (tmp_path / "train.py").write_text(TRAINER.format(door=door, callbacks=callbacks))
        done = subprocess.run(
            [sys.executable, *words, "train.py"], cwd=tmp_path, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append([line for line in done.stdout.splitlines() if line.startswith("[")])
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]  # it trains as it does without
    capture = tp.load(tmp_path / "dump")
    assert (capture.steps, capture.gaps) == ((0, 1), ())
    for step in (0, 1):
        names = {call.name for call in capture.calls(step=step)}
        attention = "Module.model.layers.0.self_attn.LlamaAttention"
        assert {f"{attention}.forward.0", f"{attention}.forward.1"} <= names  # it accumulates
        assert f"{attention}.backward.1" in names
        assert "Module.lm_head.Linear.parameters_grad.0" in names


def test_one_of_each_family_is_quick() -> None:
    assert 5 <= sum(usage.quick for usage in USAGES.values()) <= 8
