"""Step time and peak memory while recording, against no tool and against the peer.

    python benchmarks/recording.py
    python benchmarks/recording.py --device cuda --size large --levels L0 L1 mix
    python benchmarks/recording.py --peer-python PYTHON      (one that has mindstudio-probe)
    python benchmarks/recording.py --idle 50                 (loaded, but no step is recorded)

Every row is a ratio within one process: bare steps are timed before and after the recorded ones.
On a device that works beside the program there are two of them: of steps in a row, at whose end the
device is waited for, as a training runs; and of steps each of which is waited for, as where the
program reads its loss after every one (`alone`).
On a machine that does other things too, `--clock cpu` with OMP_NUM_THREADS=1 counts processor
seconds, of which the quickest step of each kind is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZE_FIELDS = ("hidden", "layers", "heads", "intermediate", "batch", "tokens")
SIZES = {
    "small": dict(zip(SIZE_FIELDS, (512, 4, 8, 1376, 2, 256), strict=True)),
    "large": dict(zip(SIZE_FIELDS, (2048, 16, 16, 5504, 2, 4096), strict=True)),
    "launch": dict(zip(SIZE_FIELDS, (128, 4, 4, 352, 1, 16), strict=True)),  # Python dominates
}


def halves(size: dict[str, int], device: str, dtype: str, vocabulary: int = 32000):
    """A Llama with random weights and SGD: the model, and its training step in two halves."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"],
        vocab_size=vocabulary,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocabulary, (size["batch"], size["tokens"]), device=device)

    def forward():
        return model(input_ids=ids, labels=ids).loss

    def backward(loss) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, forward, backward


def build(size: dict[str, int], device: str, dtype: str):
    """The model, and a function that makes one training step."""
    model, forward, backward = halves(size, device, dtype)
    return model, lambda: backward(forward())


CLOCKS = {"wall": (time.perf_counter, statistics.median), "cpu": (time.process_time, min)}


def timed(step, count: int, device: str, clock: str = "wall") -> list[float]:
    import torch

    now, _ = CLOCKS[clock]
    seconds = []
    for _ in range(count):
        if device == "cuda":
            torch.cuda.synchronize()
        began = now()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(now() - began)
    return seconds


def in_a_row(step, count: int, device: str, clock: str = "wall") -> float:
    """Seconds a step of several, with no wait between them."""

    def steps() -> None:
        for _ in range(count):
            step()

    [seconds] = timed(steps, 1, device, clock)
    return seconds / count


def reset_peak(device: str) -> None:
    """Begin to measure the peak of memory anew."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark falls to now


def peak_mbytes(device: str) -> float:
    """Peak of memory since: the device's, or resident memory on the CPU."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def folder_nbytes(path: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


def content_mbytes(run: Path, steps: int) -> float:
    """Of all tensors of a step whose content is there, each time they occur, as the peer has it."""
    import tensorprobe as tp

    tensors = (tensor for call in tp.load(run).calls for tensor in call.tensors)
    return sum(tensor.blob.nbytes for tensor in tensors if tensor.blob) / steps / 1e6


def measure_ours(args: argparse.Namespace, size: dict[str, int]) -> list[dict[str, object]]:

    import tensorprobe as tp

    _, step = build(size, args.device, args.dtype)
    timed(step, args.warmup, args.device)
    rows: list[dict[str, object]] = []
    for level in args.levels:
        for keep in args.keeps:
            if keep == "tensors" and level not in args.tensor_levels:
                continue
            folder = Path(tempfile.mkdtemp(dir=args.scratch))
            reset_peak(args.device)
            bare = timed(step, args.steps, args.device, args.clock)
            row = [in_a_row(step, args.recorded, args.device, args.clock)]
            bare_peak = peak_mbytes(args.device)
            reset_peak(args.device)
            messages: list[str] = []
            recorder = tp.Recorder(
                folder / "run", level=level, keep=keep, stacks=args.stacks, log=messages.append
            )

            def recorded_step(recorder=recorder) -> None:
                step()
                recorder.step()

            with recorder:
                timed(recorded_step, 1, args.device)  # the first one opens files, compiles kernels
                waited = recorder._writer.waited_s
                seconds = timed(recorded_step, args.recorded, args.device, args.clock)
                recorded_row = in_a_row(recorded_step, args.recorded, args.device, args.clock)
                waited = recorder._writer.waited_s - waited
            peak = peak_mbytes(args.device)
            n_steps = 2 * args.recorded + 1
            calls = recorder._writer.n_calls / n_steps
            after = timed(step, args.steps, args.device, args.clock)
            row.append(in_a_row(step, args.recorded, args.device, args.clock))
            _, middle_of = CLOCKS[args.clock]
            base, middle = middle_of(bare + after), middle_of(seconds)
            rows.append(
                {
                    "level": level,
                    "keep": keep,
                    "bare_s": base,
                    "step_s": middle,
                    "ratio": middle / base,
                    "row_bare_s": min(row),
                    "row_s": recorded_row,
                    "row_ratio": recorded_row / min(row),
                    "calls": calls,
                    "us_per_call": (middle - base) / calls * 1e6,
                    "mbytes_per_step": folder_nbytes(folder) / n_steps / 1e6,
                    "waited_s": waited / (n_steps - 1),
                    "content_mb": content_mbytes(folder / "run", n_steps),
                    "bare_peak_mb": bare_peak,
                    "peak_mb": peak,
                }
            )
            shutil.rmtree(folder)
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
    return rows


