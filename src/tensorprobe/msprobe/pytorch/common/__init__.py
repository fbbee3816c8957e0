"""Where msprobe has seed_all."""

from tensorprobe.peers.msprobe.msprobe_seeding import seed_all

__all__ = ["seed_all"]
