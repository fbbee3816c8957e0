"""From leftovers to report and case: the guide's L2Loss failure, and a real one."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ascend_files import (
    BF16,
    DUMP_NAME,
    FAILURE,
    KERNEL,
    SOURCE_HASH,
    Tensor,
    graph_text,
    shared_data,
    write_dump,
    write_incident,
    write_kernel,
)
from test_ascend_kernel import debug_files

from tensorprobe.cli.main import main

X = np.random.default_rng(0).normal(size=(62, 62)).astype(np.float32)


def run(folder: Path, *more: str, status: int = 3) -> dict:
    words = ["ascend", "incident", "-o", str(folder / "out")]
    for option in ("log", "graph", "kernel_meta", "dump"):
        if (folder / option).exists():
            words += [f"--{option.replace('_', '-')}", str(folder / option)]
    assert main([*words, *more]) == status
    content = json.loads((folder / "out" / "incident.json").read_text())
    assert content["format"] == 1
    return content


def test_the_whole_story(tmp_path: Path, capsys) -> None:
    (incident,) = run(write_incident(tmp_path, X))["incidents"]
    assert {
        key: incident[key]
        for key in ("device_id", "stream_id", "task_id", "kernel", "node", "op_type", "error_codes")
    } == {
        "device_id": 0, "stream_id": 5, "task_id": 3, "kernel": f"{KERNEL}__kernel0",
        "node": "L2Loss", "op_type": "L2Loss", "error_codes": ["0x800000"],
    }  # fmt: skip
    (tensor,) = incident["inputs"]
    assert (tensor["shape"], tensor["dtype"], tensor["format"]) == ([62, 62], "float32", "ND")
    assert incident["outputs"][0]["shape"] == []
    assert incident["attributes"] == {"T": "float32"}
    assert incident["branch"] == "could not tell"
    assert "clean input" in incident["conclusion"]
    assert incident["warnings"] == []
    assert incident["reference"]["agrees"]
    assert Path(incident["case"]).is_dir()
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "out" / "report.txt").read_text().strip()
    assert "bit 23 mte_biu_rdwr_resp: memory transfer: the bus answered" in text
    assert "the dump's output 0 agrees with the reference" in text
    assert "export ASCEND_GLOBAL_LOG_LEVEL=1" in text  # what this log lacks


def test_the_decision_tree(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    (clean,) = run(tmp_path, "--reproduced", "yes")["incidents"]
    assert clean["branch"] == "reproduces with clean input"
    (alone,) = run(tmp_path, "--reproduced", "no")["incidents"]
    assert alone["branch"] == "does not reproduce"
    assert any("addr_checker" in step for step in alone["next"])
    broken = X.copy()
    broken[3, 4] = np.nan
    write_dump(
        tmp_path / "dump" / DUMP_NAME,
        inputs=[Tensor(broken)],
        outputs=[Tensor(np.full((), np.nan, np.float32))],
    )
    (abnormal,) = run(tmp_path, "--reproduced", "yes")["incidents"]
    assert abnormal["branch"] == "reproduces with abnormal input"
    assert "input.0 has nan x1 first at [3, 4]" in abnormal["conclusion"]
    (unknown,) = run(tmp_path)["incidents"]
    assert unknown["branch"] == "could not tell"
    assert "abnormal input" in unknown["conclusion"]
    (tmp_path / "case.txt").write_text("rtStreamSynchronize failed, ret=0x7bc87")
    (by_log,) = run(tmp_path, "--case-log", str(tmp_path / "case.txt"))["incidents"]
    assert by_log["branch"] == "reproduces with abnormal input"
    (tmp_path / "case.txt").write_text("[SUCCESS] case L2Loss_static passed")
    (by_log,) = run(tmp_path, "--case-log", str(tmp_path / "case.txt"))["incidents"]
    assert by_log["branch"] == "does not reproduce"
    shutil.rmtree(tmp_path / "dump")
    (blind,) = run(tmp_path, "--reproduced", "yes")["incidents"]
    assert blind["branch"] == "could not tell"
    assert [m["what"] for m in blind["missing"]][-1] == "dump"


def plog(text: str) -> str:
    return f"[INFO] RUNTIME(370,py):2021-12-01-03:37:20.000.000 [l.cc:5] 1243 {text}\n"


@pytest.mark.parametrize(
    ("events", "standing"),
    [
        ([("m", 0x124080044000, 65536), ("m", 0x124080054000, 512)], "inside"),
        ([("m", 0x124080044000, 1024)], "past the end"),
        ([("m", 0x124080044000, 65536), ("f", 0x124080044000, 0)], "freed"),
        ([("m", 0x555000, 65536)], "unknown"),
    ],
)
def test_the_address_check(tmp_path: Path, events: list, standing: str) -> None:
    write_incident(tmp_path, X)
    lines = [
        plog(f"DevMalloc: Succ, size={size}, type=2, moduleId=45, ptr={address}")
        if kind == "m"
        else plog(f"DevFree: mem={address:#x}")
        for kind, address, size in events
    ]
    (tmp_path / "log" / "screen.log").write_text("".join(lines) + plog(FAILURE))
    (incident,) = run(tmp_path, "--reproduced", "no")["incidents"]
    assert incident["addresses"][0]["standing"] == standing
    assert ("objects" in incident["conclusion"]) == (standing != "inside")


def test_three_hashes_that_disagree(tmp_path: Path) -> None:
    """The guide's own example: log, case_name and bin_path carry three different names."""
    base = f"te_l2loss_{SOURCE_HASH}"
    write_incident(tmp_path, X)
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(
        graph_text(f"{base}_f60e652462a30de2_0")
    )
    shutil.rmtree(tmp_path / "kernel_meta")
    write_kernel(tmp_path / "kernel_meta", f"{base}_f60e652416a30de2_0")
    (incident,) = run(tmp_path)["incidents"]
    warning = next(w for w in incident["warnings"] if "disagree" in w)
    assert warning.startswith("3 kernel names disagree")
    for part in ("d5135fe39437a0d0", "f60e652462a30de2", "f60e652416a30de2"):
        assert part in warning
    case = recorded_case(Path(incident["case"]), sys.executable)["cases"][0]
    assert Path(case["bin_path"]).name == case["case_name"] + ".o"