def measure_idle(args: argparse.Namespace, size: dict[str, int]) -> str:
    """Steps that are not among the wanted ones, in turn with steps without the tool."""
    import tensorprobe as tp
    from tensorprobe.errors import NothingRecorded

    _, step = build(size, args.device, args.dtype)
    timed(step, args.warmup, args.device)
    lines = ["| level | no tool | loaded | ratio | ratio of CPU time |", "|" + " --- |" * 5]
    for level in args.levels:
        folder = Path(tempfile.mkdtemp(dir=args.scratch))
        recorder = tp.Recorder(
            folder / "run", level=level, keep="stats", steps=[10**9], log=lambda text: None
        )

        def loaded_step(recorder=recorder) -> None:
            step()
            recorder.step()

        with contextlib.suppress(NothingRecorded), recorder:
            timed(loaded_step, 1, args.device)  # in the first one modules get their names
            times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for turn in range(2 * args.idle):
                loaded = turn % 2 == 1
                (recorder.start if loaded else recorder.stop)()
                began = time.process_time()
                [seconds] = timed(loaded_step if loaded else step, 1, args.device)
                times[loaded].append((seconds, time.process_time() - began))
        bare, idle = (statistics.median(t for t, _ in times[loaded]) for loaded in (False, True))
        least = [min(cpu for _, cpu in times[loaded]) for loaded in (False, True)]
        lines.append(
            f"| {level} | {bare:.4f} s | {idle:.4f} s | {idle / bare:.3f}x | "
            f"{least[1] / least[0]:.3f}x |"
        )
        shutil.rmtree(folder)
    return "\n".join(lines)


PEER_TASKS = {
    "stats": {"task": "statistics", "summary_mode": "statistics"},
    "digest": {"task": "statistics", "summary_mode": "md5"},
    "tensors": {"task": "tensor", "summary_mode": "statistics"},
}


