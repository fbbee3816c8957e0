"""How kernels were seen to round on healthy calls, by operator, dtypes and device: a table of data.

`python -m tensorprobe.replay.calibrate` makes it. A kernel that is not in it has no law.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import BadUsage
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.kinds import api_of, kind_of
from tensorprobe.replay.rounding_laws import Departure, Law
from tensorprobe.tensors.opening import open_named, read_text

TABLE = Path(__file__).with_name("calibration.json")
OWN_TABLE = "TENSORPROBE_CALIBRATION"  # names a file of the user's, which comes first

LENGTH = 256.0  # `beyond` is measured in sums of so many numbers, and grows with them
_ENOUGH = 20  # healthy calls, for a law
_MARGIN = 2.0  # on the largest `beyond` that was measured
_WIDE_MARGIN = 3.0  # on what is systematic, of which a few calls have most
# By dtype: the least that a law allows, and beyond what measure there is none.
_BEYOND = {"bfloat16": (0.01, 0.03), "float16": (0.1, 0.25)}
_SYSTEMATIC = {"bfloat16": (0.1, 2.0), "float16": (0.1, 2.0), "float32": (0.5, 4.0)}
# A norm's mean or a softmax's sum is rounded once for all of a row, and scales or shifts it.
_SHARED = {"bfloat16": 0.5, "float16": 0.5, "float32": 2.0}
# Each number of these comes of one number, though their kind does not say so.
_ALONE = {"gelu", "mish", "elu", "selu", "celu", "hardswish", "hardsigmoid", "logsigmoid"}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_NUMBER = "number"  # in a key: an argument is a number, not a tensor
_EACH_NUMBER = ("elementwise", "compound", "general", "exact", "conversion")
_OF_MODULE = {
    "Linear": "linear", "Conv1d": "conv1d", "Conv2d": "conv2d", "Conv3d": "conv3d",
    "LayerNorm": "layer_norm", "RMSNorm": "rms_norm", "GroupNorm": "group_norm",
    "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm",
    "Softmax": "softmax", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid", "Tanh": "tanh",
    "Embedding": "embedding", "ReLU": "relu", "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
}  # fmt: skip
# What has one right answer, but that libraries may compute otherwise.
_LOOSELY_EXACT = {
    *("remainder", "fmod", "floor_divide", "__rmod__", "__rfloordiv__", "histc", "ldexp", "frexp"),
    *("round", "set", "resize", "unique", "nextafter", "bincount"),
}


class CalibratedKernel(msgspec.Struct):
    """The largest departures of one kernel's healthy calls; without `calls` nobody counted them."""

    calls: int | None = 0
    beyond: float = 0.0
    factor: float = 0.0
    offset: float = 0.0

    def add(self, departure: Departure, length: float) -> None:
        """Count one more healthy call."""
        self.calls = (self.calls or 0) + 1
        self.beyond = max(self.beyond, departure.beyond / max(1.0, length / LENGTH))
        self.factor = max(self.factor, departure.factor)
        self.offset = max(self.offset, departure.offset)

    def law(self, dtype: str, shares: bool = False) -> Law | None:
        """What its calls may do; None: they do as they like, or too few were seen.

        Numbers of a kernel that `shares` have an intermediate result in common.
        """
        if (self.calls is not None and self.calls < _ENOUGH) or dtype not in _SYSTEMATIC:
            return None
        least, most = _SYSTEMATIC[dtype]
        if max(self.factor, self.offset) > most:
            return None
        if shares:
            least = _SHARED[dtype]
        factor = max(least, _WIDE_MARGIN * self.factor)
        offset = max(least, _WIDE_MARGIN * self.offset)
        if dtype in _BEYOND and self.beyond <= _BEYOND[dtype][1]:
            beyond = max(_BEYOND[dtype][0], _MARGIN * self.beyond)
            return Law("once", beyond, factor, offset, LENGTH)
        return Law("often", factor=factor, offset=offset)


def strictest(dtype: str) -> Law:
    """The least that any law of this dtype allows: what is within it needs no second look."""
    least = _SYSTEMATIC[dtype][0]
    if dtype in _BEYOND:
        return Law("once", _BEYOND[dtype][0], least, least, LENGTH)
    return Law("often", factor=least, offset=least)


class Section(msgspec.Struct):
    """The kernels of one device, and what made them."""

    device: str
    made_by: dict[str, str]
    kernels: dict[str, CalibratedKernel]


def read_table(path: Path) -> list[Section]:
    """The sections of a table; BadUsage where it is none."""
    try:
        return msgspec.json.decode(read_text(open_named(path), path), type=list[Section])
    except (OSError, msgspec.MsgspecError) as error:
        raise BadUsage(f"{path} is no table of calibrated kernels: {error}") from error


def check_own_table() -> None:
    """BadUsage where the table of the user's cannot be read."""
    _known(os.environ.get(OWN_TABLE))


