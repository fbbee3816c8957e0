"""The result of summarising one tensor, which may come later than the call that asked for it."""

from __future__ import annotations

from tensorprobe.records import TensorSummary


class Result:
    """What became of one tensor; filled in when `ready`.

    Either `error` says why there is nothing, or `summary` and `digest` hold what was asked for.
    `note` says what else a reader should know: that the tensor had to be copied to the host.
    """

    __slots__ = ("digest", "error", "note", "ready", "summary")

    def __init__(self) -> None:
        self.summary: TensorSummary | None = None
        self.digest: str | None = None
        self.error: str | None = None
        self.note: str | None = None
        self.ready = False

    def __repr__(self) -> str:
        if not self.ready:
            return "<Result: on its way>"
        return f"<Result: {self.error or self.summary} {self.digest or ''}>"
