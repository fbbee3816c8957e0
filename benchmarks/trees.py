"""Step time while recording with the sources of two trees, in turn on one machine.

    python benchmarks/trees.py --old FOLDER --device cuda --dtype bfloat16 --size large

FOLDER holds an older `tensorprobe/`: `git archive REVISION src | tar x -C OUT` makes OUT/src. Each
tree has a process of its own with the same model. It builds its parts in C++ and then measures when
it is told to, so only one of them works at a time. Every measurement is told as it is made, the
table of medians after every round: a run that is cut off has told something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

NEW = Path(__file__).parents[1] / "src"
WARM = 2
Ratios = dict[tuple[str, str], list[list[float]]]  # by row and tree: of each round


def serve(args: argparse.Namespace) -> None:
    """Measure one row for each line that is read; what is found is one line of JSON."""
    builds = [
        subprocess.Popen([sys.executable, "-m", f"tensorprobe.{name}"], stdout=sys.stderr)
        for name in ("native.build", args.tally)
    ]
    from recording import SIZES, build, in_a_row, timed

    _, step = build(SIZES[args.size], args.device, args.dtype)
    timed(step, 3, args.device)
    for process in builds:
        process.wait()

    import tensorprobe as tp
    from tensorprobe import native

    def measure(one_step) -> list[float]:
        alone = statistics.median(timed(one_step, args.steps, args.device))
        return [in_a_row(one_step, args.steps, args.device), alone]

    def record(level: str, keep: str, *, is_trial: bool = False) -> list[float]:
        folder = tempfile.mkdtemp()
        try:
            with tp.Recorder(f"{folder}/run", level=level, keep=keep, log=lambda text: None) as rec:

                def whole() -> None:
                    step()
                    rec.step()

                timed(whole, WARM, args.device)
                return [] if is_trial else measure(whole)
        finally:
            shutil.rmtree(folder)

    for row in args.rows:
        record(*row.split(":"), is_trial=True)  # kernels are compiled
    way = "Python" if native.MODULE is None else "C++"
    print(json.dumps({"file": tp.__file__, "way": way}), flush=True)
    for line in sys.stdin:
        timed(step, 1, args.device)
        bare = measure(step)
        print(json.dumps({"bare": bare, "recorded": record(*line.strip().split(":"))}), flush=True)


def start(tree: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    tally = "tensors.build_tally" if (tree / "tensorprobe/tensors").is_dir() else "numerics.build"
    command = [sys.executable, __file__, "--serve", "--tally", tally, *sys.argv[1:]]
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> dict:
    line = process.stdout.readline()
    if not line:
        sys.exit(f"the process of a tree has ended with status {process.wait()}")
    return json.loads(line)


def table(rows: list[str], found: Ratios) -> str:
    lines = ["| row | rounds | in a row, old | new | more | alone, old | new | more |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        old, new = (
            [statistics.median(kind) for kind in zip(*found[row, tree], strict=True)]
            for tree in ("old", "new")
        )
        cells = [row, str(len(found[row, "new"]))]
        for before, now in zip(old, new, strict=True):
            cells += [f"{before:.3f}x", f"{now:.3f}x", f"{now - before:+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True, help="a folder with tensorprobe/ in it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="small", help="as of recording.py")
    parser.add_argument("--rows", nargs="+", default=["L0:stats", "L1:stats", "mix:stats"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=3600, help="seconds; begins nothing later")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tally", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    began = time.monotonic()
    trees = {"old": args.old.resolve(), "new": NEW}
    processes = {name: start(tree, args) for name, tree in trees.items()}
    try:
        for name, process in processes.items():
            ready = answer(process)
            print(
                f"{time.monotonic() - began:5.0f} s {name}: {ready['way']}, {ready['file']}",
                flush=True,
            )
        found: Ratios = defaultdict(list)
        for number in range(args.rounds):
            order = ("old", "new") if number % 2 == 0 else ("new", "old")
            for row in args.rows:
                if time.monotonic() - began > args.limit:
                    break
                for name in order:
                    processes[name].stdin.write(f"{row}\n")
                    processes[name].stdin.flush()
                    times = answer(processes[name])
                    ratios = [b / a for a, b in zip(times["bare"], times["recorded"], strict=True)]
                    found[row, name].append(ratios)
                    bare = times["bare"][0] * 1e3
                    print(
                        f"{time.monotonic() - began:5.0f} s {row} {name}: {bare:.1f} ms without, "
                        f"{ratios[0]:.3f}x in a row, {ratios[1]:.3f}x alone",
                        flush=True,
                    )
            done = [row for row in args.rows if found[row, "new"]]
            print(table(done, found), flush=True)
    finally:
        for process in processes.values():
            process.kill()


if __name__ == "__main__":
    main()