def covers(facts: Mapping[str, Any]) -> bool:
    """Whether the table was made by the torch and the processor of a recorded run: elsewhere
    kernels may round otherwise."""
    torch = facts.get("torch")
    version = torch.get("version") if isinstance(torch, Mapping) else None
    if not isinstance(torch, Mapping) or not isinstance(version, str):
        return False
    own = os.environ.get(OWN_TABLE)
    paths = ([Path(own)] if own else []) + [TABLE]
    made = [section.made_by for path in paths for section in read_table(path)]
    return any(
        _minor(each.get("torch", "")) == _minor(version)
        and each.get("processor") in (None, torch.get("cpu_capability"))
        for each in made
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@functools.lru_cache(maxsize=4)
def _known(own: str | None) -> dict[tuple[str, str], CalibratedKernel]:
    found: dict[tuple[str, str], CalibratedKernel] = {}
    paths = ([Path(own)] if own else []) + [TABLE]
    for section in (section for path in paths for section in read_table(path)):
        for key, kernel in section.kernels.items():
            found.setdefault((section.device, key), kernel)
    return found


def law_of(forward: Call, backward: Call | None, record: TensorRecord) -> Law | None:
    """The law for one result of a call, or of its backward; None for a kernel nobody has seen."""
    if backward is None and kind_of(forward) in ("exact", "conversion"):
        return None if api_of(forward.op) in _LOOSELY_EXACT else Law("exact")
    if any(map(_is_channels_last, forward.tensors)):
        return None  # kernels of their own, which were not calibrated
    if backward is not None and _kernel_name(forward) in _SHARE_SUMS:
        return None
    device = record.device.partition(":")[0]
    key = key_of(forward, backward, record)
    kernel = _known(os.environ.get(OWN_TABLE)).get((device, key))
    law = None if kernel is None else kernel.law(record.dtype, _shares(forward))
    if law is not None and law.kind == "often" and _NUMBER in key.split():
        # the number is rounded too, which scales or shifts all of the result
        law = msgspec.structs.replace(law, factor=law.factor + 1, offset=law.offset + 1)
    return law


# Each channel's gradient has two sums in common, whose rounding shifts all of it.
_SHARE_SUMS = {"batch_norm", "instance_norm", "group_norm"}


def _is_channels_last(record: TensorRecord) -> bool:
    stride = record.stride
    return stride is not None and len(stride) > 3 and stride[1] == 1 < record.shape[1]


def _shares(call: Call) -> bool:
    """Whether numbers of a result have an intermediate one in common; yes where nobody knows."""
    api = api_of(call.op)
    if api in _ALONE:
        return False
    return kind_of(call) not in ("product", "elementwise") or api in _ATTENTION


def key_of(forward: Call, backward: Call | None, record: TensorRecord) -> str:
    """What a kernel is known by: "linear bfloat16", "add bfloat16,float32 number"."""
    subject = backward or forward
    words = [_kernel_name(forward)]
    if backward is not None:
        words.append("backward")
        if kind_of(forward) in _EACH_NUMBER and _is_summed(backward, record):
            words.append("summed")
    if kind_of(forward) == "compound":
        words.append("scaled")
    words.append(",".join(sorted(_floats(forward))))
    if record.dtype not in _floats(forward) or len(_floats(forward)) > 1:
        words.append(f"to {record.dtype}")
    if any(_is_number(value) for value in (*forward.args[:2], forward.kwargs.get("other"))):
        words.append(_NUMBER)
    if any(note.startswith("autocast ") for note in forward.notes):
        words.append("autocast")
    output = record.name.removeprefix(f"{subject.name}.")
    if "_foreach_" not in forward.op and output != "output.0":
        words.append(output)
    return " ".join(words)


def _kernel_name(call: Call) -> str:
    """The operator that does the work; of a module of torch's, its function."""
    if not call.name.startswith("Module."):
        return api_of(call.op)
    name = call.op.rpartition(".")[2]
    return _OF_MODULE.get(name, name)


def _is_summed(backward: Call, record: TensorRecord) -> bool:
    """Whether an input was broadcast: its gradient is the sum of what each copy of it gets."""
    return any(r.role == "input" and r.numel > record.numel for r in backward.tensors)


def _floats(call: Call) -> set[str]:
    return {
        record.dtype
        for record in call.tensors
        if record.role != "output" and record.dtype.startswith(("float", "bfloat", "complex"))
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def sum_length(forward: Call, backward: Call | None, record: TensorRecord) -> float:
    """About how many numbers each number of a result is a sum of."""
    given = [r for r in forward.tensors if r.role != "output"]
    if backward is not None:
        # the gradient of an input comes of the others
        given = [r for r in given if r.shape != record.shape]
        given += [r for r in backward.tensors if r.role == "input"]
    sizes = sorted((r for r in given if r.numel), key=lambda r: -r.numel)
    n = max(record.numel, 1)
    longest = max((r.numel / n for r in sizes), default=1.0)
    if kind_of(forward) == "product" and len(sizes) >= 2:
        a, b = sizes[:2]
        batch = math.prod(a.shape[:-2]) if len(a.shape) == len(b.shape) > 2 else 1
        longest = max(longest, math.sqrt(a.numel * b.numel / n / max(batch, 1)))
    return max(longest, 1.0)
