"""Where msprobe has its exceptions."""

from tensorprobe.peers.msprobe.msprobe_exceptions import (
    ApiAccuracyCheckerException,
    CodedException,
    DistributedNotInitializedError,
    FileCheckException,
    FreeBenchmarkException,
    MsprobeException,
    ParseJsonException,
    ScopeException,
    StepException,
)

__all__ = [
    "ApiAccuracyCheckerException",
    "CodedException",
    "DistributedNotInitializedError",
    "FileCheckException",
    "FreeBenchmarkException",
    "MsprobeException",
    "ParseJsonException",
    "ScopeException",
    "StepException",
]
