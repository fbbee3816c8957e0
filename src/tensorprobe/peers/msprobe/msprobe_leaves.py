"""The leaves of msprobe's records: tensors, scalars and all else, to values and back."""

from __future__ import annotations

import math
import re
import zlib
from typing import Any

from tensorprobe.peers.foreign_records import MAX_DEPTH, read_shape
from tensorprobe.records import Fields, Special, TensorRecord, TensorSummary
from tensorprobe.tensors.layouts import ITEMSIZES

SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_CRC = re.compile(r"[0-9a-f]{8}")
_MD5 = re.compile(r"[0-9a-f]{32}")
# Values of these are named by their kind, and stand under this key.
_SPECIALS = {
    "torch.dtype": ("dtype", "value"),
    "torch.device": ("device", "value"),
    "torch.memory_format": ("memory_format", "format"),
    "torch.distributed.ReduceOp": ("reduce_op", "value"),
}


def is_tensor(leaf: dict[str, Any]) -> bool:
    """Whether a record's object describes a tensor, and not an array of numpy's."""
    kind = leaf.get("type")
    return isinstance(kind, str) and "dtype" in leaf and "shape" in leaf and kind != "numpy.ndarray"


# Reading


def read_scalar(leaf: dict[str, Any]) -> Any:
    """The value of a leaf that is no tensor; ValueError for what is none."""
    kind, value = leaf["type"], leaf.get("value")
    if kind == "float" and leaf.get("nonfinite") in ("inf", "-inf", "nan"):
        return float(leaf["nonfinite"])
    if kind in SCALARS:
        return _as_scalar(kind, value)
    if kind == "slice" and isinstance(value, list) and len(value) == 3:
        return slice(*(_bound(part) for part in value))
    if kind == "ellipsis":
        return ...
    if kind == "torch.Size":
        return read_shape(value)
    if kind in _SPECIALS:
        name, key = _SPECIALS[kind]
        text = str(leaf.get(key))
        return Special(name, f"torch.{text}" if name == "memory_format" else text)
    if kind == "torch.ProcessGroup":
        return Special("process_group", f"ranks {leaf.get('group_ranks')}"[:300])
    if kind == "numpy.ndarray":
        return Special("numpy", f"{leaf.get('dtype')}{leaf.get('shape')}"[:300])
    return Special("unsupported", f"{kind} {value}"[:300])


def _as_scalar(kind: str, value: object) -> Any:
    if value is None:
        return None
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is SCALARS[kind]:
        return value
    raise ValueError(f"{str(value)[:60]!r} is no {kind}")


def _bound(value: object) -> int | None:
    return value if type(value) is int else None


def read_dtype(value: object) -> str:
    """torch's name of a dtype, without its prefix."""
    if not isinstance(value, str) or not re.fullmatch(r"(torch\.)?\w{1,40}", value):
        raise ValueError(f"{str(value)[:60]!r} is no dtype")
    name = value.removeprefix("torch.")
    return name if name in ITEMSIZES else name.lower()  # MindSpore's is Float32


def read_summary(leaf: dict[str, Any]) -> TensorSummary | None:
    """The statistics of a tensor, as far as they go: see TensorSummary.counted.

    msprobe computes them in the tensor's own dtype, so that a norm or mean can overflow where no
    value does; such a one is dropped. A 0-dim tensor has its value in all four fields.
    """
    marks = leaf.get("nonfinite")
    if isinstance(marks, dict):
        return _read_nonfinite(marks)
    high, low, mean, norm = (_number(leaf.get(name)) for name in _STATISTICS)
    if high is None and low is None and mean is None:
        return None
    nan = any(isinstance(x, float) and math.isnan(x) for x in (high, low))
    if nan:
        return TensorSummary(None, None, None, None, 1, 0, 0, counted=False)
    inf = any(isinstance(x, float) and math.isinf(x) for x in (high, low))
    if leaf.get("shape") == []:
        norm = abs(norm) if norm is not None and type(norm) is not bool else None
    return TensorSummary(low, high, _finite(mean), _finite(norm), 0, int(inf), 0, counted=False)


