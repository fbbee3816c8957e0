"""Calls are judged alone: healthy ones pass, broken kernels are found, crashes are survived."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from recorded import record
from tensorprobe.checking import pool
from tensorprobe.checking.plan import likeness
from tensorprobe.checking.results import CheckResults
from tensorprobe.checking.row import Row
from tensorprobe.checking.run import Checked
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage, DeviceUnusable
from tensorprobe.replay.pairing import ForwardBackward


def grad_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def network() -> None:
    """Twenty-odd kinds of calls, each in a call of its own."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 16))
    x = F.embedding(tokens, grad_tensor(50, 32))
    x = F.layer_norm(x, (32,), grad_tensor(32), grad_tensor(32))
    x = F.linear(x, grad_tensor(64, 32), grad_tensor(64))
    x = F.gelu(x)
    x = torch.tanh(x) + torch.sigmoid(x)
    x = x.view(4, 16, 8, 8).transpose(1, 2)
    x = torch.softmax(x @ x.transpose(-1, -2), -1)
    x = F.silu(x).sum(-1)
    x = torch.cat([x, x.exp()], -1)
    y = F.conv1d(grad_tensor(2, 8, 32), grad_tensor(6, 8, 3), padding=1)
    y = F.group_norm(y, 3, grad_tensor(6), grad_tensor(6))
    y = F.avg_pool1d(y, 2).cumsum(-1)
    y = F.log_softmax(y.mean(-1), -1)
    loss = F.nll_loss(y, torch.tensor([1, 2])) + x.square().mean().rsqrt()
    loss.backward()


