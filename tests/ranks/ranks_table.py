"""Runs the programs of ranks and writes docs/ranks.md: python tests/ranks/ranks_table.py"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import tensorprobe as tp  # noqa: E402 - found by the line above
from ranks.other_layouts import FAULTS, OTHER_LAYOUTS  # noqa: E402

BEGIN, END = "<!-- table of tests/ranks/ranks_table.py -->", "<!-- end of the table -->"
BEGIN_OTHER = "<!-- table of other layouts -->"
END_OTHER = "<!-- end of other layouts -->"
NOT_NOISY = ("one_dp", "one_cp", "one_pp")  # these record without noise
WORLD = 4
# Program and fault; what must be named: rank, step, call, cause. None: a healthy pair.
CASES: list[tuple[str, str, str, tuple[int, int, str, str] | None]] = [
    ("own all_reduce", "manual", "again", None),
    ("own all_reduce", "manual", "kernel", (2, 0, "Functional.linear.1.forward", "result")),
    ("own all_reduce", "manual", "member op",
     (2, 0, "Distributed.all_reduce.0.forward", "argument")),
    ("own all_reduce", "manual", "reduce op",
     (0, 0, "Distributed.all_reduce.0.forward", "argument")),
    ("own all_reduce", "manual", "lost bucket",
     (0, 0, "Distributed.all_reduce.1.forward", "structure")),
    ("own all_reduce", "manual", "stale", (2, 0, "Module.second.Linear.forward.0", "weights")),
    ("own all_reduce", "dropout", "seed", (1, 0, "Functional.dropout.0.forward", "seed")),
    ("own all_reduce", "nan", "nan", (1, 1, "Torch.log.0.forward", "result")),
    ("DDP", "ddp", "again", None),
    ("DDP", "ddp", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("DDP", "ddp", "hook", (0, 0, "Module.module.first.Linear.parameters_grad.0", "boundary")),
    ("Megatron TP", "tp", "again", None),
    ("Megatron TP", "tp", "kernel", (2, 0, "Functional.gelu.1.forward", "result")),
    ("FSDP2", "fsdp2", "again", None),
    ("FSDP2", "fsdp2", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("DTensor TP", "dtensor", "again", None),
    ("DTensor TP", "dtensor", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("functional collectives", "functional", "again", None),
    ("functional collectives", "functional", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("two groups", "groups", "again", None),
    ("two groups", "groups", "kernel", (3, 0, "Functional.gelu.0.forward", "result")),
    ("pipeline, send and recv", "pipeline", "again", None),
    ("pipeline, send and recv", "pipeline", "kernel", (1, 0, "Torch.tanh.0.forward", "result")),
    ("isend and irecv", "messages", "again", None),
    ("isend and irecv", "messages", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("each collective", "broken", "again", None),
    ("each collective", "broken", "all_reduce",
     (1, 1, "Distributed.all_reduce.0.forward", "result")),
    ("FSDP1", "fsdp1", "again", None),
    ("FSDP1", "fsdp1", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("FSDP1", "fsdp1", "stale", (2, 0, "Distributed.all_gather.0.forward", "weights")),
    ("FSDP1", "fsdp1", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("FSDP1", "fsdp1_hook", "lost bucket",
     (0, 0, "Distributed.reduce_scatter_single.0.forward", "structure")),
    ("FSDP1", "fsdp1_hook", "reduce op",
     (0, 0, "Distributed.reduce_scatter_single.0.forward", "argument")),
    ("FSDP2", "fsdp2", "stale", (2, 0, "Module.first.FSDPLinear.forward.0", "weights")),
    ("FSDP2", "fsdp2", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("FSDP2", "fsdp2", "lost bucket", (0, 0, "Optimizer.SGD.step.0", "structure")),
    ("FSDP2", "fsdp2", "reduce op",
     (0, 0, "Distributed.reduce_scatter_single.1.forward", "argument")),
    ("sequence parallel", "sp", "again", None),
    ("sequence parallel", "sp", "kernel", (2, 0, "Functional.gelu.1.forward", "result")),
    ("sequence parallel", "sp", "stale", (2, 0, "Module.1.norm.LayerNorm.forward.0", "weights")),
    ("sequence parallel", "sp", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("sequence parallel", "sp", "lost bucket",
     (0, 0, "Distributed.all_reduce.2.forward", "structure")),
    ("sequence parallel", "sp", "reduce op",
     (0, 0, "Distributed.reduce_scatter_single.2.forward", "argument")),
    ("DTensor sequence parallel", "dtensor_sp", "again", None),
    ("DTensor sequence parallel", "dtensor_sp", "kernel",
     (2, 0, "Torch.tanh.0.forward", "result")),
    ("DTensor sequence parallel", "dtensor_sp", "stale",
     (2, 0, "Module.up.Linear.forward.0", "weights")),
    ("DTensor sequence parallel", "dtensor_sp", "tf32",
     (2, 0, "Functional.linear.0.forward", "flag")),
    ("2D, FSDP2 x TP", "2d", "again", None),
    ("2D, FSDP2 x TP", "2d", "kernel", (2, 0, "Torch.tanh.1.forward", "result")),
    ("2D, FSDP2 x TP", "2d", "stale",
     (2, 0, "Ops.fsdp.all_gather_copy_in.1.forward", "weights")),
    ("2D, FSDP2 x TP", "2d", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("2D, FSDP2 x TP", "2d", "lost bucket", (0, 0, "Optimizer.SGD.step.0", "structure")),
    ("2D, FSDP2 x TP", "2d", "reduce op",
     (0, 0, "Distributed.reduce_scatter_single.0.forward", "argument")),
    ("expert parallel", "ep", "again", None),
    ("expert parallel", "ep", "kernel", (2, 0, "Torch.tanh.1.forward", "result")),
    ("expert parallel", "ep", "expert", (2, 0, "Module.0.experts.0.Linear.forward.0", "weights")),
    ("expert parallel", "ep", "stale", (2, 0, "Module.1.Linear.forward.0", "weights")),
    ("expert parallel", "ep", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("expert parallel", "ep", "lost bucket",
     (0, 0, "Distributed.all_reduce.1.forward", "structure")),
    ("expert parallel", "ep", "reduce op",
     (0, 0, "Distributed.all_reduce.1.forward", "argument")),
    ("context parallel", "cp", "again", None),
    ("context parallel", "cp", "kernel", (2, 0, "Torch.tanh.0.forward", "result")),
    ("context parallel", "cp", "positions", (2, 0, "Module.ContextNet.forward.0", "data")),
    ("context parallel", "cp", "stale",
     (2, 0, "Module.layers.1.qkv.Linear.forward.0", "weights")),
    ("context parallel", "cp", "tf32", (2, 0, "Functional.linear.0.forward", "flag")),
    ("context parallel", "cp", "lost bucket",
     (0, 0, "Distributed.all_reduce.12.forward", "structure")),
    ("context parallel", "cp", "reduce op",
     (0, 0, "Distributed.reduce_scatter_single.0.forward", "argument")),
    ("GPipe", "gpipe", "again", None),
    ("GPipe", "gpipe", "kernel", (2, 0, "Torch.tanh.1.forward", "result")),
    ("GPipe", "gpipe", "stale", (2, 0, "Module.0.Linear.forward.0", "weights")),
    ("GPipe", "gpipe", "tf32", (2, 0, "Functional.linear.1.forward", "flag")),
    ("1F1B", "1f1b", "again", None),
    ("1F1B", "1f1b", "kernel", (2, 0, "Torch.tanh.1.forward", "result")),
    ("1F1B", "1f1b", "stale", (2, 0, "Module.0.Linear.forward.0", "weights")),
    ("1F1B", "1f1b", "tf32", (2, 0, "Functional.linear.1.forward", "flag")),
]  # fmt: skip
KEEPS = ("tensors", "stats")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-page", action="store_true", help="print the table only")
    parser.add_argument("--only", choices=("same", "other"), help="one of the two tables")
    parser.add_argument("--ranks", type=int, default=WORLD)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = [] if args.only == "other" else _lines(Path(folder), args.ranks)
        others = [] if args.only == "same" else _other_lines(Path(folder))
    sys.stdout.write("\n".join([*lines, *others]) + "\n")
    if not args.no_page:
        page = ROOT / "docs" / "ranks.md"
        for marks, made in (((BEGIN, END), lines), ((BEGIN_OTHER, END_OTHER), others)):
            if made:
                text = page.read_text()
                before, after = text.partition(marks[0])[0], text.partition(marks[1])[2]
                page.write_text("\n".join([before + marks[0], *made, marks[1]]) + after)
    return 0


def _launch(folder: Path, world: int, runs: list[str]) -> None:
    launcher = ROOT / "tests" / "ranks" / "launch_ranks.py"
    command = [sys.executable, "-W", "ignore", str(launcher), str(folder), str(world), *runs]
    subprocess.run(command, check=True)


def _lines(folder: Path, world: int) -> list[str]:
    runs = {
        f"{program}/{name}/{keep}"
        for _, program, fault, _ in CASES
        for name in ("healthy", fault)
        for keep in KEEPS
    }
    _launch(folder, world, sorted(runs))
    found = ["", "| layout | planted | tensors | stats |", "|---|---|---|---|"]
    right = dict.fromkeys(KEEPS, 0)
    for layout, program, fault, expected in CASES:
        cells = []
        for keep in KEEPS:
            actual = folder / f"{program}-{fault}-{keep}"
            verdict = tp.compare(actual, folder / f"{program}-healthy-{keep}").verdict
            cell = _cell(verdict, expected)
            right[keep] += cell.startswith("right")
            cells.append(cell)
        planted = "nothing, other noise" if expected is None else fault
        found.append(f"| {layout} | {planted} | {cells[0]} | {cells[1]} |")
    total = len(CASES)
    found += ["", ", ".join(f"{keep}: {n} of {total} right" for keep, n in right.items()), ""]
    return found


def _other_lines(folder: Path) -> list[str]:
    """Runs on two and on four ranks against one process; tensors are needed for that."""
    healthy = [f"{name}/healthy" for name in OTHER_LAYOUTS]
    noisy = [f"{name}/noise" for name in OTHER_LAYOUTS if name not in NOT_NOISY]
    of_four = [name for name in healthy if not name.startswith("one_pp")]
    for world, runs in (1, healthy), (2, [*healthy, *noisy, *FAULTS]), (4, of_four):
        _launch(folder / str(world), world, runs)
    found = ["", "| program | planted | two ranks | four ranks |", "|---|---|---|---|"]
    right = total = 0
    for name in OTHER_LAYOUTS:
        one = folder / "1" / f"{name}-healthy"
        planted = [each for each in (*healthy, *noisy, *FAULTS) if each.startswith(f"{name}/")]
        for each in planted:
            cells = []
            for world in (2, 4):
                run = folder / str(world) / each.replace("/", "-")
                if run.exists():
                    cells.append(_other_cell(tp.compare(run, one).verdict, FAULTS.get(each)))
            right += sum(cell.startswith("right") for cell in cells)
            total += len(cells)
            words = (OTHER_LAYOUTS[name].__doc__ or "").partition(".")[0].replace("\n   ", "")
            what = each.partition("/")[2].replace("healthy", "nothing")
            what = what.replace("noise", "nothing, other noise")
            found.append(f"| {words} | {what} | {' | '.join([*cells, ''][:2])} |")
    return [*found, "", f"{right} of {total} right", ""]


def _other_cell(verdict: tp.Verdict, expected: tuple[int, str, str] | None) -> str:
    if expected is None:
        return f"{'right' if verdict.verdict == 'match' else 'WRONG'}: {verdict.verdict}"
    if not verdict.culprits:
        return f"WRONG: {verdict.verdict}"
    first = verdict.culprits[0]
    is_right = (first.rank, first.cause) == expected[:2] and expected[2] in first.reason
    words = f"rank {first.rank}, {first.cause}: {first.reason[:80]} ..."
    return f"{'right' if is_right else 'WRONG'}: {words}"


def _cell(verdict: tp.Verdict, expected: tuple[int, int, str, str] | None) -> str:
    if not verdict.culprits:
        return f"right: {verdict.verdict}" if expected is None else f"WRONG: {verdict.verdict}"
    first = verdict.culprits[0]
    said = first.rank, first.step, first.name, first.cause
    words = f"rank {first.rank}, {first.name}, {first.cause}"
    return f"right: {words}" if said == expected else f"WRONG: {words}"


if __name__ == "__main__":
    sys.exit(main())
