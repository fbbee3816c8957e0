"""Every call of a capture against its reference: plan, run, report."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorprobe.checking.benchmark import hold_against
from tensorprobe.checking.plan import Planned, plan
from tensorprobe.checking.pool import Pool, Task
from tensorprobe.checking.results import CheckResults, benchmark_tensors, ordered
from tensorprobe.checking.row import TABLES, Row
from tensorprobe.checking.switches import differing
from tensorprobe.checking.worker import Setting
from tensorprobe.errors import BadUsage
from tensorprobe.keywords import keywords
from tensorprobe.notebooks import html_of
from tensorprobe.pages import write_page
from tensorprobe.records import Capture, count
from tensorprobe.replay.pairing import ForwardBackward, pair
from tensorprobe.store.loading import load
from tensorprobe.store.outputs import check_output

# Called after each call with how many are done, how many there are, and the row.
Progress = Callable[[int, int, Row], None]


class Checked:
    """The outcome of a check: its rows, failures first, and how many of each verdict."""

    def __init__(
        self, path: Path, rows: list[Row], counts: Mapping[str, int], notes: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.rows = rows
        self.counts = counts
        self.notes = notes  # what makes the verdicts less fair

    @property
    def passed(self) -> bool:
        return not (self.counts["fail"] or self.counts["crashed"] or self.is_idle)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was checked: every call was skipped."""
        return self.counts["checked"] == self.counts["skipped"]

    @property
    def folder(self) -> Path:
        """The former name of `path`."""
        return self.path

    def __repr__(self) -> str:
        verdicts = ("pass", "fail", "crashed", "skipped")
        shown = ", ".join(f"{self.counts[each]} {each}" for each in verdicts if self.counts[each])
        calls = count(self.counts["calls"], "call")
        return f"<Checked {self.path}: {calls}, {shown or 'none checked'}>"

    def _repr_html_(self) -> str:
        return html_of(self)


@keywords(output="path", timeout_s="timeout")
def check(
    capture: str | os.PathLike[str] | Capture,
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    against: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    every: bool = False,
    jobs: int = 1,
    timeout: float = 120.0,
    references: str | os.PathLike[str] | None = None,
    imports: Sequence[str | os.PathLike[str]] = (),
    peer_tables: bool = False,
    restart: bool = False,
    step: int | None = None,
    rank: int | None = None,
    sim_npu: bool = False,
    progress: Progress | None = None,
) -> Checked:
    """Run each recorded call alone on `device` and hold it against a reference on the CPU.

        checked = tp.check("runs/npu", "check/npu", device="npu", jobs=4)
        [row.name for row in checked.rows if row.verdict == "fail"]

    `against` is a capture of a benchmark device, or the output of a check there. Calls that crash
    or hang (`timeout` seconds for one) are marked and the rest goes on; run it again with the same
    `path` to take it up. `jobs` is the number of processes.
    `imports` are packages whose operators, functions and modules may be called besides torch's.
    With `sim_npu` the device npu is the simulated one.
    """
    if jobs < 1:
        raise BadUsage(f"jobs={jobs}: expected 1 or more")
    if timeout <= 0:
        raise BadUsage(f"timeout={timeout}: expected a number of seconds above 0")
    tables = TABLES.module("peers") if peer_tables else None
    folder = Path(path)
    run = capture if isinstance(capture, Capture) else load(capture)
    check_output(folder, run.path)
    planned = plan(run, only=only, skip=skip, every=every, step=step, rank=rank)
    if not planned:
        raise BadUsage(f"no call of '{run.path}' is left to check: see `only` and `skip`")
    about = {
        "capture": str(run.path),
        "device": device,
        "against": None if against is None else str(against),
        "every": every,
    }
    results = CheckResults(folder, about, restart=restart)
    kept = {key: row for key, row in results.rows.items() if _is_done(row, peer_tables)}
    if imports or references is not None:  # they may be what a skipped call lacked
        kept = {key: row for key, row in kept.items() if row.verdict != "skipped"}
    todo = [each for each in planned if _key(each) not in kept]
    benchmark = _Benchmark(against)
    setting = Setting(
        device=device,
        references=None if references is None else Path(references),
        imports=tuple(each if isinstance(each, str) else Path(each) for each in imports),
        processes=jobs,
        peer_metrics=peer_tables,
        sim_npu=sim_npu,
    )
    tasks = [Task(number, each.pair, benchmark.pair(each.pair)) for number, each in enumerate(todo)]
    done = len(planned) - len(todo)
    pool = Pool(setting, jobs, timeout)
    for task, row in pool.run(tasks) if tasks else ():
        row.alike = todo[task.number].alike
        benchmark.excuse(row)
        row.repro = _repro(run.path, row, imports)
        results.add(row)
        done += 1
        if progress is not None:
            progress(done, len(planned), row)
    notes = differing(run.facts, pool.facts, device)
    counts = results.finish(sum(each.alike + 1 for each in planned), notes)
    rows = ordered(results.rows.values())
    if tables is not None:
        tables.write_tables(folder, rows)
    write_page("check", folder)
    return Checked(folder, rows, counts, notes)


def _is_done(row: Row, peer_tables: bool) -> bool:
    """Whether a row is kept; one that was made without the peers' measures lacks them."""
    if row.reference == "its distribution":
        return True
    return not peer_tables or all(tensor.peer is not None for tensor in row.tensors)


def _key(planned: Planned) -> tuple[int, int, str]:
    call = planned.pair.forward
    return call.step, call.rank, call.name


def _repro(capture: Path, row: Row, imports: Sequence[str | os.PathLike[str]]) -> str:
    if row.verdict not in ("fail", "crashed") and not row.recorded:
        return ""
    folder = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "_", row.name)  # a name is no path
    words = ["tensorprobe", "repro", str(capture), row.name, "-o", f"repro/{folder}"]
    if row.step:
        words += ["--step", str(row.step)]
    if row.rank:
        words += ["--rank", str(row.rank)]
    if row.op.startswith("torch.ops.") or not row.op.startswith("torch."):
        for each in imports:
            words += ["--import", str(each)]
    return shlex.join(words)


class _Benchmark:
    """A second device: its capture, or the result of a check there."""

    def __init__(self, against: str | os.PathLike[str] | None) -> None:
        self._pairs: dict[tuple[int, int, str], ForwardBackward] = {}
        self._tensors: dict[str, dict[str, dict[str, Any]]] = {}
        if against is None:
            return
        if (Path(against) / "check.json").is_file():
            self._tensors = benchmark_tensors(Path(against))
        else:
            for each in pair(load(against).calls):
                key = (each.forward.step, each.forward.rank, each.forward.name)
                self._pairs[key] = each

    def pair(self, of: ForwardBackward) -> ForwardBackward | None:
        call = of.forward
        return self._pairs.get((call.step, call.rank, call.name))

    def excuse(self, row: Row) -> None:
        """Let pass what the benchmark device does as well."""
        there = self._tensors.get(row.name)
        if there is None or row.verdict not in ("pass", "fail"):
            return
        hold_against(row.tensors, {name: tensor["error"] for name, tensor in there.items()})
        for judgement in row.tensors:
            judgement.benchmark_peer = there.get(judgement.name, {}).get("peer")
        if row.verdict == "fail" and all(judgement.ok for judgement in row.tensors):
            row.verdict = "pass"
            row.reason = next((j.reason for j in row.tensors if j.reason), "")
