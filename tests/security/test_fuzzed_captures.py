"""Captures and dumps in which something was planted at random: read, refused, never obeyed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_captures import lay_out_bait
from mutations import LAYOUTS, Mutation
from victims import Sandbox, Victim

SHARED = Path(os.environ.get("TENSORPROBE_SHARED") or Path(__file__).parents[2] / ".." / "shared")
# Dumps that the peers wrote themselves, each a folder of its own.
SAMPLES = sorted(
    folder
    for folder in (*SHARED.glob("data/msprobe/dump/*"), *SHARED.glob("data/ptdbg/v*/*"))
    if folder.is_dir()
)
_BATCH = 25
_MANY = 20_000
_PARTS = 20


def problems_of(
    numbers: Sequence[int],
    victim: Victim,
    recorded: Path,
    folder: Path,
    bases: Sequence[str] = LAYOUTS,
) -> dict[int, list[str]]:
    """What went wrong with mutations of these numbers, all run in one process."""
    sandbox = Sandbox(folder)
    lay_out_bait(sandbox)
    steps, owners = [], []
    for number in numbers:
        for step in Mutation(number, recorded, sandbox, bases).steps():
            steps.append(step)
            owners.append(number)
    outcome = victim.run(sandbox, steps)
    found: dict[int, list[str]] = {}
    for problem in outcome.problems:
        named = re.search(r"\bm(\d+)\b", problem) or re.search(r"-a(\d+)\.", problem)
        found.setdefault(int(named[1]) if named else -1, []).append(problem)
    sandbox.clear()
    return found


def told(found: dict[int, list[str]]) -> str:
    lines = [
        f"mutation {number}: {line}"
        for number, problems in sorted(found.items())
        for line in dict.fromkeys(problems)
    ]
    return "\n".join(lines)


def test_some_mutations(victim: Victim, recorded: Path, tmp_path: Path) -> None:
    found: dict[int, list[str]] = {}
    for first in range(0, 150, _BATCH):
        numbers = range(first, first + _BATCH)
        found |= problems_of(numbers, victim, recorded, tmp_path / f"batch{first}")
    assert not found, told(found)


def test_a_mutation_is_the_same_every_time(recorded: Path, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        sandbox = Sandbox(tmp_path / "sandbox")
        mutations = [Mutation(number, recorded, sandbox) for number in range(20)]
        steps = [each.steps() for each in mutations]
        files = sorted(path for path in sandbox.folder.rglob("*") if path.is_file())
        made.append((steps, {path: path.read_bytes() for path in files}))
        sandbox.clear()
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS))
def test_many_mutations(recorded: Path, tmp_path: Path, part: int) -> None:
    each = _MANY // _PARTS
    batches = [range(n, n + _BATCH) for n in range(part * each, (part + 1) * each, _BATCH)]
    victims = [Victim(), Victim()]

    def run(half: int) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for numbers in batches[half::2]:
            folder = tmp_path / f"batch{numbers.start}"
            found |= problems_of(numbers, victims[half], recorded, folder)
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    for victim in victims:
        victim.close()
    assert not first | second, told(first | second)


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLES, reason="the samples are not here")
def test_mutations_of_samples(victim: Victim, tmp_path: Path) -> None:
    """What the peers' own tools wrote has forms that `convert` does not."""
    recorded = tmp_path / "samples"
    for number, sample in enumerate(SAMPLES):
        shutil.copytree(sample, recorded / str(number))
    bases = sorted(path.name for path in recorded.iterdir())
    found: dict[int, list[str]] = {}
    for first in range(0, 1000, _BATCH):
        numbers = range(first, first + _BATCH)
        found |= problems_of(numbers, victim, recorded, tmp_path / f"batch{first}", bases)
    assert not found, told(found)
