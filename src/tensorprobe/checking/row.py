"""What a check says about one call: the rows of check.json. No torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tensorprobe.parts import NamedParts
from tensorprobe.records import Call
from tensorprobe.replay.kinds import kind_of

Verdict = Literal["pass", "fail", "skipped", "crashed"]
# Tables of other tools: `peer_metrics` of each result is kept in its row, `write_tables` writes.
TABLES = NamedParts("tables", {"peers": "tensorprobe.peers.check_tables"})


class Judgement(msgspec.Struct, kw_only=True):
    """One tensor of a call on the device, against the reference.

    `error` is in units of `measure`: elements that differ, units in the last place, or what
    rounding explains. It is None where there is no number for it: another shape, a NaN.
    """

    name: str
    shape: tuple[int, ...]
    device_dtype: str
    reference_dtype: str
    measure: str
    error: float | None
    limit: float
    ok: bool
    reason: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    benchmark_error: float | None = None
    peer: dict[str, Any] | None = None
    benchmark_peer: dict[str, Any] | None = None


class Row(msgspec.Struct, kw_only=True):
    """What the check says about one call, or about several that are alike."""

    name: str
    op: str
    verdict: Verdict
    reason: str = ""
    kind: str = ""
    module: str = ""
    step: int = 0
    rank: int = 0
    device: str = ""
    device_dtype: str = ""
    reference_dtype: str = ""
    reference: str = ""  # what it was held against
    forward: Verdict | None = None
    backward: Verdict | None = None
    error: float | None = None  # the worst, as a share of its limit
    generated: bool = False  # inputs are made from statistics
    alike: int = 0  # further calls with the same op, arguments, shapes and dtypes
    elapsed_s: float = 0.0
    repro: str = ""
    recorded: str = ""  # what is wrong with the recorded result of a call that passes here
    tensors: list[Judgement] = []


def row_for(call: Call, verdict: Verdict, reason: str, **more: Any) -> Row:
    return Row(
        name=call.name,
        op=call.op,
        module=call.module,
        step=call.step,
        rank=call.rank,
        kind=kind_of(call),
        verdict=verdict,
        reason=reason,
        **more,
    )
