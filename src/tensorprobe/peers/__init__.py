"""The two peers, msprobe and ptdbg_ascend: their files, tables and options, and their scripts."""