def measure_peer(args: argparse.Namespace, size: dict[str, int]) -> list[dict[str, object]]:
    """The same steps through msprobe; it is a singleton, so one process a row."""
    rows = []
    for level in args.levels:
        for keep in args.keeps:
            if keep not in PEER_TASKS or level == "L2":
                continue
            if keep == "tensors" and level not in args.tensor_levels:
                continue
            spec = json.dumps({**vars(args), "level": level, "keep": keep, "size": size})
            try:
                done = subprocess.run(
                    [args.peer_python, __file__, "--peer-child", spec],
                    capture_output=True,
                    text=True,
                    timeout=args.peer_timeout,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:  # our rows are told all the same
                sys.stderr.write(f"msprobe at {level} {keep}: {error}\n")
                continue
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                sys.stderr.write(done.stderr[-2000:])
                continue
            rows.append(json.loads(lines[-1]))
            sys.stderr.write(lines[-1] + "\n")
    return rows


def peer_child(spec: dict[str, object]) -> None:
    folder = Path(tempfile.mkdtemp(dir=spec["scratch"]))
    level, keep = spec["level"], spec["keep"]
    task = PEER_TASKS[keep]
    config = {
        "task": task["task"],
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": level,
        task["task"]: {"summary_mode": task["summary_mode"], "scope": [], "list": []},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(path))
    model, step = build(spec["size"], spec["device"], spec["dtype"])
    timed(step, spec["warmup"], spec["device"])
    bare = timed(step, spec["steps"], spec["device"], spec["clock"])

    def recorded() -> None:
        debugger.start(model=model)
        step()
        debugger.stop()
        debugger.step()

    timed(recorded, 1, spec["device"])
    seconds = timed(recorded, spec["recorded"], spec["device"], spec["clock"])
    row = in_a_row(recorded, spec["recorded"], spec["device"], spec["clock"])
    bare_row = in_a_row(step, spec["recorded"], spec["device"], spec["clock"])
    bare += timed(step, spec["steps"], spec["device"], spec["clock"])
    _, middle_of = CLOCKS[spec["clock"]]
    base, middle = middle_of(bare), middle_of(seconds)
    row = {
        "level": level,
        "keep": keep,
        "bare_s": base,
        "step_s": middle,
        "ratio": middle / base,
        "row_ratio": row / bare_row,
        "mbytes_per_step": folder_nbytes(folder) / (2 * spec["recorded"] + 1) / 1e6,
    }
    shutil.rmtree(folder)
    print(json.dumps(row))


def table(ours: list[dict[str, object]], peer: list[dict[str, object]]) -> str:
    known = {(row["level"], row["keep"]): row for row in peer}
    titles = ["level", "keep", "no tool", "recorded", "ratio", "alone", "per call", "MB a step"]
    titles += ["waited", "peak, no tool", "peak", "msprobe", "alone", "its MB"]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for row in ours:
        other = known.get((row["level"], row["keep"]))
        cells = [
            row["level"],
            row["keep"],
            f"{row['row_bare_s']:.4f} s",
            f"{row['row_s']:.4f} s",
            f"{row['row_ratio']:.2f}x",
            f"{row['ratio']:.2f}x",
            f"{row['us_per_call']:.0f} us",
            f"{row['mbytes_per_step']:.1f}",
            f"{row['waited_s']:.2f} s",
            f"{row['bare_peak_mb']:.0f} MB",
            f"{row['peak_mb']:.0f} MB",
            f"{other['row_ratio']:.2f}x" if other else "-",
            f"{other['ratio']:.2f}x" if other else "-",
            f"{other['mbytes_per_step']:.1f}" if other else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speeds(ours: list[dict[str, object]], peer: list[dict[str, object]]) -> str:
    """Content recorded in each second that a step takes longer, where tensors are kept.

    The peer stores a content as often as it occurs: its files are that.
    """
    mine, its = (
        {
            row["level"]: row.get("content_mb", row["mbytes_per_step"])
            / 1e3
            / (row["step_s"] - row["bare_s"])
            for row in rows
            if row["keep"] == "tensors"
        }
        for rows in (ours, peer)
    )
    lines = [f"{level} tensors: {speed:.3f} GB/s" for level, speed in mine.items()]
    both = [level for level in mine if level in its]
    lines += [f"{lvl}, msprobe: {its[lvl]:.3f} GB/s, {mine[lvl] / its[lvl]:.1f}x" for lvl in both]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--levels", nargs="*", default=["L0", "L1", "mix", "L2"])
    parser.add_argument("--keeps", nargs="*", default=["structure", "stats", "digest", "tensors"])
    parser.add_argument("--tensor-levels", nargs="*", default=["L0", "L1"])
    parser.add_argument("--stacks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="bare steps before and after")
    parser.add_argument("--recorded", type=int, default=3)
    parser.add_argument("--idle", type=int, default=0, metavar="N", help="time N steps that are "
                        "loaded but not wanted instead, and N without the tool")  # fmt: skip
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--peer-python", default=os.environ.get("TENSORPROBE_PEER_PYTHON"))
    parser.add_argument("--peer-timeout", type=float, default=600)
    parser.add_argument("--json", default=None)
    parser.add_argument("--peer-child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer_child:
        peer_child(json.loads(args.peer_child))
        return
    import torch

    size = SIZES[args.size]
    if args.idle:
        print(f"{args.size} Llama, {args.dtype} on {args.device}, torch {torch.__version__}")
        print(measure_idle(args, size))
        return
    ours = measure_ours(args, size)
    peer = measure_peer(args, size) if args.peer_python else []
    print(f"{args.size} Llama {size} {args.dtype} on {args.device}")
    print(f"torch {torch.__version__}, ", end="")
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, stacks {args.stacks}")
    print(table(ours, peer))
    print(speeds(ours, peer))
    if args.json:
        Path(args.json).write_text(json.dumps({"ours": ours, "peer": peer}, indent=1))


if __name__ == "__main__":
    main()
