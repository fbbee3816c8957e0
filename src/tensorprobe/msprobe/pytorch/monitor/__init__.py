"""msprobe.pytorch.monitor, as scripts import it."""
