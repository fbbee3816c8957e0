"""Where earlier releases of msprobe have PrecisionDebugger."""

from tensorprobe.peers.msprobe.msprobe_debugger import PrecisionDebugger

__all__ = ["PrecisionDebugger"]
