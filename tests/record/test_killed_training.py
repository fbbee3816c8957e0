"""A whole recorded training: killed, it leaves what it had; on a slow disk it stays small."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import SRC, run_script
from tensorprobe.records import Capture

STEPS = 12
TRAIN = f"""
import torch, transformers as hf
torch.manual_seed(0)
config = hf.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, use_cache=False)
model = hf.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS}):
    ids = torch.randint(0, 97, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
"""


def start(folder: Path, output: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN)
    return subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", "run", "--level", "mix", "--keep", "tensors",
         "--steps", f"1-{STEPS}",  # while a model is made, memory holds what it happens to hold
         "-o", output, "train.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def contents(capture: Capture) -> dict[tuple[int, str], bytes]:
    """Every tensor that can be read, by step and name."""
    return {
        (call.step, record.name): record.array().tobytes()
        for call in capture.calls
        for record in call.tensors
        if record.blob is not None
    }


@pytest.mark.slow
def test_a_killed_training_leaves_what_it_had(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = start(tmp_path, "whole")
    _, stderr = whole.communicate(timeout=300)
    assert whole.returncode == 0, stderr
    complete = tp.load(tmp_path / "whole")
    expected = contents(complete)
    names = [(call.step, call.name) for call in complete.calls]
    chance = random.Random(time.time_ns())  # another moment each time the test is run
    for number in range(3):
        process = start(tmp_path, f"killed{number}")
        assert process.stdout is not None
        last = chance.randrange(1, STEPS - 1)
        while process.stdout.readline() != f"step {last}\n":
            assert process.poll() is None, process.communicate()[1]
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed = tp.load(tmp_path / f"killed{number}")
        # what is there is a beginning of the whole, call by call and bit by bit
        found = [(call.step, call.name) for call in killed.calls]
        assert found == names[: len(found)]
        assert {step for step, _ in found} >= set(range(1, last))
        readable = contents(killed)
        assert readable.items() <= expected.items()
        kept = {key for key in readable if key[0] < last}
        assert kept == {key for key in expected if key[0] < last}
        assert len(readable) > 100 * (last - 1)
        assert all(call.step >= last - 1 for call in killed.calls if call.status == "begun")


# Each write takes its time: 40 MB a second, which is less than the program makes.
SLOW = """
import resource, time, torch
import tensorprobe as tp
from tensorprobe.store import shard
write = shard._write_all

def slow(fd, data, offset):
    time.sleep(len(data) / 40e6)
    write(fd, data, offset)

shard._write_all = slow
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train(steps):
    for _ in range(steps):
        model(torch.randn(512, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with tp.Recorder("out", level="L1", keep="tensors", queue="8M") as recorder:
    train(10)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024)
"""


def test_memory_is_bounded_on_a_slow_disk(tmp_path: Path) -> None:
    # large blocks by mmap, so that what is freed is given back: it is not the allocator's
    # fragmentation that is measured here, but what the recorder holds
    done = run_script(tmp_path, SLOW, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.safetensors"))
    grown = int(done.stdout)
    assert written > 150e6
    # the queue, its copies, and the code that recording brings in; not what was recorded
    assert grown < 8 * 2**20 + 70e6, (grown, written)
    capture = tp.load(tmp_path / "out")
    assert capture.gaps == ()
    assert all(record.blob is not None for call in capture.calls for record in call.tensors)
