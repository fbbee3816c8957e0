"""msprobe under its own names, for its scripts; what is behind them is in peers/msprobe."""

from tensorprobe.peers.msprobe.msprobe_packages import NOT_HERE
from tensorprobe.peers.msprobe.msprobe_packages import VERSION as __version__

__all__ = ["NOT_HERE", "__version__"]
