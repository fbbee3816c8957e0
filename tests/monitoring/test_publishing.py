"""Reports in W&B, MLflow and TensorBoard: by their own packages where these are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from tensorprobe.monitoring.event_files import masked_crc

LINE = "diverged: Tensor.exp.0.forward (step 0, rank 0): "


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "report"
    folder.mkdir()
    culprit = {
        "name": "Tensor.exp.0.forward",
        "step": 0,
        "rank": 0,
        "reason": "its result is wrong",
    }
    verdict = {"format": 1, "verdict": "diverged", "culprits": [culprit]}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "report.html").write_text("<p>a page</p>")
    (folder / "tensors").mkdir()
    return folder


def test_tensorboard(report: Path) -> None:
    assert tp.publish(report, "tensorboard") == ["tensorboard"]
    (events,) = (report / "tensorboard").iterdir()
    content = events.read_bytes()
    assert LINE.encode() in content
    assert b"tensorprobe/report" in content
    at, texts = 0, 0
    while at < len(content):  # each event is whole
        size = int.from_bytes(content[at : at + 8], "little")
        event = content[at + 12 : at + 12 + size]
        assert int.from_bytes(content[at + 12 + size : at + 16 + size], "little") == masked_crc(
            event
        )
        at += 16 + size
        texts += 1
    assert texts == 2


def test_tensorboard_reads_it(report: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tp.publish(report, "tensorboard")
    events = loading.EventAccumulator(str(report / "tensorboard"))
    events.Reload()
    (found,) = events.Tensors("tensorprobe/report")
    assert found.tensor_proto.string_val[0].decode().startswith(LINE)


def test_mlflow(report: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        assert tp.publish(report, "mlflow") == ["mlflow"]
    assert mlflow.get_run(run.info.run_id).data.tags["tensorprobe.report"].startswith(LINE)
    found = mlflow.MlflowClient().list_artifacts(run.info.run_id, "tensorprobe/report")
    assert {Path(each.path).name for each in found} == {"verdict.json", "report.html"}


def test_wandb(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path), project="x") as run:
        assert tp.publish(report, "wandb") == ["wandb"]
        assert run.summary["tensorprobe/report"].startswith(LINE)
        assert run.step == 0


def test_what_is_no_report_and_what_is_no_writer(report: Path, tmp_path: Path) -> None:
    with pytest.raises(tp.BadUsage, match="is no report: expected a folder with one of verdict"):
        tp.publish(tmp_path, "tensorboard")
    with pytest.raises(tp.BadUsage, match="expected tensorboard, wandb, mlflow"):
        tp.publish(report, "tensorbord")


def test_a_comparison_is_saved_there(tmp_path: Path) -> None:
    for name in "ab":
        with tp.Recorder(tmp_path / name, level="L1", log=lambda text: None):
            torch.ones(3).exp()
    comparison = tp.compare(tmp_path / "a", tmp_path / "b", jobs=1)
    comparison.save(tmp_path / "report", writers="tensorboard")
    (events,) = (tmp_path / "report" / "tensorboard").iterdir()
    assert b"match" in events.read_bytes()
