"""Where msprobe has compare_distributed."""

from tensorprobe.peers.msprobe.msprobe_compare import compare_distributed

__all__ = ["compare_distributed"]
