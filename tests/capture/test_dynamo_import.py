"""Calls are made as ever while another thread imports torch.compile's parts for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tensorprobe as tp
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
