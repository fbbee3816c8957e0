"""PrecisionDebugger: steps, modes, modules; training goes on after the last step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dumping import call_names, lines, names, net, train
from torch.utils.data import DataLoader, TensorDataset

import tensorprobe as tp
from tensorprobe.errors import BadUsage
from tensorprobe.ptdbg_ascend import PrecisionDebugger, module_dump, module_dump_end
from tensorprobe.tensors import backends


@pytest.fixture(autouse=True)
def no_debugger_left() -> Iterator[None]:
    yield
    if PrecisionDebugger._instance is not None:
        PrecisionDebugger._instance.close()


def folders(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*.pkl"))


def test_steps_have_folders_and_numbers_begin_anew(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, hook_name="dump", step=[0, 2])
    model, bare = net(), net()
    for _ in range(4):
        debugger.start()
        train(model)
        debugger.stop()
        debugger.step()
    assert folders(tmp_path) == [
        f"ptdbg_dump_v5.0/step{n}/rank0/api_stack_dump.pkl" for n in (0, 2)
    ]  # before the program ends
    debugger.close()
    first, second = (tmp_path / name for name in folders(tmp_path))
    assert call_names(first) == call_names(second)
    assert "Functional_conv2d_0_forward" in call_names(second)
    line = next(line for line in lines(first) if line[0] == "Functional_conv2d_0_forward_input.0")
    assert line[1] == 0
    assert len(line[5]) == 4  # max, min, mean, norm
    assert tp.load(tmp_path).steps == (0, 2)
    for _ in range(4):
        train(bare)
    for ours, theirs in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not list(tmp_path.rglob("*.recording-*"))


class LateEvent:
    """A copy from a device that is behind the program."""

    def record(self) -> None:
        self._since = time.monotonic()

    def query(self) -> bool:
        return time.monotonic() - self._since > 0.3


def test_a_step_that_ends_without_stop_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(device: torch.device, *, stats: bool, digest: bool) -> backends.TorchBackend:
        backend = backends.TorchBackend(device, stats=stats, digest=digest)
        backend._module = SimpleNamespace(Event=LateEvent)
        return backend

    monkeypatch.setitem(backends._CHOICES, "cpu", late)
    debugger = PrecisionDebugger(dump_path=tmp_path, hook_name="dump", step=[0, 1])
    debugger.configure_hook(mode="api_stack", summary_only=True)
    model = net()
    debugger.start()
    for _ in range(3):
        train(model)
        debugger.step()
    debugger.close()
    first, second = (tmp_path / name for name in folders(tmp_path))
    assert names(first) == names(second)
    tensors = [line for line in lines(first) if not line[0].endswith("stack_info") and line[3]]
    assert tensors
    assert all(line[5][0] is not None for line in tensors)


def test_without_steps_each_is_kept(tmp_path: Path) -> None:
    """In release 4.0 every step was written over the one before."""
    debugger = PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump")
    debugger.configure_hook(mode="list", scope=["Functional_linear_0_forward"])
    for _ in range(2):
        PrecisionDebugger.start()  # class methods, as in their guide
        train(net())
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    debugger.close()
    assert folders(tmp_path) == [f"ptdbg_dump_v5.0/step{n}/rank0/list_dump.pkl" for n in (0, 1)]


def test_enable_dataloader_needs_no_calls_and_raises_nothing(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.ones(4, 3, 6, 6)), batch_size=1)
    debugger = PrecisionDebugger(tmp_path, "dump", step=[1], enable_dataloader=True)
    debugger.configure_hook(mode="api_list", api_list=["conv2d"])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = 0
    for (x,) in data:
        model.eval()(x).sum().backward()
        optimizer.step()
        seen += 1
    debugger.close()
    assert seen == 4
    assert folders(tmp_path) == ["ptdbg_dump_v5.0/step1/rank0/api_list_dump.pkl"]


def test_a_model_is_dumped_by_its_modules(tmp_path: Path) -> None:
    model = net()
    debugger = PrecisionDebugger(tmp_path, "dump", model=model)
    debugger.start()
    train(model)
    debugger.close()
    found = call_names(tmp_path / folders(tmp_path)[0])
    assert "Module_conv.Conv2d_0_forward" in found
    assert "Module_fc.Linear_0_backward" in found
    assert not any(name.startswith("Functional") for name in found)
    capture = tp.load(tmp_path)
    assert capture.call("Module.fc.Linear.forward.0").module == "fc"


def test_one_module_under_a_name_of_its_own(tmp_path: Path) -> None:
    model = net()
    debugger = PrecisionDebugger(tmp_path, "dump")
    with pytest.raises(BadUsage, match=r"debugger\.start\(\), before it"):
        module_dump(model.fc, "mine")
    debugger.start()
    model.conv(torch.ones(1, 3, 6, 6))
    module_dump(model.fc, "mine")
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    module_dump_end()
    model.fc(torch.ones(2, 8))
    debugger.close()
    found = call_names(tmp_path / folders(tmp_path)[0])
    forward = [name for name in found if name.endswith("forward") and "ones" not in name]
    assert forward == [
        "Functional_conv2d_0_forward",
        "Module_mine.Linear_0_forward",
        "Functional_linear_0_forward",
    ]
    assert "Module_mine.Linear_0_backward" in found
    with pytest.raises(BadUsage, match="needs a dump"):
        module_dump_end()


def test_checksums_are_those_of_the_original(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(tmp_path, "dump")
    debugger.configure_hook(mode="all", summary_mode="md5")
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    debugger.start()
    x.t().abs()
    debugger.close()
    index = tmp_path / folders(tmp_path)[0]
    line = next(line for line in lines(index) if line[0] == "Tensor_abs_0_forward_input.0")
    wide = np.ascontiguousarray(x.t().float().numpy())
    assert line[2:] == [f"{zlib.crc32(wide.tobytes()):08x}", "torch.bfloat16", [3, 2], []]
    assert not index.with_suffix("").exists()


def test_statistics_only(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(tmp_path, "dump")
    debugger.configure_hook(summary_only=True, input_output_mode=["backward", "output"])
    debugger.start()
    train(net())
    debugger.close()
    index = tmp_path / folders(tmp_path)[0]
    assert not index.with_suffix("").exists()
    tensors = [name for name in names(index) if not name.endswith("stack_info")]
    assert all("backward_output" in name for name in tensors)


def test_another_rank_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debugger = PrecisionDebugger(tmp_path, "dump", rank=3)
    debugger.start()
    train(net())
    debugger.close()
    assert folders(tmp_path) == []
    assert "rank 0 is not among ranks 3" in capsys.readouterr().err


def test_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="there is no PrecisionDebugger yet"):
        PrecisionDebugger.start()
    first = PrecisionDebugger(tmp_path, "dump")
    again = PrecisionDebugger(tmp_path, "dump")
    assert again.__dict__ is first.__dict__
    with pytest.raises(BadUsage, match=r"made in .*test_ptdbg_debugger\.py:\d+ with other"):
        PrecisionDebugger(tmp_path / "b", "dump")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "hook_name=None: expected 'dump' or 'overflow_check'"),
        ({"hook_name": "dumb"}, "hook_name='dumb'"),
        ({"hook_name": "dump", "step": ["a"]}, "step"),
        ({"hook_name": "dump", "rank": -1}, "rank"),
        ({"hook_name": "dump", "enable_dataloader": "yes"}, "enable_dataloader='yes'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=message):
        PrecisionDebugger(dump_path=tmp_path, **arguments)
