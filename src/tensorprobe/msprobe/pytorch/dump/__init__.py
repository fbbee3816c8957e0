"""Where msprobe has what dumps."""
