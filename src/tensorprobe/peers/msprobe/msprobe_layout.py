"""msprobe's layout: step{N}/rank{R} with dump.json, stack.json, construct.json and tensor files."""

from tensorprobe.peers.msprobe.msprobe_folders import recognises
from tensorprobe.peers.msprobe.msprobe_reading import read
from tensorprobe.peers.msprobe.msprobe_writing import write

__all__ = ["read", "recognises", "write"]
