"""Watching a program for overflows and errors, and running one of its ops elsewhere."""
