"""The demo tells its story, and a second one keeps what the first recorded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import tensorprobe as tp

SRC = str(Path(__file__).parents[1] / "src")
EXPECTED = """\
1. Train a small transformer for three steps, and record the first two:

   $ tensorprobe run --keep tensors --steps 0-1 -o demo/cpu train.py
   tensorprobe: recording about N MB a step, N MB for 2 steps, to demo/cpu
   step 0: loss N
   step 1: loss N
   step 2: loss N
   tensorprobe: recorded 1126 calls in 2 steps, N MB in demo/cpu. Next: tensorprobe show demo/cpu

2. What is in it, a few calls of step 0:

   call                                               module        result            min max norm
   Functional.embedding.0.forward                     digits        float32 16x8x32   N N N
   Module.blocks.0.Block.forward.0                    blocks.0      float32 16x8x32   N N N
   Functional.scaled_dot_product_attention.0.forward  blocks.0      float32 16x4x8x8  N N N
   Functional.cross_entropy.0.forward                               float32 scalar    N N N
   Functional.cross_entropy.0.backward                              float32 128x10    N N N
   Functional.linear.0.backward                       blocks.0.qkv  float32 16x8x32   N N N
   Optimizer.AdamW.step.0                                           float32 10x32     N N N
   ... 1126 calls in 2 steps, 0 gaps

3. Where it is: demo/cpu. Go on with
   tensorprobe show demo/cpu
   tensorprobe show demo/cpu Functional.cross_entropy.0.forward
"""


def without_numbers(text: str) -> str:
    """Measured numbers as N, and the columns of them as narrow as can be."""
    number = r"-?\d+(\.\d+)?(e[+-]\d+)?"
    text = re.sub(r"-?\d+\.\d+(e[+-]\d+)?\b", "N", text)
    text = re.sub(rf"(?<=  )({number}|N) +({number}|N) +({number}|N)$", "N N N", text, flags=re.M)
    return re.sub(r"min +max +norm", "min max norm", text)


def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tensorprobe", "demo"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert without_numbers(done.stdout) == EXPECTED
    capture = tp.load(tmp_path / "demo" / "cpu")
    weights = capture.call("Optimizer.AdamW.step.0", step=0).tensors
    assert all(t.blob is not None for t in weights if t.shape)
