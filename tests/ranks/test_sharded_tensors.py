"""DTensors: what is recorded of a rank's part, and which calls can be run alone on it."""

import subprocess
import sys
from pathlib import Path

import pytest

import tensorprobe as tp
from ranks.gloo_ranks import needs_gloo, run_ranks
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Sharding

pytestmark = needs_gloo

ROWS = Sharding(
    shape=(4, 4), placements=("Shard(dim=0)",), mesh_shape=(2,), ranks=(0, 1), mesh_names=("tp",)
)


def test_the_part_of_a_rank(tmp_path: Path) -> None:
    run_ranks(tmp_path, "sharded_tensors.py")
    capture = tp.load(tmp_path / "L1")
    assert capture.gaps == ()
    for rank in (0, 1):
        calls = {call.name: call for call in capture.calls(rank=rank)}
        first = calls["Torch.mul.0.forward"].tensor("input.0")
        assert (first.shape, first.sharding) == ((2, 4), ROWS)
        assert first.load()[0].tolist() == [
            0.0 + 8 * rank,
            1 + 8 * rank,
            2 + 8 * rank,
            3 + 8 * rank,
        ]
        # written to since, through the part
        assert calls["Torch.mul.1.forward"].tensor("input.0").load()[0, 0] == 100 + 8 * rank
        assert calls["Torch.mul.1.forward"].tensor("output.0").load()[0, 0] == 200 + 16 * rank
        partial = calls["Tensor.sum.0.forward"].tensor("output.0")
        assert partial.sharding is not None
        assert partial.sharding.placements == ("Partial(sum)",)
        gathered = calls["Torch.relu.0.forward"].tensor("input.0")
        assert gathered.sharding is not None
        assert gathered.sharding.placements == ("Replicate()",)
        assert gathered.load()[:, 0].tolist() == [100.0, 104, 108, 112]
    product = tp.repro(tmp_path / "L1", "Torch.matmul.0.forward", tmp_path / "repro", rank=1)
    ran = subprocess.run(
        [sys.executable, product / "repro.py"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(NotReplayable, match="its DTensors are partial sums"):
        tp.repro(tmp_path / "L1", "Tensor.sum.0.forward", tmp_path / "sum", rank=1)
