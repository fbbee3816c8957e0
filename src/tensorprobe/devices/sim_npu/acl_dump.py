"""ACL dump files: what every kernel read and wrote, in the binary layout Ascend tools read.

A file is a little-endian uint64 with the length of a header, the header (a DumpData message in
protobuf wire format), then the bytes of every input and every output, in that order.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tensorprobe.errors import BadUsage

Sides = Literal["input", "output", "all"]

_DATA_TYPES = {
    torch.float32: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4, torch.int16: 5,
    torch.uint16: 6, torch.int32: 7, torch.int64: 8, torch.uint32: 9, torch.uint64: 10,
    torch.bool: 11, torch.float64: 12, torch.complex64: 16, torch.complex128: 17,
    torch.bfloat16: 27, torch.complex32: 32, torch.float8_e5m2: 34, torch.float8_e4m3fn: 35,
}  # fmt: skip
_FORMAT_ND = 2

# What the vendor calls the kernel behind an ATen op, where it is not the same word.
_OP_TYPES = {
    "mm": "MatMulV2", "addmm": "MatMulV2", "bmm": "BatchMatMul", "baddbmm": "BatchMatMul",
    "_to_copy": "Cast", "copy_": "TensorMove", "clone": "TensorMove", "cat": "ConcatD",
    "convolution": "Conv2D", "native_layer_norm": "LayerNorm", "native_group_norm": "GroupNorm",
    "native_layer_norm_backward": "LayerNormGrad", "native_group_norm_backward": "GroupNormGrad",
    "_softmax": "SoftmaxV2", "_log_softmax": "LogSoftmaxV2", "embedding": "GatherV2",
    "sum": "ReduceSum", "mean": "ReduceMean", "div": "RealDiv", "where": "SelectV2",
    "npu_alloc_float_status": "NPUAllocFloatStatus", "npu_get_float_status": "NPUGetFloatStatus",
    "npu_clear_float_status": "NPUClearFloatStatus",
}  # fmt: skip


# They reserve memory or look at it differently; nothing runs on the device for them.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
              "empty_with_format", "_unsafe_view"}  # fmt: skip


class AclDump:
    """Writes `{dump_path}/{time}/{device}/{model}/{OpType}.{OpName}.{task}.{stream}.{us}`."""

    def __init__(self, config: Path, device: int = 0) -> None:
        self.sides, root, self._is_on = _read_config(config)
        self._folder = root / time.strftime("%Y%m%d%H%M%S") / str(device) / "0"
        self._task = 0
        self._names: dict[str, int] = {}

    def write(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """One kernel's inputs and outputs, as one file."""
        if not self._is_on or not outputs or _name(func) in _NO_KERNEL:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        kind = op_type(func)
        number = self._names.get(kind, 0)
        self._names[kind] = number + 1
        name = kind if number == 0 else f"{kind}_{number}"
        self._task += 1
        now_us = time.time_ns() // 1000
        path = self._folder / f"{kind}.{name}.{self._task}.0.{now_us}"
        path.write_bytes(
            encode(
                name,
                now_us,
                inputs if self.sides != "output" else [],
                outputs if self.sides != "input" else [],
            )
        )


def op_type(func: Any) -> str:
    """The vendor's name for the kernel behind `func`: ReduceSum, MatMulV2, Gelu."""
    name = _name(func)
    if name in _OP_TYPES:
        return _OP_TYPES[name]
    words = name.removeprefix("npu_").strip("_").replace("backward", "grad").split("_")
    return "".join(word[:1].upper() + word[1:] for word in words)


def _name(func: Any) -> str:
    return str(func._schema.name).split("::")[1]


def encode(
    op_name: str, time_us: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> bytes:
    """The bytes of one dump file."""
    blocks = [_content(tensor) for tensor in [*inputs, *outputs]]
    sizes = [len(block) for block in blocks]
    header = b"".join(
        [
            _text(1, "2.0"),
            _number(2, time_us),
            # The two messages number their fields differently: shape, size, original shape.
            *(
                _message(3, _tensor(tensor, nbytes, shape=3, size=6, original=7))
                for tensor, nbytes in zip(outputs, sizes[len(inputs) :], strict=True)
            ),
            *(
                _message(4, _tensor(tensor, nbytes, shape=3, size=5, original=6))
                for tensor, nbytes in zip(inputs, sizes[: len(inputs)], strict=True)
            ),
            _text(6, op_name),
        ]
    )
    return b"".join([len(header).to_bytes(8, "little"), header, *blocks])


def _tensor(tensor: torch.Tensor, nbytes: int, *, shape: int, size: int, original: int) -> bytes:
    dims = _message(1, b"".join(_varint(length) for length in tensor.shape))
    return b"".join(
        [
            _number(1, _DATA_TYPES.get(tensor.dtype, 0)),
            _number(2, _FORMAT_ND),
            _message(shape, dims if tensor.dim() else b""),
            _number(size, nbytes),
            _message(original, dims if tensor.dim() else b""),
        ]
    )


def _content(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    dense = tensor.detach().contiguous()
    # One element counts as contiguous whatever its strides, but cannot be seen as bytes then.
    flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
    return flat.view(torch.uint8).numpy().tobytes()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _read_config(path: Path) -> tuple[Sides, Path, bool]:
    """Sides, folder and switch of a dump.json, with its documented defaults."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or not isinstance(document.get("dump"), dict):
        raise BadUsage(f"{path} has no object 'dump'; see dump.json in docs/devices.md")
    dump = document["dump"]
    if "dump_path" not in dump:
        raise BadUsage(f"{path} has no field 'dump_path': the folder the dump goes into")
    mode = dump.get("dump_mode", "output")
    if mode not in get_args(Sides):
        raise BadUsage(f"{path}: dump_mode '{mode}' is not one of input, output, all")
    # A relative path counts from where the process runs, as it does for the ACL library.
    return mode, Path(dump["dump_path"]), dump.get("dump_op_switch", "off") == "on"
