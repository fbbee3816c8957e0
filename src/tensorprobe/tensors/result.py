"""The result of summarising one tensor, which may come later than the call that asked for it."""

from __future__ import annotations

import msgspec

from tensorprobe.tensors.summary import TensorSummary


class Result(msgspec.Struct, gc=False, eq=False):
    """What became of one tensor; filled in when `ready`.

    Either `error` says why there is nothing, or `summary` and `digest` hold what was asked for.
    `note` says what else a reader should know: that the tensor had to be copied to the host.
    """

    summary: TensorSummary | None = None
    digest: str | None = None
    error: str | None = None
    note: str | None = None
    ready: bool = False

    def __repr__(self) -> str:
        if not self.ready:
            return "<Result: on its way>"
        return f"<Result: {self.error or self.summary} {self.digest or ''}>"
