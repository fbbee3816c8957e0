"""msprobe.pytorch, as scripts import it."""

# First, or importing the package `compare` later would replace the function of the same name.
from tensorprobe.msprobe.pytorch.compare import compare as compare
from tensorprobe.peers.msprobe.msprobe_functions import *  # noqa: F403
from tensorprobe.peers.msprobe.msprobe_functions import __all__ as __all__
from tensorprobe.peers.msprobe.msprobe_functions import refuse_name as __getattr__  # noqa: F401
