"""msprobe's exceptions by their names: a script that catches one of them catches ours."""

from __future__ import annotations

from tensorprobe.errors import TensorprobeError

ApiAccuracyCheckerException = TensorprobeError
CodedException = TensorprobeError
CompareException = TensorprobeError
DistributedNotInitializedError = TensorprobeError
DumpException = TensorprobeError
FileCheckException = TensorprobeError
FreeBenchmarkException = TensorprobeError
MsprobeBaseException = TensorprobeError
MsprobeException = TensorprobeError
ParseJsonException = TensorprobeError
ScopeException = TensorprobeError
StepException = TensorprobeError
