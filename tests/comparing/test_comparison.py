"""Two captures from end to end: verdicts, files, exit codes, and bad input."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp
from recorded import SRC, record, run_script
from tensorprobe.cli.main import main
from tensorprobe.comparing.arguments import fact_differences
from tensorprobe.comparing.measure import Done
from tensorprobe.errors import BadUsage, TensorprobeError, UnreadableCapture


class Net(torch.nn.Module):
    def __init__(self, eps: float = 1e-5, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 32)
        self.norm = torch.nn.LayerNorm(32, eps=eps)
        self.second = torch.nn.Linear(32, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.norm(self.first(x)))) * self.scale


def run(
    folder: Path, *, n_steps: int = 1, data: float = 1.0, net: Net | None = None, **options: Any
) -> Path:
    net = net or Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, generator=generator) * data
    with tp.Recorder(folder, **{"keep": "tensors", **options}) as recorder:
        for _ in range(n_steps):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return folder


def test_equal_runs_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, e = run(tmp_path / "a"), run(tmp_path / "e")
    assert main(["compare", str(a), str(e), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("match: ")
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["format"], verdict["verdict"], verdict["mode"]) == (1, "match", "tensors")
    assert verdict["culprits"] == []
    assert verdict["counts"]["aligned"] == verdict["counts"]["calls_actual"] > 10


def test_a_divergence_exits_3_and_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2)), run(tmp_path / "e")
    out = tmp_path / "out"
    assert main(["compare", str(a), str(e), "-o", str(out), "--xlsx"]) == 3
    text = capsys.readouterr().out
    assert text.startswith("diverged at Functional.layer_norm.0.forward (step 0, rank 0): ")
    assert "eps: 0.01 here, 1e-05 expected" in text
    assert "test_comparison.py" in text or "normalization.py" in text
    (culprit,) = json.loads((out / "verdict.json").read_text())["culprits"]
    keys = ("name", "kind", "direction", "step", "rank", "module")
    assert {key: culprit[key] for key in keys} == {
        "name": "Functional.layer_norm.0.forward", "kind": "argument", "direction": "forward",
        "step": 0, "rank": 0, "module": "norm",
    }  # fmt: skip
    assert culprit["affected"] > 3
    assert culprit["op"] == "torch.nn.functional.layer_norm"
    book = openpyxl.load_workbook(out / "comparison.xlsx")
    assert book.sheetnames == ["verdict", "comparison"]
    assert book["comparison"].freeze_panes == "A2"
    with (out / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == book["comparison"].max_row - 1
    marked = [row for row in rows if row["note"].startswith("culprit")]
    assert [row["actual"] for row in marked] == ["Functional.layer_norm.0.forward.output.0"]


def test_the_verdict_as_text_is_about_five_lines(tmp_path: Path) -> None:
    found = tp.compare(run(tmp_path / "a", data=1.01), run(tmp_path / "e"))
    lines = str(found.verdict).splitlines()
    assert (
        lines[0]
        == "diverged at Module.Net.forward.0 (step 0, rank 0): the runs are given other data"
    )
    assert lines[-1] == f"  next: tensorprobe show {tmp_path / 'a'} Module.Net.forward.0"
    assert 4 <= len(lines) <= 6
    assert found.verdict.culprits[0].kind == "input"


def test_the_first_step_that_differs_comes_first(tmp_path: Path) -> None:
    nets = [Net(), Net()]
    nets[0].second.register_forward_hook(_after_a_while)
    found = tp.compare(
        *(run(tmp_path / n, n_steps=3, net=net) for n, net in zip("ae", nets, strict=True))
    )
    first = found.verdict.culprits[0]
    assert (first.step, first.kind) == (1, "structure")
    assert [(r.step, r.verdict) for r in found.verdict.ranks] == [(0, "match"), (1, "diverged")]


def _after_a_while(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    module.n = getattr(module, "n", 0) + 1
    return out * 1.01 if module.n == 2 else out


def test_an_argument_without_effect_is_listed_and_not_blamed(tmp_path: Path) -> None:
    captures = [
        record(tmp_path / name, lambda i=i: torch.relu(torch.ones(3).clamp(min=-5.0 - i)))
        for i, name in enumerate("ae")
    ]
    found = tp.compare(*captures)
    assert found.verdict.verdict == "match"
    assert found.structure == ["Tensor.clamp.0.forward: min: -5.0 here, -6.0 expected"]


@pytest.mark.parametrize("keep", ["stats", "digest", "structure"])
def test_less_than_tensors(keep: str, tmp_path: Path) -> None:
    a, e = (run(tmp_path / n, keep=keep, net=Net(scale=s)) for n, s in (("a", 1.5), ("e", 1.0)))
    verdict = tp.compare(a, e).verdict
    assert verdict.mode == keep
    if keep == "structure":
        assert verdict.verdict == "match"
        assert "no values were kept" in str(verdict)
    else:
        assert (verdict.culprits[0].name, verdict.culprits[0].kind) == (
            "Tensor.mul.0.forward", "argument",
        )  # fmt: skip
        assert "weaker" in str(verdict)


def test_noise_runs_raise_the_floor(tmp_path: Path) -> None:
    a, e, other = (run(tmp_path / n, data=d) for n, d in (("a", 1.001), ("e", 1.0), ("o", 0.999)))
    assert tp.compare(a, e).verdict.verdict == "diverged"
    floored = tp.compare(a, e, noise=[other], timeout=0)
    assert all(c.kind == "input" for c in floored.verdict.culprits)


def test_a_mapping_file_pairs_modules(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(
        "first: first\nFunctional.gelu.0.forward: Functional.gelu.0.forward\n"
    )
    a = run(tmp_path / "a")
    found = tp.compare(a, a, mapping=tmp_path / "map.yaml")
    hows = {pair.call.name: pair.pair.how for pair in found.pairs}
    assert hows["Functional.gelu.0.forward"] == "mapped"
    (tmp_path / "bad.yaml").write_text("- 1\n")
    with pytest.raises(BadUsage, match="holds a list"):
        tp.compare(a, a, mapping=tmp_path / "bad.yaml")


# Bad input


def test_no_capture_and_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "nothing", tmp_path / "empty"):
        assert main(["compare", str(a), str(wrong)]) == 1
        assert "capture" in capsys.readouterr().err
    assert main(["compare", str(a), str(a), "--xlsx"]) == 2
    assert "-o OUT" in capsys.readouterr().err
    assert main(["compare", str(a), str(a), "--step", "7"]) == 1
    assert "has no calls of step 7; it has steps [0]" in capsys.readouterr().err


def test_another_format_version(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b")
    for file in b.rglob("*.json"):
        file.write_text(file.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(UnreadableCapture, match="format 9"):
        tp.compare(a, b)


def test_different_levels_are_incomparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, e = run(tmp_path / "a", level="L2"), run(tmp_path / "e", level="L0")
    assert main(["compare", str(a), str(e)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("incomparable: ")
    assert "calls align; actual starts" in out


def test_a_truncated_capture_is_no_match(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a"), run(tmp_path / "e")
    log = next(a.rglob("calls.jsonl"))
    content = log.read_bytes()
    # the last eighth is gone, and half of the line before it: a cut at a line's end leaves no trace
    whole = content.rindex(b"\n", 0, -len(content) // 8)
    log.write_bytes(content[: (content.rindex(b"\n", 0, whole) + whole) // 2])
    verdict = tp.compare(a, e).verdict
    assert verdict.verdict == "incomparable"
    assert verdict.counts["gaps"] > 0
    assert "gaps in the recordings" in str(verdict)


def test_a_missing_shard_leaves_statistics(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2)), run(tmp_path / "e")
    next(a.rglob("*.safetensors")).unlink()
    verdict = tp.compare(a, e).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].name == "Functional.layer_norm.0.forward"


def test_a_missing_rank_is_no_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, e = run(tmp_path / "a"), run(tmp_path / "e")
    for rank in range(1, 3):
        shutil.copytree(a / "rank0", a / f"rank{rank}")
    assert main(["compare", str(a), str(e)]) == 1
    n = len(tp.load(e).calls)
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"incomparable: ranks 1, 2 are only in actual: {2 * n} calls could not be compared. "
        "To compare one that both have: --rank N",
        f"  the rest matches: {n} calls aligned, no call differs by more than rounding explains "
        "(tensors compared)",
    ]
    assert main(["compare", str(a), str(e), "--rank", "0"]) == 0


def test_a_missing_step_is_no_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run went on, the other ended: what both have may match, the whole does not."""
    a, e = run(tmp_path / "a", n_steps=2), run(tmp_path / "e", n_steps=3)
    found = tp.compare(a, e)
    assert (found.verdict.verdict, found.verdict.culprits) == ("incomparable", [])
    assert [(r.step, r.verdict) for r in found.verdict.ranks] == [
        (0, "match"), (1, "match"), (2, "incomparable"),
    ]  # fmt: skip
    assert main(["compare", str(a), str(e)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("incomparable: step 2 is only in expected: ")
    assert "calls of one side only" not in out
    assert main(["compare", str(a), str(e), "--step", "1"]) == 0


def test_a_step_that_was_not_to_be_recorded_is_a_note(tmp_path: Path) -> None:
    e = run(tmp_path / "e", n_steps=3)
    for number, options in enumerate(({"steps": "0-1"}, {"steps": [0, 2]}, {"keep_last": 2})):
        verdict = tp.compare(run(tmp_path / f"a{number}", n_steps=3, **options), e).verdict
        assert verdict.verdict == "match", str(verdict)
        assert "only in expected, as the other was told: not compared" in str(verdict)


def test_the_next_command_names_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names begin anew with each step: without it, the repro would be that of the first."""
    nets = [Net(), Net()]
    nets[0].norm.register_forward_pre_hook(_other_eps)
    a, e = (run(tmp_path / n, n_steps=2, net=net) for n, net in zip("ae", nets, strict=True))
    found = tp.compare(a, e).verdict
    assert (found.culprits[0].step, found.culprits[0].kind) == (1, "argument")
    command = f"tensorprobe show {a} Functional.layer_norm.0.forward --step 1"
    assert f"  next: {command}" in str(found).splitlines()
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.count("where ") == 1
    assert f"  next: {command}" in str(tp.compare(a, e, step=1).verdict).splitlines()


def test_the_next_command_names_the_call_of_the_side_that_is_wrong(tmp_path: Path) -> None:
    """There it may have another number, and be in another step."""

    def program(more: int, gain: float) -> None:
        torch.manual_seed(0)
        with tp.Recorder(tmp_path / f"run{more}", keep="tensors", first_step=more) as recorder:
            x = torch.randn(8, 8)
            for _ in range(more):
                torch.tanh(x)
            with Tanh(gain):
                (torch.tanh(x.sin()) * 2).sum()
            recorder.step()

    program(0, 1.0)
    program(2, 1.01)
    found = tp.compare(tmp_path / "run0", tmp_path / "run2").verdict
    assert (found.culprits[0].name, found.culprits[0].side) == ("Torch.tanh.0.forward", "expected")
    command = f"tensorprobe repro {tmp_path / 'run2'} Torch.tanh.2.forward --step 2 -o repro"
    assert f"  next: {command}" in str(found).splitlines()
    assert found.to_json()["culprits"][0]["expected"] == {
        "name": "Torch.tanh.2.forward", "step": 2, "rank": 0,
    }  # fmt: skip


class Tanh(TorchDispatchMode):
    """A device whose tanh is off by a factor."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.gain if func.__name__ == "tanh.default" else result


def _other_eps(module: Any, args: Any) -> None:
    module.n = getattr(module, "n", 0) + 1
    module.eps = 1e-2 if module.n == 2 else 1e-5


def test_a_culprit_is_named_beside_a_missing_step(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2), n_steps=2), run(tmp_path / "e", n_steps=3)
    verdict = tp.compare(a, e).verdict
    assert verdict.culprits[0].name == "Functional.layer_norm.0.forward"
    assert "note: step 2 is only in expected: " in str(verdict)


def test_a_capture_and_itself(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    assert "both sides are one capture" in str(tp.compare(a, a).verdict)
    assert "both sides are one capture" not in str(tp.compare(a, run(tmp_path / "b")).verdict)


def test_an_argument_that_is_blamed_is_not_harmless_in_the_next_step(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2), n_steps=2), run(tmp_path / "e", n_steps=2)
    found = tp.compare(a, e)
    assert found.verdict.culprits[0].kind == "argument"
    assert found.structure == []


def test_a_fact_that_one_layout_does_not_have_is_no_difference(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    for layout in ("msprobe", "ptdbg"):
        assert main(["convert", str(a), "--to", layout, "-o", str(tmp_path / layout)]) == 0
        facts = tp.compare(a, tmp_path / layout).verdict.facts
        assert [fact for fact in facts if "not set" in fact] == []


def test_facts_that_differ() -> None:
    actual = {
        "numerics": {"matmul_tf32": True, "new_switch": 1}, "environment": {"A": "1"},
        "packages": {"torch": "2.13"}, "config": {"steps": None, "queue": 1, "keep": "stats"},
    }  # fmt: skip
    expected = {
        "numerics": {"matmul_tf32": False}, "environment": {"B": "2"}, "python": "3.11",
        "packages": {"torch": "2.12"}, "config": {"steps": "0-1", "queue": 2, "keep": "stats"},
    }  # fmt: skip
    assert fact_differences(actual, expected) == [
        "config.steps: not set here, 0-1 expected",
        "environment.A: 1 here, not set expected",
        "environment.B: not set here, 2 expected",
        "numerics.matmul_tf32: true here, false expected",
        "packages.torch: 2.13 here, 2.12 expected",
    ]


def test_nan_everywhere_on_both_sides_is_no_difference(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", data=math.nan), run(tmp_path / "e", data=math.nan)
    assert tp.compare(a, e).verdict.verdict == "match"


def test_shapes_that_differ_are_a_row_and_a_culprit(tmp_path: Path) -> None:
    captures = [
        record(tmp_path / name, lambda n=n: torch.relu(torch.ones(n, 3)) * 2)
        for name, n in (("a", 4), ("e", 5))
    ]
    found = tp.compare(*captures)
    found.save(tmp_path / "out")
    text = (tmp_path / "out" / "comparison.csv").read_text()
    assert "shapes differ" in text
    assert found.verdict.verdict == "diverged"
    assert found.verdict.culprits[0].name == "Torch.ones.0.forward"


def test_nan_everywhere_on_one_side_is_the_data(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", data=math.nan), run(tmp_path / "e")
    first = tp.compare(a, e).verdict.culprits[0]
    assert (first.kind, first.name) == ("input", "Module.Net.forward.0")
    (back,) = tp.compare(e, a).verdict.culprits
    assert back.name == "Module.Net.forward.0"


def test_a_truncated_shard_is_said_and_its_statistics_are_compared(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2)), run(tmp_path / "e")
    shard = next(a.rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    found = tp.compare(a, e)
    assert found.verdict.culprits[0].name == "Functional.layer_norm.0.forward"
    found.save(tmp_path / "out")
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any("safetensors" in row["note"] for row in rows), rows[0]
    assert sum(row["norm_diff"] not in ("", "0.0") for row in rows) > 5


def test_a_capture_without_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e, a = run(tmp_path / "e"), run(tmp_path / "a")
    next(a.rglob("calls.jsonl")).write_text("")  # killed before the first call
    assert main(["compare", str(tmp_path / "a"), str(e)]) == 1
    assert "nothing to compare: actual" in capsys.readouterr().err


# Progress, processes, memory


def test_a_terminal_shows_calls_gigabytes_and_time_left(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    code = (
        "import time\n"
        "from tensorprobe.comparing.measure import Done, TerminalProgress\n"
        "bar = TerminalProgress(delay_s=0)\n"
        "for n in (1, 2, 3):\n"
        "    bar(Done(n * 10**9, 4 * 10**9, n * 100, 400)); time.sleep(0.3)\n"
        "bar.stop()\n"
    )
    (tmp_path / "bar.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.Popen([sys.executable, "bar.py"], cwd=tmp_path, stderr=follower, env=environ)
    os.close(follower)
    text = b""
    with contextlib.suppress(OSError):  # the terminal is gone
        while part := os.read(leader, 65536):
            text += part
    assert done.wait(60) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode())
    assert "comparing 300/400 calls" in shown
    assert "3.0/4.0 GB" in shown
    assert re.search(r"\d:\d\d:\d\d", shown)


def test_progress_counts_calls_and_bytes(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", data=1.01), run(tmp_path / "e")
    for jobs in (1, 2):
        seen: list[Done] = []
        found = tp.compare(a, e, jobs=jobs, timeout=0, progress=seen.append)
        assert [d.nbytes for d in seen] == sorted(d.nbytes for d in seen)
        last = seen[-1]
        assert last.nbytes == last.of_nbytes > 0
        assert last.calls == last.of_calls == len(found.pairs)


def test_memory_does_not_grow_with_the_captures(tmp_path: Path) -> None:
    n_tensors, size = 24, 1 << 20
    for name in "ae":
        with tp.Recorder(tmp_path / name, keep="tensors") as recorder:
            for i in range(n_tensors):
                recorder.save(f"x{i}", torch.rand(size))
    done = run_script(
        tmp_path,
        "import resource\n"
        "from tensorprobe.report.saving import compare\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "compare('a', 'a', jobs=1)\n"
        "before = peak()\n"
        "compare('a', 'e', jobs=1, replay=False)\n"
        "print(peak() - before)\n",
    )
    both_sides = 2 * n_tensors * size * 4
    assert int(done.stdout) < both_sides / 4, done.stderr


# Files


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    evil = '=HYPERLINK("http://x")'

    def program() -> None:
        with tp.Recorder(tmp_path / "a", keep="tensors") as recorder:
            recorder.save(evil, torch.ones(2))
            recorder.save("@cmd", torch.tensor([-math.inf, 1.0]))

    program()
    found = tp.compare(tmp_path / "a", tmp_path / "a")
    found.save(tmp_path / "out", xlsx=True)
    with (tmp_path / "out" / "comparison.csv").open() as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not any(cell.startswith(("=", "@", "+", "-inf")) for cell in cells)
    book = openpyxl.load_workbook(tmp_path / "out" / "comparison.xlsx")
    assert all(cell.data_type != "f" for row in book["comparison"].iter_rows() for cell in row)


def test_columns_of_ptdbg(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(scale=-1.0)), run(tmp_path / "e")
    tp.compare(a, e).save(tmp_path / "out", columns="ptdbg")
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:8] == [
        "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape",
        "Bench Tensor Shape", "Cosine", "MaxAbsErr",
    ]  # fmt: skip
    by_name = {row["NPU Name"]: row for row in rows}
    good = by_name["Functional_linear_0_forward_output"]
    assert (good["Cosine"], good["MaxAbsErr"], good["Accuracy Reached or Not"]) == (
        "1.0", "0.000000", "Yes",
    )  # fmt: skip
    bad = by_name["Tensor_mul_0_forward_output"]
    assert (bad["Cosine"], bad["Accuracy Reached or Not"]) == ("-1.000000", "No")
    assert bad["NPU Tensor Dtype"] == "torch.float32"


@pytest.mark.parametrize("keep", ["tensors", "stats", "digest"])
def test_columns_of_msprobe(keep: str, tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", keep=keep, net=Net(scale=1.01)), run(tmp_path / "e", keep=keep)
    tp.compare(a, e).save(tmp_path / "out", columns="msprobe")
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = {
        "tensors": ["Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio"],
        "stats": ["Max diff", "Min diff", "Mean diff", "L2norm diff", "MaxRelativeErr"],
        "digest": ["NPU MD5", "BENCH MD5", "Requires_grad Consistent", "Result", "Err_message"],
    }
    assert list(rows[0])[8:13] == columns[keep]
    bad = next(row for row in rows if row["NPU Name"] == "Tensor.mul.0.forward.output.0")
    factor = next(row for row in rows if row["NPU Name"] == "Tensor.mul.0.forward.input.1")
    assert factor["NPU Dtype"] == "<class 'float'>"
    assert factor["Result"] == "error"
    if keep == "stats":
        assert float(bad["MaxRelativeErr"].rstrip("%")) == pytest.approx(1.0, rel=1e-4)
        assert bad["MaxRelativeErr"].endswith("%")
        good = next(row for row in rows if row["NPU Name"] == "Functional.gelu.0.forward.output.0")
        assert (good["Max diff"], good["MaxRelativeErr"]) == ("0", "0")


def test_unknown_columns_leave_nothing_behind(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    with pytest.raises(TensorprobeError, match="native, ptdbg, msprobe"):
        tp.compare(a, a).save(tmp_path / "out", columns="excel")
    assert not (tmp_path / "out").exists()


def test_a_script_without_a_main_guard_compares_in_processes(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", net=Net(eps=1e-2)), run(tmp_path / "e")
    done = run_script(
        tmp_path,
        "import multiprocessing\n"
        "multiprocessing.set_start_method('spawn')\n"
        "print('begun')\n"
        "import tensorprobe as tp\n"
        f"found = tp.compare({str(a)!r}, {str(e)!r}, jobs=2)\n"
        "print(found.verdict.culprits[0].name)\n",
    )
    assert done.stdout.split() == ["begun", "Functional.layer_norm.0.forward"], done.stderr


def test_processes_and_one_process_measure_the_same(tmp_path: Path) -> None:
    a, e = run(tmp_path / "a", data=1.01), run(tmp_path / "e")
    ones, twos = (tp.compare(a, e, jobs=n, timeout=0) for n in (1, 2))
    assert [row.metrics for _, row in ones.rows] == [row.metrics for _, row in twos.rows]


@pytest.mark.parametrize("side", ["actual", "expected"])
@pytest.mark.parametrize("kind", ["end", "value", "call"])
def test_what_cannot_be_read_is_no_match(kind: str, side: str, tmp_path: Path) -> None:
    for name in ("actual", "expected"):
        record(tmp_path / name, lambda: torch.nn.functional.gelu(torch.arange(4.0)))
    assert tp.compare(tmp_path / "actual", tmp_path / "expected").verdict.verdict == "match"
    log = next((tmp_path / side).rglob("calls.jsonl"))
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f'{{"type":"{kind}"'))
    lines[at] = lines[at][:-2] + "\ud83d".encode("utf-8", "surrogatepass").decode("latin-1") + "]"
    log.write_text("\n".join(lines) + "\n")
    verdict = tp.compare(tmp_path / "actual", tmp_path / "expected").verdict
    assert verdict.verdict == "incomparable"
    # a call's end needs its beginning, and the step has fewer calls than it says
    assert re.search(rf"[123] lines? of {side} '", str(verdict))
    assert f"calls.jsonl:{at + 1}: " in str(verdict)
    assert "--gaps" in str(verdict)


@pytest.mark.parametrize("swapped", [False, True])
def test_runs_without_a_call_in_common_never_match(tmp_path: Path, swapped: bool) -> None:
    """One side has calls of a model, the other none: no half of nothing aligns."""
    layer = torch.nn.Linear(4, 4)
    with tp.Recorder(tmp_path / "model", log=lambda text: None):
        layer(torch.ones(2, 4))
    with tp.Recorder(tmp_path / "other", log=lambda text: None):
        for _ in range(9):
            torch.exp(torch.zeros(3))
    sides = [tmp_path / "model", tmp_path / "other"]
    verdict = tp.compare(*(reversed(sides) if swapped else sides), jobs=1).verdict
    assert verdict.verdict == "incomparable"
    assert "0 of 18 calls align" in str(verdict)


def test_json_is_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, e = run(tmp_path / "a"), run(tmp_path / "e")
    assert main(["compare", str(a), str(e), "--json", "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "verdict.json").read_text()
    assert json.loads(printed)["verdict"] == "match"


def test_without_a_verb_it_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "to begin: tensorprobe demo" in capsys.readouterr().out


def test_where_two_runs_part_is_said_if_they_start_alike(tmp_path: Path) -> None:
    def program(folder: Path, n: int) -> Path:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), *(torch.nn.Tanh() for _ in range(n)))
        with tp.Recorder(folder, log=lambda text: None):
            net(torch.ones(2, 4)) if n > 1 else net(torch.ones(2, 4)).sum().backward()
        return folder

    a, e = program(tmp_path / "a", 9), program(tmp_path / "e", 1)
    verdict = tp.compare(a, e, jobs=1).verdict
    assert verdict.verdict == "incomparable"
    assert re.search(r"\d+ of \d+ calls align; after \S+ only expected makes \S+\. ", str(verdict))
