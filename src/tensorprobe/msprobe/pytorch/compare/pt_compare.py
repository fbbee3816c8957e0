"""Where msprobe has compare since 2025; 26 calls it pt_compare."""

from tensorprobe.peers.msprobe.msprobe_compare import compare
from tensorprobe.peers.msprobe.msprobe_compare import compare as pt_compare

__all__ = ["compare", "pt_compare"]
