"""Captures on disk, one file a layout."""
