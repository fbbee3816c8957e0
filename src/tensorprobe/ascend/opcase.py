"""A single-operator case for op_test_frame out of what is known about one op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tensorprobe.ascend.dump import DumpTensor
from tensorprobe.ascend.dump_conversion import npy_header
from tensorprobe.ascend.element_types import kind_of, widened
from tensorprobe.ascend.kernel import KernelFiles
from tensorprobe.ascend.writing import (
    bytes_of,
    copy_file,
    folder_inside,
    safe_name,
    whole_file,
    write_all,
    write_text,
)


class CaseTensor(msgspec.Struct, frozen=True):
    """One argument of the kernel."""

    role: Literal["input", "output"]
    shape: tuple[int, ...]
    dtype: str
    format: str
    ori_shape: tuple[int, ...] | None = None
    ori_format: str | None = None
    name: str | None = None
    data: DumpTensor | None = None
    address: int | None = None
    nbytes: int | None = None

    @property
    def is_dynamic(self) -> bool:
        return any(size < 0 for size in self.shape)

    def described(self) -> dict[str, Any]:
        """The tensor as incident.json has it."""
        described: dict[str, Any] = {
            "shape": list(self.shape), "dtype": self.dtype, "format": self.format
        }  # fmt: skip
        if self.ori_shape is not None:
            described["ori_shape"] = list(self.ori_shape)
        if self.ori_format is not None:
            described["ori_format"] = self.ori_format
        if self.name is not None:
            described["name"] = self.name
        if self.address is not None:
            described["address"] = hex(self.address)
        return described


class OpCase(msgspec.Struct, frozen=True):
    """What one case is made of. `kernel_name` is the one source of case_name and bin_path."""

    op_type: str
    kernel_name: str
    tensors: tuple[CaseTensor, ...]
    kernel: KernelFiles | None = None
    node: str | None = None
    attributes: dict[str, Any] = {}
    device_id: int | None = None
    block_dim: int | None = None
    tiling_key: int | None = None
    tiling_data: bytes = b""
    soc: str = "all"


def case_warnings(case: OpCase, folder: Path) -> list[str]:
    """What will keep this case from running, or from meaning what it should."""
    warnings = []
    if ".o" in str(folder.resolve()):
        warnings.append(
            f"the path {folder} contains '.o': the frame finds the json by replacing every '.o' "
            "of bin_path. Move the case to a folder without it"
        )
    if case.kernel is None:
        warnings.append(f"{case.kernel_name}.o and .json were not found: put them into kernel/")
    dynamic = [tensor for tensor in case.tensors if tensor.is_dynamic]
    if dynamic:
        warnings.append("a shape is dynamic and its real size is not known: fill in -1 by hand")
    if case.kernel is not None and case.kernel.is_dynamic:
        warnings.append(
            "the kernel is compiled for dynamic shapes and needs tiling data: the published "
            "add_direct_case does not pass block_dim and tiling_data on; use case.json with "
            "msaicerr's runner instead"
        )
        size = case.kernel.info.get("opParaSize")
        if isinstance(size, int) and 0 < len(case.tiling_data) < size:
            warnings.append(
                f"the log has {len(case.tiling_data)} of {size} bytes of tiling data: log lines "
                "are cut; tiling_data.bin is incomplete"
            )
    if any(tensor.dtype == "undefined" for tensor in case.tensors):
        warnings.append("the dtype of some tensors is not known: fill in 'undefined' by hand")
    if any(tensor.role == "input" and tensor.data is None for tensor in case.tensors):
        warnings.append("some inputs have no dumped data: the frame will make up values for them")
    raw = [t.dtype for t in case.tensors if t.data is not None and not kind_of(t.dtype).is_plain]
    if raw:
        warnings.append(
            f"{', '.join(sorted(set(raw)))}: numpy has no such type, the value files hold the raw "
            "bits (how the frame takes them is not verified)"
        )
    return warnings


def write_case(case: OpCase, folder: Path) -> Path:
    """Write a folder: main.py, its data, the kernel's files, and case.json for msaicerr."""
    folder.mkdir(parents=True, exist_ok=True)
    values = [
        None if tensor.data is None else _write_value(tensor.data, folder)
        for tensor in case.tensors
    ]
    if case.kernel is not None:
        target = folder_inside(folder, Path("kernel"))
        for source, suffix in (
            (case.kernel.binary, ".o"), (case.kernel.json_path, ".json"), (case.kernel.cce, ".cce")
        ):  # fmt: skip
            if source is not None:
                copy_file(source, target / f"{_file_name(case.kernel_name)}{suffix}")
    if case.tiling_data:
        with whole_file(folder / "tiling_data.bin") as file:
            write_all(file, case.tiling_data)
    write_text(folder / "case.json", json.dumps(_msaicerr(case, values), indent=2) + "\n")
    write_text(folder / "main.py", _main_text(case, values))
    return folder


def _file_name(name: str) -> str:
    return safe_name(name, longest=200)  # with room for what is appended


