"""Runs a script with the simulated NPU: `python -m tensorprobe.devices.sim_npu script.py ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tensorprobe.devices import sim_npu


def main() -> int:
    """Install the device, with the faults the environment names, and be the script."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m tensorprobe.devices.sim_npu script.py [arguments]\n")
        return 2
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    sim_npu.install()
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
