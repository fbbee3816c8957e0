"""Tensors: their bytes, summaries, digests and metrics; on the host, by Triton, by torch."""
