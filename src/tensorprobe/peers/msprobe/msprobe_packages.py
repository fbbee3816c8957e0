"""What msprobe has beside msprobe.pytorch: its version, and packages that are not here."""

from __future__ import annotations

VERSION = "26.2.0"  # of the release whose words these are

_MONITOR = "tensorprobe run: parameters, gradients and optimizer steps are in a recording"
_CONFIG_CHECK = "tp.env(FILE) in the program, and tensorprobe env compare A B"
# Packages of msprobe's that are not here, with what to use instead.
NOT_HERE = {
    "core.config_check": _CONFIG_CHECK,
    "core.config_checking": _CONFIG_CHECK,
    "core.monitor": _MONITOR,
    "core.monitor_v2": _MONITOR,
    "mindspore": "msprobe itself: tensorprobe is for PyTorch",
    "pytorch.api_accuracy_checker": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.compile_accuracy_checker": "tensorprobe compare, of runs with and without it",
    "pytorch.config_checking": _CONFIG_CHECK,
    "pytorch.free_benchmark": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.grad_probe": _MONITOR,
    "pytorch.monitor": _MONITOR,
    "pytorch.online_dispatch": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.reproducibility": "tensorprobe run --save-start and --load-start",
    "visualization": "tensorprobe show DUMP, or tensorprobe compare A B -o OUT",
}
