"""Runs the cases and writes docs/trust.md: python tests/trust/table.py [PATTERN ...]

Outcomes are kept in build/trust.jsonl. What was measured with the sources as they are is not run
again, so that a measurement that was ended goes on, or is made family by family.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from trust import known, page  # noqa: E402 - found by the line above
from trust.every_case import CASES, by_name, is_possible  # noqa: E402
from trust.harness import Outcome, run_case  # noqa: E402
from trust.measured import Measured  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="of cases or families; without one, all")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--run", default="*", help="only these runs, such as 'tensors *'")
    parser.add_argument("--accept", action="store_true", help="write known_failures.txt too")
    parser.add_argument("--failures", type=Path, help="a file for all that was said in failures")
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "trust.jsonl")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was said")
    args = parser.parse_args()
    chosen = [
        (case.name, run)
        for case in CASES
        for run in case.runs
        if _is_chosen(args.patterns, case.name, case.family) and fnmatch.fnmatch(run, args.run)
    ]
    measured = Measured(args.results)
    possible = [each for each in chosen if is_possible(by_name(each[0]))]
    todo = [each for each in possible if args.again or measured.of(*each) is None]
    for said in _judged([] if args.page else todo, args.jobs):
        _tell(said, args.verbose)
        measured.add(said)
    known_by_now = (measured.of(*each, older=args.page) for each in possible)
    outcomes = [said for said in known_by_now if said is not None]
    failures = [line for line in map(known.failure_of, outcomes) if line]
    print(f"{len(outcomes) - len(failures)} of {len(outcomes)} runs are right")
    if args.failures is not None:
        args.failures.write_text(page.failures(outcomes))
    if len(chosen) == sum(len(case.runs) for case in CASES):
        n_older = sum(not measured.is_new(said) for said in outcomes)
        lacking = len(possible) - len(outcomes)
        page.write(ROOT / "docs" / "trust.md", outcomes, CASES, n_older=n_older, lacking=lacking)
        if args.accept:
            known.write(failures)
    return 0


def _is_chosen(patterns: list[str], *names: str) -> bool:
    return not patterns or any(fnmatch.fnmatch(n, pattern) for pattern in patterns for n in names)


def _judged(chosen: list[tuple[str, str]], jobs: int) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_judge, chosen)


def _judge(chosen: tuple[str, str]) -> Outcome:
    name, run = chosen
    with tempfile.TemporaryDirectory() as folder:
        return run_case(by_name(name), run, Path(folder))


def _tell(said: Outcome, verbose: bool) -> None:
    mark = "WRONG" if said.wrong else "cause" if said.wrong_cause else "right"
    print(f"{mark} {said.name}  {said.wrong or said.wrong_cause}", flush=True)
    if verbose:
        print("".join(f"      {line}\n" for line in said.text.splitlines()[:24]))


if __name__ == "__main__":
    sys.exit(main())
