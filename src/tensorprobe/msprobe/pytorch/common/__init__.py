"""Where msprobe has seed_all."""

from tensorprobe.msprobe.pytorch.seeding import seed_all

__all__ = ["seed_all"]
