"""TensorProbeCallback in the real trainers: steps, phases, equal losses, and faults found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe as tp
from comparing.planting import Device, Fault
from recorded import SRC
from training.trained import hugging_face, lightning, losses

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def probe(path: Path, said: list[str] | None = None, **options: Any) -> tp.TensorProbeCallback:
    tell = (lambda text: None) if said is None else said.append
    return tp.TensorProbeCallback(path, log=tell, **options)


def equal_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_hugging_face(tmp_path: Path) -> None:
    """Steps are those of the Trainer; evaluations are apart; the losses are the same bits."""
    pytest.importorskip("accelerate")
    callback = probe(tmp_path / "run", steps="1-2", guard="overflow")
    watched = hugging_face(tmp_path, [callback])
    watched.train()
    assert callback.failed is None
    bare = hugging_face(tmp_path, [])
    bare.train()
    assert losses(watched) == losses(bare)
    assert len(losses(bare)) == 4 * 2 + 2
    assert equal_weights(watched.model, bare.model)
    with callback.phase("predict"):
        watched.predict(watched.eval_dataset)
    callback.close()

    train = tp.load(tmp_path / "run" / "train")
    assert train.steps == (1, 2)
    assert not train.gaps
    for step in train.steps:  # two batches are one step, which ends with its optimizer's
        calls = [call.name for call in train.calls(step=step)]
        assert [name for name in calls if name.startswith("Module.LlamaForCausalLM.forward")] == [
            "Module.LlamaForCausalLM.forward.0",
            "Module.LlamaForCausalLM.forward.1",
        ]
        assert [name for name in calls if name.startswith("Optimizer.")] == [
            "Optimizer.AdamW.step.0"
        ]
    for phase, steps in (("eval", (1, 2)), ("predict", (1,))):
        capture = tp.load(tmp_path / "run" / phase)
        assert capture.steps == steps
        for step in steps:
            roots = [
                call for call in capture.calls(step=step)
                if call.name == "Module.LlamaForCausalLM.forward.0"
            ]  # fmt: skip
            assert len(roots) == 1
        assert not capture.calls(direction="backward")
    assert json.loads((tmp_path / "run/guard/train/findings.json").read_text())["findings"] == []


def test_a_fault_between_two_trainings_is_found(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for name, fault in (("good", None), ("bad", Fault("silu", 5, lambda x: x * 1.01))):
        callback = probe(tmp_path / name, keep="tensors", steps=1, phases="train")
        trainer = hugging_face(tmp_path, [callback], max_steps=2, eval_strategy="no")
        with Device(noise=False, fault=fault) as device:
            trainer.train()
        assert device.struck == (fault is not None)
    verdict = tp.compare(tmp_path / "bad/train", tmp_path / "good/train", jobs=1).verdict
    assert verdict.verdict == "diverged"
    assert (verdict.culprits[0].name, verdict.culprits[0].step) == ("Functional.silu.1.forward", 1)


def test_a_resumed_training_goes_on_with_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first = hugging_face(
        tmp_path, [], max_steps=2, eval_strategy="no", save_strategy="steps", save_steps=2
    )
    first.train()
    callback = probe(tmp_path / "run", steps="0-3", phases=["train"])
    trainer = hugging_face(tmp_path, [callback], eval_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert tp.load(tmp_path / "run" / "train").steps == (2, 3)


def test_an_evaluation_that_nobody_announces_is_told(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said: list[str] = []
    trainer = hugging_face(tmp_path, [probe(tmp_path / "run", said)])
    trainer.evaluate()
    trainer.evaluate()
    assert said == [
        "not recorded: the Trainer tells nobody when an evaluation or a prediction outside of "
        'training begins. Write: with callback.phase("eval"): trainer.evaluate()'
    ]
    assert not (tmp_path / "run").exists()
    said.clear()  # nothing is missing where it is not wanted
    callback = probe(tmp_path / "run", said, phases=["train"])
    hugging_face(tmp_path, [callback], max_steps=2).train()
    assert not [text for text in said if "tells nobody" in text]


class Falls:
    """A companion that fails after its first step."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self) -> None:
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")

    def step(self) -> None:
        self.told.append("step")
        raise ZeroDivisionError("of the companion")

    def __exit__(self, *_: object) -> None:
        self.told.append("exit")


