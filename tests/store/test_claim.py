"""Two runs into one folder: the newest stays at the path, nothing is mixed or lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_making import open_writer, write_capture, write_relu

import tensorprobe
from tensorprobe.errors import UnreadableCapture
from tensorprobe.store.claim import claim, run_identity

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


def test_a_process_alone_is_its_own_run() -> None:
    code = "import os; from tensorprobe.store.claim import run_identity; print(run_identity({}))"
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(found | {run_identity({})}) == 3
    assert run_identity({}) == run_identity({})


@pytest.mark.parametrize("name", sorted(TORCHRUN.keys() - {"LOCAL_WORLD_SIZE"}))
def test_ranks_of_a_launch_share_it_and_other_launches_do_not(name: str) -> None:
    mine = run_identity({**TORCHRUN, "RANK": "0"})
    assert mine == run_identity({**TORCHRUN, "RANK": "1"})
    assert mine != run_identity({**TORCHRUN, name: "7"})
    assert mine != run_identity({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}), "without the parent"


def test_a_second_run_moves_the_first_whole(tmp_path: Path) -> None:
    root = tmp_path / "a"
    (root / "mine").mkdir(parents=True)
    (root / "mine" / "notes.txt").write_text("keep me")
    for n in range(1, 4):
        warnings: list[str] = []
        write_capture(root, n_calls=n, run=f"run {n}", on_warning=warnings.append)
        assert len(warnings) == (n > 1)
    assert warnings == [f"'{root}' held an earlier run: it is in '{root}/earlier/2' now"]
    assert len(tensorprobe.load(root).calls) == 3
    for n in (1, 2):
        earlier = tensorprobe.load(root / "earlier" / str(n))
        assert len(earlier.calls) == n
        assert earlier.facts["run"] == f"run {n}"
        assert earlier.calls[0].tensors[0].array().tolist() == [0, 1, 2, 3]
    assert (root / "mine" / "notes.txt").read_text() == "keep me"


def test_ranks_of_one_run_are_not_moved(tmp_path: Path) -> None:
    for rank in (1, 0, 12):
        write_capture(tmp_path / "a", rank=rank, run="same", n_calls=2)
    capture = tensorprobe.load(tmp_path / "a")
    assert capture.ranks == (0, 1, 12)
    assert [(call.rank, call.index) for call in capture.calls] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (12, 0), (12, 1),
    ]  # fmt: skip
    assert not (tmp_path / "a" / "earlier").exists()
    assert tensorprobe.load(tmp_path / "a" / "rank12").ranks == (12,)


def test_more_ranks_before_than_now(tmp_path: Path) -> None:
    for rank in range(4):
        write_capture(tmp_path / "a", rank=rank, run="four")
    write_capture(tmp_path / "a", rank=0, run="one")
    assert tensorprobe.load(tmp_path / "a").ranks == (0,)
    assert tensorprobe.load(tmp_path / "a/earlier/1").ranks == (0, 1, 2, 3)


def test_one_run_that_records_again_keeps_its_ranks_together(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for rank, n_calls in [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]:
        write_capture(root, rank=rank, run="same", n_calls=n_calls)
    for path, n_calls in [(root, 3), (root / "earlier/1", 1), (root / "earlier/2", 2)]:
        capture = tensorprobe.load(path)
        assert capture.ranks == (0, 1)
        assert len(capture.calls) == 2 * n_calls
        assert capture.facts["run"] == "same"


def test_a_run_that_still_writes_goes_on_where_it_was_moved_to(tmp_path: Path) -> None:
    root = tmp_path / "a"
    old = open_writer(root, run="old")
    old.begin_step(0)
    write_relu(old, 0, np.zeros(4, np.float32))
    write_capture(root, run="new")
    write_relu(old, 1, np.ones(4, np.float32))
    old.begin_step(1)
    write_relu(old, 0, np.ones(4, np.float32))
    old.close()
    assert old.error is None
    assert tensorprobe.load(root).steps == (0,)
    earlier = tensorprobe.load(root / "earlier/1")
    assert earlier.steps == (0, 1)
    assert len(earlier.calls) == 3


def test_only_earlier_runs_left(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a", run="1")
    claim(root, 0, "2", {}, {}, str)
    with pytest.raises(UnreadableCapture, match=r"earlier runs are in '.*earlier'"):
        tensorprobe.load(root)


RANK = """
import sys
from pathlib import Path
from store_making import write_capture
root, run, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
write_capture(root, rank=rank, run=run, n_calls=2, on_warning=print)
"""


def test_many_ranks_at_once(tmp_path: Path) -> None:
    root = tmp_path / "a"
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    for run in ("first", "second"):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(root), run, str(rank)],
                env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(6)
        ]  # fmt: skip
        for process in ranks:  # all at one moment
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        warnings = [process.communicate()[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * 6
        assert len([text for text in warnings if text]) == (run == "second")
    for path, run in [(root, "second"), (root / "earlier/1", "first")]:
        capture = tensorprobe.load(path)
        assert capture.ranks == tuple(range(6))
        assert len(capture.calls) == 12
        assert capture.facts["run"] == run
    assert [path.name for path in (root / "earlier").iterdir()] == ["1"]
