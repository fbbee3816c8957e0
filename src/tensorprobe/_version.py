"""The version, a literal: it is right from a source tree on PYTHONPATH too."""

__version__ = "0.1.0"
