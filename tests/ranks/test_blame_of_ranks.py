"""The origin among ranks, with real processes: who began, and who only received it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import tensorprobe as tp
from recorded import SRC
from tensorprobe.cli.main import main
from tensorprobe.comparing.verdict import Verdict
from tensorprobe.errors import TensorprobeError

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)
HERE = Path(__file__).parent
WORLD = 4
RUNS = [
    "manual/healthy", "manual/kernel", "manual/again", "manual/two", "manual/member op",
    "manual/stale", "manual/lost bucket", "ddp/healthy", "ddp/kernel", "ddp/hook", "ddp/again",
    "nan/healthy", "nan/nan", "broken/healthy", "broken/all_reduce", "broken/order",
    "groups/healthy", "groups/kernel",
    "fsdp1/healthy", "fsdp1/again", "fsdp1/stale", "sp/healthy", "sp/lost bucket",
    "2d/healthy", "2d/kernel", "ep/healthy", "ep/expert", "cp/healthy", "cp/positions",
    "gpipe/healthy", "gpipe/again", "1f1b/healthy", "1f1b/tf32",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, recorded by four processes in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_ranks.py"), str(folder), str(WORLD), *RUNS],
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def compared(runs: Path, name: str, **options: int) -> Verdict:
    program = name.partition("-")[0]
    return tp.compare(runs / name, runs / f"{program}-healthy", **options).verdict


def first(verdict: Verdict) -> tuple[int, int, str]:
    culprit = verdict.culprits[0]
    return culprit.rank, culprit.step, culprit.name


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("manual-kernel", (2, 0, "Functional.linear.1.forward")),
        ("manual-member op", (2, 0, "Distributed.all_reduce.0.forward")),
        ("ddp-kernel", (2, 0, "Torch.tanh.0.forward")),
        ("nan-nan", (1, 1, "Torch.log.0.forward")),
        ("broken-all_reduce", (1, 1, "Distributed.all_reduce.0.forward")),
        ("groups-kernel", (3, 0, "Functional.gelu.0.forward")),
        ("fsdp1-stale", (2, 0, "Distributed.all_gather.0.forward")),
        ("2d-kernel", (2, 0, "Torch.tanh.1.forward")),
        ("ep-expert", (2, 0, "Module.0.experts.0.Linear.forward.0")),
        ("cp-positions", (2, 0, "Module.ContextNet.forward.0")),
    ],
)
def test_one_rank_is_the_origin(runs: Path, name: str, origin: tuple[int, int, str]) -> None:
    verdict = compared(runs, name)
    assert first(verdict) == origin, str(verdict)
    assert len(verdict.culprits) == 1, str(verdict)
    assert verdict.origins == [origin[0]]


@pytest.mark.parametrize("name", ["manual-again", "ddp-again", "fsdp1-again", "gpipe-again"])
def test_noise_on_every_rank_is_a_match(runs: Path, name: str) -> None:
    assert compared(runs, name).verdict == "match"


def test_a_reduction_that_only_one_side_makes(runs: Path) -> None:
    verdict = compared(runs, "sp-lost bucket")
    assert first(verdict) == (0, 0, "Distributed.all_reduce.2.forward"), str(verdict)
    assert verdict.culprits[0].cause == "structure"
    assert verdict.origins == [0, 1, 2, 3]


def test_a_switch_of_one_rank_is_the_cause(runs: Path) -> None:
    verdict = compared(runs, "1f1b-tf32")
    assert first(verdict) == (2, 0, "Functional.linear.1.forward"), str(verdict)
    culprit = verdict.culprits[0]
    assert culprit.cause == "flag"
    assert culprit.reason.startswith("numerics."), culprit.reason
    assert " on rank 2, " in culprit.reason
    assert verdict.origins == [2]


def test_the_others_received_it_through_a_named_communication(runs: Path) -> None:
    verdict = compared(runs, "manual-kernel")
    assert [(each.rank, each.origin) for each in verdict.received] == [(0, 2), (1, 2), (3, 2)]
    assert "1 origin (rank 2), 3 received it: ranks 0, 1, 3 through all_reduce #0" in str(verdict)
    through = {each.rank: each.name for each in compared(runs, "groups-kernel").received}
    assert through == {
        0: "Distributed.all_gather.0.forward",
        1: "Distributed.all_gather.0.forward",
        2: "Distributed.all_reduce.0.forward",
    }


def test_two_origins_that_have_not_heard_of_each_other(runs: Path) -> None:
    verdict = compared(runs, "manual-two")
    assert {(c.rank, c.name) for c in verdict.culprits} == {
        (1, "Functional.gelu.0.forward"), (3, "Torch.tanh.0.forward"),
    }  # fmt: skip
    assert verdict.origins == [1, 3]
    assert [each.rank for each in verdict.received] == [0, 2]


def test_a_collective_is_judged_by_what_its_members_gave(runs: Path) -> None:
    culprit = compared(runs, "broken-all_reduce").culprits[0]
    assert (culprit.side, culprit.proof) == ("actual", "replayed")
    assert "from what its 4 members gave, worked out in float64" in culprit.reason
    text = str(compared(runs, "broken-all_reduce"))
    assert "tensorprobe repro" not in text  # which would refuse it


def test_members_that_give_in_another_order(runs: Path) -> None:
    verdict = compared(runs, "broken-order")
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].rank == 2, str(verdict)


def test_one_rank_alone_is_never_a_match(runs: Path) -> None:
    for options in ({"rank": 0}, {}):
        here = "" if options else "/rank0"
        pair = (runs / f"ddp-kernel{here}", runs / f"ddp-healthy{here}")
        verdict = tp.compare(*pair, **options).verdict
        assert verdict.verdict == "diverged"
        assert verdict.culprits[0].kind == "boundary"
        assert "entered rank 0 through its gradient reduction" in str(verdict)
        assert "compare all ranks to find the origin" in str(verdict)
    verdict = compared(runs, "manual-kernel", rank=0)
    assert "entered rank 0 through all_reduce #0" in verdict.culprits[0].reason
    assert tp.compare(runs / "ddp-again/rank0", runs / "ddp-healthy/rank0").verdict.verdict == (
        "match"
    )


def test_another_hook_of_ddp_is_named(runs: Path) -> None:
    verdict = compared(runs, "ddp-hook")
    culprit = verdict.culprits[0]
    assert (verdict.verdict, culprit.kind) == ("diverged", "boundary")
    assert "DDP's gradient reduction (a bucket, a hook in C++)" in culprit.reason
    assert "another communication hook" in culprit.reason
    assert verdict.origins == [0, 1, 2, 3]


def test_two_ranks_of_one_run_are_compared_step_by_step(runs: Path) -> None:
    verdict = tp.compare(runs / "manual-healthy/rank0", runs / "manual-healthy/rank1").verdict
    assert verdict.counts["aligned"] == verdict.counts["calls_actual"] > 0
    assert verdict.verdict == "diverged"  # they are given other data


def test_a_broken_rank_is_said_and_the_rest_compared(runs: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    subprocess.run(["cp", "-r", str(runs / "manual-kernel"), str(whole)], check=True)
    (whole / "rank1" / "step0" / "calls.jsonl").write_text("no line of ours")
    verdict = tp.compare(whole, runs / "manual-healthy").verdict
    assert [(c.rank, c.name) for c in verdict.culprits] == [(2, "Functional.linear.1.forward")]
    assert any("step 0 is only in expected" in note for note in verdict.notes)
    shutil.rmtree(whole / "rank1")
    verdict = tp.compare(whole, runs / "manual-healthy").verdict
    assert [(c.rank, c.name) for c in verdict.culprits] == [(2, "Functional.linear.1.forward")]
    assert any("what rank 1 gave to the others was not compared" in n for n in verdict.notes)


# Inside one run


def inside(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["ranks", str(run), *options])
    return status, capsys.readouterr().out


def test_healthy_ranks_agree(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = inside(runs / "manual-again", capsys)
    assert (status, text.splitlines()[0]) == (
        0,
        "4 ranks agree: 10 communications linked, 10 of them judged by what was given, "
        "4 replicas held against each other",
    )


def test_what_ranks_do_not_agree_in(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, ranks, kind, words in (
        ("broken-all_reduce", [1], "collective", "is not what its 4 members gave (sum)"),
        ("manual-member op", [2], "arguments", "reduces by MAX, not SUM"),
        ("manual-stale", [2], "parameter", "rank 2 has another parameter second.weight"),
        ("manual-lost bucket", [1, 2, 3], "gradient", "first.weight that the optimizer was given"),
    ):
        status, text = inside(runs / name, capsys, "-o", str(tmp_path / name))
        assert status == 3, text
        written = json.loads((tmp_path / name / "ranks.json").read_text())
        assert written["findings"][0]["ranks"] == ranks, text
        assert written["findings"][0]["kind"] == kind
        assert words in written["findings"][0]["reason"]
        assert len(written["findings"]) == 1, text


def test_a_switch_of_one_rank_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(runs / "manual-healthy"), str(run)], check=True)
    file = run / "rank3" / "rank.json"
    facts = json.loads(file.read_text())
    facts["numerics"]["matmul_tf32"] = True
    file.write_text(json.dumps(facts))
    verdict = tp.compare(run, runs / "manual-healthy").verdict
    assert verdict.facts == ["numerics.matmul_tf32: true here, false expected (rank 3)"]
    status, text = inside(run, capsys)
    assert status == 3
    assert "numerics.matmul_tf32 is true on rank 3, false on the others" in text


def test_one_rank_gets_a_clear_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = inside(runs / "manual-healthy" / "rank0", capsys)
    assert status == 2
    assert "only rank 0 is in" in text
    assert inside(runs / "manual-healthy" / "rank0", capsys, "--only", "nonfinite")[0] == 0


def test_a_hang_names_who_waits_and_where_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "hanging.py"), str(rank), str(tmp_path / "meet")],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": SRC,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "0",
            },
        )
        for rank in range(3)
    ]
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (
            (tmp_path / "gone").exists() and _are_waiting(tmp_path / "run")
        ):
            time.sleep(0.5)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    status, text = inside(tmp_path / "run", capsys)
    assert status == 3
    line = text.splitlines()[0]
    assert line.startswith(
        "it hung: ranks 0, 2 wait in all_reduce #1 of all ranks; rank 1 is after"
    )
    assert "Torch.exp.0.forward" in line


def _are_waiting(run: Path) -> bool:
    try:
        begun = {(call.rank, call.name) for call in tp.load(run).begun}
    except TensorprobeError:  # it is being written
        return False
    return begun == {(rank, "Distributed.all_reduce.1.forward") for rank in (0, 2)}
