"""Pairs of small programs, with or without a planted fault, and what `compare` must say of them."""
