"""ptdbg_ascend: its dumps, its tables, and what stands behind its names."""
