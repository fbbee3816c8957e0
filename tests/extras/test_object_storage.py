"""Captures at s3://, of a server of moto's on this machine: make test-s3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.two_runs import write_run

pytestmark = pytest.mark.slow
NEEDED = "moto and s3fs are not installed: make test-s3 has an environment with them"
pytest.importorskip("s3fs", reason=NEEDED)
SRC = Path(__file__).parents[2] / "src"
moto_server = pytest.importorskip("moto.server", reason=NEEDED)


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
    s3fs.S3FileSystem().makedirs("runs", exist_ok=True)
    yield "s3://runs"
    server.stop()


def tensorprobe(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(SRC)}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_run_is_sent_and_read_by_each_verb(bucket: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", 2)
    write_run(tmp_path / "b", 2, faulty=1)
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
    write_run(tmp_path / "a", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    status, _, said = tensorprobe("upload", str(tmp_path / "a"), f"{bucket}/a")
    assert (status, said.count("\n")) == (1, 1), said
    assert "could not be written" in said
