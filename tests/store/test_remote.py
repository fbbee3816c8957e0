"""Captures at a URL: copied to be read, sent by a process of their own when they are recorded.

`file://` stands for object storage here; test_object_storage.py has S3.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import SRC, run_script, start_script
from tensorprobe.cli.main import main
from tensorprobe.errors import MissingDependency
from tensorprobe.store import remote
from tensorprobe.store.remote import RemoteFailed, place_of

pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies and spools are."""
    monkeypatch.setenv("TENSORPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def url_of(folder: Path) -> str:
    return f"file://{folder}"


def record(path: str | Path, factor: float = 1.0) -> tp.Recorder:
    with tp.Recorder(path, keep="tensors", log=lambda text: None) as recorder:
        for _ in range(2):
            torch.relu(torch.linspace(-1, 1, 64) * factor)
            recorder.step()
    return recorder


def test_a_recording_at_a_url_is_read_by_each_verb(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [url_of(tmp_path / "bucket" / name) for name in ("a", "b")]
    recorders = [record(urls[0]), record(urls[1], 1.5)]
    assert [recorder.failed for recorder in recorders] == [None, None]
    assert recorders[0].path == place / "spools" / "file" / str(tmp_path)[1:] / "bucket" / "a"
    there = tp.load(urls[0])
    assert torch.equal(
        there.call("Torch.relu.0.forward", step=1).tensor("output.0").load(),
        torch.relu(torch.linspace(-1, 1, 64)),
    )
    assert str(there.path).startswith(str(place / "copies"))
    assert not there.gaps
    assert main(["show", urls[0]]) == 0
    assert "Torch.relu.0.forward" in capsys.readouterr().out
    assert main(["compare", *urls, "-o", str(tmp_path / "out")]) == 3
    assert main(["compare", urls[0], urls[0]]) == 0
    assert main(["ranks", urls[0], "--only", "nonfinite"]) == 0
    assert main(["convert", urls[0], "--to", "native", "-o", str(tmp_path / "converted")]) == 0
    assert len(tp.load(tmp_path / "converted").calls) == len(there.calls)


def test_only_what_has_changed_is_copied_again(tmp_path: Path, place: Path) -> None:
    run = tmp_path / "bucket"
    record(run)
    copy = tp.load(url_of(run)).path
    before = {path: path.stat().st_ino for path in copy.rglob("*") if path.is_file()}
    log = run / "rank0" / "step1" / "calls.jsonl"
    log.write_bytes(log.read_bytes() + b'{"type":"gap","name":"x","reason":"new"}\n')
    assert [gap.name for gap in tp.load(url_of(run)).gaps] == ["x"]
    changed = {path.name for path, node in before.items() if path.stat().st_ino != node}
    assert changed <= {"calls.jsonl", ".copied.json"}
    for path in sorted((run / "rank0" / "step0").iterdir()):
        path.unlink()
    assert tp.load(url_of(run)).steps == (1,)


def test_a_run_that_is_too_large_is_not_copied(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "bucket")
    monkeypatch.setenv("TENSORPROBE_CACHE_LIMIT", "1000")
    with pytest.raises(RemoteFailed, match=r"bytes, and 1,000 may be copied to .*LIMIT=BYTES"):
        tp.load(url_of(tmp_path / "bucket"))
    assert not (place / "copies").exists()


@pytest.mark.parametrize("name", ["../out", "a//b", "/etc/x", "a\\b", "a/./b", "x" * 300])
def test_an_object_whose_name_leads_out_is_refused(name: str) -> None:
    with pytest.raises(RemoteFailed, match="an object that no capture has"):
        remote._check_name("s3://bucket/run", name)


@pytest.mark.parametrize("url", ["s3://", "s3://bucket//x", "file:///a/../b", "s3://b/.."])
def test_a_url_without_a_folder_is_wrong_usage(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", url]) == 2
    assert "://BUCKET/FOLDER" in capsys.readouterr().err


def test_the_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(MissingDependency, match=rf"tensorprobe\[{scheme}\]"):
                tp.load(f"{scheme}://bucket/run")
            assert main(["show", f"{scheme}://bucket/run"]) == 1
            assert capsys.readouterr().err.count("\n") == 1


def test_nothing_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with pytest.raises(tp.TensorprobeError, match="there is nothing below it"):
        tp.load(url_of(tmp_path / "bucket"))


def test_a_failed_upload_is_told_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = tmp_path / "bucket"
    bucket.write_text("a file, not a folder")
    url = url_of(bucket / "run")
    recorder = record(url)
    assert isinstance(recorder.failed, RemoteFailed)
    command = f"tensorprobe upload {recorder.path} {url}"
    assert str(recorder.failed).endswith(command)
    assert len(tp.load(recorder.path).steps) == 2  # the spool
    bucket.unlink()
    assert main(command.split()[1:]) == 0
    assert "files" in capsys.readouterr().out
    assert tp.load(url).steps == (0, 1)
    assert main([*command.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == url


def test_a_second_run_does_not_mix_with_the_first(tmp_path: Path) -> None:
    url = url_of(tmp_path / "bucket")
    script = f"""
import torch, tensorprobe as tp
with tp.Recorder({url!r}, log=lambda text: None) as recorder:
    torch.relu(torch.ones(3))
print(recorder.failed)
"""
    assert run_script(tmp_path, script).stdout == "None\n"
    said = run_script(tmp_path, script).stdout
    assert "holds another run already: nothing was sent. Give another URL" in said
    assert len(tp.load(url).calls) == 2


def test_a_program_that_is_killed_leaves_a_spool_and_its_steps_are_sent(tmp_path: Path) -> None:
    url = url_of(tmp_path / "bucket")
    script = f"""
import os, signal, torch, tensorprobe as tp
recorder = tp.Recorder({url!r}, keep="tensors", log=lambda text: None)
recorder.start()
for n in range(3):
    torch.relu(torch.full((64,), float(n)))
    recorder.step()
torch.cos(torch.ones(3))
recorder.drain()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_script(tmp_path, script).returncode == -signal.SIGKILL
    spool = tp.load(place_of(url, "spools"))
    assert spool.steps == (0, 1, 2, 3)
    end = time.monotonic() + 100
    while True:  # the process that uploads goes on, and sends all there is
        try:
            if tp.load(url).steps == (0, 1, 2, 3):
                break
        except tp.TensorprobeError:
            pass
        assert time.monotonic() < end
        time.sleep(0.2)
    there = tp.load(url)
    assert [c.name for c in there.calls] == [c.name for c in spool.calls]


def test_the_spool_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORPROBE_CACHE_LIMIT", "300000")
    url = url_of(tmp_path / "bucket")
    with tp.Recorder(url, keep="tensors", log=lambda text: None) as recorder:
        for _ in range(3):
            torch.relu(torch.rand(100_000))
    assert recorder.path.exists()
    sizes = [path.stat().st_blocks * 512 for path in recorder.path.rglob("*") if path.is_file()]
    assert sum(sizes) < 1_200_000
    assert tp.load(url).calls


def test_upload_refuses_what_is_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upload", str(tmp_path / "no"), url_of(tmp_path)]) == 2
    assert main(["upload", str(tmp_path), "bucket"]) == 2
    assert main(["upload", str(tmp_path), url_of(tmp_path / "x")]) == 1
    assert "it has no capture.json" in capsys.readouterr().err


def test_links_and_hidden_files_are_not_sent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run)
    (tmp_path / "secret").write_text("secret")
    (run / "rank0" / "link.txt").symlink_to(tmp_path / "secret")
    (run / "rank0" / "folder").symlink_to(tmp_path)
    (run / ".hidden").write_text("secret")
    assert main(["upload", str(run), url_of(tmp_path / "bucket")]) == 0
    sent = {path.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()}
    assert "capture.json" in sent
    assert not sent & {"link.txt", ".hidden", "secret"}


def test_a_link_at_a_url_is_not_followed(tmp_path: Path) -> None:
    run = tmp_path / "bucket"
    record(run)
    (tmp_path / "secret").write_text("secret")
    (run / "rank0" / "link.txt").symlink_to(tmp_path / "secret")
    (run / "rank0" / "step9").symlink_to(tmp_path)
    copy = tp.load(url_of(run)).path
    assert not [p for p in copy.rglob("*") if p.is_file() and p.read_bytes() == b"secret"]


def test_processes_that_the_program_forked_do_not_keep_it_from_ending(tmp_path: Path) -> None:
    script = f"""
import os, signal, time, torch, tensorprobe as tp
with tp.Recorder("file://{tmp_path}/bucket", log=lambda text: None) as recorder:
    torch.relu(torch.ones(3))
    child = os.fork()  # as a worker of a DataLoader
    if child == 0:
        time.sleep(1000)
        os._exit(0)
os.kill(child, signal.SIGKILL)
print(recorder.failed)
"""
    assert run_script(tmp_path, script).stdout == "None\n"
    assert tp.load(f"file://{tmp_path}/bucket").calls


def test_steps_that_were_dropped_are_not_sent(tmp_path: Path) -> None:
    url = url_of(tmp_path / "bucket")
    with tp.Recorder(url, keep_last=2, log=lambda text: None) as recorder:
        for _ in range(5):
            torch.relu(torch.ones(3))
            recorder.step()
    assert recorder.failed is None
    assert tp.load(url).steps == (3, 4)


def test_run_records_to_a_url(tmp_path: Path) -> None:
    url = url_of(tmp_path / "bucket" / "run")
    (tmp_path / "train.py").write_text("import torch\ntorch.relu(torch.ones(3))\n")
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", "-o", url, "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SRC)}, check=False,
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [call.op for call in tp.load(url).calls][-1] == "torch.relu"


def test_two_programs_may_copy_one_run_at_once(tmp_path: Path) -> None:
    record(tmp_path / "bucket")
    script = f"""
import tensorprobe as tp
print(len(tp.load("file://{tmp_path}/bucket").calls))
"""
    started = [start_script(tmp_path, script) for _ in range(2)]
    said = {each.communicate(timeout=200)[0] for each in started}
    assert len(said) == 1
    assert said != {""}
