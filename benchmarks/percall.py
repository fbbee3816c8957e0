"""What one recorded call costs the program, where Python dominates: a small Llama, batch 1.

    python benchmarks/percall.py
    python benchmarks/percall.py --device cuda --levels L1 --keeps stats
    python benchmarks/percall.py --levels L1 --keeps stats --profile 25
    python benchmarks/percall.py --levels L1 --keeps stats --callgrind     (needs valgrind)

Each row is the difference to the same step without the tool, over the calls of a step, forward and
backward counted alike. `wall` is what the program waits, the least of many steps, bare and recorded
steps in turn. `thread` is the processor time of the program's own threads (backward's too) and
`writer` that of the thread which writes, both the mean over all steps. `--profile` shows the
functions in which the program's thread spends it, `--callgrind` counts instructions, which no
neighbour on the machine disturbs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from recording import SIZES, halves

STEPS = 5  # counted by callgrind


class Program(NamedTuple):
    """A training step in two halves."""

    forward: Callable[[], object]
    backward: Callable[[object], None]


def build(size: str, device: str, dtype: str) -> Program:
    """A small Llama: of 32000 words the logits would be all of the step."""
    _, forward, backward = halves(SIZES[size], device, dtype, vocabulary=512)
    return Program(forward, backward)


def run(program: Program, sync: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the two halves of one step."""
    began = time.perf_counter()
    loss = program.forward()
    sync()
    middle = time.perf_counter()
    program.backward(loss)
    sync()
    return middle - began, time.perf_counter() - middle


def thread_s() -> dict[int, float]:
    """Processor seconds of each thread of this process, by its id. Linux."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds = (task / "schedstat").read_text().split()[0]
            found[int(task.name)] = int(nanoseconds) / 1e9
    return found


def writer_id() -> int | None:
    import threading

    for thread in threading.enumerate():
        if thread.name == "tensorprobe writer":
            return thread.native_id
    return None


class Timing(NamedTuple):
    """Seconds of one step."""

    forward: float
    backward: float
    own_cpu: float
    writer_cpu: float


def timed(
    program: Program, steps: int, sync: Callable[[], None], after: Callable[[], None]
) -> Timing:
    before = thread_s()
    halves = []
    for _ in range(steps):
        halves.append(run(program, sync))
        after()
    time.sleep(0.3)  # lets the writer come to its end
    spent = {task: s - before.get(task, 0.0) for task, s in thread_s().items()}
    writer = spent.pop(writer_id(), 0.0)
    forward, backward = (min(half) for half in zip(*halves, strict=True))
    return Timing(forward, backward, sum(spent.values()) / steps, writer / steps)


def synchronizer(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


@contextlib.contextmanager
def recording(args: argparse.Namespace, level: str, keep: str) -> Iterator[object]:
    import tensorprobe as tp

    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    recorder = tp.Recorder(
        folder / "run", level=level, keep=keep, stacks=args.stacks, log=lambda text: None
    )
    try:
        with recorder:
            yield recorder
    finally:
        shutil.rmtree(folder)


def count_calls(program: Program, args: argparse.Namespace, level: str) -> tuple[int, int]:
    """Forward and backward calls of a step."""
    import tensorprobe as tp

    with recording(args, level, "structure") as recorder:
        program.backward(program.forward())
        recorder.stop()
        calls = tp.load(recorder.path).calls
    backward = sum(call.direction == "backward" for call in calls)
    return len(calls) - backward, backward


def measure(program: Program, args: argparse.Namespace, level: str, keep: str) -> dict:
    sync = synchronizer(args.device)
    n_forward, n_backward = count_calls(program, args, level)
    bare, recorded = [], []
    with recording(args, level, keep) as recorder:

        def rounds() -> None:
            recorder.stop()
            bare.append(timed(program, args.steps, sync, lambda: None))
            recorder.start()
            program.backward(program.forward())  # opens the files, starts the thread
            recorder.step()
            recorded.append(timed(program, args.steps, sync, recorder.step))

        for _ in range(args.rounds):
            rounds()
    calls = n_forward + n_backward

    def least(timings: list[Timing]) -> Timing:
        return Timing(*(min(values) for values in zip(*timings, strict=True)))

    off, on = least(bare), least(recorded)
    extra = Timing(*((b - a) * 1e6 for a, b in zip(off, on, strict=True)))
    return {
        "level": level,
        "keep": keep,
        "calls": calls,
        "bare_ms": (off.forward + off.backward) * 1e3,
        "wall_us": (extra.forward + extra.backward) / calls,
        "forward_us": extra.forward / max(n_forward, 1),
        "backward_us": extra.backward / max(n_backward, 1),
        "thread_us": extra.own_cpu / calls,
        "writer_us": extra.writer_cpu / calls,
    }


def profile(program: Program, args: argparse.Namespace, level: str, keep: str) -> None:
    """The functions by the time spent in themselves; that of a program without the tool too."""
    with recording(args, level, keep) as recorder:
        program.backward(program.forward())
        recorder.step()
        profiler = cProfile.Profile()
        calls = recorder._writer.n_calls
        profiler.enable()
        for _ in range(args.steps):
            program.backward(program.forward())
            recorder.step()
        profiler.disable()
        calls = recorder._writer.n_calls - calls
    stats = pstats.Stats(profiler).stats
    print(f"\n{level} {keep}: functions by own time, a recorded call")
    print(f"| {'us':>6} | {'times':>6} | function |\n| ---: | ---: | --- |")
    rows = sorted(stats.items(), key=lambda item: -item[1][2])
    for (file, line, name), (_, times, own, _, _) in rows[: args.profile]:
        where = "/".join(file.split(os.sep)[-2:]) + f":{line} " if line else ""
        print(f"| {own / calls * 1e6:6.2f} | {times / calls:6.2f} | {where}{name} |")


def callgrind(args: argparse.Namespace, level: str, keep: str) -> int:
    """Instructions of STEPS steps, counted in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    child = {**vars(args), "levels": [level], "keeps": [keep], "child": True}
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=no"]
    command += [f"--callgrind-out-file={folder}/out.%p", sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PERCALL_CHILD": json.dumps(child)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    counts = [
        int(line.split()[1])
        for path in folder.iterdir()
        for line in path.read_text().splitlines()
        if line.startswith("totals:")
    ]
    shutil.rmtree(folder)
    return max(counts, default=0)


