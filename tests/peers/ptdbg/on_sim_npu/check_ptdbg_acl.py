"""Mode acl on the simulated NPU: one call again under ACL dump, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe as tp
from tensorprobe.ascend.dump import read_dump
from tensorprobe.devices import sim_npu
from tensorprobe.errors import BadUsage, DeviceUnusable
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump, overflow_check

FILE = re.compile(r"(\w+)\.\1(_\d+)?\.\d+\.\d+\.\d{16}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")


def config(**fields: object) -> str:
    dump = {"dump_list": [], "dump_path": "./dump/output", "dump_op_switch": "on", **fields}
    Path("dump.json").write_text(json.dumps({"dump": dump}))
    return "./dump.json"


def dumped() -> list[Path]:
    """The files of the device, by time."""
    found = [path for path in Path("dump/output").rglob("*") if FILE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition(".")[2]))


def train(conv: torch.nn.Module) -> None:
    x = torch.randn(2, 3, 6, 6).npu()
    y = conv(x).permute(0, 2, 3, 1)
    y = F.batch_norm(y.transpose(1, 3), None, None, training=True)
    y.sort(dim=-1)[0].pow(2).sum().backward()


def conv() -> torch.nn.Module:
    return torch.nn.Conv2d(3, 4, 3, padding=1).npu()


def acl(scope: str, program: Any, gradients: list[str] | None = None, **fields: object) -> None:
    session = PtdbgSession()
    session.set_dump_path("./npu_dump1.pkl", "acl")
    session.register_hook(None, acc_cmp_dump, dump_mode="acl", dump_config=config(**fields))
    session.set_dump_switch("ON", mode="acl", scope=[scope], filter_switch="OFF")
    if gradients is not None:
        session.set_backward_input(gradients)
    program()
    session.set_dump_switch("OFF")
    session.close()


def test_a_forward_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = conv()
    acl("Functional_conv2d_0_forward", lambda: train(model), dump_mode="all")
    (path,) = dumped()
    assert path.name.startswith("Conv2D.")
    # {dump_path}/{time}/{deviceid}/{model_id}
    assert re.fullmatch(r"\d{14}/0/0", str(path.parent.relative_to("dump/output")))
    said = capsys.readouterr().err
    assert said.count("set_dump_path is not used") == 1
    assert "was run again under ACL dump: 1 files" in said
    assert not list(Path().rglob("*.recording-*"))
    assert [tensor.role for tensor in read_dump(path).tensors] == ["input"] * 3 + ["output"]


def test_output_is_what_is_dumped_by_default() -> None:
    model = conv()
    acl("Tensor_permute_0_forward", lambda: train(model))
    acl("Functional_conv2d_0_forward", lambda: train(model))
    assert [tensor.role for tensor in read_dump(dumped()[-1]).tensors] == ["output"]


def test_the_switch_is_off_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    model = conv()
    acl("Functional_conv2d_0_forward", lambda: train(model), dump_op_switch="off")
    assert dumped() == []
    assert "dump_op_switch is off" in capsys.readouterr().err


def test_a_call_that_calls_others_is_one_dump() -> None:
    """F.batch_norm calls torch.batch_norm: the original starts ACL twice for it."""
    model = conv()
    acl("Functional_batch_norm_0_forward", lambda: train(model))
    assert len({path.parent for path in dumped()}) == 1


def test_training_goes_on_as_it_would_have() -> None:
    bare, dumping = conv(), conv()
    dumping.load_state_dict(bare.state_dict())
    torch.manual_seed(5)
    train(bare)
    torch.manual_seed(5)
    acl("Functional_conv2d_0_backward", lambda: train(dumping))
    for ours, theirs in zip(bare.parameters(), dumping.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())


def test_a_backward_call_with_and_without_a_file() -> None:
    model = conv()
    session = PtdbgSession()
    session.set_dump_path("./first.pkl", "ptdbg_dump")
    session.register_hook(model, acc_cmp_dump)
    session.set_dump_switch("ON", mode="api_list", api_list=["conv2d"])
    train(model)
    session.close()
    saved = "ptdbg_dump_v2.3/rank0/first//Functional_conv2d_0_backward_input.0.npy"
    acl("Functional_conv2d_0_backward", lambda: train(model), [saved])
    kinds = [path.name.partition(".")[0] for path in dumped()]
    assert any("Grad" in kind or "Backward" in kind for kind in kinds), kinds
    assert "Conv2D" not in kinds  # the forward is not under the dump
    acl("Functional_conv2d_0_backward", lambda: train(model))
    again = [path.name.partition(".")[0] for path in dumped()]
    assert again == kinds * 2


def test_an_output_that_is_no_tensor_gets_a_warning_and_a_repro(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = torch.ones(1, requires_grad=True).npu()
    acl("Tensor_item_0_backward", x.item)
    said = capsys.readouterr().err
    assert "is not of tensor type and cannot be automatically derived" in said
    command = re.search(r"tensorprobe repro (\S+) (\S+) -o (\S+)", said)
    assert command is not None
    assert tp.load(command[1]).call(command[2]).op == "torch.Tensor.item"


@pytest.mark.parametrize("value", ["1", "2", None])
def test_a_task_queue_is_refused_before_training(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE")
    if value is not None:
        monkeypatch.setenv("TASK_QUEUE_ENABLE", value)
    with pytest.raises(DeviceUnusable, match="export TASK_QUEUE_ENABLE=0"):
        PtdbgSession().register_hook(None, acc_cmp_dump, dump_mode="acl", dump_config=config())


def test_half_of_the_settings_say_the_other_half() -> None:
    session = PtdbgSession()
    with pytest.raises(BadUsage, match=r"dump_config='\./dump\.json'"):
        session.register_hook(None, acc_cmp_dump, dump_mode="acl")
    session.register_hook(None, acc_cmp_dump)
    with pytest.raises(BadUsage, match="write both register_hook"):
        session.set_dump_switch("ON", mode="acl", scope=["Tensor_permute_0_forward"])
    Path("dump.json").write_text("{}")
    with pytest.raises(BadUsage, match=r"has no dump_path\. It holds"):
        session.register_hook(None, acc_cmp_dump, dump_mode="acl", dump_config="dump.json")
    with pytest.raises(BadUsage, match=r"there is no file 'nowhere\.npy'"):
        session.set_backward_input(["nowhere.npy"])
    session.close()


def test_each_overflowing_call_is_run_again_under_dump(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = PtdbgSession()
    session.set_dump_path("./x.pkl", "ptdbg_dump")
    session.register_hook(
        None, overflow_check, overflow_nums=2, dump_mode="acl", dump_config=config()
    )
    model = torch.nn.Linear(4, 2).npu()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def train_on() -> None:
        for _ in range(4):
            y = model(torch.ones(3, 4).npu())
            (y * 1e30 * 1e30).sum().backward()
            optimizer.zero_grad()
            optimizer.step()

    with pytest.raises(ValueError, match=r"\[overflow 2 times\]: dump file is saved in '.*output'"):
        train_on()
    session.close()
    assert [path.name.partition(".")[0] for path in dumped()] == ["Mul", "Mul"]
    assert capsys.readouterr().err.count("set_dump_path is not used") == 1
    assert not list(tmp_path.rglob("*.pkl"))


def test_an_overflow_that_saturates_is_seen_by_the_flag(tmp_path: Path) -> None:
    sim_npu.set_overflow_mode("saturation")
    session = PtdbgSession()
    session.set_dump_path("./x.pkl", "ptdbg_dump")
    session.register_hook(None, overflow_check)
    x = torch.full((4,), 60000.0, dtype=torch.float16).npu().requires_grad_()
    with pytest.raises(ValueError, match=r"\[overflow 1 times\]"):
        (x * x).sum().backward()
    session.close()
    (index,) = tmp_path.rglob("Overflow_info_*.pkl")
    assert tp.load(index).calls[0].name.startswith("Tensor.__mul__.0")
