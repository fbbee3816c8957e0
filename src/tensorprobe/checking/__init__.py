"""Every call of a capture, run alone on a device and held against its reference."""
