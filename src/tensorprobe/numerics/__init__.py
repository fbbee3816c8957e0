"""Tensors to numbers: summaries, digests, metrics."""