def _read_nonfinite(marks: dict[str, Any]) -> TensorSummary:
    """The whole summary, which release 0.1 put beside statistics that strict JSON cannot hold."""
    values = {name: _number(marks.get(name)) for name in ("min", "max", "mean", "norm")}
    counts = {name: marks.get(name) for name in ("nan", "inf", "zero")}
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"nonfinite.{name} is {str(count)[:60]!r}")
    return TensorSummary(
        values["min"],
        values["max"],
        _finite(values["mean"]),
        _finite(values["norm"]),
        counts["nan"] or 0,
        counts["inf"] or 0,
        counts["zero"] or 0,
        counted=marks.get("counted") is not False,
    )


def _number(value: object) -> float | int | bool | None:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a statistic is {str(value)[:60]!r}")


def _finite(value: float | int | bool | None) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_digest(value: object) -> str | None:
    """The checksum of a tensor with its kind before it, as a digest of another kind is no match."""
    if value is None:
        return None
    if isinstance(value, int | float):  # xor stores the number itself of a 0-dim tensor
        return f"xor:{value!r}"
    if isinstance(value, str):
        if _CRC.fullmatch(value):
            return f"crc32:{value}"
        if _MD5.fullmatch(value):
            return f"md5:{value}"
        if value.startswith("0x") and len(value) <= 40:
            return f"xor:{value}"
    raise ValueError(f"a checksum is {str(value)[:60]!r}")


# Writing


def write_value(value: Any, write_tensor: Any, path: tuple[str, ...] = (), depth: int = 0) -> Any:
    """A value as msprobe writes it; `write_tensor(record, path)` makes the leaf of a tensor."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, TensorRecord):
        return write_tensor(value, path)
    if isinstance(value, list | tuple):
        return [
            write_value(item, write_tensor, (*path, str(i)), depth + 1)
            for i, item in enumerate(value)
        ]
    if isinstance(value, Fields):
        value = value.fields
    if isinstance(value, dict):
        return {
            str(key): write_value(item, write_tensor, (*path, str(key)), depth + 1)
            for key, item in value.items()
        }
    return write_scalar(value)


def write_scalar(value: Any) -> Any:
    """A leaf that is no tensor; null for what msprobe has no leaf for."""
    if isinstance(value, bool | int | float | str):
        return {"type": type(value).__name__, "value": value}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"type": "slice", "value": [p if isinstance(p, int) else None for p in parts]}
    if value is ...:
        return {"type": "ellipsis", "value": "..."}
    if isinstance(value, Special):
        return _write_special(value)
    return None


def _write_special(value: Special) -> dict[str, Any] | None:
    for kind, (name, key) in _SPECIALS.items():
        if value.kind == name:
            text = value.text
            return {"type": kind, key: text.removeprefix("torch.") if key == "format" else text}
    if value.kind == "process_group":
        ranks = [int(number) for number in re.findall(r"\d+", value.text)]
        group = f"{zlib.crc32(str(ranks).encode()):08x}"
        return {"type": "torch.ProcessGroup", "group_ranks": ranks, "group_id": group}
    return None


def write_statistics(record: TensorRecord) -> dict[str, Any]:
    """The four statistics by msprobe's rules, which are torch's: NaN and infinities show in all."""
    s = record.summary
    if s is None:
        return dict.fromkeys(_STATISTICS)
    kind = record.dtype
    high, low, mean, norm = statistics_of(s)
    if not kind.startswith(("float", "bfloat", "complex")):
        mean = None
    if not kind.startswith(("float", "bfloat")):
        norm = None
    if not record.shape and kind != "bool" and not kind.startswith("complex"):
        mean = norm = high  # of one number all four are that number, signed
    return {"Max": high, "Min": low, "Mean": mean, "Norm": norm}


def statistics_of(s: TensorSummary) -> tuple[Any, Any, Any, Any]:
    """Max, min, mean and norm as torch computes them; a summary's are of what is not NaN."""
    if s.nan_count:
        return (math.nan,) * 4
    if not s.inf_count:
        return s.max, s.min, s.mean, s.norm
    mean = math.inf if s.max == math.inf else -math.inf
    if s.max == math.inf and s.min == -math.inf:
        mean = math.nan
    return s.max, s.min, mean, math.inf


def digest_of(text: str | None) -> str | None:
    """What msprobe would write of a digest: a CRC-32 or xor, of other kinds nothing."""
    kind, _, value = (text or "").partition(":")
    return value if kind in ("crc32", "md5", "xor") else None
