"""msprobe.pytorch.compare, as scripts import it."""

from tensorprobe.peers.msprobe.msprobe_compare import compare, compare_distributed

__all__ = ["compare", "compare_distributed"]
