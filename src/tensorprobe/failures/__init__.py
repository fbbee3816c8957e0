"""The errors watch: which call is behind an error, saved and tried alone."""
