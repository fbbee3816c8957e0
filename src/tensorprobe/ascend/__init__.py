"""Ascend artefacts, offline: dumps, graphs, logs, kernels, OpUT cases. No torch, no CANN."""
