"""Programs of several gloo processes, started by hand: quicker than torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
SRC = str(TESTS.parent / "src")
PROGRAMS = Path(__file__).parent / "programs"
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)


def run_ranks(folder: Path, program: str, *words: str, ranks: int = 2) -> list[str]:
    """What each rank of a program of programs/ prints; they meet by the variables of torchrun."""
    meet = folder / f"meet-{'-'.join((program, *words)).replace('/', '_')}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *words],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": SRC,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "0",
                "MEET": f"file://{meet}?rank={rank}&world_size={ranks}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    wrong = [err for (_, err), process in zip(told, processes, strict=True) if process.returncode]
    assert not wrong, "\n\n".join(wrong)[-6000:]
    return [out for out, _ in told]
