"""Two processes, a simulated NPU each, DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

WORKER = textwrap.dedent(
    """
    import copy, os, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from tensorprobe.devices import current_rank, local_rank, sim_npu, world_size

    sim_npu.install()
    rank = int(os.environ["RANK"])
    assert (current_rank(), local_rank()) == (rank, rank)
    torch.npu.set_device(f"npu:{rank}")
    dist.init_process_group("gloo", os.environ["MEET"])
    assert (current_rank(), world_size()) == (rank, 2)

    x = torch.full((3,), rank + 1.0, device="npu")
    dist.all_reduce(x)
    assert x.tolist() == [3, 3, 3]
    dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [6, 6, 6]
    parts = [torch.zeros(2, device="npu") for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(rank), device="npu"))
    assert [part.tolist() for part in parts] == [[0, 0], [1, 1]]
    dist.broadcast(x := torch.full((2,), float(rank), device="npu"), 1)
    assert x.tolist() == [1, 1]

    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
    npu = copy.deepcopy(host).to(f"npu:{rank}")
    data = [torch.randn(5, 4) for _ in range(3)]
    for device, model in (("cpu", host), ("npu", npu)):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=sys.argv[1] == "view")
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for batch in data:
            ddp(batch.to(device) * (rank + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(host.parameters(), npu.parameters()):
        assert torch.equal(one, other.cpu())
    dist.destroy_process_group()
    """
)


def run_two(tmp_path: Path, option: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    common = {**os.environ, "WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    common["PYTHONPATH"] = os.pathsep.join(sys.path)
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), option],
            env={
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MEET": f"file://{tmp_path}/meet?world_size=2&rank={rank}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["plain", "view"])
def test_ddp_is_bit_equal(tmp_path: Path, gradients: str) -> None:
    run_two(tmp_path, gradients)
