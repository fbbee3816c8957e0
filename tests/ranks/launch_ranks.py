"""Runs programs on several ranks in one launch: launch_ranks.py FOLDER RANKS RUN..."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path, world: int, runs: list[str]) -> None:
    """Record each run, "program/fault" or "program/fault/keep", into a folder of that name."""
    import torch.multiprocessing as mp

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    with tempfile.TemporaryDirectory() as place:
        mp.start_processes(
            _rank, (world, f"file://{place}/meet", folder, runs), world, start_method="spawn"
        )


def _rank(rank: int, world: int, meet: str, folder: Path, runs: list[str]) -> None:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    from ranks.layout_programs import LAYOUTS
    from ranks.other_layouts import OTHER_LAYOUTS
    from ranks.rank_programs import PROGRAMS, Run

    torch.set_num_threads(1)
    dist.init_process_group("gloo", meet, rank=rank, world_size=world)
    for each in runs:
        program, fault, *keep = each.split("/")
        name = each.replace("/", "-")
        run = Run(str(folder / name), fault if fault != "healthy" else "",
                  8 if fault == "again" else 7, *keep)  # fmt: skip
        {**PROGRAMS, **LAYOUTS, **OTHER_LAYOUTS}[program](run)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
