"""A recorded call again, alone: rebuilt from its record, run in float64, written as a script."""
