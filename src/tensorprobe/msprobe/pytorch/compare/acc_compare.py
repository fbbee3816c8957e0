"""Where earlier releases of msprobe have compare."""

from tensorprobe.msprobe.pytorch.compare import compare

__all__ = ["compare"]
