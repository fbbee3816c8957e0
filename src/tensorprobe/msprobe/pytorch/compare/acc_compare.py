"""Where earlier releases of msprobe have compare."""

from tensorprobe.peers.msprobe.msprobe_compare import compare

__all__ = ["compare"]
