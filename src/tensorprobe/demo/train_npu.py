"""The training of `train.py` on an NPU, simulated, one of whose kernels is broken.

What a person has who moved a model to another device: every kernel rounds a little differently,
and the third layer norm of a step is 1 % too large. The rest of the demo does not know which.
"""

import runpy
import sys
from pathlib import Path

from tensorprobe.devices import sim_npu

sim_npu.noise(ulps=1)
sim_npu.plant("native_layer_norm", calls=[2, 7, 12], effect="scale:1.01")
script = Path(__file__).with_name("train.py")
sys.argv = [script.name, "--device", "npu"]
runpy.run_path(str(script), run_name="__main__")
