"""What one call costs under the overflow guard, where Python dominates: a small Llama, batch 1.

    python benchmarks/guard_percall.py
    python benchmarks/guard_percall.py --device cuda --dtype bfloat16
    python benchmarks/guard_percall.py --profile 30
    python benchmarks/guard_percall.py --callgrind     (needs valgrind)

Each figure is the difference to the same step without the guard, over the calls of a step, forward
and backward counted alike; the least of many steps, bare and guarded ones in turn. On the CPU the
way of a GPU is gone: nothing is read inside a step, and a function written in C that does nothing
stands in place of the kernel that flags a tensor. `--callgrind` counts the instructions that the
guard adds to single calls, which no neighbour on the machine disturbs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import itertools
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

from percall import Program, build, count_calls, synchronizer
from recording import SIZES

COUNTED = 60  # calls, by callgrind
LATE = 10**9  # calls between two looks: only the end of a step is one


def stand_in_for_a_gpu() -> None:
    """Let tensors of the host be flagged as those of a GPU are, by a kernel that does nothing."""
    import torch

    from tensorprobe.tensors import finiteness, launch

    class Nothing:
        """A compiled kernel."""

        run = itertools.chain  # in C, and takes any arguments
        function = packed_metadata = 0

    class Function:
        def __getitem__(self, grid: object) -> object:
            return lambda *arguments, **constants: Nothing

    def flags_on_host(device: torch.device) -> finiteness.Flags:
        flagger = launch.Flagger(device, finiteness.SLOTS, interpreted=True)
        flagger._index = 0
        flagger._kernel._function = Function()
        flagger.read = flagger.decode
        return finiteness.KernelFlags(flagger)

    launch._starts_directly = lambda: True
    finiteness._CHOICES["cpu"] = flags_on_host
    launch._is_capturing = torch.is_inference_mode_enabled
    launch._current_device = int
    launch._current_stream = abs


@contextlib.contextmanager
def guarding(args: argparse.Namespace) -> Iterator[object]:
    import tensorprobe as tp

    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    every = None if args.device == "cuda" or args.at_once else LATE
    guard = tp.Guard(folder, step_on="explicit", look_every=every, log=lambda text: None)
    try:
        with guard:
            yield guard
        if guard.findings:
            sys.exit(f"the model is not healthy: {guard.findings[0]}")
    finally:
        shutil.rmtree(folder)


def halves(program: Program, sync) -> tuple[float, float]:
    """Processor seconds of the two halves of one step."""
    clock = time.perf_counter if sync is not None else time.process_time
    began = clock()
    loss = program.forward()
    middle = clock()
    program.backward(loss)
    if sync is not None:
        sync()
    return middle - began, clock() - middle


def measure(program: Program, args: argparse.Namespace) -> dict[str, float]:
    sync = synchronizer(args.device) if args.device == "cuda" else None
    bare, guarded, looks = [], [], []
    with guarding(args) as guard:
        for _ in range(args.rounds):
            guard.stop()
            bare += [halves(program, sync) for _ in range(args.steps)]
            guard.start()
            program.backward(program.forward())
            guard.step()
            for _ in range(args.steps):
                guarded.append(halves(program, sync))
                began = time.process_time()
                guard.step()
                looks.append(time.process_time() - began)
    off, on = (tuple(map(min, zip(*times, strict=True))) for times in (bare, guarded))
    counted = argparse.Namespace(**{**vars(args), "stacks": False})
    n_forward, n_backward = count_calls(program, counted, "L1")
    calls = n_forward + n_backward
    return {
        "forward_calls": n_forward,
        "backward_calls": n_backward,
        "bare_ms": sum(off) * 1e3,
        "forward_us": (on[0] - off[0]) / n_forward * 1e6,
        "backward_us": (on[1] - off[1]) / n_backward * 1e6,
        "step_end_us": min(looks) / calls * 1e6,
        "call_us": (sum(on) - sum(off) + min(looks)) / calls * 1e6,
    }


def profile(program: Program, args: argparse.Namespace) -> None:
    """The functions of the program's thread; backward of the host runs in it too."""
    with guarding(args) as guard:
        for _ in range(3):
            program.backward(program.forward())
            guard.step()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(20):
            program.backward(program.forward())
            guard.step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(args.profile)