# A device's kernels, broken ten different ways; each process that checks calls reads this.
FAULTS = """
from tensorprobe.devices import sim_npu
sim_npu.install()
sim_npu.plant("native_layer_norm", effect="scale:1.001", output=0)
sim_npu.plant("gelu", effect="low-precision")
sim_npu.plant("tanh", effect="permute")
sim_npu.plant("exp", effect="scale:1.0001")
sim_npu.plant("cumsum", effect="nan")
sim_npu.plant("mean.dim", effect="inf")
sim_npu.plant("embedding_dense_backward", effect="scale:0.99")
sim_npu.plant("convolution_backward", effect="scale:1.01", output=1)
sim_npu.plant("sigmoid_backward", effect="stale")
sim_npu.plant("native_group_norm_backward", effect="permute", output=0)
"""
BROKEN = {
    "Functional.layer_norm.0.forward": "forward",
    "Functional.gelu.0.forward": "forward",
    "Torch.tanh.0.forward": "forward",
    "Tensor.exp.0.forward": "forward",
    "Tensor.cumsum.0.forward": "forward",
    "Tensor.mean.0.forward": "forward",
    "Functional.embedding.0.forward": "backward",
    "Functional.conv1d.0.forward": "backward",
    "Torch.sigmoid.0.forward": "backward",
    "Functional.group_norm.0.forward": "backward",
}
CRASHES = """
import ctypes, time, torch
library = torch.library.Library("tensorprobe_check", "DEF")
for name, kernel in {
    "well": lambda x: x * 2,
    "segfault": lambda x: ctypes.string_at(0),
    "hang": lambda x: time.sleep(600),
    "raises": lambda x: [][0],
}.items():
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CPU")
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture") / "run"
    record(folder, network, level="L1")
    return folder


@pytest.fixture(scope="module")
def healthy(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return tp.check(capture, tmp_path_factory.mktemp("healthy"), peer_tables=True)


def verdicts(checked: Checked) -> dict[str, str]:
    return {row.name: row.verdict for row in checked.rows}


def test_a_healthy_device_passes(healthy: Checked) -> None:
    assert {row.verdict for row in healthy.rows} == {"pass"}, healthy.rows[0]
    assert healthy.passed
    row = next(row for row in healthy.rows if row.name == "Functional.linear.0.forward")
    assert (row.forward, row.backward) == ("pass", "pass")
    assert (row.device_dtype, row.reference_dtype, row.kind) == ("float32", "float64", "product")
    assert [t.name for t in row.tensors] == [
        "forward.output.0",
        "backward.output.0",
        "backward.output.1",
        "backward.output.2",
    ]


def test_ten_broken_kernels_are_found_and_nothing_else(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    checked = tp.check(capture, tmp_path / "out", device="npu", references=tmp_path / "faults.py")
    found = {row.name: row for row in checked.rows if row.verdict == "fail"}
    assert set(found) == set(BROKEN)
    assert {row.verdict for row in checked.rows} == {"pass", "fail"}
    for name, direction in BROKEN.items():
        bad = [t.name for t in found[name].tensors if not t.ok]
        assert bad[0].startswith(direction), (name, bad)
        assert found[name].repro.startswith("tensorprobe repro ")
    assert checked.rows[0].verdict == "fail"


@pytest.mark.slow
def test_rounding_as_another_chip_does_it_is_no_fault(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text(
        "from tensorprobe.devices import sim_npu\nsim_npu.install()\nsim_npu.noise(ulps=2)\n"
    )
    checked = tp.check(capture, tmp_path / "out", device="npu", references=tmp_path / "noise.py")
    assert {row.verdict for row in checked.rows} == {"pass"}, checked.rows[0]


def custom(tmp_path: Path, names: str, **options: Any) -> Checked:
    """Check calls of custom ops that crash in the process that runs them, not in this one."""
    library = torch.library.Library("tensorprobe_check", "FRAGMENT")
    for name in names.split():
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CPU")

    def program() -> None:
        for name in names.split():
            getattr(torch.ops.tensorprobe_check, name)(torch.ones(3))

    record(tmp_path / "run", program, level="L1")
    library._destroy()
    # the reference is the user's, so that only the device runs the kernel
    references = (
        CRASHES
        + "import tensorprobe as tp\n"
        + "".join(
            f"tp.reference('tensorprobe_check::{name}')(lambda x: x * 2)\n"
            for name in names.split()
        )
    )
    (tmp_path / "ops.py").write_text(references)
    return tp.check(tmp_path / "run", tmp_path / "out", references=tmp_path / "ops.py", **options)


def test_a_crash_a_hang_and_an_exception_are_marked(tmp_path: Path) -> None:
    checked = custom(tmp_path / "a", "segfault well raises", only=["Ops.*"])
    rows = {row.name.split(".")[2]: row for row in checked.rows}
    assert rows["well"].verdict == "pass"
    assert rows["segfault"].verdict == "crashed"
    assert rows["segfault"].reason == "the process died of SIGSEGV"
    assert rows["raises"].reason == "raised IndexError: list index out of range"
    assert checked.counts["crashed"] == 2
    assert not checked.passed
    hung = custom(tmp_path / "b", "hang", timeout=0.5, only=["Ops.*"])
    assert [(row.verdict, row.reason) for row in hung.rows] == [("crashed", "no answer in 0.5 s")]


def test_whoever_takes_the_rows_may_take_his_time(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered meanwhile was answered in time."""
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=0.0)
    monkeypatch.setattr(pool, "time", clock)

    def pause(done: int, total: int, row: Row) -> None:
        clock.now_s += 1000

    checked = tp.check(capture, tmp_path / "out", only=["gelu", "tanh"], progress=pause)
    assert [row.verdict for row in checked.rows] == ["pass"] * len(checked.rows)
    assert len(checked.rows) == 2


def test_what_is_done_is_kept(capture: Path, healthy: Checked, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    lines = (healthy.folder / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:20])  # killed in a write
    done: list[str] = []
    checked = tp.check(capture, out, progress=lambda n, total, row: done.append(row.name))
    assert len(done) == 3
    assert verdicts(checked) == verdicts(healthy)
    with pytest.raises(BadUsage, match=r"holds another check \(device differ\)"):
        CheckResults(out, {**json.loads(lines[0]), "device": "npu"})


