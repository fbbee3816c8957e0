"""Where msprobe has compare_distributed."""

from tensorprobe.msprobe.pytorch.compare import compare_distributed

__all__ = ["compare_distributed"]
