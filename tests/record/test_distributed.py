"""Two processes under torchrun: each rank has its folder, collectives are calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import tensorprobe as tp
from tensorprobe.devices import current_rank
from tensorprobe.records import REDUCES_GRADIENTS
from tensorprobe.store.claim import run_identity

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)

SRC = str(Path(__file__).parents[2] / "src")
SCRIPT = """
import hashlib, os, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", os.environ.get("MEET"))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
parallel = DistributedDataParallel(model)
parallel.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
torch.manual_seed(rank + int(sys.argv[1]))
for _ in range(3):
    parallel(torch.randn(4, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.full((2,), float(rank + 1))
    dist.all_reduce(total)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.full((1,), float(rank)))
    later = torch.full((3,), float(rank + 1))
    work = dist.all_reduce(later, async_op=True)
    meanwhile = torch.ones(2) * 2
    work.wait()
    later.mul_(10)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
sys.stdout.write(f"rank {rank} has {hashlib.sha256(weights).hexdigest()}\\n")
dist.destroy_process_group()
"""


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "ddp.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def bare(folder: Path, *words: str) -> str:
    """What the two ranks print on their own, started by hand: quicker than torchrun."""
    (folder / "ddp.py").write_text(SCRIPT)
    meet = f"file://{folder}/meet?world_size=2"  # of a port another program may be as quick
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MEET": f"{meet}&rank={rank}",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return "".join(process.communicate(timeout=200)[0] for process in ranks)


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d has \w+", output))


def test_ranks_of_other_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert current_rank() == 0
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert current_rank() == 3
    monkeypatch.setenv("RANK", "1")
    assert current_rank() == 1
    job = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    assert run_identity(job) == "17/0/4"
    assert run_identity({**job, "SLURM_NTASKS": "1"}) == run_identity({})


def test_each_rank_records_and_training_is_bit_identical(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path, "-m", "tensorprobe", "run", "--keep", "tensors", "-o", "out", "ddp.py", "1"
    )
    assert done.returncode == 0, done.stderr
    assert len(weights(done.stdout)) == 2
    assert weights(done.stdout) == weights(bare(tmp_path, "ddp.py", "1"))
    assert "out/rank0. Next" in done.stderr
    capture = tp.load(tmp_path / "out")
    assert capture.ranks == (0, 1)
    assert capture.gaps == ()
    assert not (tmp_path / "out" / "earlier").exists()
    for rank in (0, 1):
        calls = {call.name: call for call in capture.calls(step=1, rank=rank)}
        wrapper = calls["Module.DistributedDataParallel.forward.0"]
        assert wrapper.status == "complete"
        hook = f"{default_hooks.__name__}.fp16_compress_hook"
        assert f"{REDUCES_GRADIENTS}0,1, group 0, hook {hook}" in wrapper.notes
        reduced = calls["Distributed.all_reduce.0.forward"]
        assert reduced.tensor("input.0").load().tolist() == [rank + 1.0] * 2
        assert reduced.tensor("output.0").load().tolist() == [3.0, 3.0]
        gathered = calls["Distributed.all_gather.0.forward"]
        assert [gathered.tensor(f"output.0.{i}").load().item() for i in (0, 1)] == [0.0, 1.0]
        later = calls["Distributed.all_reduce.1.forward"]
        assert later.tensor("input.0").load().tolist() == [rank + 1.0] * 3
        assert later.tensor("output.0").load().tolist() == [3.0] * 3
        assert "asynchronous: read after it had completed" in later.notes
        assert calls["Tensor.mul_.0.forward"].tensor("input.0").load().tolist() == [3.0] * 3


@pytest.mark.slow
def test_all_ranks_end_together_when_one_is_recorded(tmp_path: Path) -> None:
    options = ["--ranks", "1", "--steps", "0", "--stop-after-last-step", "-o", "out"]
    done = torchrun(tmp_path, "-m", "tensorprobe", "run", *options, "ddp.py", "1")
    assert done.returncode == 0, done.stderr
    assert "rank 0 is not among ranks 1" in done.stderr
    assert tp.load(tmp_path / "out").ranks == (1,)


@pytest.mark.slow
def test_a_start_has_each_rank_s_batches(tmp_path: Path) -> None:
    options = ["-m", "tensorprobe", "run", "--keep", "digest", "--steps", "0"]
    torchrun(tmp_path, *options, "--save-start", "start", "-o", "a", "ddp.py", "1")
    done = torchrun(tmp_path, *options, "--load-start", "start", "-o", "b", "ddp.py", "7")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        a, b = (
            [
                (t.name, t.digest)
                for call in tp.load(tmp_path / name).calls(step=0, rank=rank, name="Module")
                for t in call.tensors
            ]
            for name in "ab"
        )
        assert a == b


BUFFERS = """
import torch
import torch.distributed as dist
import tensorprobe as tp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
parallel = DistributedDataParallel(model)
live = []
model[1].register_forward_pre_hook(lambda norm, args: live.append(norm.running_mean.clone()))
with tp.Recorder("buffers", level="mix", keep="tensors", log=lambda text: None):
    for _ in range(3):
        parallel(torch.randn(4, 3)).sum().backward()
capture = tp.load(f"buffers/rank{rank}")
for number, mean in enumerate(live):
    module = capture.call(f"Module.module.1.BatchNorm1d.forward.{number}")
    call = capture.call(f"Functional.batch_norm.{number}.forward")
    assert torch.equal(module.tensor("buffers.running_mean").load(), mean), (rank, number)
    assert torch.equal(call.tensor("input.1").load(), mean), (rank, number)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_buffers_that_ddp_broadcasts_within_a_step(tmp_path: Path) -> None:
    (tmp_path / "buffers.py").write_text(BUFFERS)
    done = torchrun(tmp_path, "buffers.py")
    assert done.returncode == 0, done.stderr
