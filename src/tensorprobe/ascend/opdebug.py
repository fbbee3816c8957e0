"""The overflow record a dump named Opdebug carries: which task overflowed, and in what way."""

from __future__ import annotations

import struct
from typing import Any

from tensorprobe.ascend.dump import DumpTensor
from tensorprobe.errors import BadArtefact

MAGIC = 0x5A5A5A5A
_TASK = ("model_id", "stream_id", "task_id", "task_type", "pc_start", "para_base")
_ADDRESSES = ("pc_start", "para_base", "kernel_code", "src_addr", "dst_addr")
_NEW_FIELDS = {
    0: ("AI Core", (*_TASK[:4], "context_id", "thread_id", *_TASK[4:], "core_id", "block_id")),
    1: ("Vector Core", (*_TASK[:4], "context_id", "thread_id", *_TASK[4:], "core_id", "block_id")),
    2: ("AI CPU", (*_TASK[:4], "context_id", "thread_id", "cpu_id", "cpu_thread_id")),
    3: ("SDMA", (*_TASK[:4], "context_id", "thread_id", "src_addr", "dst_addr", "channel_id")),
}
_STATUS_BITS = {
    0x8: "negating the smallest integer overflowed",
    0x10: "integer add, subtract or multiply overflowed",
    0x20: "floating-point overflow",
    0x80: "a negative float was converted to an unsigned integer",
    0x100: "float32 or int32 to float16 overflowed",
    0x400: "accumulation in the cube unit overflowed",
}
_ATOMIC = ("overflow", "underflow", "the source is NaN", "the target is NaN", "both are NaN")


def parse_opdebug(tensor: DumpTensor) -> dict[str, Any]:
    """The overflow record in the one output of an Opdebug dump, in the vendor tool's keys."""
    raw = tensor.raw()[:4096].tobytes()
    if len(raw) >= 24 and struct.unpack_from("<I", raw)[0] == MAGIC:
        return _new_record(tensor, raw)
    if len(raw) < 2048:
        raise BadArtefact(
            f"{tensor.path}: at byte {tensor.offset}: an overflow record of {len(raw)} bytes; "
            "expected 2048, or the magic 0x5a5a5a5a"
        )
    return {
        "DHA Atomic Add": _old_part(raw, 0, 512, ("status",), 8, 0x9),
        "L2 Atomic Add": _old_part(raw, 128, 768, ("status",), 16, 0x1),
        "AI Core": _old_part(raw, 256, 1024, ("kernel_code", "block_idx", "status"), None, 0),
    }


def _old_part(
    raw: bytes, info: int, status: int, names: tuple[str, ...], shift: int | None, first: int
) -> dict[str, Any]:
    values = dict(zip(_TASK, struct.unpack_from("<6Q", raw, info), strict=True))
    values |= zip(names, struct.unpack_from(f"<{len(names)}Q", raw, status), strict=True)
    if shift is None:
        meaning = _ai_core_meaning(values["status"])
    else:
        code = (values["status"] >> shift) & (0xFF if shift == 8 else 0x7)
        at = code - first
        meaning = [_ATOMIC[at]] if 0 <= at < len(_ATOMIC) else []
    return _readable(values) | {"meaning": meaning}


def _new_record(tensor: DumpTensor, raw: bytes) -> dict[str, Any]:
    _, version, valid, kind, _, nbytes = struct.unpack_from("<6I", raw)
    name, fields = _NEW_FIELDS.get(kind, (f"accelerator {kind}", _TASK[:4]))
    words = 4 if version >= 1 and kind in (0, 1) else 1
    needed = 8 * (len(fields) + words)
    if len(raw) - 24 < needed:
        raise BadArtefact(
            f"{tensor.path}: at byte {tensor.offset + 24}: {len(raw) - 24} bytes of overflow "
            f"record; expected {needed} for {name}"
        )
    numbers = struct.unpack_from(f"<{len(fields) + words}Q", raw, 24)
    values: dict[str, int] = dict(zip(fields, numbers, strict=False))
    status = numbers[len(fields) :]
    values["status"] = status[0]
    record = _readable(values) | {"valid": bool(valid), "data_len": nbytes}
    if words > 1:
        record["status_words"] = list(status)
    record["meaning"] = _ai_core_meaning(status[0]) if kind in (0, 1) else []
    return {"version": version, name: record}


def _readable(values: dict[str, int]) -> dict[str, Any]:
    return {k: hex(v) if k in _ADDRESSES else v for k, v in values.items()}


def _ai_core_meaning(status: int) -> list[str]:
    return [text for bit, text in _STATUS_BITS.items() if status & bit]
