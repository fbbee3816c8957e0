"""ptdbg_ascend under its own name, for its scripts; what is behind it is in peers/ptdbg."""

from tensorprobe.peers.ptdbg.ptdbg_functions import *  # noqa: F403
from tensorprobe.peers.ptdbg.ptdbg_functions import __all__ as __all__
