"""Where earlier releases of msprobe have PrecisionDebugger."""
