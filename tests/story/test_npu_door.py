"""What the guide of ptdbg_ascend describes, done on the simulated NPU by unedited scripts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from npu_program import BROKEN, call_of, end, on_cpu, on_npu, rows, run, start, write

import tensorprobe as tp
from tensorprobe.cli.main import main
from tensorprobe.peers.ptdbg.ptdbg_layout import spelt_name
from tensorprobe.ptdbg_ascend import compare_distributed
from tensorprobe.records import Capture

# One step of the training each. Calls are counted on, and a step has two norms and three linears.
SWITCHES = {
    "whole": {"mode": "api_stack"},
    "list": {
        "mode": "list",
        "scope": ["Functional_layer_norm_3_forward", "Functional_gelu_2_backward"],
    },
    "range": {
        "mode": "range",
        "scope": ["Functional_layer_norm_4_forward", "Functional_linear_6_forward"],
    },
    "stack": {
        "mode": "stack",
        "scope": ["Functional_layer_norm_6_forward", "Functional_linear_9_forward"],
    },
    "api_list": {"mode": "api_list", "api_list": ["relu"]},
    "unfiltered": {"filter_switch": "OFF"},
    "backward": {"dump_mode": "backward"},
}
MODES = f"""
register_hook(model, acc_cmp_dump)
for name, switch in {SWITCHES!r}.items():
    set_dump_path(f"./{{device}}/npu_dump.pkl", dump_tag=name)
    set_dump_switch("ON", **switch)
    step()
    set_dump_switch("OFF")
"""
ACL = """
begun = []
init_dump = torch_npu.npu.init_dump


def counted():
    begun.append(True)
    init_dump()


torch_npu.npu.init_dump = counted
set_dump_path("./unused.pkl")
register_hook(model, acc_cmp_dump, dump_mode="acl", dump_config="./dump.json")
set_backward_input(["npu/whole_v2.3/rank0/api_stack_npu_dump/Functional_conv2d_0_backward_input.0.npy"])
for scope in sys.argv[2:]:
    del begun[:]
    set_dump_switch("ON", mode="acl", scope=[scope], filter_switch="OFF")
    step()
    set_dump_switch("OFF")
    print(scope, "began", len(begun))
"""
FILE = re.compile(r"\d{14}/0/0/(\w+)\.\1(_\d+)?\.\d+\.0\.\d{16}")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of both devices: npu/{mode}_v2.3 and cpu/{mode}_v2.3."""
    folder = tmp_path_factory.mktemp("door")
    write(folder, "modes", MODES)
    for process in (start(folder, *on_npu("modes")), start(folder, *on_cpu("modes"))):
        done = end(process)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("loss") == len(SWITCHES)
    return folder


@pytest.fixture(scope="module")
def suspect(dumps: Path) -> str:
    """The first call that the table of the whole network calls inaccurate."""
    compare_distributed(dumps / "npu/whole_v2.3", dumps / "cpu/whole_v2.3", dumps / "output")
    table = rows(dumps / "output")
    return call_of(next(row["NPU Name"] for row in table if row["Accuracy Reached or Not"] == "No"))


def of(dumps: Path, device: str, mode: str) -> Capture:
    return tp.load(dumps / device / f"{mode}_v2.3")


def names(capture: Capture) -> list[str]:
    return [spelt_name(call) for call in capture.calls]


def tensors(capture: Capture) -> set[str]:
    """The names of gradients, without the numbers of their calls."""
    backward = [call for call in capture.calls if call.direction == "backward"]
    return {re.sub(r"\.\d+\.backward", "", t.name) for call in backward for t in call.tensors}


def test_every_mode_dumps_on_the_npu_what_it_dumps_on_the_cpu(dumps: Path) -> None:
    for mode in SWITCHES:
        npu, cpu = of(dumps, "npu", mode), of(dumps, "cpu", mode)
        assert names(npu) == names(cpu), mode
        for ours, theirs in zip(npu.calls, cpu.calls, strict=True):
            seen = [(t.name, t.dtype, t.shape) for t in ours.tensors]
            assert seen == [(t.name, t.dtype, t.shape) for t in theirs.tensors], mode
            assert ours.stack[:2] == theirs.stack[:2]  # the chip's own script calls it


