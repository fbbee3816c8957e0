"""Wrong answers of the original, each of which must not exist here."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dumping import call_names, dump, lines, names, net, session, train
from test_ptdbg_compare import advice, broken, dumped, given, rows_of

from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump, compare


def accuracy(rows: list[dict[str, str]]) -> dict[str, str]:
    return {row["NPU Name"]: row["Accuracy Reached or Not"] for row in rows}


# Recording


def test_the_tool_does_not_record_itself(tmp_path: Path) -> None:
    """4.0: four of five lines were its own calls of detach."""
    x = torch.ones(3, requires_grad=True)
    folder = dump(tmp_path / "a.pkl", lambda: (x * 2).relu().sum().backward(), mode="api_stack")
    assert call_names(folder / "api_stack_a.pkl") == [
        f"Tensor_{api}_0_{way}"
        for way in ("forward", "backward")
        for api in (("__mul__", "relu", "sum") if way == "forward" else ("sum", "relu", "__mul__"))
    ]


def test_an_exception_that_is_caught_does_not_end_the_dump(tmp_path: Path) -> None:
    def program() -> None:
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(2).abs()

    folder = dump(tmp_path / "a.pkl", program)
    assert "Tensor_abs_0_forward" in call_names(folder / "a.pkl")


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(2, dtype=torch.bfloat16).abs(),
        lambda: torch.ones(2, dtype=torch.complex64).abs(),
        lambda: torch.ones(2)[torch.tensor(1)],
        lambda: torch.ones(2, 0).abs(),
        lambda: torch.ones(2)[None, ..., :1],
    ],
    ids=["bf16", "complex", "0-d index", "empty", "slices"],
)
def test_no_call_of_the_program_fails_by_the_dump(program: Any, tmp_path: Path) -> None:
    expected = program()
    results = []
    folder = dump(tmp_path / "a.pkl", lambda: results.append(program()), filter_switch="OFF")
    assert torch.equal(results[0], expected)
    assert any("abs" in n or "getitem" in n for n in call_names(folder / "a.pkl"))


def test_backward_of_every_thread_is_dumped(tmp_path: Path) -> None:
    """2.3 and 4.0 kept the first thread that ran backward, and dropped the others."""

    def program() -> None:
        losses = [(torch.ones(3, requires_grad=True) * i).sum() for i in range(3)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

    found = call_names(dump(tmp_path / "a.pkl", program) / "a.pkl")
    assert {f"Tensor___mul___{i}_backward" for i in range(3)} <= set(found)


def test_importing_and_hooking_change_nothing_in_the_program(tmp_path: Path) -> None:
    code = """
import random, torch, torch.nn.functional as F, numpy as np
torch.use_deterministic_algorithms(True)
torch.manual_seed(5); random.seed(5); np.random.seed(5)
expected = torch.rand(1), random.random(), np.random.rand()
script, relu, dropout, item = torch.jit.script, torch.relu, F.dropout, torch.Tensor.__getitem__
torch.manual_seed(5); random.seed(5); np.random.seed(5)
from tensorprobe.ptdbg_ascend import *
register_hook(None, acc_cmp_dump)
assert (torch.rand(1), random.random(), np.random.rand()) == expected
assert torch.are_deterministic_algorithms_enabled()
set_dump_path("d.pkl"); set_dump_switch("ON")
assert (script, relu, dropout, item) == (
    torch.jit.script, torch.relu, F.dropout, torch.Tensor.__getitem__)
