"""Ascend files made by hand, byte by byte: what the tests read back. Nothing of src is used."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

FLOAT, FLOAT16, INT8, INT32, BF16 = 1, 2, 3, 7, 27
ND, NCHW, NC1HWC0, FRACTAL_Z, FRACTAL_NZ = 2, 0, 3, 4, 29


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def chunk(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def shape_message(dims, packed: bool = True) -> bytes:
    if not packed:
        return b"".join(varint(1 << 3) + varint(dim) for dim in dims)
    return chunk(1, b"".join(varint(dim) for dim in dims)) if len(dims) else b""


class Tensor:
    """One entry: `raw` bytes with the numbers of the header."""

    def __init__(self, raw, dtype=FLOAT, fmt=ND, shape=None, original=None, **more) -> None:
        if isinstance(raw, np.ndarray):
            shape = raw.shape if shape is None else shape
            raw = raw.tobytes()
        self.raw, self.dtype, self.format = raw, dtype, fmt
        self.shape, self.original, self.more = shape or (), original, more

    def message(self, role: str, inline: bool) -> bytes:
        data, size, original, address = (4, 5, 6, 8) if role == "input" else (5, 6, 7, 9)
        out = number(1, self.dtype) + number(2, self.format) + chunk(3, shape_message(self.shape))
        if inline:
            out += chunk(data, self.raw)
        out += number(size, len(self.raw))
        if self.original is not None:
            out += chunk(original, shape_message(self.original))
        out += number(address, self.more.get("address", 0))
        if role == "input":
            out += number(11, self.more.get("input_type", 0))
        return out


def header(inputs=(), outputs=(), buffers=(), spaces=(), op_name="", inline=False) -> bytes:
    out = chunk(1, b"2.0") + number(2, 1638329841577837)
    out += b"".join(chunk(3, tensor.message("output", inline)) for tensor in outputs)
    out += b"".join(chunk(4, tensor.message("input", inline)) for tensor in inputs)
    for field, blocks in ((5, buffers), (8, spaces)):
        for block in blocks:
            body = (chunk(2, block) if inline else b"") + number(3, len(block))
            out += chunk(field, body)
    return out + (chunk(6, op_name.encode()) if op_name else b"")


def dump_bytes(inputs=(), outputs=(), buffers=(), spaces=(), op_name="") -> bytes:
    head = header(inputs, outputs, buffers, spaces, op_name)
    blocks = [t.raw for t in (*inputs, *outputs)] + list(buffers) + list(spaces)
    return struct.pack("<Q", len(head)) + head + b"".join(blocks)


def write_dump(path: Path, **parts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_bytes(**parts))
    return path


# --- an incident like the guide's -----------------------------------------------------------

SOURCE_HASH = "c0c615ce55e6d3f96950bca0ea39a9ba178f78dab0e17f9096acb313f6057d65"
KERNEL = f"te_l2loss_{SOURCE_HASH}_d5135fe39437a0d0_0"
DUMP_NAME = "L2Loss.L2Loss.3.1638329841577837"


def _line(text: str, function: str, file: str, line: int) -> str:
    return f"        {text}[FUNC:{function}][FILE:{file}][LINE:{line}]\n"


FAILURE = (
    "Aicore kernel execute failed, device_id=0, stream_id=5, report_stream_id=3, task_id=3, "
    f"fault kernel_name=0_11_L2Loss, func_name={KERNEL}__kernel0, program id=3, "
    "hash=2896346369331939785"
)
SCREEN_LOG = "".join(
    [
        "EZ9999: Inner Error!\n",
        _line(
            "The device(0), core list[0-0], error code is:",
            "PrintCoreInfoErrMsg", "device_error_proc.cc", 417,
        ),
        _line(
            "coreId( 0):        0x800000    ", "PrintCoreInfoErrMsg", "device_error_proc.cc", 428
        ),
        _line(FAILURE, "GetError", "stream.cc", 712),
        _line(
            "Stream synchronize failed, stream = 0xfffe24161eb0",
            "StreamSynchronize", "logger.cc", 274,
        ),
    ]
)  # fmt: skip


def graph_text(kernel: str = KERNEL, op_type: str = "L2Loss", dynamic: bool = False) -> str:
    rows = -1 if dynamic else 62
    return f"""graph {{
  name: "ge_default_20211201033720_11"
  op {{
    name: "Variable"
    type: "Variable"
    output_desc {{ dtype: DT_FLOAT shape {{ dim: 62 dim: 62 }} layout: "ND" size: 15424 }}
  }}
  op {{
    name: "L2Loss"
    type: "{op_type}"
    input: "Variable:0"
    input: "atomic_addr_clean0_11_0:-1"
    attr {{ key: "L2Loss_kernelname" value {{ s: "{kernel}__kernel0" }} }}
    attr {{
      key: "_datadump_original_op_names"
      value {{ list {{ s: "loss/L2Loss" val_type: VT_LIST_STRING }} }}
    }}
    attr {{ key: "_op_slice_info" value {{ s: "{{\\"splitMaps\\": [{{\\"idx\\": 1}}]}}" }} }}
    attr {{ key: "_session_graph_id" value {{ s: "0_11" }} }}
    attr {{ key: "T" value {{ dt: 0 }} }}
    id: 3
    input_desc {{
      dtype: DT_FLOAT
      shape {{ dim: {rows} dim: 62 }}
      layout: "ND"
      attr {{ key: "origin_format" value {{ s: "ND" }} }}
      attr {{ key: "origin_shape" value {{ list {{ i: {rows} i: 62 val_type: VT_LIST_INT }} }} }}
      size: 15424
    }}
    output_desc {{
      dtype: DT_FLOAT
      shape {{
      }}
      layout: "ND"
      attr {{ key: "origin_format" value {{ s: "ND" }} }}
      attr {{ key: "origin_shape" value {{ list {{ val_type: VT_LIST_INT }} }} }}
      size: 64
    }}
  }}
}}
"""


def write_kernel(folder: Path, base: str = KERNEL, arguments: int = 2, name: str | None = None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{base}.o").write_bytes(b"\x7fELF" + bytes(60))
    (folder / f"{base}.json").write_text(
        f'{{"binFileName": "{base}", "binFileSuffix": ".o", "blockDim": 1, '
        f'"kernelName": "{name or base + "__kernel0"}", "magic": "RT_DEV_BINARY_MAGIC_ELF", '
        f'"opParaSize": 0, "parameters": {[0] * arguments}}}'
    )


def write_incident(folder: Path, x: np.ndarray, output=None, kernel: str = KERNEL) -> Path:
    """log/, graph/, kernel_meta/ and dump/ of the guide's L2Loss failure."""
    for name in ("log", "graph"):
        (folder / name).mkdir(parents=True)
    (folder / "log" / "screen.log").write_text(SCREEN_LOG)
    (folder / "graph" / "ge_proto_00000011_Build.txt").write_text(graph_text(kernel))
    write_kernel(folder / "kernel_meta", kernel)
    if output is None:
        output = np.float32(np.sum(x.astype(np.float64) ** 2) / 2)
    write_dump(
        folder / "dump" / DUMP_NAME,
        inputs=[Tensor(x.astype(np.float32), address=0x124080044000)],
        outputs=[Tensor(np.asarray(output, np.float32), address=0x124080054000)],
    )
    return folder


def shared_data(name: str) -> Path:
    """A folder of the real artefacts; the test is skipped where they are not."""
    root = Path(os.environ.get("TENSORPROBE_SHARED", Path(__file__).parents[2] / ".." / "shared"))
    path = root / "data" / "ascend" / name
    if not path.is_dir():
        pytest.skip("the real artefacts are not here")
    return path