def test_the_modes_choose(dumps: Path) -> None:
    found = {mode: of(dumps, "npu", mode) for mode in SWITCHES}
    assert names(found["list"]) == SWITCHES["list"]["scope"]
    block = ["Functional_layer_norm_{0}", "Functional_gelu_{0}", "Functional_linear_{1}"]
    for mode, numbers in (("range", (4, 6)), ("stack", (6, 9))):
        there = [f"{name.format(*numbers)}_forward" for name in block]
        back = [f"{name.format(*numbers)}_backward" for name in reversed(block)]
        assert names(found[mode]) == there + back
    assert all(call.stack and not call.tensors for call in found["stack"].calls)
    assert names(found["api_list"]) == ["Torch_relu_4_forward", "Torch_relu_4_backward"]
    assert {call.direction for call in found["backward"].calls} == {"backward"}
    # A gradient has the same name whatever else is dumped, and a listed backward has its stack.
    assert tensors(found["backward"]) == tensors(found["whole"])
    assert all(call.stack for call in found["list"].calls)
    kinds = {mode: {t.dtype for c in found[mode].calls for t in c.tensors} for mode in SWITCHES}
    assert "int64" not in kinds["whole"]
    assert "int64" in kinds["unfiltered"]
    assert all(call.stack for call in found["whole"].calls)


def test_the_suspect_of_the_table_is_the_broken_kernel(suspect: str) -> None:
    assert suspect == BROKEN


def test_acl_data_of_the_suspect_of_a_backward_and_of_a_nested_call(
    dumps: Path, suspect: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(dumps)
    write(dumps, "acl", ACL)
    config = {"dump_list": [], "dump_path": "./dump/output", "dump_op_switch": "on"}
    Path("dump.json").write_text(json.dumps({"dump": config}))
    scopes = [
        suspect,
        "Functional_conv2d_1_backward",
        "Functional_batch_norm_2_forward",  # which calls torch.batch_norm
        "Tensor_item_3_backward",
    ]
    done = run(dumps, *on_npu("acl"), *scopes, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set_dump_path is not used") == 1
    assert not list(dumps.rglob("unused*"))
    began = re.findall(r"(\S+) began (\d)", done.stdout)
    assert began == [(name, "0" if "item" in name else "1") for name in scopes]

    # Where the guide says, and only outputs, which is the default.
    output = Path("dump/output")
    found = [str(p.relative_to(output)) for p in output.glob("2*/**/*") if p.is_file()]
    assert found
    assert all(FILE.fullmatch(path) for path in found), found
    assert main(["ascend", "convert", "dump/output", "-o", "arrays"]) == 0
    arrays = {path.name: np.load(path) for path in Path("arrays").rglob("*.npy")}
    assert not any(".input." in name for name in arrays)

    # The kernel of the suspect gave what the dump of the network has, and not what the CPU gave.
    (norm,) = (array for name, array in arrays.items() if re.match(r"LayerNorm\..*\.0\.npy", name))
    npu, cpu = (
        np.load(dumps / device / f"whole_v2.3/rank0/api_stack_npu_dump/{suspect}_output.npy")
        for device in ("npu", "cpu")
    )
    np.testing.assert_allclose(norm, npu, rtol=1e-4, atol=1e-6)
    assert np.abs(norm - cpu).max() > 0.1

    # Backward ran with the file: the gradient of a bias is the sum of what came in.
    (back,) = Path("npu").rglob("whole_v2.3/**/Functional_conv2d_0_backward_input.0.npy")
    bias = np.load(back).astype(np.float64).sum((0, 2, 3))
    sums = [array for array in arrays.values() if array.shape == bias.shape]
    assert any(np.allclose(array, bias, atol=1e-6) for array in sums)

    # What has no tensor to derive gets the guide's warning, and a command that works.
    assert "is not of tensor type and cannot be automatically derived" in done.stderr
    command = re.search(r"tensorprobe (repro .* -o \S+)", done.stderr)
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    assert "wrote repro_Tensor_item_3_forward" in capsys.readouterr().out
