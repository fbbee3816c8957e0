"""Time and memory of comparing many ranks: python benchmarks/many_ranks.py RANKS [--calls N]

One rank is recorded three times: healthy, with a wrong kernel, and as a rank that receives what the
wrong one gave. The ranks of both runs are hard links to these; rank 37, or the last, is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
import tensorprobe as tp

folder, kind, world, calls, keep = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]


class Kernels(TorchDispatchMode):
    sines = reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name.startswith("sin"):
            self.sines += 1
            if kind == "wrong" and self.sines == 20:
                result.mul_(1.01)
        if "allreduce" in name:
            self.reductions += 1
            if kind != "healthy" and self.reductions == 1:
                args[0][0].mul_(1.001)
        return result


dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
torch.manual_seed(0)
with Kernels(), tp.Recorder(folder, keep=keep, log=lambda text: None) as recorder:
    x = torch.randn(8, 16)
    for n in range(calls // 4):
        y = torch.cos(torch.sin(x))
        if n % 25 == 24:
            dist.all_reduce(y)
        else:
            y = y * 0.1
        x = x + y
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--keep", default="stats")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--healthy", action="store_true", help="without the wrong rank")
    parser.add_argument("--verbs", default="compare,ranks", help="which to measure")
    parser.add_argument("--options", default="", help="further ones of compare: '--engine ray'")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as folder:
        _make(Path(folder), args)
        for name, command in (
            ("compare", ["compare", "actual", "expected", "-o", "out", *args.options.split()]),
            ("ranks", ["ranks", "actual", "-o", "out2"]),
        ):
            if name in args.verbs.split(","):
                _measure(name, command, Path(folder), args)
    return 0


def _make(folder: Path, args: argparse.Namespace) -> None:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    kinds = ["healthy"] if args.healthy else ["healthy", "wrong", "received"]
    for kind in kinds:
        words = [str(folder / kind), kind, str(args.ranks), str(args.calls), args.keep]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(script), *words], check=True, env=environment)
    odd = min(37, args.ranks - 1)
    for side in ("actual", "expected"):
        run = folder / side
        run.mkdir()
        shutil.copy(folder / "healthy" / "capture.json", run)
        for rank in range(args.ranks):
            kind = "healthy"
            if side == "actual" and not args.healthy:
                kind = "wrong" if rank == odd else "received"
            shutil.copytree(folder / kind / "rank0", run / f"rank{rank}", copy_function=os.link)
            about = run / f"rank{rank}" / "rank.json"
            facts = {**json.loads(about.read_text()), "rank": rank}
            about.unlink()  # it is a link
            about.write_text(json.dumps(facts))


def _measure(name: str, command: list[str], folder: Path, args: argparse.Namespace) -> None:
    begun = time.monotonic()
    done = subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", *command],
        cwd=folder, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    text = done.stdout.read() if done.stdout else ""
    _, status, used = os.wait4(done.pid, 0)
    seconds = time.monotonic() - begun
    cpu = used.ru_utime + used.ru_stime
    sys.stdout.write(
        f"{name}: {args.ranks} ranks x {args.calls} calls ({args.keep}): {seconds:.1f} s, "
        f"{cpu:.1f} s of processor, {used.ru_maxrss / 1024:.0f} MB in the largest process, "
        f"{1000 * cpu / args.ranks:.0f} ms a rank; "
        f"exit {os.waitstatus_to_exitcode(status)}\n"
    )
    sys.stdout.write("".join(f"    {line[:160]}\n" for line in text.splitlines()[:6]))


if __name__ == "__main__":
    sys.exit(main())
