"""msprobe.pytorch.functional.module_dump, as scripts import it."""

from tensorprobe.peers.msprobe.msprobe_debugger import module_dump, module_dump_end

__all__ = ["module_dump", "module_dump_end"]
