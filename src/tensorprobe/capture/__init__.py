"""Seeing the calls of a running program."""
