"""What msprobe 26.2.0 gets wrong, item by item, as tests that it is right here.

The numbers are those of the list of its faults, parts A1 to A3. What is about recording as such is
in tests/test_peer_failures.py, for the recorder behind this door.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msprobe_making import leaf, write_dump
from torch import nn

import tensorprobe as tp
from recorded import run_script
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.msprobe.pytorch import PrecisionDebugger, compare

PROC = f"proc{os.getpid()}"
X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def one_debugger_a_test() -> Iterator[None]:
    yield
    PrecisionDebugger.close()


def dump(folder: Path, program: Callable[[], Any], **options: Any) -> Path:
    """What `program()` leaves behind in the step folder of a dump."""
    config = {"dump_path": str(folder), "level": "L1", "task": "statistics", **options}
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.json")
    path.write_text(json.dumps(config))
    debugger = PrecisionDebugger(path)
    debugger.start()
    program()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    return folder / "step0" / PROC


def records(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "dump.json").read_text())["data"]


def table(actual: Path, expected: Path, out: Path, **more: Any) -> list[dict[str, str]]:
    compare({"npu_path": str(actual), "bench_path": str(expected)}, out, **more)
    (file,) = out.glob("*compare_result_*.csv")
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def linear(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: F.relu(F.linear(X, weight)).sum()


WEIGHT = torch.linspace(0.5, 2, 12).reshape(3, 4)


# A1: wrong answers without any warning


def test_a1_1_a_weight_off_by_one_percent_does_not_pass(tmp_path: Path) -> None:
    a = dump(tmp_path / "a", linear(WEIGHT * 1.01), task="tensor")
    b = dump(tmp_path / "b", linear(WEIGHT), task="tensor")
    rows = {row["NPU Name"]: row for row in table(a, b, tmp_path / "out")}
    weight = rows["Functional.linear.0.forward.input.1"]
    assert weight["One Thousandth Err Ratio"] == "0.0"
    assert weight["Result"] in ("error", "warning")
    assert rows["Functional.linear.0.forward.output.0"]["Result"] in ("error", "warning")
    assert rows["Functional.linear.0.forward.input.0"]["Result"] == "pass"
    verdict = tp.compare(a, b).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].name == "Functional.linear.0.forward"


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_a1_2_saved_values_that_differ_do_not_pass(tmp_path: Path, task: str) -> None:
    sides = []
    for name, value in (("a", torch.randn(5)), ("b", torch.randn(5))):
        debugger = PrecisionDebugger(dump_path=tmp_path / name, level="debug", task=task)
        debugger.save(value, "h")
        debugger.step()
        PrecisionDebugger.close()
        sides.append(tmp_path / name)
    (row,) = table(*sides, tmp_path / "out")
    assert row["Result"] in ("error", "warning")
    assert [p.name[:21] for p in (tmp_path / "out").iterdir()] == ["debug_compare_result_"]


def test_a1_3_what_one_side_alone_has_is_in_the_table_and_no_pass(tmp_path: Path) -> None:
    a = dump(tmp_path / "a", lambda: (torch.relu(X), torch.exp(X), torch.tanh(X)))
    b = dump(tmp_path / "b", lambda: (torch.relu(X), torch.sin(X), torch.tanh(X)))
    rows = table(a, b, tmp_path / "out")
    alone = {(row["NPU Name"], row["Bench Name"]): row for row in rows if "N/A" in row.values()}
    ours = alone["Torch.exp.0.forward.output.0", "N/A"]
    theirs = alone["N/A", "Torch.sin.0.forward.output.0"]
    assert (ours["Result"], theirs["Result"]) == ("warning", "warning")
    assert json.loads(ours["Err_message"]) == ["warning: no bench data matched."]


def test_a_gradient_that_never_came_is_in_the_table(tmp_path: Path) -> None:
    """msprobe writes null for it; its own table says pass."""
    x, y = leaf(torch.ones(2)), leaf(torch.full((2,), 3.0))
    forward = {"input_args": [x], "input_kwargs": {}, "output": [x], "parameters": {"weight": x}}
    name = "Module.fc.Linear"
    for side, grads, outputs in (("a", [None], [x, None]), ("b", [y], [None, x])):
        write_dump(
            tmp_path / side,
            {
                f"{name}.forward.0": forward,
                f"{name}.backward.0": {"input": [x], "output": outputs},
                f"{name}.parameters_grad": {"weight": grads},
            },
            level="L0",
        )
    for actual, expected, wanted in (
        ("a", "b", {("N/A", "parameters_grad.weight"): "error"}),
        ("b", "a", {("parameters_grad.weight", "N/A"): "error"}),
    ):
        rows = table(tmp_path / actual, tmp_path / expected, tmp_path / f"out_{actual}")
        found = {
            (row["NPU Name"].removeprefix(f"{name}."), row["Bench Name"].removeprefix(f"{name}.")):
            row["Result"]
            for row in rows
        }  # fmt: skip
        places = ("0", "1") if actual == "a" else ("1", "0")
        assert found == {
            ("forward.0.input.0", "forward.0.input.0"): "pass",
            ("forward.0.parameters.weight", "forward.0.parameters.weight"): "pass",
            ("forward.0.output.0", "forward.0.output.0"): "pass",
            ("backward.0.input.0", "backward.0.input.0"): "pass",
            (f"backward.0.output.{places[0]}", "N/A"): "warning",
            ("N/A", f"backward.0.output.{places[1]}"): "warning",
            **wanted,
        }
    rows = table(tmp_path / "a", tmp_path / "a", tmp_path / "out_same")
    null = next(row for row in rows if row["NPU Name"] == f"{name}.backward.0.output.1")
    assert (null["NPU Name"], null["NPU max"], null["Bench max"], null["Result"]) == (
        null["Bench Name"], "None", "None", "pass",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["statistics", "md5"])
def test_a1_4_calls_are_aligned_whatever_their_numbers(tmp_path: Path, mode: str) -> None:
    section = {"summary_mode": mode}
    a = dump(
        tmp_path / "a", lambda: (torch.relu(X), torch.relu(X * 2), torch.exp(X)), statistics=section
    )
    b = dump(tmp_path / "b", lambda: (torch.relu(X * 2), torch.exp(X)), statistics=section)
    for fuzzy in (False, True):
        rows = table(a, b, tmp_path / f"out{fuzzy}", fuzzy_match=fuzzy)
        results = {row["NPU Name"]: (row["Bench Name"], row["Result"]) for row in rows}
        twin = ("Torch.relu.0.forward.output.0", "pass")
        assert results["Torch.relu.1.forward.output.0"] == twin
        assert results["Torch.relu.0.forward.output.0"] == ("N/A", "warning")
        assert results["Torch.exp.0.forward.output.0"][1] == "pass"


def test_a1_5_backward_pairs_with_the_same_op_as_forward(tmp_path: Path) -> None:
    def program(extra: bool) -> None:
        x = X.clone().requires_grad_()
        y = x + 1
        if extra:
            y = y.tanh() + 3
        (y.exp() + 2).sum().backward()

    a = dump(tmp_path / "a", lambda: program(True))
    b = dump(tmp_path / "b", lambda: program(False))
    rows = table(a, b, tmp_path / "out")
    forward, backward = (
        {
            row["NPU Name"].split(direction)[0]: row["Bench Name"].split(direction)[0]
            for row in rows
            if direction in row["NPU Name"]
        }
        for direction in (".forward.", ".backward.")
    )
    assert backward
    for name, bench in backward.items():
        assert forward[name] == bench


def test_a1_6_checksums_are_of_the_values_at_the_call(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.zeros(1 << 16)
        for _ in range(20):
            x.add_(1)

    section = {"summary_mode": "md5"}
    first, again = (
        records(dump(tmp_path / name, program, statistics=section)) for name in ("a", "b")
    )
    assert first == again
    for i in range(20):
        record = first[f"Tensor.add_.{i}.forward"]
        assert record["input_args"][0]["md5"] != record["output"][0]["md5"]
        if i:
            before = first[f"Tensor.add_.{i - 1}.forward"]
            assert record["input_args"][0]["md5"] == before["output"][0]["md5"]


def test_a1_7_xor_keeps_a_checksum_that_sees_two_values_swapped(tmp_path: Path) -> None:
    sums = []
    for name, values in (("a", [1.0, 2.0]), ("b", [2.0, 1.0])):
        x = torch.tensor(values)
        folder = dump(
            tmp_path / name, lambda x=x: torch.relu(x), statistics={"summary_mode": "xor"}
        )
        sums.append(records(folder)["Torch.relu.0.forward"]["output"][0]["md5"])
    assert sums[0] != sums[1]


def test_a1_8_precision_high_has_mean_and_norm(tmp_path: Path) -> None:
    data = records(dump(tmp_path / "a", lambda: torch.relu(X), precision="high"))
    out = data["Torch.relu.0.forward"]["output"][0]
    assert out["Mean"] == pytest.approx(X.relu().double().mean().item())
    assert out["Norm"] == pytest.approx(X.relu().double().norm().item())


def test_a1_9_statistics_are_of_high_precision(tmp_path: Path) -> None:
    halves = torch.full((100_000,), 300.0, dtype=torch.float16)
    data = records(dump(tmp_path / "a", lambda: (halves.clone(), halves.bfloat16())))
    for name in ("Tensor.clone.0.forward", "Tensor.bfloat16.0.forward"):
        norm = data[name]["output"][0]["Norm"]
        assert norm == pytest.approx(94868.3, rel=1e-6)


@pytest.mark.parametrize("level", ["ALL", "FOCUS", "CORE", None])
def test_a1_10_and_11_no_risk_level_hides_calls(tmp_path: Path, level: str | None) -> None:
    def program() -> None:
        y = F.linear(X, WEIGHT).half().to(torch.float32)
        torch.cat([y, y]).clamp(0, 1)

    options = {} if level is None else {"risk_level": level}
    assert list(records(dump(tmp_path / "a", program, **options))) == [
        "Functional.linear.0.forward",
        "Tensor.half.0.forward",
        "Tensor.to.0.forward",
        "Torch.cat.0.forward",
        "Tensor.clamp.0.forward",
    ]


def test_a1_12_backward_outputs_are_the_gradients_of_the_inputs(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    w = torch.randn(5, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)

    def program() -> None:
        F.cross_entropy(F.linear(x, w, bias).flatten(0, 1), torch.zeros(6).long()).backward()

    folder = dump(tmp_path / "a", program, task="tensor")
    files = folder / "dump_tensor_data"
    for i, tensor in enumerate((x, w, bias)):
        saved = torch.load(files / f"Functional.linear.0.backward.output.{i}.pt", weights_only=True)
        assert torch.equal(saved, tensor.grad)
    logits = tp.load(folder).call("Functional.cross_entropy.0.forward").tensor("input.0").load()
    soft = (logits.softmax(1) - F.one_hot(torch.zeros(6).long(), 5)) / 6
    found = torch.load(files / "Functional.cross_entropy.0.backward.output.0.pt", weights_only=True)
    torch.testing.assert_close(found, soft)


def test_a1_13_a_ratio_between_the_two_thresholds_does_not_pass(tmp_path: Path) -> None:
    """The text of msprobe's rule says 0.6, its code tests for 0.1."""
    worse = X.relu().clone()
    worse[0] *= 1.1  # half of the numbers
    worse[1, :2] *= 1.1

    def program(y: torch.Tensor) -> None:
        out = torch.relu(X)
        out.copy_(y)

    a = dump(tmp_path / "a", lambda: program(worse), task="tensor")
    b = dump(tmp_path / "b", lambda: program(X.relu()), task="tensor")
    rows = table(a, b, tmp_path / "out")
    copied = next(row for row in rows if row["NPU Name"] == "Tensor.copy_.0.forward.output.0")
    assert 0.1 < float(copied["One Thousandth Err Ratio"]) < 0.9
    assert copied["Result"] != "pass"