def counted_child(args: argparse.Namespace) -> None:
    """Runs inside valgrind: counts STEPS steps, recorded unless the keep is 'none'."""
    program = build(args.size, args.device, args.dtype)
    level, keep = args.levels[0], args.keeps[0]
    context = contextlib.nullcontext() if keep == "none" else recording(args, level, keep)
    with context as recorder:

        def step() -> None:
            program.backward(program.forward())
            if recorder is not None:
                recorder.step()

        step()
        step()
        gc.collect()
        switch = ["callgrind_control", "-i"]
        subprocess.run([*switch, "on", str(os.getpid())], check=True, capture_output=True)
        for _ in range(STEPS):
            step()
        if recorder is not None:
            recorder._writer.drain()
        subprocess.run([*switch, "off", str(os.getpid())], check=True, capture_output=True)


COLUMNS = ["wall", "forward", "backward", "thread", "writer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="launch", choices=SIZES)
    parser.add_argument("--levels", nargs="*", default=["L0", "L1", "mix", "L2"])
    parser.add_argument("--keeps", nargs="*", default=["structure", "stats", "digest"])
    parser.add_argument("--stacks", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--steps", type=int, default=15, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=4, help="bare and recorded steps in turn")
    parser.add_argument("--profile", type=int, default=0, help="how many functions to show")
    parser.add_argument("--callgrind", action="store_true", help="count instructions")
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if "PERCALL_CHILD" in os.environ:
        counted_child(argparse.Namespace(**json.loads(os.environ["PERCALL_CHILD"])))
        return
    program = build(args.size, args.device, args.dtype)
    for _ in range(3):
        program.backward(program.forward())
    rows = []
    print(f"{args.size} Llama on {args.device}; us a recorded call, stacks {args.stacks}")
    print(f"| level | keep | calls | no tool | {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * (len(COLUMNS) + 4)}", flush=True)
    for level in args.levels:
        for keep in args.keeps:
            row = measure(program, args, level, keep)
            rows.append(row)
            cells = [f"{row[column + '_us']:.1f}" for column in COLUMNS]
            cells = [level, keep, str(row["calls"]), f"{row['bare_ms']:.1f} ms", *cells]
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.callgrind:
        bare = callgrind(args, "L1", "none")
        print("\ninstructions a recorded call, all threads")
        for row in rows:
            count = callgrind(args, row["level"], row["keep"])
            row["instructions"] = (count - bare) / STEPS / row["calls"]
            print(f"{row['level']} {row['keep']}: {row['instructions']:.0f}", flush=True)
    if args.profile:
        for row in rows:
            profile(program, args, row["level"], row["keep"])
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
