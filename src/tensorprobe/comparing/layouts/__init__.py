"""Runs of one model in other layouts: what the ranks have is put together, and compared."""
