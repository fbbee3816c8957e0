"""msprobe.pytorch.debugger.precision_debugger, as scripts import it."""

from tensorprobe.peers.msprobe.msprobe_debugger import (
    PrecisionDebugger,
    module_dump,
    module_dump_end,
)

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end"]
