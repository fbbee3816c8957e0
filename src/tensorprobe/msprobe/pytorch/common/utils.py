"""Where msprobe has seed_all too."""

from tensorprobe.peers.msprobe.msprobe_seeding import seed_all

__all__ = ["seed_all"]
