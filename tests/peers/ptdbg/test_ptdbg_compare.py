"""compare, compare_distributed and parse: tables, advice, and what they say when they cannot."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dumping import dump, net, session, train

import tensorprobe as tp
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.ptdbg_ascend import compare, compare_distributed, parse

COLUMNS = [
    *("NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype"),
    *("NPU Tensor Shape", "Bench Tensor Shape", "Cosine", "MaxAbsErr"),
    *("NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean"),
    *("Accuracy Reached or Not", "Err_message"),
]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def given(npu: Path, bench: Path, **more: Any) -> dict[str, Any]:
    """The dict of `compare` for two indexes with their folders."""
    return {
        "npu_pkl_path": str(npu),
        "bench_pkl_path": str(bench),
        "npu_dump_data_dir": str(npu.with_suffix("")),
        "bench_dump_data_dir": str(bench.with_suffix("")),
        "is_print_compare_log": False,
        **more,
    }


def dumped(folder: Path, **switch: Any) -> Path:
    return next(iter(dump(folder / "d.pkl", **switch).glob("*.pkl")))


def broken(source: Path, target: Path, name: str, change: Any) -> Path:
    """A copy of a dump with one tensor changed, in its file and in the index."""
    shutil.copytree(source.parent, target)
    file = target / source.stem / f"{name}.npy"
    array = change(np.load(file))
    np.save(file, array)
    index = target / source.name
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        if line[0] == name:
            stats = [float(array.max()), float(array.min()), float(array.mean())]
            line[4:] = [list(array.shape), stats]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return index


def advice(folder: Path) -> list[str]:
    (path,) = folder.glob("advisor_*.txt")
    return path.read_text().splitlines()


def test_two_equal_dumps(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    path = compare(given(index, index), tmp_path / "out")
    assert re.fullmatch(r"compare_result_\d{14}\.csv", path.name)
    rows = rows_of(path)
    assert list(rows[0]) == COLUMNS
    assert {row["Accuracy Reached or Not"] for row in rows} == {"Yes"}
    assert {row["MaxAbsErr"] for row in rows} == {"0.000000"}
    found = next(row for row in rows if row["NPU Name"] == "Functional_conv2d_0_forward_output")
    assert found["Bench Name"] == found["NPU Name"]
    assert (found["NPU Tensor Dtype"], found["NPU Tensor Shape"]) == (
        "torch.float32",
        "[2, 4, 6, 6]",
    )
    assert advice(tmp_path / "out")[:2] == ["Line: NA", "Suspect Nodes: NA"]


def test_the_first_wrong_row_is_named_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = dumped(tmp_path / "a", mode="api_stack")
    name = "Tensor___mul___0_forward_output"
    wrong = broken(index, tmp_path / "b", name, lambda array: -array)
    path = compare(
        given(wrong, index, is_print_compare_log=True),
        tmp_path / "out",
        stack_mode=True,
        suffix="x",
    )
    assert re.fullmatch(r"compare_result_x_\d{14}\.csv", path.name)
    rows = rows_of(path)
    assert list(rows[0]) == [*COLUMNS, "NPU_Stack_Info"]
    bad = [i for i, row in enumerate(rows) if row["Accuracy Reached or Not"] == "No"]
    assert rows[bad[0]]["NPU Name"] == name
    assert rows[bad[0]]["Cosine"] == "-1.000000"
    line, node, text = advice(tmp_path / "out")
    assert line == f"Line: {bad[0] + 2}"  # the header is line 1
    assert path.read_text().count("\n") == len(rows) + 1
    assert node == f"Suspect Nodes: {name}"
    assert "its forward is the suspect" in text
    assert "the first culprit is Tensor.__mul__.0.forward" in text
    assert name in capsys.readouterr().err
    stacks = [row["NPU_Stack_Info"] for row in rows if row["NPU_Stack_Info"]]
    assert len(stacks) == len({row["NPU Name"].rpartition("ward_")[0] for row in rows})
    assert "dumping.py" in stacks[0]


def test_a_wrong_stack_mode_never_fails(tmp_path: Path) -> None:
    plain, stacked = dumped(tmp_path / "a"), dumped(tmp_path / "b", mode="api_stack")
    for ours, theirs, mode in (
        (plain, stacked, True),
        (stacked, plain, False),
        (stacked, stacked, False),
        (plain, plain, True),
    ):
        path = compare(given(ours, theirs), tmp_path / "out", stack_mode=mode)
        rows = rows_of(path)
        assert ("NPU_Stack_Info" in rows[0]) == (ours is stacked)
        assert {row["Accuracy Reached or Not"] for row in rows} == {"Yes"}


def test_both_spellings_of_the_first_argument(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    for name in ("input_param", "input_parma"):
        path = compare(**{name: given(index, index)}, output_path=tmp_path, auto_analyze=False)
        assert rows_of(path)
    assert not list(tmp_path.glob("advisor_*"))
    assert len(list(tmp_path.glob("compare_result_*.csv"))) == 2  # never one over the other


def test_statistics_alone_are_compared(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    name = "Functional_linear_0_forward_output"
    wrong = broken(index, tmp_path / "b", name, lambda array: array * 9)
    both = {"npu_pkl_path": str(wrong), "bench_pkl_path": str(index)}
    rows = rows_of(compare(both, tmp_path / "out"))
    assert {"Max diff", "L2norm diff", "Bench l2norm", "Result"} <= set(rows[0])
    assert [row["NPU Name"] for row in rows if row["Result"] == "Warning"] == [name]
    assert f"Suspect Nodes: {name}" in advice(tmp_path / "out")


def test_checksums_are_compared(tmp_path: Path) -> None:
    ours = dumped(tmp_path / "a", summary_mode="md5")
    model = net(seed=1)
    with session(tmp_path / "b" / "d.pkl") as made:
        made.set_dump_switch("ON", summary_mode="md5")
        train(model)
    theirs = tmp_path / "b" / "ptdbg_dump_v2.3" / "rank0" / "d.pkl"
    rows = rows_of(compare({"npu_pkl_path": ours, "bench_pkl_path": theirs}, tmp_path / "out"))
    results = {row["NPU Name"]: row["Result"] for row in rows}
    assert results["Functional_conv2d_0_forward_input.0"] == "Pass"
    assert results["Functional_conv2d_0_forward_input.1"] == "Different"


def test_ranks_pair_by_number_and_missing_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = dumped(tmp_path / "a")
    ours, theirs = tmp_path / "npu_v2.3", tmp_path / "gpu_v2.3"
    for rank in (0, 2, 10):
        shutil.copytree(index.parent, ours / f"rank{rank}")
    for rank in (0, 1, 10):
        shutil.copytree(index.parent, theirs / f"rank{rank}")
    (ours / "notes.txt").write_text("something else")
    tables = compare_distributed(ours, theirs, tmp_path / "out")
    assert [re.sub(r"\d{14}", "TIME", path.name) for path in tables] == [
        "compare_result_rank0-rank0_TIME.csv",
        "compare_result_rank10-rank10_TIME.csv",
    ]
    said = capsys.readouterr().err
    assert "only in npu_dump_dir, not compared: rank2" in said
    assert "only in bench_dump_dir, not compared: rank1" in said
    assert len(list((tmp_path / "out").glob("advisor_rank*.txt"))) == 2


def test_one_rank_each_is_a_pair_whatever_its_number(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    shutil.copytree(index.parent, tmp_path / "x" / "rank0")
    shutil.copytree(index.parent, tmp_path / "y" / "rank31405")
    (path,) = compare_distributed(tmp_path / "x", tmp_path / "y", tmp_path, suffix="s")
    assert path.name.startswith("compare_result_s_rank0-rank31405_")


def test_parse_prints_statistics_and_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = dumped(tmp_path / "a", mode="api_stack")
    capsys.readouterr()
    parse(index, "Functional_linear_0_forward")
    text = capsys.readouterr().out.splitlines()
    assert text[:2] == ["Functional_linear_0_forward", "Statistic Info:"]
    assert text[2].startswith("  input.0: torch.float32 [2, 8] max ")
    assert text[5].startswith("  output: torch.float32 [2, 2] max ")
    assert text[6] == "Stack, outermost first:"
    assert any("return self.fc(h) + 1" in line for line in text)
    parse(index, module_name_prefix="Functional_linear")
    assert "Functional_linear_0_backward" in capsys.readouterr().out
    with pytest.raises(BadUsage, match=r"no call that begins with 'Functional_linaer_0'.*linear"):
        parse(index, moudule_name_prefix="Functional_linaer_0")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a")
    with pytest.raises(UnreadableCapture, match=r"'npu_pkl_path' names 'nowhere\.pkl'"):
        compare({**given(index, index), "npu_pkl_path": "nowhere.pkl"}, tmp_path)
    with pytest.raises(UnreadableCapture, match="Leave it out to compare statistics only"):
        compare({**given(index, index), "bench_dump_data_dir": "nowhere"}, tmp_path)
    with pytest.raises(BadUsage, match="'bench_pkl_path' is missing"):
        compare({"npu_pkl_path": str(index)}, tmp_path)
    with pytest.raises(BadUsage, match="unknown key 'npu_pkl'"):
        compare({"npu_pkl": str(index)}, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableCapture, match="holds no dump: expected folders rank0"):
        compare_distributed(tmp_path / "empty", tmp_path / "empty", tmp_path)


def test_an_old_dump_compares_with_a_native_capture(tmp_path: Path) -> None:
    index = dumped(tmp_path / "a", filter_switch="OFF")
    model = net()
    with tp.Recorder(tmp_path / "native", level="L1", keep="tensors"):
        train(model)
    found = tp.compare(index, tmp_path / "native")
    assert found.verdict.verdict == "match", str(found.verdict)
    assert found.verdict.counts["only_actual"] == 0
    model = net()
    model.fc.weight.data *= 1.5
    with tp.Recorder(tmp_path / "other", level="L1", keep="tensors"):
        train(model)
    found = tp.compare(index, tmp_path / "other")
    assert found.verdict.culprits[0].name == "Functional.linear.0.forward", str(found.verdict)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_low_precision_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    if dtype is torch.bfloat16:
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    folder = dump(tmp_path / "a.pkl", lambda: x.clone())
    stored = np.load(folder / "a" / "Tensor_clone_0_forward_output.npy")
    assert stored.dtype == np.float32
    record = tp.load(folder).calls[-1].tensor("output.0")
    assert record.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(record.load().view(bits.dtype), bits)
