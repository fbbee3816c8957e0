"""What msprobe has beside msprobe.pytorch: its version, and packages that are not here."""

from __future__ import annotations

VERSION = "26.2.0"  # of the release whose words these are

_MONITOR = "tensorprobe run --monitor DIR, or tp.Monitor; TrainerMon and TrainerMonitorV2 work"
_CONFIG_CHECK = "tp.env(FILE) in the program, and tensorprobe env compare A B"
_FIRST_NAN = "tensorprobe ranks DUMP, which names the first call that made NaN or infinity"
_OPERATORS = "tensorprobe run --level L2, of the program without graph capture"
# Packages of msprobe's that are not here, with what to use instead.
NOT_HERE = {
    "core.config_check": _CONFIG_CHECK,
    "core.config_checking": _CONFIG_CHECK,
    "core.monitor": _MONITOR,
    "infer": "tensorprobe ascend --help",
    "mindspore": "msprobe itself: tensorprobe is for PyTorch",
    "nan_analyze": _FIRST_NAN,
    "overflow_check": _FIRST_NAN,
    "pytorch.aclgraph_dump": _OPERATORS,
    "pytorch.aclgraph_dumper": _OPERATORS,
    "pytorch.api_accuracy_checker": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.compile_accuracy_checker": "tensorprobe compiled RUN --against RUN: the stage",
    "pytorch.config_checking": _CONFIG_CHECK,
    "pytorch.free_benchmark": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.grad_probe": _MONITOR,
    "pytorch.nan_check": _FIRST_NAN,
    "pytorch.online_dispatch": "tensorprobe check DUMP --device D -o OUT",
    "pytorch.reproducibility": "tensorprobe run --save-start and --load-start",
    "pytorch.torchair_dump": _OPERATORS,
    "response_anomaly": "msprobe itself: it reads the text that a model writes",
    "visualization": "tensorprobe compare A B -o OUT: its report.html has the model as a graph",
}
