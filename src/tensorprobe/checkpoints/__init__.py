"""Checkpoints: what is in them, read without running any of it, and how two of them differ."""
