"""Captures at s3://, of a server of moto's on this machine: make test-s3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorded import SRC

pytestmark = pytest.mark.slow
NEEDED = "moto and s3fs are not installed: make test-s3 has an environment with them"
pytest.importorskip("s3fs", reason=NEEDED)
moto_server = pytest.importorskip("moto.server", reason=NEEDED)

LOG = """{"type":"value","id":0,"summary":[-1.0,1.0,0.0,2.0,0,0,0]}
{"type":"call","id":0,"name":"Torch.relu.0.forward","op":"torch.relu","args":[{"tensor":{"dtype":"float32","shape":[4],"stride":[1],"value":0}}]}
{"type":"end","id":0,"outputs":{"tensor":{"dtype":"float32","shape":[4],"stride":[1],"value":0}}}
{"type":"closed","calls":1}
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An empty bucket of a server that ends with the test."""
    import s3fs

    server = moto_server.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("TENSORPROBE_CACHE", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("runs")
    yield "s3://runs"
    server.stop()


def tensorprobe(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(SRC)}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run_at(folder: Path, low: float = -1.0) -> Path:
    """A run of one call on two ranks, written by hand: no torch is needed."""
    for rank in (0, 1):
        step = folder / f"rank{rank}" / "step0"
        step.mkdir(parents=True)
        (step / "calls.jsonl").write_text(LOG.replace("-1.0", str(low)))
        about = json.dumps({"format": 1, "run": "x", "rank": rank})
        (folder / f"rank{rank}" / "rank.json").write_text(about)
    (folder / "capture.json").write_text('{"format":1,"run":"x","config":{"keep":"stats"}}')
    return folder


def test_a_run_is_sent_and_read_by_each_verb(bucket: str, tmp_path: Path) -> None:
    run_at(tmp_path / "a")
    run_at(tmp_path / "b", -0.5)
    for name in ("a", "b"):
        status, said, wrong = tensorprobe("upload", str(tmp_path / name), f"{bucket}/{name}")
        assert status == 0, wrong
        assert said.startswith("sent 5 files")
    status, said, wrong = tensorprobe("show", f"{bucket}/a")
    assert status == 0, wrong
    assert "Torch.relu.0.forward" in said
    assert tensorprobe("ranks", f"{bucket}/a")[0] == 0
    assert tensorprobe("compare", f"{bucket}/a", f"{bucket}/a")[0] == 0
    out = tmp_path / "out"
    assert tensorprobe("compare", f"{bucket}/a", f"{bucket}/b", "-j", "2", "-o", str(out))[0] == 3
    local = tmp_path / "local"
    assert (
        tensorprobe("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(local))[0] == 3
    )
    there, here = (json.loads((f / "verdict.json").read_text()) for f in (out, local))
    for each in (there, here):
        del each["actual"], each["expected"]
    assert there == here


def test_what_is_not_there_is_one_line(bucket: str) -> None:
    for url in (f"{bucket}/nothing", "s3://no-such-bucket/run"):
        status, _, said = tensorprobe("show", url)
        assert (status, said.count("\n")) == (1, 1), said


def test_a_server_that_is_gone_is_one_line(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_at(tmp_path / "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    status, _, said = tensorprobe("upload", str(tmp_path / "a"), f"{bucket}/a")
    assert (status, said.count("\n")) == (1, 1), said
    assert "could not be written" in said
