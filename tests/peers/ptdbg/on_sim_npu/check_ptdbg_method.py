"""The method of the guide from end to end: dump, compare, narrow, look inside, fix, compare."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorprobe.devices import sim_npu
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump, compare, parse


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = self.norm(x).permute(1, 0)
        return self.last(F.gelu(x.transpose(0, 1)))


def train(device: str) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.linspace(-2, 2, 64).reshape(8, 8)
    for _ in range(2):
        loss = model(x.to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def dump(name: str, device: str, **switch: Any) -> Path:
    """A dump of the training on a device; gives its index."""
    session = PtdbgSession()
    session.set_dump_path(f"./{name}.pkl", "all")
    session.register_hook(None, acc_cmp_dump, rank=0)
    session.set_dump_switch("ON", **switch)
    train(device)
    session.close()
    prefix = "api_stack_" if switch.get("mode") == "api_stack" else ""
    return Path("all_v2.3/rank0") / f"{prefix}{name}.pkl"


def compared(npu: Path, cpu: Path) -> list[dict[str, str]]:
    both = {
        "npu_pkl_path": npu,
        "bench_pkl_path": cpu,
        "npu_dump_data_dir": npu.with_suffix(""),
        "bench_dump_data_dir": cpu.with_suffix(""),
        "is_print_compare_log": False,
    }
    with compare(both, "./output").open(newline="") as file:
        return list(csv.DictReader(file))


def failing(rows: list[dict[str, str]]) -> list[str]:
    return [row["NPU Name"] for row in rows if row["Accuracy Reached or Not"] == "No"]


def test_from_the_whole_network_to_the_kernel_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    fault = sim_npu.plant(op="gelu", effect=lambda out: out.roll(1, -1) * 3, calls=[0])

    # 1, 2: the whole network on both sides, compared
    cpu = dump("cpu", "cpu", mode="api_stack")
    npu = dump("npu", "npu", mode="api_stack")
    suspect = failing(compared(npu, cpu))[0]
    assert suspect == "Functional_gelu_0_forward_output"

    # 3: narrowed to a range and to the call alone; each step agrees with the one before
    scope = ["Functional_layer_norm_0_forward", "Functional_linear_1_forward"]
    fault.remove()
    fault = sim_npu.plant(op="gelu", effect=lambda out: out.roll(1, -1) * 3, calls=[0])
    ranges = [dump(f"{d}_range", d, mode="range", scope=scope) for d in ("npu", "cpu")]
    assert failing(compared(*ranges))[0] == suspect
    for wanted in ("Functional_gelu_0_forward", "Functional_gelu_0"):
        fault.remove()
        fault = sim_npu.plant(op="gelu", effect=lambda out: out.roll(1, -1) * 3, calls=[0])
        lists = [dump(f"{d}_{wanted}", d, mode="list", scope=[wanted]) for d in ("npu", "cpu")]
        assert failing(compared(*lists))[0] == suspect

    # 4: where it is called
    capsys.readouterr()
    parse(npu, "Functional_gelu_0_forward")
    assert "return self.last(F.gelu(x.transpose(0, 1)))" in capsys.readouterr().out

    # 5: the data of its kernel
    Path("dump.json").write_text(
        json.dumps({"dump": {"dump_path": "./dump", "dump_mode": "all", "dump_op_switch": "on"}})
    )
    session = PtdbgSession()
    session.register_hook(None, acc_cmp_dump, dump_mode="acl", dump_config="./dump.json")
    session.set_dump_switch("ON", mode="acl", scope=["Functional_gelu_0_forward"])
    train("npu")
    session.close()
    assert [path.name.partition(".")[0] for path in Path("dump").rglob("Gelu.*")] == ["Gelu"]

    # 6: fixed, and compared again
    fault.remove()
    assert failing(compared(dump("fixed", "npu"), dump("cpu_again", "cpu"))) == []
