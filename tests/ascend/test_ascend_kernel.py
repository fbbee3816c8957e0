"""kernel_meta: the right files under every naming, and the line an offset stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_files import KERNEL, shared_data, write_kernel

from tensorprobe.ascend.addresses import DeviceMemory, changed_arguments, overlapping
from tensorprobe.ascend.kernel import (
    KernelFolder,
    check_kernel,
    locate,
    pc_offset,
    refined_offset,
)
from tensorprobe.ascend.log import Allocation

OBJDUMP = """
k.o:     file format elf64-hiipu

Disassembly of section .text:
0000000000000000 <k__kernel0>:
k__kernel0():
/x/kernel_meta/k.cce:10
       0:\t04c20000 \tMOV X1, X2
       4:\t04c20001 \tMOV X2, X3
/x/kernel_meta/k.cce:135
     504:\t04c20000 \tVADD
     508:\t04c20000 \tBAR
/x/kernel_meta/k.cce:140
     50c:\t04c20000 \tEND
"""


def debug_files(folder: Path, base: str = KERNEL) -> None:
    write_kernel(folder, base)
    (folder / f"{base}.o.txt").write_text(OBJDUMP)
    (folder / f"{base}.cce").write_text("".join(f"line {n}\n" for n in range(1, 200)))
    table = [{"cce_line": 10, "loc": ["", ""]}, {"cce_line": 134, "loc": ["impl/l2.py", 77]}]
    table.append({"cce_line": 140, "loc": ["impl/l2.py", "90"]})
    (folder / f"{base}_loc.json").write_text(
        json.dumps([{"cce_full_path": "k.cce", "cce_line2loc": table}])
    )


def test_offset_to_cce_and_python_line(tmp_path: Path) -> None:
    debug_files(tmp_path)
    kernel = KernelFolder([tmp_path]).find([f"{KERNEL}__kernel0"])
    assert kernel is not None
    place = locate(kernel, 0x506, None)
    assert (place.cce_line, place.cce_text) == (135, "line 135")
    assert (place.python_file, place.python_line) == ("impl/l2.py", 77)
    assert place.instructions[-1].startswith("504:")
    assert locate(kernel, 0x0, None).python_file is None
    assert locate(kernel, 0x9999, None).cce_line is None
    assert locate(None, 0x504, None, tmp_path / f"{KERNEL}.o.txt").cce_line == 135


def test_offsets_of_registers() -> None:
    assert pc_offset(0x1000124080064000, 0x124080067D2C) == 0x3D2C
    assert pc_offset(0x1240800FF000, 0x124080101010) == 0x2010  # across the 20 bits
    registers = {"ccu error info": 0x42, "vec error info": 0x9F}
    assert refined_offset(0x64000, 0x67D2C, ["ccu"], registers) == 0x3D08
    assert refined_offset(0x64000, 0x67D2C, ["vec"], registers) == 0x3A7C
    assert refined_offset(0x64000, 0x67D2C, ["mte", "ifu"], registers) is None


@pytest.mark.parametrize(
    ("file", "function"),
    [
        (KERNEL, f"{KERNEL}__kernel0"),
        (KERNEL, KERNEL),
        ("Add_ab1b6750d7f510985325b603cb06dc8b", "Add_ab1b6750d7f510985325b603cb06dc8b_0"),
        ("Flash_58_100", "Flash_58_100_mix_aic"),
    ],
)
def test_files_are_found_under_every_name(tmp_path: Path, file: str, function: str) -> None:
    write_kernel(tmp_path / "kernel_meta_1_2" / "kernel_meta", file)
    kernel = KernelFolder([tmp_path]).find([function])
    assert kernel is not None
    assert kernel.base == file
    assert kernel.binary is not None
    assert kernel.json_path is not None


def test_the_hosts_copy_in_an_exception_dump(tmp_path: Path) -> None:
    base = "Add_ab1b6750d7f510985325b603cb06dc8b"
    write_kernel(tmp_path, base)
    (tmp_path / f"{base}.o").rename(tmp_path / f"{base}_0_host.o")
    kernel = KernelFolder([tmp_path]).find([f"{base}_0"])
    assert kernel is not None
    assert kernel.binary == tmp_path / f"{base}_0_host.o"


def test_files_are_found_by_what_the_json_says(tmp_path: Path) -> None:
    write_kernel(tmp_path, "other", name="renamed__kernel0")
    folder = KernelFolder([tmp_path])
    kernel = folder.find(["absent", "renamed__kernel0"])
    assert kernel is not None
    assert kernel.base == "other"
    assert folder.find(["../other", "/etc/passwd", ""]) is None
    assert "names kernel renamed" in check_kernel(kernel, 1, 1)[0]


def test_checks(tmp_path: Path) -> None:
    write_kernel(tmp_path, KERNEL, arguments=1)
    kernel = KernelFolder([tmp_path]).find([KERNEL])
    assert kernel is not None
    assert check_kernel(kernel, 1, 0) == []
    assert "takes 1 arguments" in check_kernel(kernel, 1, 1)[0]
    (tmp_path / f"{KERNEL}.o").write_bytes(b"junk")
    assert "no ELF" in check_kernel(kernel, 1, 0)[0]
    (tmp_path / f"{KERNEL}.o").unlink()
    (tmp_path / f"{KERNEL}.json").write_text("{broken")
    kernel = KernelFolder([tmp_path]).find([KERNEL])
    assert kernel is not None
    text = " ".join(check_kernel(kernel, 1, 0))
    assert "no kernel json" in text
    assert ".o is missing" in text


def test_the_real_kernel_meta() -> None:
    folder = KernelFolder([shared_data("graph-resnet50") / "kernel_meta"])
    kernel = folder.find(["te_transdata_a603142389973648_c50cf465894adb0d_1__kernel0"])
    assert kernel is not None
    assert kernel.loc is not None
    assert not kernel.is_dynamic
    gather = KernelFolder([shared_data("incident-gatherv2") / "kernel_meta"])
    (name,) = [name for name in gather.files if "gatherv2" in name]
    dynamic = gather.find([name])
    assert dynamic is not None
    assert dynamic.is_dynamic


def test_where_an_argument_points() -> None:
    events = [
        Allocation(1, 7, 0x124000, 100),
        Allocation(2, 7, 0x125000, 100),
        Allocation(3, 7, 0x125000, None),
        Allocation(4, 8, 0x126000, 100),
        Allocation(9, 7, 0x127000, 100),
    ]
    memory = DeviceMemory(events, 7, 5)
    standing = {
        what: memory.check(what, address, nbytes).standing
        for what, address, nbytes in [
            ("whole", 0x124000, 100), ("part", 0x124010, 10), ("long", 0x124010, 100),
            ("freed", 0x125004, 4), ("other process", 0x126000, 4), ("later", 0x127000, 4),
            ("zero", 0, 4), ("host", 0xFFF4543037C0, 4),
        ]
    }  # fmt: skip
    assert standing == {
        "whole": "inside", "part": "inside", "long": "past the end", "freed": "freed",
        "other process": "unknown", "later": "unknown", "zero": "null", "host": "host",
    }  # fmt: skip
    assert "16 bytes behind the end" in memory.check("x", 0x124010, 100).detail
    assert DeviceMemory([], 7, 5).check("x", 0x124000, 4).standing == "unchecked"
    inside = memory.check("input 0", 0x124000, 100)
    assert overlapping(0x1000000000124010, [inside]) == inside
    assert overlapping(0x200000, [inside]) is None
    assert changed_arguments([1, 2, 3], {0: [1, 5], 2: [3]}) == [
        "argument 1: 0x2 before, 0x5 after"
    ]