def test_a1_14_another_learning_rate_is_found(tmp_path: Path) -> None:
    def program(lr: float) -> None:
        w = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([w], lr)
        (w * 2).sum().backward()
        optimizer.step()

    a, b = (dump(tmp_path / n, lambda lr=lr: program(lr)) for n, lr in (("a", 0.1), ("b", 0.2)))
    verdict = tp.compare(a, b).verdict
    assert verdict.verdict == "diverged"
    assert "alpha" in verdict.culprits[0].reason
    rows = table(a, b, tmp_path / "out")
    alpha = next(row for row in rows if row["NPU Name"].endswith("input.alpha"))
    assert alpha["Result"] == "error"


@pytest.mark.slow
def test_a1_15_a_compiled_part_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    dump(tmp_path / "a", lambda: compiled(X))
    assert "torch.compile" in capsys.readouterr().err


def test_a1_16_gradients_are_bit_equal_at_every_level(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))

    plain = net()
    plain(X).square().sum().backward()
    for level in ("L0", "L1", "mix"):
        model = net()
        dump(tmp_path / level, lambda m=model: m(X).square().sum().backward(), level=level)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_a1_18_in_place_modules_have_their_backward_and_their_parents(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    folder = dump(tmp_path / "a", lambda: model(X).sum().backward(), level="mix")
    data = records(folder)
    for i, kind in enumerate(("Linear", "ReLU", "Linear")):
        assert f"Module.{i}.{kind}.backward.0" in data
    tree = json.loads((folder / "construct.json").read_text())
    assert tree["Functional.relu.0.backward"] == "Module.1.ReLU.backward.0"
    assert tree["Functional.linear.0.backward"] == "Module.0.Linear.backward.0"


# A2: crashes and dead ends


def test_a2_1_the_check_needs_no_accelerator(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a", lambda: F.linear(X, WEIGHT), task="tensor")
    checked = tp.check(folder, tmp_path / "out", device="cpu")
    assert checked.passed
    assert checked.counts["pass"] == 1


def test_a2_2_the_first_difference_is_always_named(tmp_path: Path) -> None:
    a = dump(tmp_path / "a", lambda: torch.tanh(torch.relu(X) * 1.5), task="tensor")
    b = dump(tmp_path / "b", lambda: torch.tanh(torch.relu(X) * 1.0), task="tensor")
    comparison = compare({"npu_path": a, "bench_path": b}, tmp_path / "out")
    assert comparison.verdict.culprits[0].name == "Tensor.__mul__.0.forward"


def test_a2_3_and_4_any_depth_and_a_second_run(tmp_path: Path) -> None:
    inside = dump(tmp_path / "a", lambda: torch.relu(X))
    for path in (inside, inside.parent, tmp_path / "a", inside / "dump.json"):
        out = tmp_path / f"out{len(path.parts)}{path.suffix}"
        assert len(table(path, inside, out)) == 2
    dump(tmp_path / "a", lambda: (torch.relu(X), torch.exp(X)))
    assert len(tp.load(tmp_path / "a").calls) == 2


def test_a2_6_7_and_13_tasks_that_are_none_say_what_to_do(tmp_path: Path) -> None:
    for task, text in (
        ("acc_check", "tensorprobe check DUMP --device DEVICE"),
        ("free_benchmark", "tensorprobe check DUMP"),
        ("tensors", "Did you mean 'tensor'"),
    ):
        with pytest.raises(BadUsage, match=text):
            PrecisionDebugger(dump_path=tmp_path, task=task)


def test_a2_8_any_path_will_do(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a b+c" / "données", lambda: torch.relu(X))
    assert len(tp.load(folder).calls) == 1


def test_a2_9_a_dump_without_a_tree_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump(tmp_path / "a", lambda: torch.relu(X))
    assert (folder / "construct.json").read_text() == "{}"
    assert main(["show", str(folder)]) == 0
    assert "Torch.relu.0.forward" in capsys.readouterr().out


def test_a2_14_an_exit_before_stop_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import os, torch\nfrom tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "d = PrecisionDebugger(dump_path='dump')\nd.start()\ntorch.relu(torch.ones(2))\n{}\n"
    )
    assert run_script(tmp_path, script.format("os._exit(3)")).returncode == 3
    assert [c.name for c in tp.load(tmp_path / "dump").calls][-1] == "Torch.relu.0.forward"
    assert run_script(tmp_path, script.format("raise SystemExit(4)")).returncode == 4
    assert list((tmp_path / "dump" / "step0").glob("proc*/dump.json"))


# A3: friction


def test_a3_rank_0_of_a_single_process_is_dumped(tmp_path: Path) -> None:
    assert records(dump(tmp_path / "a", lambda: torch.relu(X), rank=[0]))


def test_a3_a_rank_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path / "a", lambda: torch.relu(X), rank=[1])
    assert "rank 0 is not among ranks 1" in capsys.readouterr().err
    assert not (tmp_path / "a" / "step0").exists()


def test_a3_misplaced_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="unknown field 'summary_mode'"):
        dump(tmp_path / "a", lambda: None, summary_mode="md5")


def test_a3_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a", lambda: torch.relu(X))
    with pytest.raises(UnreadableCapture, match="there is no such path"):
        compare({"npu_path": folder, "bench_path": tmp_path / "b"}, tmp_path / "out")
    tensors = dump(tmp_path / "c", lambda: torch.relu(X), task="tensor")
    next((tensors / "dump_tensor_data").glob("*output*")).unlink()
    rows = table(tensors, tensors, tmp_path / "out")
    assert {row["Result"] for row in rows} <= {"pass", "warning"}


def test_a3_the_log_grows_by_what_is_new(tmp_path: Path) -> None:
    """msprobe rewrites dump.json at every thousand records; here it is written when complete."""

    def program() -> None:
        for _ in range(300):
            torch.relu(X)

    folder = dump(tmp_path / "a", program)
    assert len(records(folder)) == 300