def _write_value(data: DumpTensor, folder: Path) -> str:
    """The bytes the kernel gets; in numpy's own type where it has one, else as raw bits."""
    target = folder_inside(folder, Path("data"))
    name = f"{_file_name(data.path.name)}.{data.name}.npy"
    kind = kind_of(data.dtype)
    if kind.is_plain:
        array = data.array()
    elif data.fits and kind.bits in (8, 16):
        array = data.raw()[: (data.count or 0) * kind.bits // 8].view(f"<u{kind.bits // 8}")
        array = array.reshape(data.shape)
    else:
        array = widened(data.array())
    with whole_file(target / name) as file:
        write_all(file, npy_header(np.dtype(array.dtype.str), array.shape))
        write_all(file, bytes_of(array))
    return f"data/{name}"


def _tuple(values: tuple[int, ...]) -> str:
    return repr(tuple(int(value) for value in values))


def _comment(text: str) -> str:
    """Text that stays on its line, whatever it is."""
    return "".join(c if c.isprintable() else "?" for c in text[:300])


def _param_text(tensor: CaseTensor, value: str | None) -> str:
    ori_shape = tensor.shape if tensor.ori_shape is None else tensor.ori_shape
    parts = [
        f'"shape": {_tuple(tensor.shape)}',
        f'"dtype": {tensor.dtype!r}',
        f'"format": {tensor.format!r}',
        f'"ori_shape": {_tuple(ori_shape)}',
        f'"ori_format": {(tensor.ori_format or tensor.format)!r}',
        f'"param_type": {tensor.role!r}',
    ]
    if value is not None and tensor.role == "input":
        parts.append(f'"value": os.path.join(HERE, *{tuple(value.split("/"))!r})')
    return "            {" + ", ".join(parts) + "},\n"


def _main_text(case: OpCase, values: list[str | None]) -> str:
    params = "".join(
        _param_text(tensor, value) for tensor, value in zip(case.tensors, values, strict=True)
    )
    attributes = "".join(
        f"#   {_comment(f'{key} = {value!r}')}\n" for key, value in case.attributes.items()
    )
    # The first line: one of the first two may name an encoding, and a node may be called anything.
    return f"""# -*- coding: utf-8 -*-
# Runs one Ascend operator alone: python3.7 main.py [SOC]
# node {_comment(case.node or "unknown")}, type {_comment(case.op_type)}
# A failure with a runtime code 0x7.... (as 0x7bc87) means: it reproduces. Success: it does not.
{"# attributes (compiled into the kernel):" + chr(10) + attributes if attributes else ""}import os
import sys

from op_test_frame.ut import OpUT

HERE = os.path.dirname(os.path.abspath(__file__))
KERNEL = {_file_name(case.kernel_name)!r}
BIN_PATH = os.path.join(HERE, "kernel", KERNEL + ".o")


def check_files():
    # The frame finds the json by replacing every ".o" in bin_path.
    if BIN_PATH.count(".o") != 1:
        sys.stderr.write("move this folder: its path contains '.o'\\n")
    for path in (BIN_PATH, BIN_PATH[:-2] + ".json"):
        if not os.path.isfile(path):
            sys.stderr.write("missing: " + path + "\\n")


def run_sample_case(soc):
    ut_case = OpUT({case.op_type!r}, None, None)
    case1 = {{
        "params": [
{params}        ],
        "case_name": KERNEL,
        "bin_path": BIN_PATH,
    }}
    ut_case.add_direct_case(case1)
    ut_case.run(soc)


if __name__ == "__main__":
    check_files()
    run_sample_case(sys.argv[1] if len(sys.argv) > 1 else {case.soc!r})
"""


def _msaicerr(case: OpCase, values: list[str | None]) -> dict[str, Any]:
    """The configuration msaicerr's own runner takes: it can pass tiling data, OpUT cannot."""
    info = case.kernel.info if case.kernel is not None else {}
    stated, workspace = info.get("kernelName"), info.get("workspace")
    files = list(zip(case.tensors, values, strict=True))
    name = _file_name(case.kernel_name)
    cce = case.kernel is not None and case.kernel.cce is not None
    return {
        "kernel_name": stated if isinstance(stated, str) else case.kernel_name,
        "bin_path": f"kernel/{name}.o",
        "json_path": f"kernel/{name}.json",
        "cce_file": f"kernel/{name}.cce" if cce else "",
        "tiling_data": "tiling_data.bin" if case.tiling_data else "",
        "tiling_key": case.tiling_key if case.tiling_key is not None else 0,
        "block_dim": case.block_dim if case.block_dim is not None else info.get("blockDim", -1),
        "input_file_list": [value for tensor, value in files if tensor.role == "input"],
        "output_file_list": [value for tensor, value in files if tensor.role == "output"],
        "workspace_file_list": [],
        "bin_file_list": [],
        "workspace": workspace.get("size", []) if isinstance(workspace, dict) else [],
        "device_id": case.device_id if case.device_id is not None else 0,
        "sub_ptr_addrs": {},
        "ffts_addrs_num": 0,
    }
