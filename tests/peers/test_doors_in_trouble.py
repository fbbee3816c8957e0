"""What the doors say when their disk refuses; the program goes on."""

import shutil
from pathlib import Path

import pytest
import torch

from tensorprobe.peers.msprobe.msprobe_config import from_door_arguments
from tensorprobe.peers.msprobe.msprobe_session import MsprobeSession
from tensorprobe.peers.ptdbg.ptdbg_dump import PtdbgDump
from tensorprobe.peers.ptdbg.ptdbg_settings import DumpTarget, read_switch


def relu() -> None:
    torch.ones(2).relu()


def test_an_msprobe_script_whose_folder_cannot_be_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = MsprobeSession(from_door_arguments(None, {"dump_path": "/proc/nope"}))
    for _ in range(2):
        session.start()
        relu()
        session.stop()
        session.step()
    session.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("tensorprobe: the dump in /proc/nope cannot be written: [Errno 2] ")


def test_an_msprobe_dump_that_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = MsprobeSession(from_door_arguments(None, {"dump_path": str(tmp_path / "dump")}))
    for step in range(3):
        session.start()
        relu()
        if step == 1:
            shutil.rmtree(tmp_path / "dump")
        session.stop()
        session.step()
    session.close()
    said = capsys.readouterr().err
    assert said.count("The program goes on") == 1
    assert "deleted while it was recorded" in said


def test_a_ptdbg_dump_that_is_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = PtdbgDump(
        DumpTarget(tmp_path / "dump", release="5.0"), read_switch("api_stack"), lambda: 0, set()
    )
    dump.start()
    for step in range(3):
        relu()
        if step == 1:
            shutil.rmtree(tmp_path / "dump")
        dump.recorder.step()
        dump.publish_steps()
    dump.close()
    said = capsys.readouterr().err
    assert "deleted while it was recorded" in said
    assert "Traceback" not in said