torch.manual_seed(5)
assert (F.dropout(torch.ones(1000), 0.5) == 0).any()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_inputs_are_those_before_the_call(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a.pkl", lambda: torch.ones(2).add_(5))
    stored = np.load(folder / "a" / "Tensor_add__0_forward_input.0.npy")
    assert stored.tolist() == [1.0, 1.0]


def test_operators_leave_a_trace(tmp_path: Path) -> None:
    x = torch.full((2,), 3.0)

    folder = dump(tmp_path / "a.pkl", lambda: (1 - x, -x, x**2))
    found = " ".join(call_names(folder / "a.pkl"))
    for api in ("rsub", "neg", "pow"):
        assert api in found


def test_keyword_arguments_are_dumped(tmp_path: Path) -> None:
    def program() -> None:
        F.layer_norm(input=torch.ones(2, 3), normalized_shape=(3,), weight=torch.ones(3))

    found = names(dump(tmp_path / "a.pkl", program) / "a.pkl")
    assert sum(name.startswith("Functional_layer_norm_0_forward_input.") for name in found) == 2


def test_names_are_whole_and_not_beginnings(tmp_path: Path) -> None:
    """Their scope ..._1 takes ..._10 too, and their api_list "relu" takes leaky_relu."""

    def program() -> None:
        x = torch.ones(2)
        for _ in range(12):
            x.abs()
        F.leaky_relu(x)
        F.adaptive_avg_pool2d(torch.ones(1, 2, 4, 4), 2)
        torch.ones(2, 2).t()

    def found(**switch: Any) -> list[str]:
        folder = dump(tmp_path / str(random.random()) / "a.pkl", program, **switch)
        index = folder / "a.pkl"
        return call_names(index) if index.exists() else []

    assert found(mode="list", scope=["Tensor_abs_1"]) == ["Tensor_abs_1_forward"]
    assert found(mode="api_list", api_list=["relu"]) == []
    assert found(mode="api_list", api_list=["t"]) == ["Tensor_t_0_forward"]
    assert found(mode="api_list", api_list=["adaptive_avg_pool2d"]) == [
        "Functional_adaptive_avg_pool2d_0_forward"
    ]


def test_weight_gradients_of_three_dimensional_linears(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    x = torch.randn(2, 5, 3, requires_grad=True)
    folder = dump(tmp_path / "a.pkl", lambda: F.linear(x, weight).sum().backward())
    stored = np.load(folder / "a" / "Functional_linear_0_backward_output.1.npy")
    assert weight.grad is not None
    assert np.array_equal(stored, weight.grad.numpy())


def test_a_second_run_never_adds_to_the_first_index(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a.pkl", mode="api_stack")
    count = len(lines(folder / "api_stack_a.pkl"))
    dump(tmp_path / "a.pkl", mode="api_stack")
    assert len(lines(folder / "api_stack_a.pkl")) == count


def test_the_index_is_there_without_off(tmp_path: Path) -> None:
    """The original has the index in memory until set_dump_switch("OFF")."""
    made = PtdbgSession()
    made.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
    made.register_hook(None, acc_cmp_dump)
    made.set_dump_switch("ON")
    torch.ones(2).abs()
    made.close_at_exit()
    assert call_names(tmp_path / "ptdbg_dump_v2.3" / "rank0" / "a.pkl")


# Comparing


def test_list_and_range_dumps_are_compared(tmp_path: Path) -> None:
    """2.3 wrote an empty table for them, and praised it."""
    scope = ["Functional_linear_0_forward", "Tensor___add___0_forward"]
    for mode in ("list", "range"):
        ours = dumped(tmp_path / mode / "a", mode=mode, scope=scope)
        wrong = broken(
            ours, tmp_path / mode / "b", "Functional_linear_0_forward_output", lambda x: -x
        )
        rows = rows_of(compare(given(wrong, ours), tmp_path / mode / "out"))
        assert accuracy(rows)["Functional_linear_0_forward_output"] == "No"


def test_an_empty_comparison_is_not_praised(tmp_path: Path) -> None:
    stacks = dumped(tmp_path / "a", mode="stack")
    compare({"npu_pkl_path": stacks, "bench_pkl_path": stacks}, tmp_path / "out")
    assert "nothing was compared" in advice(tmp_path / "out")[2]


def test_a_bench_that_ends_early_hides_no_rows(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "b")
    short = tmp_path / "b" / index.name
    kept = index.read_text().splitlines(keepends=True)
    short.write_text("".join(kept[:12]))
    rows = rows_of(compare(given(index, short), tmp_path / "out"))
    assert len(rows) == len(kept)
    missing = [row for row in rows if row["Bench Name"] == "Nan"]
    assert len(missing) == len(kept) - 12
    assert {row["Err_message"] for row in missing} == {"no bench data to compare with"}
    assert {row["Accuracy Reached or Not"] for row in missing} == {"Nan"}
    assert f"{len(missing)} rows could not be compared" in advice(tmp_path / "out")[2]


def test_what_only_the_bench_has_is_a_row(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "b")
    short = tmp_path / "b" / index.name
    short.write_text(
        "".join(line for line in index.read_text().splitlines(keepends=True) if "relu" not in line)
    )
    rows = rows_of(compare(given(short, index), tmp_path / "out"))
    only = [row for row in rows if row["NPU Name"] == "Nan"]
    assert {row["Bench Name"] for row in only} == {n for n in names(index) if "relu" in n}
    assert {row["Err_message"] for row in only} == {"only the bench has it"}


def test_one_more_call_shifts_nothing(tmp_path: Path) -> None:
    plain = dumped(tmp_path / "a")
    model = net()
    with session(tmp_path / "b" / "d.pkl") as made:
        made.set_dump_switch("ON")
        torch.relu(torch.full((2,), 9.0))  # of another shape: relu_0 here is another call
        train(model)
    more = tmp_path / "b" / "ptdbg_dump_v2.3" / "rank0" / "d.pkl"
    rows = rows_of(compare(given(more, plain), tmp_path / "out"))
    relu = next(row for row in rows if row["NPU Name"] == "Torch_relu_1_forward_output")
    assert relu["Bench Name"] == "Torch_relu_0_forward_output"
    assert "No" not in accuracy(rows).values()


def test_a_wrong_loss_fails(tmp_path: Path) -> None:
    """A tensor of one element was always reached, or not judged at all."""
    index = dumped(tmp_path / "a")
    loss = "Functional_cross_entropy_0_forward_output"
    wrong = broken(index, tmp_path / "b", loss, lambda x: x * np.float32(1.5))
    found = accuracy(rows_of(compare(given(wrong, index), tmp_path / "out")))
    assert found[loss] == "No"
    near = broken(index, tmp_path / "c", loss, lambda x: x * np.float32(1.00001))
    found = accuracy(rows_of(compare(given(near, index), tmp_path / "out2")))
    assert found[loss] == "Yes"


def test_a_missing_file_is_a_row_and_never_a_wait(tmp_path: Path) -> None:
    """4.0 and 6.0 hang for ever."""
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "b")
    name = "Functional_linear_0_forward_output"
    (tmp_path / "b" / index.stem / f"{name}.npy").unlink()
    rows = rows_of(compare(given(tmp_path / "b" / index.name, index), tmp_path / "out"))
    row = next(row for row in rows if row["NPU Name"] == name)
    assert row["Accuracy Reached or Not"] == "Nan"
    assert row["Err_message"] == f"{name}.npy is missing"
    assert len(rows) == len(names(index))


def test_a_factor_that_the_rule_lets_pass_is_named_by_the_advice(tmp_path: Path) -> None:
    """The rule of the guide stays that of the guide: a tensor that is twice as large passes."""
    index = dumped(tmp_path / "a")
    name = "Functional_linear_0_forward_output"
    wrong = broken(index, tmp_path / "b", name, lambda x: x * np.float32(2))
    rows = rows_of(compare(given(wrong, index), tmp_path / "out"))
    assert "No" not in accuracy(rows).values()
    line, _, text = advice(tmp_path / "out")
    assert line == "Line: NA"
    assert "the first culprit is Functional.linear.0.forward" in text


def test_memory_that_nobody_wrote_to_is_not_judged(tmp_path: Path) -> None:
    """torch.empty and what fills it: a model that is made while the switch is on."""

    def program(value: float) -> Any:
        def run() -> None:
            torch.empty(4).fill_(value)  # so that the next one may get this memory
            x = torch.empty(4)
            x.zero_()
            x.abs()

        return run

    ours = dump(tmp_path / "x" / "a.pkl", program(5.0)) / "a.pkl"
    theirs = dump(tmp_path / "y" / "a.pkl", program(7.0)) / "a.pkl"
    for index, value in ((ours, 1.0), (theirs, 9.0)):  # or whatever was there
        for name in ("Torch_empty_1_forward_output", "Tensor_zero__0_forward_input.0"):
            np.save(index.with_suffix("") / f"{name}.npy", np.full(4, value, np.float32))
    found = accuracy(rows_of(compare(given(ours, theirs), tmp_path / "out")))
    assert found["Torch_empty_1_forward_output"] == "Nan"
    assert found["Tensor_zero__0_forward_input.0"] == "Nan"
    assert found["Tensor_zero__0_forward_output"] == "Yes"


def test_shapes_that_differ_keep_the_table(tmp_path: Path) -> None:
    """4.0 deletes the whole table."""
    index = dumped(tmp_path / "a")
    name = "Functional_linear_0_forward_output"
    wrong = broken(index, tmp_path / "b", name, lambda x: x[:1])
    rows = rows_of(compare(given(wrong, index), tmp_path / "out"))
    row = next(row for row in rows if row["NPU Name"] == name)
    assert (row["Cosine"], row["Accuracy Reached or Not"]) == ("shape unmatched", "Unmatched")
    assert len(rows) == len(names(index))


def test_nan_on_one_side_fails(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    name = "Functional_linear_0_forward_output"

    def poison(x: Any) -> Any:
        x[0, 0] = np.nan
        return x

    wrong = broken(index, tmp_path / "b", name, poison)
    row = next(
        row
        for row in rows_of(compare(given(wrong, index), tmp_path / "out"))
        if row["NPU Name"] == name
    )
    assert row["Accuracy Reached or Not"] == "No"
    assert "NaN or infinity in 1 places" in row["Err_message"]
    both = rows_of(compare(given(wrong, wrong), tmp_path / "out2"))
    assert accuracy(both)[name] == "Yes"  # the same on both sides


def test_a_side_of_zeros_fails(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    name = "Functional_linear_0_forward_output"
    wrong = broken(index, tmp_path / "b", name, np.zeros_like)
    for ours, theirs in ((wrong, index), (index, wrong)):
        rows = rows_of(compare(given(ours, theirs), tmp_path / "out"))
        row = next(row for row in rows if row["NPU Name"] == name)
        assert (row["Cosine"], row["Accuracy Reached or Not"]) == ("Nan", "No")
        assert "all zero" in row["Err_message"]


def test_dtypes_that_differ_are_said(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "b")
    other = tmp_path / "b" / index.name
    name = "Functional_linear_0_forward_output"
    file = tmp_path / "b" / index.stem / f"{name}.npy"
    np.save(file, np.load(file).astype(np.float16))
    text = other.read_text().splitlines()
    other.write_text(
        "".join(
            (json.dumps([*json.loads(t)[:3], "torch.float16", *json.loads(t)[4:]])
             if json.loads(t)[0] == name else t) + "\n"
            for t in text
        )
    )  # fmt: skip
    rows = rows_of(compare(given(other, index), tmp_path / "out"))
    row = next(row for row in rows if row["NPU Name"] == name)
    assert row["Err_message"] == "dtypes differ: float16 and float32"
    dtypes = row["NPU Tensor Dtype"], row["Bench Tensor Dtype"]
    assert dtypes == ("torch.float16", "torch.float32")


def test_other_numbers_among_the_arguments_fail(tmp_path: Path) -> None:
    """A different eps is an answer; they call every number equal."""

    def program(eps: float) -> Any:
        return lambda: F.layer_norm(torch.arange(6.0).reshape(2, 3), (3,), None, None, eps)

    def index(name: str, eps: float) -> Path:
        return dump(tmp_path / name / "a.pkl", program(eps), filter_switch="OFF") / "a.pkl"

    rows = rows_of(compare(given(index("x", 1e-5), index("y", 1e-6)), tmp_path / "out"))
    wrong = [row for row in rows if row["Accuracy Reached or Not"] == "No"]
    assert [row["NPU Name"] for row in wrong] == ["Functional_layer_norm_0_forward_input.4"]
    assert wrong[0]["NPU Tensor Dtype"] == "<class 'float'>"


def test_a_dump_of_the_original_with_records_run_together(tmp_path: Path) -> None:
    """FAQ: JSONDecodeError: Extra data."""
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "b")
    torn = tmp_path / "b" / index.name
    torn.write_text(index.read_text().replace("\n", "", 3))
    rows = rows_of(compare(given(torn, index), tmp_path / "out"))
    assert set(accuracy(rows).values()) == {"Yes"}
    assert len(rows) == len(names(index))