def single_calls() -> dict[str, tuple[Callable[[], object], Callable[[object], object]]]:
    """By name: what is done before it counts, and what is counted."""
    import torch

    x = torch.randn(4, 4)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    hidden = torch.randn(1, 4, 4, requires_grad=True) * 1
    linear = torch.nn.Linear(4, 4, bias=False)
    gradient = torch.ones(1, 4, 4)
    return {
        "a view": (lambda: None, lambda _: hidden.view(16)),
        "a product": (lambda: None, lambda _: x.mul(x)),
        "a product with a graph": (lambda: None, lambda _: hidden.mul(weight)),
        "a linear layer": (lambda: None, lambda _: linear(hidden)),
        "backward of a product": (
            lambda: hidden.detach().requires_grad_().mul(weight),
            lambda product: torch.autograd.backward([product], [gradient]),
        ),
    }


def callgrind(args: argparse.Namespace) -> dict[str, float]:
    """Instructions that the guard adds to one call of each kind, in a module."""
    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=no"]
    command += [f"--callgrind-out-file={folder}/out", sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GUARD_CHILD": json.dumps(vars(args))}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    counts = []
    for part in range(1, 2 * len(single_calls()) + 1):
        lines = (folder / f"out.{part}").read_text().splitlines()
        counts += [int(line.split()[1]) for line in lines if line.startswith("totals:")]
    shutil.rmtree(folder)
    pairs = zip(counts[::2], counts[1::2], strict=True)
    extra = [(guarded - bare) / COUNTED for bare, guarded in pairs]
    return dict(zip(single_calls(), extra, strict=True))


def counted_child(args: argparse.Namespace) -> None:
    """Runs inside valgrind: counts each kind of call without the guard and with it."""
    import torch

    class Caller(torch.nn.Module):
        def forward(self, do: Callable[[], object]) -> object:
            return do()

    def control(*what: str) -> None:
        command = ["callgrind_control", *what, str(os.getpid())]
        subprocess.run(command, check=True, capture_output=True)

    def count(prepare: Callable[[], object], do: Callable[[object], object]) -> None:
        prepared = [prepare() for _ in range(COUNTED)]
        control("-z")
        control("-i", "on")
        for each in prepared:
            do(each)
        control("-d")
        control("-i", "off")

    if not args.at_once:
        stand_in_for_a_gpu()
    gc.disable()
    for prepare, do in single_calls().values():
        for context in (contextlib.nullcontext(), guarding(args)):
            with context:
                torch.ones(2).mul(1)  # the guard knows now where it looks
                for _ in range(20):
                    do(prepare())
                Caller()(lambda prepare=prepare, do=do: count(prepare, do))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="launch", choices=SIZES)
    parser.add_argument("--at-once", action="store_true", help="the way of the host, not a GPU's")
    parser.add_argument("--steps", type=int, default=15, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=6, help="bare and guarded steps in turn")
    parser.add_argument("--profile", type=int, default=0, help="how many functions to show")
    parser.add_argument(
        "--callgrind", action="store_true", help="count instructions of single calls"
    )
    parser.add_argument("--scratch", default=None)
    args = parser.parse_args()
    if "GUARD_CHILD" in os.environ:
        counted_child(argparse.Namespace(**json.loads(os.environ["GUARD_CHILD"])))
        return
    if args.callgrind:
        for name, instructions in callgrind(args).items():
            print(f"| {name} | {instructions:.0f} |")
        return
    if args.device == "cpu" and not args.at_once:
        stand_in_for_a_gpu()
    program = build(args.size, args.device, args.dtype)
    for _ in range(3):
        program.backward(program.forward())
    row = measure(program, args)
    print(f"{args.size} Llama on {args.device}, {'at once' if args.at_once else 'later'}")
    print(f"| {' | '.join(row)} |\n|{' --- |' * len(row)}")
    print(f"| {' | '.join(f'{value:.1f}' for value in row.values())} |", flush=True)
    if args.profile:
        profile(program, args)


if __name__ == "__main__":
    main()
