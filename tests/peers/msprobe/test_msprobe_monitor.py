"""msprobe's monitors: their configuration and calls, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msprobe_making import SHARED
from torch import nn

import tensorprobe as tp
from tensorprobe.errors import BadArtefact
from tensorprobe.monitoring.series_reading import TrendKey, read_steps, read_trends
from tensorprobe.monitoring.trend_comparison import compare_trends
from tensorprobe.msprobe.core.monitor_v2.trainer import TrainerMonitorV2
from tensorprobe.msprobe.pytorch import TrainerMon
from tensorprobe.peers.msprobe.msprobe_monitor import plan_of

HEADER = "vpp_stage,name,step,min,max,mean,norm,nans,zeros,shape,dtype\n"


def config(folder: Path, **fields: Any) -> Path:
    path = folder / "monitor.json"
    path.write_text(json.dumps(fields))
    return path


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def kinds(folder: Path) -> set[str]:
    return {key.kind for key in read_trends(folder)[0].trends} - {"scalar"}


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({}, {"input"}),
        ({"wg_distribution": True}, {"input", "gradient", "gradient.backward"}),
        (
            {"mv_distribution": True, "ur_distribution": True},
            {"input", "moment.exp_avg", "moment.exp_avg_sq", "update"},
        ),
        (
            {"xy_distribution": True, "param_distribution": True},
            {"input", "activation", "parameter"},
        ),
    ],
)
def test_trainer_mon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], measured: set[str]
) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    path = config(tmp_path, targets={"2": {}}, step_interval=2, start_step=12, **fields)
    peer = TrainerMon(path, params_have_main_grad=False)
    peer.set_monitor(model, grad_acc_steps=1, optimizer=optimizer, start_iteration=10)
    for _ in range(8):
        train(model, optimizer)
    assert peer.monitor is not None
    peer.monitor.close()
    steps = [*read_steps(tmp_path / "out" / "rank0", pytest.fail)]
    assert [step.step for step in steps if step.tables] == [12, 14, 16]
    assert kinds(tmp_path / "out") == measured
    (rank,) = read_trends(tmp_path / "out")
    named = {key.name for key in rank.trends if key.kind not in ("scalar", "input")}
    assert named <= {"2", "2.weight", "2.bias", "total"}


def test_trainer_monitor_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sections = {"module": {"enabled": False}, "weight_grad": {"enabled": True}}
    path = config(tmp_path, framework="pytorch", output_dir=str(tmp_path / "o"), monitors=sections)
    peer = TrainerMonitorV2(path)
    peer.start(model)
    for _ in range(3):
        train(model, optimizer)
        peer.step()
    peer.stop()
    assert kinds(tmp_path / "o") == {"input", "gradient", "gradient.backward"}
    assert [step.step for step in read_steps(tmp_path / "o" / "rank0", pytest.fail)] == [0, 1, 2]


def test_what_is_not_measured_is_said() -> None:
    plan = plan_of({"l2_targets": {"a": ["b"]}, "cc_distribution": {"enable": True}, "colour": 1})
    assert plan.notes == (
        "cc_distribution is not measured: communication: use tensorprobe run, and tensorprobe "
        "ranks",
        "l2_targets is not measured: attention entropy and the like",
        "unknown field of the monitor's configuration: colour",
    )
    with pytest.raises(tp.BadUsage, match="step_interval=0 in the monitor's configuration"):
        plan_of({"step_interval": 0})
    with pytest.raises(tp.BadUsage, match="generate_xy_metrics is not supported"):
        TrainerMon.generate_xy_metrics(None)  # type: ignore[arg-type]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(tp.BadUsage, match="cannot read"):
        TrainerMon(tmp_path / "nowhere.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(tp.BadUsage, match="expected a JSON object"):
        TrainerMon(tmp_path / "list.json")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no ../shared")
def test_files_that_msprobe_has_written() -> None:
    (rank,) = read_trends(SHARED / "data" / "msprobe" / "other")
    assert rank.gaps == []
    weight = rank.trends[TrendKey("gradient", "fc1.weight")]
    assert weight.steps.tolist() == [0, 1]
    assert weight.values.tolist() == pytest.approx([0.09362666, 0.06906112])
    assert rank.trends[TrendKey("moment.exp_avg", "fc1.weight")].steps.tolist() == [1]
    assert TrendKey("activation", "fc1.output") in rank.trends


def test_its_trends_are_compared(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for side, factor in (("a", 1.0), ("b", 0.3)):
        folder = tmp_path / side / "Nov19_10-00-00-rank3-ab"
        folder.mkdir(parents=True)
        generator.manual_seed(0)
        for step in range(40):
            norm = 1 + 0.1 * float(torch.rand(1, generator=generator))
            norm *= factor if step >= 20 else 1
            rows = f'0,fc.weight,{step},-1,1,0,{norm},0,0.5,"[3, 4]",torch.float32\n'
            (folder / f"grad_reduced_{step}-{step}.csv").write_text(HEADER + rows)
    found = compare_trends(tmp_path / "b", tmp_path / "a")
    (first,) = found.partings
    assert (first.kind, first.name, first.rank, first.step) == ("gradient", "fc.weight", 3, 20)
    assert found.next.endswith("-o runs/step20 SCRIPT")


@pytest.mark.parametrize(
    ("text", "gap"),
    [
        ("", "expected the columns name, step and norm"),
        ("a,b\n1,2\n", "expected the columns name, step and norm"),
        (HEADER + "0,fc,x,1,1,1,1,0,0,,\n", "invalid literal for int"),
        (HEADER + "0,fc\n", "index out of range"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, gap: str) -> None:
    (tmp_path / "grad_reduced_0-0.csv").write_text(text)
    with pytest.raises(BadArtefact, match=gap):
        read_trends(tmp_path)
    (tmp_path / "actv_0-0.csv").write_text(HEADER + "0,fc,0,1,1,1,2.5,0,0,,\n")
    (rank,) = read_trends(tmp_path)
    assert gap in rank.gaps[0]
    assert len(rank.trends) == 1


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text(HEADER)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "grad_reduced_0-0.csv").symlink_to(tmp_path / "secret.csv")
    with pytest.raises(BadArtefact, match="leads out"):
        read_trends(tmp_path / "in")
