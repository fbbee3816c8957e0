"""Two healthy runs of one layout: recording changes no bit of them, and they match."""

from pathlib import Path

import pytest

import tensorprobe as tp
from ranks.gloo_ranks import needs_gloo, run_ranks

pytestmark = [needs_gloo, pytest.mark.slow]

LAYOUTS = (
    "ddp", "tp", "sp", "2d", "gpipe", "1f1b", "functional", "fsdp1", "fsdp2",
)  # fmt: skip


def explained(comparison: tp.Comparison) -> str:
    verdict = comparison.verdict
    return "\n".join([str(verdict), *(str(culprit) for culprit in verdict.culprits[:3])])


@pytest.mark.parametrize("level", ["mix", "L2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_healthy_runs_match(tmp_path: Path, layout: str, level: str) -> None:
    ranks = 4 if layout == "2d" else 2
    bare = run_ranks(tmp_path, "layouts.py", layout, "-", level, "tensors", ranks=ranks)
    for out in ("a", "b"):
        recorded = run_ranks(tmp_path, "layouts.py", layout, out, level, "tensors", ranks=ranks)
        assert recorded == bare
    capture = tp.load(tmp_path / "a")
    assert {gap.reason for gap in capture.gaps} == set()
    comparison = tp.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.verdict.verdict == "match", explained(comparison)
