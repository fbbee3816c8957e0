"""Where msprobe has its exceptions."""