def test_our_errors_never_end_a_training(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    bare = hugging_face(tmp_path, [], eval_strategy="no")
    bare.train()
    said: list[str] = []
    falls = Falls()
    callback = probe(tmp_path / "run", said, also=[falls])
    trainer = hugging_face(tmp_path, [callback], eval_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 4
    assert losses(trainer) == losses(bare)
    assert "ZeroDivisionError: of the companion. The training goes on" in said[0]
    assert isinstance(callback.failed, ZeroDivisionError)
    assert falls.told[:2] == ["start", "step"]
    (tmp_path / "file").write_text("in the way")
    said.clear()
    again = hugging_face(tmp_path, [probe(tmp_path / "file", said)], max_steps=1)
    again.train()
    assert losses(again)[:2] == losses(bare)[:2]
    assert "'{}' is a file".format(tmp_path / "file") in said[0]


def test_a_guard_of_ones_own_may_end_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    guard = tp.Guard(tmp_path / "guard", log=lambda text: None)
    callback = probe(tmp_path / "run", also=[guard])
    trainer = hugging_face(tmp_path, [callback], eval_strategy="no")
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(3e38)
    with pytest.raises(tp.GuardStopped), callback:
        trainer.train()
    assert guard.findings[0].name.startswith("Functional.linear")


@pytest.mark.parametrize(
    "by_hand", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["automatic", "by hand"]
)
def test_lightning(tmp_path: Path, by_hand: bool) -> None:
    pytest.importorskip("lightning")
    callback = probe(tmp_path / "run", steps="1-4", guard="overflow")
    watched = lightning(tmp_path, [callback], by_hand=by_hand)
    callback.close()
    bare = lightning(tmp_path, [], by_hand=by_hand)
    assert watched.losses == bare.losses
    assert equal_weights(watched, bare)
    train = tp.load(tmp_path / "run" / "train")
    assert train.steps == ((2, 4) if by_hand else (1, 2, 3))  # trainer.global_step
    for step in train.steps:
        names = [call.name for call in train.calls(step=step)]
        optimizers = [name for name in names if name.startswith("Optimizer.")]
        assert len(optimizers) == 1 + by_hand
        roots = [name for name in names if name.startswith("Module.net.Sequential.forward")]
        assert len(roots) == (3 if by_hand else 2)
    for phase in ("eval", "test", "predict"):
        capture = tp.load(tmp_path / "run" / phase)
        assert capture.steps == (1, 2, 3, 4)
        assert {call.module for call in capture.calls} <= {"", "net", *(f"net.{n}" for n in "0123")}


def test_an_overflow_in_lightning_is_found(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    callback = probe(tmp_path / "run", guard="overflow", phases="train")
    lightning(tmp_path, [callback], bad_batch=5)
    callback.close()
    found = json.loads((tmp_path / "run/guard/train/findings.json").read_text())["findings"]
    assert (found[0]["name"], found[0]["step"]) == ("Tensor.square.1.forward", 2)


def test_accelerate_is_a_plain_loop(tmp_path: Path) -> None:
    """A Recorder with `step_on="auto"` takes accumulated batches as one step by itself."""
    accelerate = pytest.importorskip("accelerate")

    def train(recorder: tp.Recorder | None) -> list[float]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        if recorder is not None:
            recorder.start()
        for number in range(6):
            with accelerator.accumulate(model):
                loss = model(torch.full((2, 4), 0.1 * number)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        if recorder is not None:
            recorder.close()
        return found

    recorder = tp.Recorder(tmp_path / "run", step_on="auto", log=lambda text: None)
    assert train(recorder) == train(None)
    capture = tp.load(tmp_path / "run")
    names = [[call.name for call in capture.calls(step=step)] for step in (0, 1, 2)]
    for calls in names:
        assert "Module.Linear.forward.1" in calls
        assert "Module.Linear.forward.2" not in calls


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe(tmp_path / "run") as callback:
        for _ in range(2):
            with callback.phase("train"):
                for _ in range(2):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    callback.step()
            with callback.phase("eval"), torch.no_grad():
                model(torch.ones(2, 4))
                callback.step()
    assert tp.load(tmp_path / "run" / "train").steps == (0, 1)
    evaluation = tp.load(tmp_path / "run" / "eval")
    assert next(iter(evaluation.calls(step=1))).name == "Torch.ones.0.forward"
    assert evaluation.steps == (0, 1)


def test_without_a_path_it_is_off() -> None:
    """One flag: `TensorProbeCallback(args.probe)`. Nothing is imported for it."""
    code = """
import sys
import tensorprobe as tp
off = tp.TensorProbeCallback(None, guard="overflow")
off.on_step_begin(None, None, None)
off.on_something_new(1, 2, three=4)
with off.phase("eval"):
    off.step()
off.close()
on = tp.TensorProbeCallback("run", level="L1", steps="0-3")
print(off, on, sorted({"torch", "transformers", "lightning"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "<TensorProbeCallback None: off> <TensorProbeCallback run> []\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"phases": "training"}, "phases='training': expected one of train, eval, predict, test"),
        ({"phases": ()}, "phases=(): expected some of train, eval, predict, test"),
        ({"guard": "overflo"}, "unknown guard 'overflo': expected overflow or errors, or both"),
        ({"steps": "a"}, "steps='a': expected numbers from 0"),
        ({"levle": "L1"}, "levle"),
    ],
)
def test_wrong_usage_is_told_before_training(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(tp.BadUsage) as told:
        tp.TensorProbeCallback("run", **options)
    assert expected in str(told.value)


RANKS = """
import sys
import warnings
from pathlib import Path

import tensorprobe as tp
from training.trained import hugging_face, losses

warnings.simplefilter("ignore")
folder, on = Path(sys.argv[1]), sys.argv[2] == "on"
callbacks = [tp.TensorProbeCallback(folder / "run", guard="overflow")] if on else []
trainer = hugging_face(folder, callbacks, ddp_backend="gloo", max_steps=2)
trainer.train()
if trainer.args.process_index == 0:
    (folder / f"{sys.argv[2]}.txt").write_text(repr(losses(trainer)))
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """torchrun and DDP under the Trainer: a folder a rank, in each phase, and the same losses."""
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(RANKS)
    paths = f"{SRC}:{SRC.parent / 'tests'}"
    for on in ("on", "off"):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *launch, "train.py", str(tmp_path), on],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "on.txt").read_text() == (tmp_path / "off.txt").read_text()
    for phase, steps in (("train", (0, 1)), ("eval", (0,))):
        capture = tp.load(tmp_path / "run" / phase)
        assert (capture.steps, capture.ranks) == (steps, (0, 1))
        assert (tmp_path / "run" / "guard" / phase / "rank1" / "findings.json").exists()
