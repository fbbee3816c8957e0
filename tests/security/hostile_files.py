"""Files that are no captures: graphs of compiled parts, trends, weights, facts of an environment.

Each as we write it, in a folder of its own, for attackers to change.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tensorprobe.compiling.compile_records import GeneratedCode, GraphNode, GraphRun, RecordedGraph
from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.monitor_file import append_alarm, write_facts
from tensorprobe.monitoring.series import StepTable, StepValues
from tensorprobe.monitoring.series_files import SeriesFiles

_CSV = "step_rank0"


def make_others(folder: Path) -> None:
    """Beside the captures of a folder, of which "L0" is one."""
    write_graphs(folder / "L0", folder / "graphs")
    write_trends(folder / "trends")
    write_peer_trends(folder / "peer-trends")
    write_weights(folder / "weights")
    facts = {"python": "3.11", "torch": {"version": "2.13"}, "environment": {"NCCL_ALGO": "Ring"}}
    facts |= {"command": ["python", "train.py", "--lr", "0.1"], "seed": {"torch": 1}}
    (folder / "facts").mkdir()
    (folder / "facts" / "env.json").write_text(json.dumps(facts))


# Graphs

X = GraphNode(name="x", kind="input", target="x", dtype="float32", shape="[3, 4]")


def node(name: str, target: str, *args: Any, **fields: Any) -> GraphNode:
    """A call of a graph, of arguments as they are written."""
    kind = fields.pop("kind", "call")
    return GraphNode(
        name=name, kind=kind, target=target, args={"tuple": list(args)}, kwargs={"dict": []},
        **{"dtype": "float32", "shape": "[3, 4]", **fields},
    )  # fmt: skip


def of(name: str) -> dict[str, list[str]]:
    """An argument that is what another node gave."""
    return {"special": ["node", name]}


def plain_nodes() -> tuple[GraphNode, ...]:
    relu = node("relu", "torch.ops.aten.relu.default", of("x"))
    return X, relu, node("output", "output", [of("relu")], kind="output")


def write_graphs(capture: Path, folder: Path, nodes: tuple[GraphNode, ...] = ()) -> None:
    """A recording with a compiled part, whose code has given something else than its graph."""
    shutil.copytree(capture, folder)
    nodes = nodes or plain_nodes()
    place = folder / "rank0" / "compiled"
    place.mkdir()
    values = torch.cat([torch.linspace(-1, 1, 12), torch.linspace(2, 3, 12)])
    (place / "tensors-0.safetensors").write_bytes(values.numpy().tobytes())
    stored = {"type": "tensor", "dtype": "float32", "shape": [3, 4], "stride": [4, 1]}
    stored |= {"device": "cpu", "shard": 0, "nbytes": 48, "requires_grad": False}
    given, made = {**stored, "offset": 0}, {**stored, "offset": 48}
    lines = [
        RecordedGraph(id=0, stage="inference", compilation="0/0", nodes=nodes, n_results=1),
        RecordedGraph(id=1, stage="inductor", compilation="0/0", nodes=nodes, inductor=0),
        GeneratedCode(graph=1, text="def call(self, args):\n", buffers={"buf0": "relu"}),
        GraphRun(id=0, step=0, graph=1, inputs=(), outputs=()),
    ]
    written = [json.loads(msgspec.json.encode(line)) for line in lines]
    written[-1] |= {"inputs": [given], "outputs": [made]}
    text = "".join(json.dumps(line) + "\n" for line in written)
    (place / "compiled.jsonl").write_text(text)


# Trends


def steps(count: int = 20, factor: float = 1.0) -> list[StepValues]:
    """A training that goes well."""
    made = []
    for number in range(count):
        columns = {name: np.array([0.5, 1.0]) * factor for name in ("norm", "mean", "min", "max")}
        columns |= {name: np.zeros(2) for name in ("nan", "inf", "zero")}
        table = StepTable(("a.weight", "b.weight"), {**columns, "count": np.array([4.0, 8.0])})
        made.append(
            StepValues(number, 1.0 * number, {"loss": factor / (number + 1)}, {"gradient": table})
        )
    return made


def write_trends(folder: Path) -> None:
    rank = folder / "rank0"
    write_facts(rank, {"attempts": [{"first_segment": 0, "first_step": 0, "program": ["a.py"]}]})
    files = SeriesFiles(rank, max_disk=1 << 20, header={})
    for step in steps():
        files.write(step)
    files.close()
    alarm = Alarm(
        rule="frozen", step=3, since=2, last_good_step=1, kind="parameter", name="a", reason="x"
    )
    append_alarm(rank, alarm)


def write_peer_trends(folder: Path) -> None:
    """As msprobe's monitor writes them."""
    place = folder / "rank0"
    place.mkdir(parents=True)
    rows = [f"0,a.weight,{number},{0.5 + number},0.1,1.0,-1.0" for number in range(20)]
    header = "vpp_stage,name,step,norm,mean,max,min"
    (place / "grad_reduced_0-19.csv").write_text("\n".join([header, *rows, ""]))


# Weights


def write_weights(folder: Path) -> None:
    folder.mkdir()
    state = {"w": torch.linspace(0, 1, 12).reshape(3, 4), "lr": 0.1, "name": "x" * 300}
    torch.save({"model": state, "shape": torch.Size([3, 4])}, folder / "rank0.pt")
    torch.save({"model": state, "shape": torch.Size([3, 4])}, folder / "rank1.pt")
    (folder / "layout.yaml").write_text("dp: 2\norder: dp\n")
