"""msprobe's layout: step{N}/rank{R} with dump.json, stack.json, construct.json and tensor files."""

from tensorprobe.store.msprobe.folders import recognises
from tensorprobe.store.msprobe.reading import read
from tensorprobe.store.msprobe.writing import write

__all__ = ["read", "recognises", "write"]