@pytest.mark.slow
def test_alike_calls_are_checked_once(tmp_path: Path) -> None:
    def program() -> None:
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        for _ in range(3):
            torch.mm(x, y)
        torch.mm(x[:2], y)

    record(tmp_path / "run", program, level="L1")
    once = tp.check(tmp_path / "run", tmp_path / "once", only=["mm"])
    alike = {row.name: row.alike for row in once.rows}
    assert alike == {"Torch.mm.0.forward": 2, "Torch.mm.3.forward": 0}
    assert once.counts["calls"] == 4
    every = tp.check(tmp_path / "run", tmp_path / "every", only=["mm"], skip=["*.3.*"], every=True)
    assert len(every.rows) == 3


@pytest.mark.slow
def test_dropout_is_judged_by_its_share(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        F.dropout(grad_tensor(64, 64), 0.3).sum().backward()

    record(tmp_path / "run", program, level="L1")
    good = tp.check(tmp_path / "run", tmp_path / "good", only=["dropout"])
    assert verdicts(good) == {"Functional.dropout.0.forward": "pass"}
    (tmp_path / "faults.py").write_text(
        "from tensorprobe.devices import sim_npu\n"
        "sim_npu.install()\n"
        "sim_npu.plant('native_dropout', effect=lambda t: t * (t > 0))\n"
    )
    bad = tp.check(
        tmp_path / "run", tmp_path / "bad", device="npu", references=tmp_path / "faults.py",
        only=["dropout"],
    )  # fmt: skip
    assert bad.rows[0].verdict == "fail"
    assert "elements are zero, p is 30.000%" in bad.rows[0].reason


@pytest.mark.slow
def test_a_benchmark_device_excuses_what_it_does_too(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(
        "from tensorprobe.devices import sim_npu\n"
        "sim_npu.install()\n"
        "sim_npu.plant('gelu', effect='scale:1.0001')\n"
    )
    options: dict[str, Any] = {
        "device": "npu", "references": tmp_path / "faults.py", "only": ["gelu"],
    }  # fmt: skip
    alone = tp.check(capture, tmp_path / "alone", **options)
    assert alone.rows[0].verdict == "fail"
    excused = tp.check(capture, tmp_path / "both", against=tmp_path / "alone", **options)
    assert excused.rows[0].verdict == "pass"
    assert "the benchmark device has" in excused.rows[0].reason
    against_cpu = tp.check(capture, tmp_path / "cpu", against=capture, **options)
    assert against_cpu.rows[0].verdict == "fail"
    assert against_cpu.rows[0].tensors[0].benchmark_error is not None


def test_from_statistics_inputs_are_generated(tmp_path: Path) -> None:
    record(tmp_path / "run", network, level="L1", keep="stats")
    checked = tp.check(tmp_path / "run", tmp_path / "out", only=["linear", "gelu", "softmax"])
    assert {row.verdict for row in checked.rows} == {"pass"}
    assert all(row.generated for row in checked.rows)


@pytest.mark.slow
def test_a_capture_of_structure_alone_is_skipped_with_the_reason(tmp_path: Path) -> None:
    record(tmp_path / "run", network, level="L1", keep="structure")
    checked = tp.check(tmp_path / "run", tmp_path / "out", only=["gelu"])
    assert checked.rows[0].verdict == "skipped"
    assert "keep='stats' or 'tensors'" in checked.rows[0].reason
    assert not checked.passed


def test_a_check_that_skips_all_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", lambda: torch.ones(2).sum().item(), level="L1", keep="tensors")
    command = ["check", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--only", "item"]
    assert main(command) == 1
    assert "nothing was checked, every call was skipped" in capsys.readouterr().err


def test_a_device_that_is_not_there(capture: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceUnusable, match="device 'cuda' is not usable here"):
        tp.check(capture, tmp_path / "out", device="cuda")


def test_check_json_is_as_promised(healthy: Checked) -> None:
    report = json.loads((healthy.folder / "check.json").read_text())
    assert report["format"] == 1
    assert report["counts"]["pass"] == len(report["calls"])
    assert {"name", "op", "verdict", "reason"} <= report["calls"][0].keys()


def test_the_command_line(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faults.py").write_text(
        "from tensorprobe.devices import sim_npu\n"
        "sim_npu.install()\n"
        "sim_npu.plant('gelu', effect='nan')\n"
    )
    out = str(tmp_path / "out")
    status = main(
        ["check", str(capture), "--device", "npu", "-o", out, "--only", "gelu", "--only", "tanh",
         "--references", str(tmp_path / "faults.py")]
    )  # fmt: skip
    assert status == 3
    assert capsys.readouterr().out == (
        "fail     Functional.gelu.0.forward (general, float32 on npu against float64)\n"
        "         forward.output.0: 1 elements are NaN or infinite on one side only; first at "
        "[2, 0, 0]: nan, expected -0\n"
        f"         tensorprobe repro {capture} Functional.gelu.0.forward -o "
        "repro/Functional.gelu.0.forward\n"
        f"2 calls, 2 different: 1 pass, 1 fail, 0 crashed, 0 skipped; {out}/check.json\n"
    )
    assert main(["check", str(capture), "-o", out, "--only", "nothing"]) == 2
    assert main(["check", str(capture), "-o", out, "--jobs", "0"]) == 2


class Sick(TorchDispatchMode):
    """A device whose tanh, and the gradient of whose sigmoid, is 1 % off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wrong = func.__name__ in ("tanh.default", "sigmoid_backward.default")
        return result * 1.01 if wrong else result


def test_a_wrong_recording_is_told_though_this_device_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capture of a sick device, checked on a healthy one."""
    with Sick():
        capture = record(tmp_path / "run", network)
    words = ["check", str(capture.path), "-o", str(tmp_path / "out")]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "out" / "check.json").read_text())
    wrong = {row["name"]: row for row in report["calls"] if row["recorded"]}
    assert {name: row["recorded"].partition(":")[0] for name, row in wrong.items()} == {
        "Torch.tanh.0.forward": "forward.output.0",
        "Torch.sigmoid.0.forward": "backward.output.0",
    }
    assert {row["verdict"] for row in wrong.values()} == {"pass"}
    told = [line for line in printed if line.startswith("recorded ")]
    assert len(told) == 2
    assert all("passes here, but what was recorded is wrong" in line for line in told)
    for row in wrong.values():
        assert f"         {row['recorded']}" in printed
        assert f"         {row['repro']}" in printed
    assert "(2 of them recorded wrong)" in printed[-1]
    assert main(words) == 0  # taken up again: the rows on disk still say it
    assert "(2 of them recorded wrong)" in capsys.readouterr().out


def test_a_healthy_recording_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = record(tmp_path / "run", network)
    assert main(["check", str(capture.path), "--all", "-o", str(tmp_path / "out")]) == 0
    assert "recorded" not in capsys.readouterr().out


def test_modules_made_of_modules_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)))
    capture = record(tmp_path / "run", lambda: model(torch.ones(2, 4)))
    assert main(["check", str(capture.path), "--all", "-o", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "made of other modules" in line] == [
        "skipped  Module.0.Sequential.forward.0 and 3 more: is made of other modules, whose calls "
        "are checked"
    ]


def test_modules_with_other_attributes_are_not_alike(tmp_path: Path) -> None:
    """The first would stand for a second that computes something else."""
    capture = record(tmp_path / "run", lambda: torch.nn.ReLU()(torch.ones(3)), level="L0")
    (call,) = [each for each in capture.calls if each.name.startswith("Module.")]
    one, same, other = (
        msgspec.structs.replace(call, notes=(f"made with mylib.Norm({{'eps': {eps}}}, {{}}, [])",))
        for eps in (1e-5, 1e-5, 1e5)
    )
    assert likeness(ForwardBackward(one, None)) == likeness(ForwardBackward(same, None))
    assert likeness(ForwardBackward(one, None)) != likeness(ForwardBackward(other, None))
