"""Where releases of msprobe have TrainerMon."""

from tensorprobe.peers.msprobe.msprobe_monitor import TrainerMon

__all__ = ["TrainerMon"]
