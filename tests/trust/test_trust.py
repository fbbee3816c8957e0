"""Each case gets the verdict that it must get, but for those in known_failures.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from trust import known
from trust.every_case import CASES, by_name, is_possible
from trust.harness import run_case

KNOWN = known.read()
RUNS = [
    pytest.param(case.name, run, marks=[] if case.quick else pytest.mark.slow)
    for case in CASES
    for run in case.runs
]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_the_verdict(name: str, run: str, tmp_path: Path) -> None:
    case = by_name(name)
    if not is_possible(case):
        pytest.skip(f"{case.needs} is not installed")
    said = run_case(case, run, tmp_path)
    failure = known.failure_of(said)
    if failure in KNOWN:
        pytest.xfail(said.wrong or said.wrong_cause)
    assert not failure, f"{said.wrong or said.wrong_cause}\n{said.text}"
    better = {said.name, f"{said.name} (cause)"} & KNOWN
    assert not better, f"mended: remove {better} from {known.FILE.name}"


def test_every_known_failure_is_a_case() -> None:
    names = {f"{case.name} {run}" for case in CASES for run in case.runs}
    assert {line.removesuffix(" (cause)") for line in KNOWN} <= names


def test_every_family_has_faults_and_healthy_pairs() -> None:
    for family in {case.family for case in CASES}:
        faults = [case for case in CASES if case.family == family and case.is_fault]
        healthy = [case for case in CASES if case.family == family and not case.is_fault]
        assert len(faults) >= 5, family
        assert len(healthy) >= 3, family
