"""Logs of every year: the failure is found, once, with all that belongs to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ascend_files import FAILURE, KERNEL, SCREEN_LOG, shared_data

from tensorprobe.ascend.errorcodes import BIT_NAMES, decode_code, decode_register
from tensorprobe.ascend.log import Fault, LogFacts, failure_keys, read_logs

FLASH = "FlashAttentionScore_5881aeec01e51adb01fb1db8be1c04f0_10000000000022420943_mix_aic"


def read(tmp_path: Path, *texts: str) -> LogFacts:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text(text)
    return read_logs(paths)


def one(tmp_path: Path, *texts: str) -> Fault:
    (fault,) = read(tmp_path, *texts).faults
    return fault


LINES = {
    "2020": (
        "Aicore kernel execute failed, device_id=0, stream_id=5, task_id=61, fault kernel_name="
        "-1_0_1_trans_TransData_170, func_name=te_transdata_83d5_7b99_1__kernel0.",
        {"stream_id": "5", "task_id": "61", "fault kernel_name": "-1_0_1_trans_TransData_170",
         "func_name": "te_transdata_83d5_7b99_1__kernel0"},
    ),
    "2022": (
        "Aicore kernel execute failed, device_id=0, stream_id=23, report_stream_id=20, task_id=24, "
        "flip_num=0, fault kernel_name=16805736118314619649-1_0_1_Add_35, func_name=te_add_72_1"
        "__kernel0, program id=22, hash=3338199064661472585.",
        {"report_stream_id": "20", "program id": "22", "hash": "3338199064661472585"},
    ),
    "mindspore": (
        "Aicore kernel execute failed, device_id=0, stream_id=14, report_stream_id=17, task_id=13, "
        "fault kernel_name=add_13570952190744021808_0__kernel0, func_name=add_13570952190744021808"
        "_0__kernel0, program id=8, hash=14046644073217913723[FUNC:GetError][FILE:stream.cc]",
        {"func_name": "add_13570952190744021808_0__kernel0", "hash": "14046644073217913723"},
    ),
    "2023": (
        "Aicore kernel execute failed, device_id=0, stream_id=2, report_stream_id=2, task_id=6, "
        "flip_num=0, fault kernel_name=2_0_11_GatherV2, program id=1, hash=15656883929986130445.",
        {"fault kernel_name": "2_0_11_GatherV2"},
    ),
    "2024": (
        "Aicore kernel execute failed, device_id=0, stream_id=42, report_stream_id=42, task_id=1, "
        f"flip_num=0, fault kernel_name={FLASH}, fault kernel info ext=none, program id=0, "
        "hash=1208019939949783628.",
        {"fault kernel_name": FLASH, "program id": "0"},
    ),
    "2025": (
        "[DFX_INFO]AI Core kernel execution failed, device_id=3, stream_id=4, report_stream_id=4, "
        f"task_id=9, flip_num=1, fault kernel_name={FLASH}, fault kernel info ext=none, "
        "program id=0, hash=(no result), module is nullptr!",
        {"device_id": "3", "flip_num": "1", "program id": "0"},
    ),
    "ffts": (
        "fftsplus task execute failed, dev_id=1, stream_id=2, task_id=3, context_id=4, thread_id=5,"
        " err_type=12[fftsplus aivector error], error_code=0x10, pc start=0x1240. "
        "fault kernel_name=ffts_Add, blockDim=8",
        {"device_id": "1", "context_id": "4", "fault kernel_name": "ffts_Add", "blockDim": "8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("era", LINES)
def test_the_failure_line_of_every_era(era: str) -> None:
    line, expected = LINES[era]
    keys = failure_keys(
        f"[RAW SERVER] (Worker_TP2 pid=1456) ERROR 09-17 05:36:01 [x.py:654]  {line}"
    )
    assert keys is not None
    assert {key: keys.get(key) for key in expected} == expected
    assert "fault kernel info ext" not in keys
    assert "hash" not in keys or keys["hash"].isdigit()


def test_what_is_no_ai_core_failure(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        "[ERROR] RUNTIME(1,a):2023-01-01-00:00:00.000.000 [t.cc:1]1 P:[EXEC][EXEC]Aicpu kernel "
        "execute failed, device_id=0, stream_id=1, task_id=2, fault op_name=Unique\n"
        "AI CPU kernel execution failed, device_id=0\nkernel execute succeeded\n",
    )
    assert facts.faults == []
    assert facts.aicpu_count == 2


def test_the_screen_of_the_guide(tmp_path: Path) -> None:
    fault = one(tmp_path, SCREEN_LOG)
    assert (fault.device_id, fault.stream_id, fault.task_id) == (0, 5, 3)
    assert fault.functions == [f"{KERNEL}__kernel0"]
    assert [(e.core_id, e.code) for e in fault.core_errors] == [(0, 0x800000)]


def test_markdown_escapes_are_undone(tmp_path: Path) -> None:
    text = SCREEN_LOG.replace("_", r"\_").replace("(", r"\(").replace("[", r"\[")
    text = text.replace(f"func\\_name={KERNEL}".replace("_", r"\_"), "func\\_name=**x**")
    fault = one(tmp_path, text)
    assert fault.core_errors[0].code == 0x800000
    assert fault.kernel_name == "0_11_L2Loss"


def test_a_terminal_wrapped_inside_the_name(tmp_path: Path) -> None:
    wrapped = FAILURE.replace("0_11_L2Loss", "0_11_L2            Loss")
    assert one(tmp_path, wrapped).kernel_name == "0_11_L2Loss"


CORE = (
    "The error from device(chipId:0, dieId:0), serial number is 48, there is an aivec error "
    "exception, core id is {core}, error code = {code}, dump info: pc start: 0x12c0c002e000, "
    "current: 0x12c0c002e5e8, vec error info: 0x51000070f7, mte error info: 0xb90000006a, ifu "
    "error info: 0x29883d2080000, ccu error info: 0xc791c207288000f7, cube error info: 0, biu "
    "error info: 0, aic error mask: 0x6500020bd00028c, para base: 0x12c100010000."
)


def plog(text: str, pid: int = 370, ms: int = 0) -> str:
    return (
        f"[ERROR] RUNTIME({pid},python3):2025-04-02-07:19:26.{ms:03d}.560 [task.cc:1341]{pid} "
        f"Print:[EXEC][EXEC]{text}\n"
    )


def test_cores_registers_and_the_words_behind_them(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        plog(CORE.format(core=16, code="0x200000000"))
        + plog(
            "The extend info: errcode:(0x200000000, 0x100, 0) errorStr: The write address of the "
            "MTE instruction is out of range. fixp_error0 info: 0x6a, fixp_error1 info: 0xb9"
        )
        + plog(CORE.format(core=17, code="0x200000000"))
        + plog(LINES["2024"][0]),
    )
    first, second = fault.core_errors
    assert first.code == 0x200000000 | 0x100 << 64
    assert [bit.name for bit in decode_code(first.code)] == [
        "mte_gdma_write_overflow",
        "ccu_inf_nan",
    ]
    assert first.text == "The write address of the MTE instruction is out of range"
    assert (first.pc_start, first.pc_current) == (0x12C0C002E000, 0x12C0C002E5E8)
    assert first.registers["aic error mask"] == 0x6500020BD00028C
    assert (second.core_id, second.kind) == (17, "aivec error")


def test_a_code_of_zero_and_a_numbered_one(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        plog(CORE.format(core=0, code="0"))
        + plog("The extend info: errcode:(0, 0, 0) errorStr: timeout or trap error. fixp_error0")
        + plog(LINES["2024"][0]),
    )
    assert (fault.core_errors[0].code, fault.core_errors[0].text) == (0, "timeout or trap error")
    numbered = (
        "The error from device(chipId:0, dieId:0), serial number is 1, there is an error of aicore "
        "error, core id is 2, error code = 95, dump info: pc start: 0x10, current: 0x20, sc error "
        "info: 0x1, su error info: 0x2,0x3, mte error: 0x80000000, l1 error info: 0x4"
    )
    error = one(tmp_path, plog(numbered) + plog(LINES["2025"][0])).core_errors[0]
    assert (error.code, error.is_number, error.code_text) == (95, True, "95")
    assert (error.registers["su error info"], error.registers["su error info 2"]) == (2, 3)


def test_the_newest_screen_form(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        "EZ9999[PID: 3705317] 2026-08-03-20:08:15.912.327 (EZ9999):  "
        + CORE.format(core=1, code="0x10")
        + "\n        TraceBack (most recent call last):\n        "
        + LINES["2025"][0]
        + "[FUNC:GetError][FILE:stream.cc][LINE:1][THREAD:2]\n",
    )
    assert (fault.pid, fault.device_id, fault.core_errors[0].code) == (3705317, 3, 0x10)


def test_the_oldest_device_log(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        "[ERROR] TSCH(-1,null):2020-09-09-15:22:38.1.2 1 (cpuid:0) x.c:1 f: <exception_print>TIME:"
        "2020-09-09-15:22:38.100.200, device_id=0, stream_id=523, task_id=2, AICORE_INFO_START: "
        "core_id=3, AIC_ERROR=0x10, PC_START=0x1000, VEC_ERR_INFO=0x5, CURRENT_PC=0x1010\n",
    )
    assert (fault.stream_id, fault.task_id) == (523, 2)
    (error,) = fault.core_errors
    assert (error.core_id, error.code, error.pc_current) == (3, 0x10, 0x1010)
    assert error.registers["vec error info"] == 5


def test_one_failure_printed_three_times_is_one_fault(tmp_path: Path) -> None:
    text = plog(CORE.format(core=1, code="0x10")) + plog(LINES["2023"][0]) * 2
    fault = one(tmp_path, text, LINES["2023"][0] + "\n")
    assert fault.pid == 370
    assert len(fault.core_errors) == 1


def test_several_errors_are_several_faults(tmp_path: Path) -> None:
    second = LINES["2023"][0].replace("task_id=6", "task_id=7").replace("GatherV2", "Add")
    facts = read(
        tmp_path,
        plog(CORE.format(core=1, code="0x10"))
        + plog(LINES["2023"][0])
        + plog(CORE.format(core=2, code="0x800000"))
        + plog(second)
        + plog(LINES["2023"][0]),
        plog(LINES["2023"][0], pid=999),
    )
    assert [(f.task_id, f.pid) for f in facts.faults] == [(6, 370), (7, 370), (6, 999)]
    assert [[e.code for e in f.core_errors] for f in facts.faults] == [[0x10], [0x800000], []]


def test_core_errors_without_a_kernel_line(tmp_path: Path) -> None:
    fault = one(tmp_path, plog(CORE.format(core=1, code="0x10")))
    assert fault.kernel_name is None
    assert "no line that names the kernel" in fault.notes[0]


def info(text: str) -> str:
    return (
        "[INFO] GE(370,python3):2023-07-13-07:42:40.517.823 [exception_dumper.cc:255]1432 "
        f"LogExceptionTvmOpInfo:[AIC_INFO] {text}\n"
    )


def test_aic_info(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        plog(LINES["2023"][0])
        + plog("[AIC_INFO] args after execute: 20068234969088, 0, 64, ")
        + info("node_name:GatherV2, node_type:GatherV2, stream_id:2, task_id:6")
        + info("input:0;shape:[64,2];format:ND;dtype:DT_FLOAT;addr:0x124080044000;size:512 bytes")
        + info("input:1;shape:[];format:ND;dtype:DT_INT32;addr:0xfff4543037c0")
        + info("output:0;shape:[2];format:ND;dtype:DT_BF16;addr:0x124080054000")
        + info("block_dim:32")
        + info("dev_func:te_gatherv2_657c_1__kernel0")
        + info("tiling_key:0")
        + info("tiling_data:0x04 0x00")
        + "0x05 0x06\n"
        + info("args before execute: 20068234969088, 20068234838016, , addr:0xfff4543002f0")
        + plog("[Dump][Exception] The exception dump file path is /x/0/GatherV2.GatherV2.6.16"),
    )
    node = fault.node
    assert node is not None
    assert (node.inputs[0].shape, node.inputs[0].dtype, node.inputs[0].nbytes) == (
        (64, 2), "float32", 512
    )  # fmt: skip
    assert (node.inputs[1].shape, node.outputs[0].dtype) == ((), "bfloat16")
    assert node.facts["tiling_data"] == "0x04 0x00 0x05 0x06"
    assert fault.functions == ["te_gatherv2_657c_1__kernel0"]
    assert fault.args_before == [20068234969088, 20068234838016]
    assert fault.args_after == {0: [20068234969088, 0, 64]}
    assert fault.files == ["/x/0/GatherV2.GatherV2.6.16"]


def test_arguments_in_parts_and_loaded_tensors(tmp_path: Path) -> None:
    fault = one(
        tmp_path,
        plog(LINES["2024"][0])
        + plog("[AIC_INFO] args(0 to 2) after execute:0xe7ffc0009000, 0x12c200000000,  ")
        + plog("[AIC_INFO] args(2 to 4) after execute:0x34, 0,  ")
        + plog("tilingKey = 100, print 16 Times totalLen=(308*8)Bytes, argsSize=2464, blockDim=20")
        + plog("[Dump][Exception] begin to load normal tensor, index:1")
        + plog(
            "[Dump][Exception] exception info dump args data, addr:0x12c200000000; size:268448256 "
            "bytes"
        ),
    )
    assert fault.args_after == {0: [0xE7FFC0009000, 0x12C200000000], 2: [0x34, 0]}
    assert (fault.keys["tiling_key"], fault.keys["blockDim"]) == ("100", "20")
    assert [(a.index, a.address, a.nbytes) for a in fault.arguments] == [
        (1, 0x12C200000000, 268448256)
    ]


def test_hostile_logs_do_no_harm(tmp_path: Path) -> None:
    began = time.process_time()
    facts = read(
        tmp_path,
        "Aicore kernel execute failed" + ", device_id=" * 20_000 + "\n",
        "The error from device(" * 20_000 + "\n" + "a" * 3_000_000 + "\n\0\n",
        "Aicore kernel execute failed" + " " * 500_000 + "x\n",
        *(
            f"{start} " * 20_000
            for start in (
                "[AIC_INFO] node_name:",
                "DevMalloc: Succ, size=1",
                "<exception_print>TIME:1 device_id=1 stream_id=1",
                "kernelName[",
                "[ERROR] A(1,",
            )
        ),
        "Aicore kernel execute failed, fault kernel_name=../../etc/passwd\n",
    )
    assert facts.faults[-1].kernel_name == "../../etc/passwd"
    assert time.process_time() - began < 20


def test_bits_and_registers_in_words() -> None:
    assert len(BIT_NAMES) == 176
    (bit,) = decode_code(0x800000)
    assert bit.name == "mte_biu_rdwr_resp"
    assert "global memory" in bit.meaning
    assert not bit.points_at_data
    assert [b.points_at_data for b in decode_code(1 << 54 | 1 << 156 | 1)] == [False, True, True]
    assert decode_code(1 << 45)[0].is_hardware
    assert decode_code(1 << 200)[0].name == "bit_200"
    assert decode_code(0) == []
    words = {name: decode_code(1 << n)[0].meaning for n, name in enumerate(BIT_NAMES)}
    vague = [name for name, text in words.items() if text.endswith(": an error")]
    assert vague == []
    assert decode_register("mte error info", 0x3000046) == (
        "read from an address that belongs to nothing, address bits 19:5 = 0x0, pc bits 9:2 = 0x118"
    )
    assert decode_register("biu error info", 0) is None
    assert decode_register("aic error mask", 5) is None


def test_the_real_log() -> None:
    facts = read_logs([shared_data("incident-gatherv2") / "log"])
    (fault,) = facts.faults
    assert (fault.device_id, fault.stream_id, fault.task_id, fault.pid) == (0, 2, 6, 370)
    assert fault.kernel_name == "2_0_11_GatherV2"
    (error,) = fault.core_errors
    assert (error.code, error.core_id, error.pc_current) == (0x10, 0, 0x124080067D2C)
    assert fault.node is not None
    assert [t.shape for t in fault.node.inputs.values()] == [(64,), (2,), ()]
    assert len(fault.args_before) == 42
    assert len(facts.allocations) == 34
