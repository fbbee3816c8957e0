"""How fast captures are compared: bytes a second, rows of statistics, calls aligned.

    python benchmarks/compare.py [metrics|rows|align|capture]... [--peer-python PYTHON]
    python benchmarks/compare.py scaling --jobs 1 2 4 8 16 --gb 8

Bars: ten times as fast as the peer on the same data; 1.5 GB/s a core (bytes of both sides, float32,
warm); 100,000 rows of statistics compared and written in 3 s; 100,000 calls a side aligned in
seconds. Where others use the machine, CPU time says more than wall time; both are printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from tensorprobe.comparing.align import align
from tensorprobe.errors import TensorprobeError
from tensorprobe.records import Call, Capture, TensorRecord, TensorSummary
from tensorprobe.report.saving import compare
from tensorprobe.store.loading import load
from tensorprobe.tensors.metrics import measure_pair

N_ROWS = 100_000
N_TENSORS, TENSOR = 128, 1 << 20  # of each side: half a gigabyte


class Clock:
    wall_s = cpu_s = 0.0

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} s wall, {self.cpu_s:.2f} s CPU"


@contextmanager
def timed() -> Iterator[Clock]:
    clock = Clock()
    wall, cpu = time.perf_counter(), time.process_time()
    yield clock
    clock.wall_s, clock.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def metrics() -> None:
    """Array pairs in memory, one thread."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(4 << 20).astype(np.float32)
    actual = expected * (1 + 1e-6 * rng.standard_normal(expected.size).astype(np.float32))
    for name, dtype in (
        ("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16),
        ("float64", np.float64),
    ):  # fmt: skip
        a, e = actual.astype(dtype), expected.astype(dtype)
        best = Clock()
        best.wall_s = best.cpu_s = 1e9
        for _ in range(7):
            with timed() as clock:
                measure_pair(a, e)
            best.wall_s, best.cpu_s = (
                min(best.wall_s, clock.wall_s), min(best.cpu_s, clock.cpu_s),
            )  # fmt: skip
        gb = (a.nbytes + e.nbytes) / 1e9
        print(
            f"metrics {name:9} {gb / best.wall_s:5.2f} GB/s wall  {gb / best.cpu_s:5.2f} GB/s CPU"
        )


def program(n_calls: int, shift: float, seed: int = 0) -> list[Call]:
    """Calls with two inputs and two outputs, statistics only, each feeding the next."""
    rng = random.Random(seed)
    calls = []
    before = 1.0
    for i in range(n_calls):
        name = f"Functional.linear.{i}.forward"
        after = rng.uniform(1, 2) * (1 + shift * rng.uniform(-1, 1))
        values = (("input.0", before), ("input.1", 1.0 + i), ("output.0", after), ("output.1", 2.0))
        tensors = tuple(
            TensorRecord(
                f"{name}.{suffix}", "input" if suffix < "j" else "output", "float32", (64, 64),
                summary=TensorSummary(-v, v, v / 9, v * 30, 0, 0, 0),
            )
            for suffix, v in values
        )  # fmt: skip
        before = after
        calls.append(
            Call(index=i, name=name, op="torch.nn.functional.linear", module=f"layers.{i // 20}",
                 args=tensors[:2], outputs=tensors[2:], tensors=tensors)
        )  # fmt: skip
    return calls


def rows() -> None:
    """Statistics compared, judged, and written as csv and json."""
    sides = [
        Capture(Path(name), "native", program(N_ROWS // 4, shift))
        for name, shift in (("a", 1e-8), ("e", 0.0))
    ]
    with tempfile.TemporaryDirectory() as folder, timed() as clock:
        compare(*sides).save(folder)
    print(f"rows {N_ROWS} {clock.wall_s:.2f} s wall  {clock.cpu_s:.2f} s CPU")


def aligning() -> None:
    calls = program(N_ROWS, 0.0)
    gone = set(random.Random(1).sample(range(N_ROWS), 2000))
    expected = [call for i, call in enumerate(calls) if i not in gone]
    with timed() as clock:
        pairs = align(calls, expected)
    wrong = sum(a is not e for a, e, _ in pairs if a and e)
    print(f"align {N_ROWS} calls, 2000 missing: {clock}, {wrong} mispaired")


def capture(peer_python: str | None = None) -> None:
    """Two runs of half a gigabyte each, on all cores, as a user runs it; beside it the peer."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = [Path(folder) / name for name in ("actual", "expected")]
        write_dumps(dumps)
        runs = dumps if reads_dumps(dumps[0]) else write_captures(dumps)
        nbytes = 2 * N_TENSORS * TENSOR * 4
        ours = timed_command(
            [sys.executable, "-m", "tensorprobe", "compare", *map(str, runs), "-o", f"{folder}/out"]
        )
        what = "the same files" if runs == dumps else "the same tensors in its own format"
        print(f"capture 2 x {nbytes / 2e9:.2f} GB: {ours} , {nbytes / 1e9 / ours.wall_s:.2f} GB/s")
        if peer_python is None:
            return
        command = [peer_python, "-m", "msprobe.msprobe", "compare", "-tp",
                   str(dumps[0] / "dump.json"), "-gp", str(dumps[1] / "dump.json"), "-o",
                   f"{folder}/peer"]  # fmt: skip
        peer = timed_command(command)
        print(f"peer    2 x {nbytes / 2e9:.2f} GB: {peer}; tensorprobe read {what}")
        print(f"ratio   {peer.wall_s / ours.wall_s:.1f}x wall, {peer.cpu_s / ours.cpu_s:.1f}x CPU")


def timed_command(command: list[str]) -> Clock:
    """A process and its children, from start to end."""
    clock = Clock()
    before = os.times()
    wall = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    clock.wall_s = time.perf_counter() - wall
    after = os.times()
    clock.cpu_s = sum(after[2:4]) - sum(before[2:4])
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return clock


def write_dumps(folders: list[Path]) -> None:
    """The layout of msprobe: dump.json beside one file a tensor."""
    import torch

    torch.manual_seed(0)
    for folder in folders:
        (folder / "dump_tensor_data").mkdir(parents=True)
    data: dict[str, dict[str, list[object]]] = {}
    for i in range(N_TENSORS // 2):
        name = f"Functional.relu.{i}.forward"
        record: dict[str, list[object]] = {"input_args": [], "output": []}
        for part, label in (("input_args", "input"), ("output", "output")):
            x = torch.randn(TENSOR)
            file = f"{name}.{label}.0.pt"
            for folder, noise in zip(folders, (1e-7, 0.0), strict=True):
                torch.save(
                    x * (1 + noise * torch.randn(TENSOR)), folder / "dump_tensor_data" / file
                )
            record[part].append(
                {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [TENSOR],
                 "Max": x.max().item(), "Min": x.min().item(), "Mean": x.mean().item(),
                 "Norm": x.norm().item(), "requires_grad": False, "data_name": file}
            )  # fmt: skip
        data[name] = {**record, "input_kwargs": {}}  # type: ignore[dict-item]
    for folder in folders:
        tree = {"task": "tensor", "level": "L1", "framework": "pytorch",
                "dump_data_dir": str(folder / "dump_tensor_data"), "data": data}  # fmt: skip
        (folder / "dump.json").write_text(json.dumps(tree))
        (folder / "stack.json").write_text("{}")
        (folder / "construct.json").write_text("{}")


def reads_dumps(folder: Path) -> bool:
    try:
        return load(folder).layout == "msprobe"
    except TensorprobeError:
        return False


def write_captures(dumps: list[Path]) -> list[Path]:
    """The same tensors, recorded."""
    import torch

    import tensorprobe as tp

    runs = []
    for dump in dumps:
        runs.append(dump.with_name(dump.name + "-native"))
        with tp.Recorder(runs[-1], keep="tensors") as recorder:
            for file in sorted((dump / "dump_tensor_data").iterdir()):
                recorder.save(file.stem.replace(".", "_"), torch.load(file))
    return runs


def scaling(args: argparse.Namespace) -> None:
    """The same two captures by ever more processes: the command as a user runs it, and its parts.

    Serial is what the parts other than measuring take. Its share by the times (Karp and Flatt)
    counts as serial also what processes lose by starting, by uneven shares and by the memory. The
    machine's speed-up is of as many processes that measure arrays of their own, in memory, and
    share nothing: two processors of one core have not the speed of two.
    """
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        runs = [Path(folder) / name for name in ("actual", "expected")]
        nbytes = sum(
            write_run(run, int(args.gb * 1e9), args.calls, noise)
            for run, noise in zip(runs, (1e-7, 0.0), strict=True)
        )
        print(f"scaling 2 x {nbytes / 2e9:.2f} GB, {args.calls} calls, {os.cpu_count()} cores")
        titles = ["processes", "command", "GB/s", "speed-up", "efficiency", "serial by times"]
        titles += ["CPU", "measuring", "its speed-up", "the machine's", "of that", "serial"]
        print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
        first: tuple[float, float] | None = None
        alone = measured_apart(1)
        for jobs in args.jobs:
            command = [sys.executable, "-m", "tensorprobe", "compare", *map(str, runs),
                       "-o", f"{folder}/out", "--jobs", str(jobs)]  # fmt: skip
            clocks = [timed_command(command) for _ in range(args.repeats)]
            wall, cpu = min(c.wall_s for c in clocks), min(c.cpu_s for c in clocks)
            parts = min(
                (parts_in_a_process(runs, jobs) for _ in range(args.repeats)),
                key=lambda parts: parts["measure"],
            )
            measured = parts.pop("measure")
            first = first or (wall * jobs, measured * jobs)
            gain, its_gain = first[0] / wall, first[1] / measured
            machine = measured_apart(jobs) / alone
            share = f"{(jobs / gain - 1) / (jobs - 1):.1%}" if jobs > 1 else "-"
            print(
                f"| {jobs} | {wall:.2f} s | {nbytes / 1e9 / wall:.2f} | {gain:.2f}x | "
                f"{gain / jobs:.0%} | {share} | {cpu:.2f} s | {measured:.2f} s | {its_gain:.2f}x | "
                f"{machine:.2f}x | {its_gain / machine:.0%} | {sum(parts.values()):.2f} s: "
                f"{', '.join(f'{k} {s:.2f}' for k, s in parts.items())} |",
                flush=True,
            )


def measured_apart(n: int, seconds: float = 1.5) -> float:
    """Bytes a second that n processes measure, each the same pair again and again."""
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(n), context.SimpleQueue()

    def work() -> None:
        expected = np.random.default_rng(0).standard_normal(4 << 20, np.float32)
        actual = expected * np.float32(1 + 1e-6)
        measure_pair(actual, expected)
        barrier.wait()
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            measure_pair(actual, expected)
            count += 1
        counts.put(count * 2 * expected.nbytes / passed)

    processes = [context.Process(target=work) for _ in range(n)]
    for process in processes:
        process.start()
    speed = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return speed


def parts_in_a_process(runs: list[Path], jobs: int) -> dict[str, float]:
    command = [sys.executable, __file__, "parts", *map(str, runs), str(jobs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def parts_of_a_comparison(actual: str, expected: str, jobs: int) -> dict[str, float]:
    """Seconds of each part of comparing, the first from the start of this process."""
    from tensorprobe.comparing import comparison as room

    seconds = dict.fromkeys(("start", "load", "align", "measure", "judge", "other", "save"), 0.0)

    def watch(function: str, part: str) -> None:
        called = getattr(room, function)

        def watched(*args: object, **options: object) -> object:
            with timed() as clock:
                found = called(*args, **options)
            seconds[part] += clock.wall_s
            return found

        setattr(room, function, watched)

    parts = {"_opened": "load", "_align": "align", "measure": "measure", "_judge": "judge"}
    for function, part in parts.items():
        watch(function, part)
    seconds["start"] = since_start_s()
    with timed() as whole:
        found = compare(actual, expected, jobs=jobs)
    seconds["other"] = whole.wall_s - sum(seconds[part] for part in parts.values())
    with tempfile.TemporaryDirectory() as folder, timed() as saving:
        found.save(folder)
    seconds["save"] = saving.wall_s
    return seconds


def since_start_s() -> float:
    """How long this process has been there."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def write_run(root: Path, nbytes: int, n_calls: int, noise: float) -> int:
    """A run whose tensors have sizes as those of models have: few large ones, many small."""
    from tensorprobe.store.claim import run_identity
    from tensorprobe.store.lines import CallLine, EndLine, TensorLine
    from tensorprobe.store.writer import CaptureWriter

    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(0, 1.6, n_calls))
    sizes = (sizes / sizes.sum() * nbytes / 4).astype(int) + 64
    base = rng.standard_normal(int(sizes.max()) + 4096, np.float32)
    base *= 1 + np.float32(noise) * rng.standard_normal(base.size, np.float32)
    writer = CaptureWriter(root, 0, run_identity(os.environ), {"config": {"level": "L1"}}, {})
    writer.begin_step(0)
    before = []
    for i, size in enumerate(sizes.tolist()):
        at = i % 4096  # no two contents are equal
        name = f"Torch.relu.{i}.forward"
        writer.call(CallLine(id=i, name=name, op="torch.relu", args=before))
        writer.tensor(i, name, "float32", (size,), base[at : at + size].view(np.uint8))
        writer.value(i)
        before = [{"tensor": TensorLine("float32", (size,), value=i)}]
        writer.end(EndLine(id=i, outputs=before[0]))
    writer.close()
    return writer.nbytes_written


PARTS = {"metrics": metrics, "rows": rows, "align": aligning, "capture": capture}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    if sys.argv[1:2] == ["parts"]:
        print(json.dumps(parts_of_a_comparison(*sys.argv[2:4], int(sys.argv[4]))))
        sys.exit()
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "scaling", []], default=list(PARTS))
    parser.add_argument("--peer-python", help="a Python that has mindstudio-probe")
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--gb", type=float, default=2.0, help="of each side, for scaling")
    parser.add_argument("--calls", type=int, default=2000, help="for scaling")
    parser.add_argument("--repeats", type=int, default=3, help="the best counts, for scaling")
    parser.add_argument("--scratch", default=None, help="where the runs for scaling are written")
    options = parser.parse_args()
    for part in options.parts:
        if part == "capture":
            capture(options.peer_python)
        elif part == "scaling":
            scaling(options)
        else:
            PARTS[part]()
