"""Chosen places: `compare --at`."""
