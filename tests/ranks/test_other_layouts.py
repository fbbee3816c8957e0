"""Runs on several ranks against one process: healthy ones match, and faults are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorprobe as tp
from ranks.gloo_ranks import needs_gloo
from ranks.other_layouts import FAULTS, OTHER_LAYOUTS
from tensorprobe.cli.main import main
from tensorprobe.comparing.layouts.shard_places import ShardPlace, places_of, sharded
from tensorprobe.comparing.verdict import Verdict
from tensorprobe.errors import BadUsage
from tensorprobe.records import Sharding

HERE = Path(__file__).parent
FAST = ["one_tp", "one_tp/no reduce", "one_tp/double bias", "one_dp", "one_dp/averaged twice",
        "one_cp/positions", "one_ep/expert", "one_pp", "one_pp/tied"]  # fmt: skip


class Launched:
    """Recordings of programs, on one process and on two."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        programs = sorted({name.partition("/")[0] for name in names})
        self._launch(1, [f"{program}/healthy" for program in programs])
        self._launch(2, [name if "/" in name else f"{name}/healthy" for name in names])

    def _launch(self, world: int, runs: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, str(HERE / "launch_ranks.py"), str(self.folder / str(world)),
             str(world), *runs],
            capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]

    def paths(self, name: str) -> tuple[Path, Path]:
        run = name if "/" in name else f"{name}/healthy"
        one = f"{name.partition('/')[0]}-healthy"
        return self.folder / "2" / run.replace("/", "-"), self.folder / "1" / one

    def verdict(self, name: str) -> Verdict:
        return tp.compare(*self.paths(name)).verdict


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(tmp_path_factory.mktemp("fast"), FAST)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    noisy = [f"{name}/noise" for name in ("one_tp", "one_ddp", "one_fsdp2", "one_sp")]
    return Launched(tmp_path_factory.mktemp("every"), [*OTHER_LAYOUTS, *FAULTS, *noisy])


def check_fault(verdict: Verdict, name: str) -> None:
    rank, cause, words = FAULTS[name]
    assert verdict.verdict == "diverged", str(verdict)
    first = verdict.culprits[0]
    assert (first.rank, first.cause) == (rank, cause), str(verdict)
    assert words in first.reason, str(verdict)


@needs_gloo
def test_two_ranks_against_one_process(fast: Launched) -> None:
    for name in FAST:
        if "/" in name:
            check_fault(fast.verdict(name), name)
        else:
            assert fast.verdict(name).verdict == "match", str(fast.verdict(name))


@needs_gloo
def test_the_one_process_may_be_the_actual_side(fast: Launched) -> None:
    for name, outcome in (("one_tp", "match"), ("one_tp/no reduce", "diverged")):
        verdict = tp.compare(*reversed(fast.paths(name))).verdict
        assert verdict.verdict == outcome, str(verdict)


@needs_gloo
def test_a_layout_file(fast: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = map(str, fast.paths("one_tp"))
    layout = tmp_path / "layout.yaml"
    layout.write_text("tp: 2\n")
    assert main(["compare", ours, theirs, "--layout", str(layout), "-o", str(tmp_path / "o")]) == 0
    assert "match: " in capsys.readouterr().out
    assert (tmp_path / "o" / "verdict.json").exists()
    layout.write_text("tp: 2\npp: 2\n")
    assert main(["compare", ours, theirs, "--layout", str(layout)]) == 2
    assert "tp 2 x pp 2 is 4 ranks, and there are 2" in capsys.readouterr().err
    with pytest.raises(BadUsage, match="leave out `at`"):
        tp.compare(ours, theirs, layout=layout, at="outputs")


@needs_gloo
def test_what_cannot_be_known_is_incomparable(fast: Launched, tmp_path: Path) -> None:
    ours, theirs = fast.paths("one_tp")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(ours), str(copy)], check=True)
    subprocess.run(["rm", "-r", str(copy / "rank1")], check=True)
    (tmp_path / "layout.yaml").write_text("tp: 2\n")
    verdict = tp.compare(copy, theirs, layout=tmp_path / "layout.yaml").verdict
    assert verdict.verdict == "incomparable"
    assert verdict.reason is not None
    assert "rank 1 of 2 was not recorded" in verdict.reason


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", list(OTHER_LAYOUTS))
def test_each_healthy_layout_matches_one_process(every: Launched, name: str) -> None:
    verdict = every.verdict(name)
    assert verdict.verdict == "match", str(verdict)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_tp", "one_ddp", "one_fsdp2", "one_sp"])
def test_noise_on_every_rank_matches_one_process(every: Launched, name: str) -> None:
    verdict = every.verdict(f"{name}/noise")
    assert verdict.verdict == "match", str(verdict)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_of_a_layout_is_named(every: Launched, name: str) -> None:
    check_fault(every.verdict(name), name)


# Where a part lies


def test_a_part_is_found_by_its_numbers() -> None:
    whole = np.arange(48.0).reshape(8, 6)
    cases = {
        "all": whole,
        "piece 1 of 2 along dimension 0": whole[4:],
        "piece 2 of 3 along dimension 1": whole[:, 4:],
    }
    for words, part in cases.items():
        (found,) = places_of(part, whole)
        assert str(found) == words
        assert np.array_equal(found.of(whole), part)
    for part in (whole[[5, 0, 2]], whole[:, [4, 1]], whole[:3], whole[4:, 3:]):
        (found,) = places_of(part, whole)
        assert np.array_equal(found.of(whole), part)
    (flat,) = places_of(whole.reshape(-1)[7:20], whole)
    assert flat.is_flat
    assert np.array_equal(flat.of(whole), np.arange(7.0, 20))
    assert places_of(whole[4:] + 1, whole) == []
    assert len(places_of(np.ones((2, 6)), np.ones((8, 6)))) == 4


def test_placements_say_where_a_part_lies() -> None:
    mesh = {"mesh_shape": (2, 2), "ranks": (0, 1, 2, 3)}
    plain = Sharding(shape=(8, 6), placements=("Shard(dim=0)", "Shard(dim=1)"), **mesh)  # type: ignore[arg-type]
    whole = np.arange(48.0).reshape(8, 6)
    part = sharded(plain, 3, (8, 6))
    assert isinstance(part, ShardPlace)
    assert np.array_equal(part.of(whole), whole[4:, 3:])
    strided = Sharding(
        shape=(8, 6), placements=("_StridedShard(dim=0, sf=2)", "Shard(dim=0)"), **mesh
    )  # type: ignore[arg-type]
    part = sharded(strided, 1, (8, 6))  # the second half by tensor parallel, of it the first
    assert part is not None
    assert np.array_equal(part.of(whole), whole[4:6])
    assert sharded(plain, 9, (8, 6)) is None
