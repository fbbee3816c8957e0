"""A precision debugger for PyTorch: which call did it, and a script that shows it alone."""

from tensorprobe._version import __version__

__all__ = ["__version__"]
