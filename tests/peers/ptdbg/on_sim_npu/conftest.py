"""The checks of this folder have the simulated NPU, cured after each."""

from simulated_chip import _healthy_chip, pytest_collect_file

__all__ = ["_healthy_chip", "pytest_collect_file"]
