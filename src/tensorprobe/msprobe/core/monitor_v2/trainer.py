"""Where msprobe has TrainerMonitorV2."""

from tensorprobe.peers.msprobe.msprobe_monitor import TrainerMonitorV2

__all__ = ["TrainerMonitorV2"]
