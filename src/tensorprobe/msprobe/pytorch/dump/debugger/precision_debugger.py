"""Where msprobe 26 has PrecisionDebugger and module_dump."""

from tensorprobe.peers.msprobe.msprobe_debugger import (
    PrecisionDebugger,
    module_dump,
    module_dump_end,
)

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end"]
