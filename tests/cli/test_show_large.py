"""`tensorprobe show` of a large capture: what it reads, and what it holds in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorprobe.store.claim import claim
from tensorprobe.store.lines import (
    CallLine,
    ClosedLine,
    EndLine,
    Line,
    TensorLine,
    ValueLine,
    encode_lines,
)

SUMMARY = [-1.5, 2.5, 0.25, 3.75, 0, 0, 1]
# `show`, then what the process has read since and what its memory was at most, in bytes.
SHOW = """
import sys
from tensorprobe.cli import main, show
from tensorprobe.store import picking  # so that imports are not counted

def number(file, label):
    return next(int(line.split()[1]) for line in open(file) if line.startswith(label))

before = number("/proc/self/io", "rchar:")
code = main.main(["show", *sys.argv[1:]])
read = number("/proc/self/io", "rchar:") - before
print(code, read, number("/proc/self/status", "VmHWM:") * 1024, file=sys.stderr)
"""


def step_lines(n_calls: int) -> Iterator[Line]:
    yield CallLine(id=0, name="Module.model.Net.forward.0", op="Net", module="model")
    for id in range(1, n_calls):
        tensors = [{"tensor": TensorLine("float32", (2, 3), value=v)} for v in (id - 1, id)]
        yield CallLine(
            id=id, name=f"Torch.relu.{id}.forward", op="torch.relu", module="model.act",
            args=tensors[:1],
        )  # fmt: skip
        yield ValueLine(id=id, summary=SUMMARY)
        yield EndLine(id=id, outputs=tensors[1])
    yield EndLine(id=0)
    yield ClosedLine(n_calls, 0, whole=True)


def write_large(root: Path, n_steps: int, calls_a_step: int) -> int:
    """A capture of equal steps; gives the size of its lines."""
    claim(root, 0, "run", {}, {}, str)
    text = encode_lines(list(step_lines(calls_a_step)))
    for step in range(n_steps):
        folder = root / f"rank0/step{step}"
        folder.mkdir()
        (folder / "calls.jsonl").write_bytes(text)
    return n_steps * len(text)


def show(*words: object) -> tuple[list[str], int, int]:
    """The lines it wrote, how much it read, and its peak of memory."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *map(str, words)],
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, n_read, peak = map(int, done.stderr.split())
    assert code == 0
    return done.stdout.splitlines(), n_read, peak


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, int]]:
    """By their number of calls, in steps of 2500; and the size of each."""
    folder = tmp_path_factory.mktemp("large")
    return {
        n: (folder / str(n), write_large(folder / str(n), n // 2500, 2500))
        for n in (5_000, 50_000)
    }  # fmt: skip


QUESTIONS = {
    "no filter": ([], 50 + 4),
    "the end": (["--step", "{last}"], 50 + 4),
    "everything": (["--direction", "forward"], 50 + 4),
    "one call": (["Torch.relu.2499", "--step", "{last}"], 11),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_memory_does_not_grow_with_the_capture(
    captures: dict[int, tuple[Path, int]], question: str
) -> None:
    peaks = []
    for n, (path, nbytes) in captures.items():
        words, n_lines = QUESTIONS[question]
        lines, n_read, peak = show(path, *(word.format(last=n // 2500 - 1) for word in words))
        extra = question == "no filter" and n == 50_000  # it says that not every line was read
        assert len(lines) == n_lines + extra
        assert n_read < 1.5 * nbytes + 1e6, "one pass, and the step of what is shown once more"
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 4e6


def test_the_first_page_takes_neither_all_bytes_nor_all_lines(
    captures: dict[int, tuple[Path, int]],
) -> None:
    path, nbytes = captures[50_000]
    lines, n_read, _ = show(path)
    assert lines[0].startswith(f"{path}: native, steps 0-19, rank 0, 50000 calls, 0 gaps, ")
    assert lines[1] == "not every line was read to count them; to read all: --gaps"
    assert lines[-1] == "49950 more: --offset 50"
    assert nbytes > 15e6
    assert n_read < 6e6


def test_gaps_are_counted_by_reading_all(captures: dict[int, tuple[Path, int]]) -> None:
    path, nbytes = captures[50_000]
    log = path / "rank0/step3/calls.jsonl"
    whole = log.read_bytes()
    log.write_bytes(b"#" + whole[1:])
    try:
        lines, n_read, _ = show(path, "--gaps")
    finally:
        log.write_bytes(whole)
    assert n_read > nbytes
    # the end of that call has no beginning, and the last line says that there is one call more
    assert ", 49999 calls, 3 gaps, " in lines[0]
    assert lines[1] == ""
    assert [line.split()[2] for line in lines[3:]] == [
        "rank0/step3/calls.jsonl:1", "rank0/step3/calls.jsonl:7499", "rank0/step3/calls.jsonl:7500",
    ]  # fmt: skip


def test_pages_follow_one_another(captures: dict[int, tuple[Path, int]]) -> None:
    path, _ = captures[5_000]
    lines, _, _ = show(path, "--offset", 2499, "--limit", 2)
    assert [line.split()[:4] for line in lines[-3:-1]] == [
        ["2499", "0", "0", "Torch.relu.2499.forward"],
        ["2500", "1", "0", "Module.model.Net.forward.0"],
    ]
    assert lines[-1] == "2499 more: --offset 2501"