def test_several_errors_are_several_incidents(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    second = FAILURE.replace("task_id=3", "task_id=9").replace("0_11_L2Loss", "0_11_Other")
    second = second.replace("te_l2loss", "te_other")
    with (tmp_path / "log" / "screen.log").open("a") as file:
        file.write(second + "\n")
    first, other = run(tmp_path)["incidents"]
    assert (first["node"], other["node"]) == ("L2Loss", "Other")
    assert first["case"] is not None
    assert other["case"] is None
    assert other["op_type"] is None
    assert other["inputs"] == []


def test_missing_pieces_are_named_with_their_settings(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.log").write_text(FAILURE)
    (incident,) = run(tmp_path)["incidents"]
    settings = json.dumps(incident["missing"])
    for word in (
        "DUMP_GE_GRAPH=1", "DUMP_GRAPH_LEVEL=1", "ASCEND_GLOBAL_LOG_LEVEL=1", "op_debug_level=1",
        "op_debug_level=2", "default 0", "NPURunConfig", "enable_exception_dump", "parameter_map",
        "torch_npu", "not verified on hardware",
    ):  # fmt: skip
        assert word in settings
    assert incident["op_type"] is None
    assert incident["case"] is None
    assert incident["node"] == "L2Loss"
    assert "too little is known" in incident["conclusion"]


def test_a_dynamic_shape_explains_a_missing_dump(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    shutil.rmtree(tmp_path / "dump")
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(graph_text(dynamic=True))
    (incident,) = run(tmp_path)["incidents"]
    (missing,) = [m for m in incident["missing"] if m["what"] == "dump"]
    assert "dynamic shape" in missing["why"]
    assert incident["inputs"][0]["shape"] == [-1, 62]
    assert any("fill in -1" in warning for warning in incident["warnings"])


def test_a_dynamic_shape_is_taken_from_the_dump(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(graph_text(dynamic=True))
    (incident,) = run(tmp_path)["incidents"]
    assert incident["inputs"][0]["shape"] == [62, 62]


def test_an_untyped_dump_takes_its_types_from_the_graph(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    (tmp_path / "dump" / DUMP_NAME).unlink()
    write_dump(
        tmp_path / "dump" / "exception_info.5.3.20211201033720123",
        inputs=[Tensor(X.tobytes(), dtype=0)],
        outputs=[Tensor(np.full(1, np.sum(X.astype(float) ** 2) / 2, np.float32), dtype=0)],
    )
    (incident,) = run(tmp_path)["incidents"]
    assert incident["values"][0]["shape"] == [62, 62]
    assert incident["reference"]["agrees"]


def test_a_dump_that_lists_all_arguments_as_inputs(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    loss = np.full((), np.sum(X.astype(float) ** 2) / 2, np.float32)
    write_dump(
        tmp_path / "dump" / DUMP_NAME,
        inputs=[
            Tensor(X, input_type=2),
            Tensor(loss, input_type=3),
            Tensor(bytes(64), dtype=0, input_type=7),
        ],
    )
    (incident,) = run(tmp_path)["incidents"]
    assert [value["name"] for value in incident["values"]] == ["input.0", "output.0"]
    assert incident["reference"]["agrees"]


def test_a_missing_clean_is_said(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    path = tmp_path / "kernel_meta" / f"{KERNEL}.json"
    info = json.loads(path.read_text())
    info["parameters"] = [None, {"dtype": "float32", "init_value": 0}]
    path.write_text(json.dumps(info))
    (incident,) = run(tmp_path)["incidents"]
    assert any("must be zeroed" in warning for warning in incident["warnings"])
    with (tmp_path / "log" / "screen.log").open("a") as file:
        file.write("launched AtomicLaunchKernelWithFlag_L2Loss, ok\n")
    (incident,) = run(tmp_path)["incidents"]
    assert incident["warnings"] == []


def test_blocked_formats_are_put_in_order_for_the_reference(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    text = graph_text(op_type="Square").replace(
        'shape { dim: 62 dim: 62 }\n      layout: "ND"',
        'shape { dim: 4 dim: 4 dim: 16 dim: 16 }\n      layout: "FRACTAL_NZ"',
    )
    text = text.replace("shape {\n      }", "shape { dim: 62 dim: 62 }")
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(text)
    full = np.zeros((64, 64), np.float32)
    full[:62, :62] = X
    blocked = full.reshape(4, 16, 4, 16).transpose(2, 0, 1, 3).copy()
    write_dump(
        tmp_path / "dump" / DUMP_NAME,
        inputs=[Tensor(blocked, fmt=29, original=(62, 62))],
        outputs=[Tensor(X**2)],
    )
    (incident,) = run(tmp_path)["incidents"]
    assert incident["inputs"][0]["format"] == "FRACTAL_NZ"
    assert incident["reference"]["agrees"], incident["reference"]


def test_an_output_that_is_wrong(tmp_path: Path) -> None:
    (incident,) = run(write_incident(tmp_path, X, output=1.0))["incidents"]
    assert incident["reference"]["agrees"] is False
    assert "is off by" in incident["reference"]["text"]


def test_sources_that_contradict_each_other(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    write_dump(tmp_path / "dump" / DUMP_NAME, inputs=[Tensor(X[:, :31].copy())])
    (incident,) = run(tmp_path)["incidents"]
    text = " ".join(incident["warnings"])
    assert "[62, 62] by the graph, [62, 31] by the dump" in text
    assert "the dump has 0 outputs" not in text


def test_the_line_when_an_object_dump_is_there(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    debug_files(tmp_path / "kernel_meta")
    core = (
        "The error from device(0), serial number is 1, there is an aicore error, core id is 0, "
        "error code = 0x800000, dump info: pc start: 0x1000124080060000, current: 0x124080060504, "
        "vec error info: 0, mte error info: 0, ifu error info: 0, para base: 0x1240"
    )
    (tmp_path / "log" / "screen.log").write_text(plog(core) + plog(FAILURE))
    (incident,) = run(tmp_path, "--reproduced", "yes")["incidents"]
    assert incident["pc"]["cce_line"] == 135
    assert (incident["pc"]["python_file"], incident["pc"]["python_line"]) == ("impl/l2.py", 77)
    assert "CCE line 135, impl/l2.py:77" in incident["conclusion"]


def test_no_error_in_the_log_is_exit_0(tmp_path: Path, capsys) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.log").write_text("all is well\n")
    assert run(tmp_path, status=0)["incidents"] == []
    assert "no AI Core error in 1 files, 1 lines" in capsys.readouterr().out


def test_wrong_usage_is_exit_2(tmp_path: Path) -> None:
    words = ["ascend", "incident", "--log", str(tmp_path / "absent"), "-o", str(tmp_path / "o")]
    assert main(words) == 2
    with pytest.raises(SystemExit) as caught:
        main(["ascend", "incident"])
    assert caught.value.code == 2


def test_damaged_pieces_are_warnings_not_the_end(tmp_path: Path) -> None:
    write_incident(tmp_path, X)
    (tmp_path / "dump" / DUMP_NAME).write_bytes(b"\xff" * 40)
    (tmp_path / "graph" / "ge_proto_00000012_Build.txt").write_text("graph { op {")
    (tmp_path / "kernel_meta" / f"{KERNEL}.json").write_text("[]")
    (incident,) = run(tmp_path)["incidents"]
    text = " ".join(incident["warnings"])
    assert "dump not read" in text
    assert "graph not read" in text
    assert "is no kernel json" in text
    assert incident["op_type"] == "L2Loss"


def test_hostile_names_write_nothing_outside(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_incident(folder, X)
    evil = "../../../../../../tmp/evil"
    (folder / "log" / "screen.log").write_text(
        FAILURE.replace(f"{KERNEL}__kernel0", f"{evil}__kernel0")
    )
    text = graph_text(evil, op_type='x\\", __import__(\\"os\\").system(\\"true\\"), \\"')
    (folder / "graph" / "ge_proto_00000011_Build.txt").write_text(
        text.replace('key: "T"', 'key: "T\\nimport os; os.abort()"')
    )
    shutil.rmtree(folder / "kernel_meta")
    before = set(tmp_path.rglob("*"))
    (incident,) = run(folder)["incidents"]
    made = set(tmp_path.rglob("*")) - before
    assert all(folder / "out" in (p, *p.parents) for p in made)
    tree = ast.parse((Path(incident["case"]) / "main.py").read_text(), feature_version=(3, 7))
    calls = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and hasattr(n.func, "id")]
    assert "__import__" not in calls
    assert not any(isinstance(n, ast.Attribute) and n.attr == "abort" for n in ast.walk(tree))


@pytest.mark.slow
def test_damage_anywhere_ends_in_a_report_or_a_clear_error(tmp_path: Path) -> None:
    """Bytes changed, doubled and cut in every piece: never an exception of Python's own."""
    from tensorprobe.ascend.incident import CrashEvidence, investigate
    from tensorprobe.ascend.incident_report import incidents_json, render
    from tensorprobe.ascend.opcase import write_case
    from tensorprobe.errors import TensorprobeError

    rng = np.random.default_rng(1)
    write_incident(tmp_path, X)
    debug_files(tmp_path / "kernel_meta")
    core = (
        "The error from device(0), serial number is 1, there is an aicore error, core id is 0, "
        "error code = 0x800000, dump info: pc start: 0x1000124080060000, current: 0x124080060504, "
        "vec error info: 0x5, mte error info: 0x7, ifu error info: 0x9, para base: 0x1240"
    )
    details = [
        "node_name:L2Loss, node_type:L2Loss, stream_id:5, task_id:3",
        "input:0;shape:[62,62];format:ND;dtype:DT_FLOAT;addr:0x124080044000",
        "output:0;shape:[];format:ND;dtype:DT_FLOAT;addr:0x124080054000",
        "block_dim:32", "tiling_key:0", "tiling_data:0x04 0x00",
        "args before execute: 1, 2, 3", "args(0 to 2) after execute:0x1, 0x5",
    ]  # fmt: skip
    log = plog(f"DevMalloc: Succ, size=512, ptr={0x124080044000}") + plog(core) + plog(FAILURE)
    log += "".join(plog(f"[AIC_INFO] {text}") for text in details)
    (tmp_path / "log" / "screen.log").write_text(log)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    whole = {path: path.read_bytes() for path in files}
    evidence = CrashEvidence(
        (tmp_path / "log",),
        (tmp_path / "graph",),
        (tmp_path / "kernel_meta",),
        (tmp_path / "dump",),
    )
    for _ in range(400):
        for path, data in whole.items():
            raw = bytearray(data)
            head = min(len(raw), 600)
            for _ in range(int(rng.integers(0, 4))):
                at = int(rng.integers(0, head))
                kind = rng.integers(0, 4)
                if kind == 0:
                    raw[at] = int(rng.integers(0, 256))
                elif kind == 1:
                    del raw[at : at + int(rng.integers(1, 40))]
                elif kind == 2:
                    raw[at:at] = raw[at : at + int(rng.integers(1, 40))]
                else:
                    raw[at : at + 1] = str(2 ** int(rng.integers(0, 80))).encode()
                head = min(len(raw), 600)
                if not head:
                    break
            path.write_bytes(bytes(raw))
        try:
            facts, incidents = investigate(evidence)
        except TensorprobeError:
            continue
        for number, incident in enumerate(incidents):
            case = incident.case()
            if case is not None:
                folder = write_case(case, tmp_path / "out" / str(number))
                ast.parse((folder / "main.py").read_text(), feature_version=(3, 7))
        cases = [None] * len(incidents)
        render(facts, incidents, cases)
        json.dumps(incidents_json(incidents, cases), allow_nan=False, default=str)


# --- the case -------------------------------------------------------------------------------

STAND_IN = """
import json, os

RECORD = {"cases": [], "runs": []}


class OpUT(object):
    def __init__(self, op_type, op_module_name=None, op_func_name=None):
        RECORD["op"] = [op_type, op_module_name, op_func_name]

    def add_direct_case(self, case):
        for param in case["params"]:
            if "value" in param:
                with open(param["value"], "rb") as file:
                    assert file.read(6) == b"\\x93NUMPY"
        case = dict(case, files=[os.path.exists(case["bin_path"]),
                                 os.path.exists(case["bin_path"].replace(".o", ".json"))])
        RECORD["cases"].append(case)

    def run(self, soc, case_name=None):
        RECORD["runs"].append(soc)
        with open(os.environ["RECORD"], "w") as file:
            json.dump(RECORD, file)
"""


def python37() -> str:
    """The guide's interpreter where there is one, else this one."""
    for name in ("python3.7", os.environ.get("PYTHON37", "")):
        path = shutil.which(name) if name else None
        if path:
            probe = subprocess.run([path, "--version"], capture_output=True, check=False)
            if probe.returncode == 0:
                return path
    return sys.executable


def recorded_case(case: Path, python: str) -> dict:
    frame = case.parent / "stand_in" / "op_test_frame" / "ut"
    frame.mkdir(parents=True, exist_ok=True)
    (frame.parent / "__init__.py").write_text("")
    (frame / "__init__.py").write_text(STAND_IN)
    record = case.parent / "record.json"
    done = subprocess.run(
        [python, "main.py"],
        cwd=case,
        env={**os.environ, "PYTHONPATH": str(case.parent / "stand_in"), "RECORD": str(record)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(record.read_text())
    content["stderr"] = done.stderr
    return content


def test_the_guides_case_runs(tmp_path: Path) -> None:
    (incident,) = run(write_incident(tmp_path, X))["incidents"]
    folder = Path(incident["case"])
    ast.parse((folder / "main.py").read_text(), feature_version=(3, 7))
    record = recorded_case(folder, python37())
    assert record["op"] == ["L2Loss", None, None]
    assert record["runs"] == ["all"]
    assert record["stderr"] == ""
    (case,) = record["cases"]
    first, second = case["params"]
    assert np.array_equal(np.load(first.pop("value")), X)
    assert first == {
        "shape": [62, 62], "dtype": "float32", "format": "ND", "ori_shape": [62, 62],
        "ori_format": "ND", "param_type": "input",
    }  # fmt: skip
    assert second == {
        "shape": [], "dtype": "float32", "format": "ND", "ori_shape": [], "ori_format": "ND",
        "param_type": "output",
    }  # fmt: skip
    assert case["case_name"] == KERNEL
    assert Path(case["bin_path"]).name == f"{KERNEL}.o"
    assert case["files"] == [True, True]
    config = json.loads((folder / "case.json").read_text())
    assert config["input_file_list"] == [f"data/{DUMP_NAME}.input.0.npy"]
    assert config["kernel_name"] == f"{KERNEL}__kernel0"


def test_opcase_alone(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    words = ["ascend", "opcase", "--graph", str(tmp_path / "graph"), "--op", "L2Loss"]
    words += ["--kernel-meta", str(tmp_path / "kernel_meta"), "--dump", str(tmp_path / "dump")]
    assert main([*words, "-o", str(tmp_path / "case"), "--soc", "Ascend910A"]) == 0
    assert "agrees with the reference" in capsys.readouterr().out
    record = recorded_case(tmp_path / "case", sys.executable)
    assert record["runs"] == ["Ascend910A"]
    write_dump(
        tmp_path / "dump" / DUMP_NAME,
        inputs=[Tensor(X)],
        outputs=[Tensor(np.full((), 7, np.float32))],
    )
    assert main([*words, "-o", str(tmp_path / "case")]) == 3
    assert "is off by" in capsys.readouterr().out


def test_an_unknown_op_still_gets_its_case(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    path = tmp_path / "graph" / "ge_proto_00000011_Build.txt"
    path.write_text(graph_text(op_type="MyFusedThing"))
    words = ["ascend", "opcase", "--graph", str(path), "--kernel", KERNEL, "--dump"]
    assert main([*words, str(tmp_path / "dump"), "-o", str(tmp_path / "case")]) == 0
    said = capsys.readouterr()
    assert "no reference exists for MyFusedThing" in said.out
    assert f"{KERNEL}.o and .json were not found" in said.err
    record = recorded_case(tmp_path / "case", sys.executable)
    assert record["op"][0] == "MyFusedThing"
    assert "missing: " in record["stderr"]


def test_the_trap_in_the_frames_replace_is_said(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "x.opp"
    write_incident(folder, X)
    (incident,) = run(folder)["incidents"]
    assert any("contains '.o'" in warning for warning in incident["warnings"])
    assert "move this folder" in recorded_case(Path(incident["case"]), sys.executable)["stderr"]


def test_types_numpy_lacks_are_passed_as_bits(tmp_path: Path) -> None:
    raw = X.astype(ml_dtypes.bfloat16)
    write_incident(tmp_path, X)
    text = graph_text().replace("DT_FLOAT", "DT_BF16")
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(text)
    out = np.asarray(np.sum(raw.astype(float) ** 2) / 2, ml_dtypes.bfloat16)
    write_dump(
        tmp_path / "dump" / DUMP_NAME,
        inputs=[Tensor(raw.tobytes(), BF16, shape=(62, 62))],
        outputs=[Tensor(out.tobytes(), BF16)],
    )
    (incident,) = run(tmp_path)["incidents"]
    assert incident["inputs"][0]["dtype"] == "bfloat16"
    assert incident["reference"]["agrees"]
    value = np.load(Path(incident["case"]) / "data" / f"{DUMP_NAME}.input.0.npy")
    assert value.dtype == np.uint16
    assert value.tobytes() == raw.tobytes()
    assert any("raw bits" in warning for warning in incident["warnings"])


# --- the real one ---------------------------------------------------------------------------


def test_the_real_gather_incident(tmp_path: Path) -> None:
    real = shared_data("incident-gatherv2")
    words = ["ascend", "incident", "--log", str(real / "log"), "--graph", str(real / "graph")]
    words += ["--kernel-meta", str(real / "kernel_meta"), "-o", str(tmp_path)]
    assert main(words) == 3
    (incident,) = json.loads((tmp_path / "incident.json").read_text())["incidents"]
    assert (incident["node"], incident["op_type"], incident["error_codes"]) == (
        "GatherV2", "GatherV2", ["0x10"]
    )  # fmt: skip
    assert (incident["device_id"], incident["stream_id"], incident["task_id"]) == (0, 2, 6)
    assert incident["kernel"].startswith("te_gatherv2_657cb48fa1743a43209d7bc779fe8c29")
    described = [(t["shape"], t["dtype"], t["format"]) for t in incident["inputs"]]
    assert described == [([64], "float32", "ND"), ([2], "int32", "ND"), ([], "int32", "ND")]
    assert [(t["shape"], t["dtype"]) for t in incident["outputs"]] == [([2], "float32")]
    assert incident["attributes"]["batch_dims"] == 0
    assert incident["attributes"]["Tparams"] == "float32"
    assert [c["standing"] for c in incident["addresses"]] == ["inside"] * 4
    (missing,) = [m for m in incident["missing"] if m["what"] == "dump"]
    assert "GatherV2.GatherV2.6.1689234160564442" in missing["why"]
    ast.parse((Path(incident["case"]) / "main.py").read_text(), feature_version=(3, 7))
