"""msprobe: its dumps, its tables, its configuration, and what stands behind its names."""
