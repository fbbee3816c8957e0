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

BEGIN, END = "<!-- table of tests/ranks/ranks_table.py -->", "<!-- end of the table -->"
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
]  # fmt: skip
KEEPS = ("tensors", "stats")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-page", action="store_true", help="print the table only")
    parser.add_argument("--ranks", type=int, default=WORLD)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = list(_lines(Path(folder), args.ranks))
    sys.stdout.write("\n".join(lines) + "\n")
    if not args.no_page:
        page = ROOT / "docs" / "ranks.md"
        text = page.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        page.write_text("\n".join([before + BEGIN, *lines, END]) + after)
    return 0


def _lines(folder: Path, world: int) -> list[str]:
    runs = {
        f"{program}/{name}/{keep}"
        for _, program, fault, _ in CASES
        for name in ("healthy", fault)
        for keep in KEEPS
    }
    launcher = ROOT / "tests" / "ranks" / "launch_ranks.py"
    subprocess.run(
        [sys.executable, str(launcher), str(folder), str(world), *sorted(runs)], check=True
    )
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


def _cell(verdict: tp.Verdict, expected: tuple[int, int, str, str] | None) -> str:
    if not verdict.culprits:
        return f"right: {verdict.verdict}" if expected is None else f"WRONG: {verdict.verdict}"
    first = verdict.culprits[0]
    said = first.rank, first.step, first.name, first.cause
    words = f"rank {first.rank}, {first.name}, {first.cause}"
    return f"right: {words}" if said == expected else f"WRONG: {words}"


if __name__ == "__main__":
    sys.exit(main())
