"""msprobe.core.monitor_v2, as scripts import it."""
