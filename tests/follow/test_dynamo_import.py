"""Calls are made as ever beside torch.compile's parts: while another thread imports them for the
first time, and while they look at every frame."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tensorprobe as tp
from recorded import run_script
from tensorprobe import native


def _recording(folder: Path) -> AbstractContextManager[object]:
    return tp.Recorder(folder, level="L1")


def _guarding(folder: Path) -> AbstractContextManager[object]:
    return tp.Guard(folder, look_every=10**6, log=lambda text: None)


@pytest.mark.parametrize("watching", [_recording, _guarding])
@pytest.mark.parametrize("is_native", [True, False])
def test_calls_while_another_thread_imports_dynamo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watching: Callable[[Path], AbstractContextManager[object]],
    is_native: bool,
) -> None:
    if not is_native:
        monkeypatch.setattr(native, "MODULE", None)
    half = ModuleType("torch._dynamo.convert_frame")  # among the modules before it has anything
    with watching(tmp_path):
        torch.ones(2) * 1
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, half.__name__, half)
            assert (torch.ones(2) * 2).sum().item() == 4.0


_UNSEEN = """
import sys, torch
import tensorprobe as tp

def part(x):
    for _ in range(2):
        x = x + 1
        print(end="")  # what dynamo does not compile is run with its eyes open
    return x.sum()

before = "torch._dynamo" in sys.modules
with tp.Recorder("runs/a", level="L2") as recorder:
    torch.ones(2) * 1
    imported = "torch._dynamo" in sys.modules and not before
    seen = []
    from torch._dynamo import convert_frame
    look = convert_frame.ConvertFrameAssert.__call__

    def watch(self, frame, *args, **kwargs):
        seen.append(frame.f_code.co_filename)
        return look(self, frame, *args, **kwargs)

    convert_frame.ConvertFrameAssert.__call__ = watch
    x = torch.ones(3, requires_grad=True)
    torch.compile(part, backend="eager")(x).backward()
    recorder.step()
print(imported, [name for name in seen if "tensorprobe" in name])
"""


def test_operators_are_recorded_unseen_by_dynamo(tmp_path: Path) -> None:
    done = run_script(tmp_path, _UNSEEN)
    assert (done.returncode, done.stdout) == (0, "False []\n"), done.stderr
    names = [call.name for call in tp.load(tmp_path / "runs/a").calls]
    assert names.count("Aten.add.0.forward") == 1
