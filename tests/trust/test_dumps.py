"""Dumps of msprobe in which calls are missing: a tensor without a recorded producer is no proof."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

import tensorprobe as tp
from tensorprobe.cli.main import main
from trust.harness import Start
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import Attention, adamw, token_loss, tokens, train


def _dumped(folder: Path, name: str, inside: object, keep: str) -> Path:
    """A training in msprobe's layout, without every third of its calls of torch."""
    train(
        Start(folder / f"{name}-native", keep, "mix"),
        net=Attention,
        data=tokens,
        loss=token_loss,
        optimizer=lambda parameters: adamw(parameters, fused=True),
        steps=3,
        inside=inside,  # type: ignore[arg-type]
    )
    out = folder / name
    assert main(["convert", str(folder / f"{name}-native"), "--to", "msprobe", "-o", str(out)]) == 0
    for file in out.rglob("dump.json"):
        content = json.loads(file.read_text())
        calls = [c for c in content["data"] if not c.startswith("Module.") and "linear" not in c]
        stems = sorted({call.rpartition(".")[0] for call in calls})
        for call in calls:
            if stems.index(call.rpartition(".")[0]) % 3 == 0:
                del content["data"][call]
        file.write_text(json.dumps(content))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_healthy_pair_of_dumps_with_calls_missing_matches(tmp_path: Path, keep: str) -> None:
    sides = [
        _dumped(tmp_path, name, inside, keep)
        for name, inside in (("actual", other_kernels), ("expected", contextlib.nullcontext))
    ]
    verdict = tp.compare(*sides, jobs=1).verdict
    assert verdict.verdict == "match", str(verdict)


@pytest.mark.slow
def test_a_fault_in_dumps_with_calls_missing_is_not_blamed_on_the_optimizer(tmp_path: Path) -> None:
    sides = [
        _dumped(tmp_path, name, lambda f=factor: wrong_kernel("addmm", gain(f), nth=1), "tensors")
        for name, factor in (("actual", 1.05), ("expected", 1.0))
    ]
    verdict = tp.compare(*sides, jobs=1).verdict
    assert verdict.verdict == "diverged", str(verdict)
    assert verdict.culprits[0].name == "Functional.linear.1.forward", str(verdict)
    assert len(verdict.culprits) == 1, str(verdict)
