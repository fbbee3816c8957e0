"""Where msprobe 26 has PrecisionDebugger."""
