"""Both ways with the installed tool: it reads and compares what we write, we read what it wrote.

TENSORPROBE_PEER_PYTHON is the interpreter of an environment with mindstudio-probe 26.2.0 in it.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msprobe_making import ROOT

import tensorprobe as tp

PEER = os.environ.get("TENSORPROBE_PEER_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEER, reason="no TENSORPROBE_PEER_PYTHON"),
    pytest.mark.timeout(600),
]

# One program for both tools: only the import differs.
PROGRAM = """
import json, sys
import torch, torch.nn.functional as F
from torch import nn
from {package} import PrecisionDebugger

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(3, 2)
    def forward(self, x, scale=None):
        h = self.act(2 * self.fc1(x) + 1 - x.mean())
        return self.fc2(h if scale is None else h * scale) ** 2

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(2, 4)
json.dump({config}, open("config.json", "w"))
debugger = PrecisionDebugger(config_path="config.json")
for step in range(2):
    debugger.start(model=model)
    out = model(x, scale=torch.ones(3))
    loss = F.cross_entropy(out, torch.tensor([0, 1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    debugger.stop()
    debugger.step()
"""


def dump(folder: Path, who: str, **config: object) -> Path:
    """The program's dump by us or by the peer."""
    folder.mkdir(parents=True)
    fields = {"dump_path": "./dump", "rank": [], "step": [], "risk_level": "ALL", **config}
    package = "msprobe.pytorch" if who == "peer" else "tensorprobe.msprobe.pytorch"
    script = folder / "script.py"
    script.write_text(PROGRAM.format(package=package, config=fields))
    interpreter = PEER if who == "peer" else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if who != "peer":
        environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [interpreter, str(script)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "dump"


def peer_compare(actual: Path, expected: Path, out: Path) -> list[dict[str, str]]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = Path(PEER).with_name("msprobe")
    done = subprocess.run(
        [str(command), "compare", "-tp", str(actual), "-gp", str(expected), "-o", str(out)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "compare ends successfully" in done.stderr + done.stdout, done.stderr
    (table,) = out.glob("compare_result*.csv")
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def data(dump: Path) -> dict[str, object]:
    (path,) = (dump / "step0").glob("*/dump.json")
    return json.loads(path.read_text())["data"]


IN_PLACE = re.compile(r"[a-z]_\.\d+\.forward\.input\.0$")


# Where we differ on purpose: gradients that calls send to their inputs, and arguments that torch
# fills in with their defaults before it tells anybody.
def differs_on_purpose(name: str) -> bool:
    return ".backward.output" in name and not name.startswith("Module.")


CONFIGS = [
    ("L1", "statistics", {}),
    ("L0", "statistics", {}),
    ("mix", "statistics", {}),
    ("mix", "tensor", {}),
    ("L1", "statistics", {"statistics": {"summary_mode": "md5"}}),
]


@pytest.mark.parametrize(("level", "task", "more"), CONFIGS, ids=lambda v: str(v))
def test_both_ways(tmp_path: Path, level: str, task: str, more: dict[str, object]) -> None:
    ours = dump(tmp_path / "ours", "us", level=level, task=task, **more)
    theirs = dump(tmp_path / "theirs", "peer", level=level, task=task, **more)
    # the same records, under the same names
    a, b = data(ours), data(theirs)
    only_theirs = {name for name in b if name not in a}
    assert not only_theirs
    # msprobe compares our dump with its own, by step folder, and finds every number equal
    rows = peer_compare(ours / "step0", theirs / "step0", tmp_path / "out")
    assert len(rows) > 15
    compared = [
        r for r in rows if r["Bench Name"] != "N/A" and not differs_on_purpose(r["NPU Name"])
    ]
    assert len(compared) > 12
    results = {row["NPU Name"]: row.get("BENCH MD5") for row in compared}
    for row in compared:
        name = row["NPU Name"]
        if "NPU MD5" in row and IN_PLACE.search(name) and row["NPU MD5"] != row["BENCH MD5"]:
            # msprobe has taken the checksum of what a call writes to after the call, or meanwhile
            assert row["NPU MD5"] != results[name.replace("input.0", "output.0")], row
            continue
        # ours are statistics of float64, theirs of float32: their rules take that for growth
        assert row["Result"] in ("pass", "warning" if "Max diff" in row else "pass"), row
        if "NPU MD5" in row:
            assert row["NPU MD5"] == row["BENCH MD5"], row
        elif "MaxAbsErr" in row:
            assert row["MaxAbsErr"] in ("0.0", "unsupported"), row
        else:
            assert row["Max diff"] in ("0", "0.0"), row
    # and we compare its dump with ours, and with a native recording of the same
    verdict = tp.compare(theirs, ours).verdict
    assert verdict.verdict == "match"
    assert verdict.counts["aligned"] == 2 * len(b)
    assert tp.load(theirs).gaps == ()


@pytest.mark.parametrize(("level", "task", "more"), CONFIGS, ids=lambda v: str(v))
def test_one_pair_of_dumps_has_one_table(
    tmp_path: Path, level: str, task: str, more: dict[str, object]
) -> None:
    """msprobe's table of its own dumps and ours: the same rows, gradients that are null too."""
    a, b = (dump(tmp_path / who, "peer", level=level, task=task, **more) for who in "ab")
    theirs = peer_compare(a / "step0", b / "step0", tmp_path / "theirs")
    paths = tp.compare(a / "step0", b / "step0").save(tmp_path / "ours", columns="msprobe")
    with next(path for path in paths if path.suffix == ".csv").open(newline="") as file:
        ours = list(csv.DictReader(file))
    # their stack has lines of source, and the norm of a value without dimensions is its value
    apart = {"NPU_Stack_Info", "NPU l2norm", "Bench l2norm"}
    assert list(theirs[0]) == list(ours[0])
    assert len(ours) == len(theirs)
    # ours are in the order of execution, theirs have what a module called before the module
    mine, other = (
        {row["NPU Name"]: {k: v for k, v in row.items() if k not in apart} for row in rows}
        for rows in (ours, theirs)
    )
    assert mine == other


def test_msprobe_compares_what_convert_writes(tmp_path: Path) -> None:
    theirs = dump(tmp_path / "theirs", "peer", level="mix", task="tensor")
    native, back = tmp_path / "native", tmp_path / "back"
    from tensorprobe.cli.main import main

    assert main(["convert", str(theirs), "--to", "native", "-o", str(native)]) == 0
    assert main(["convert", str(native), "--to", "msprobe", "-o", str(back)]) == 0
    (source,) = (theirs / "step0").glob("proc*")
    rows = peer_compare(
        back / "step0" / "rank0" / "dump.json", source / "dump.json", tmp_path / "o"
    )
    assert {row["Result"] for row in rows} == {"pass"}
    assert all(row["Bench Name"] != "N/A" for row in rows)
    for path in (source / "dump_tensor_data").iterdir():
        twin = back / "step0" / "rank0" / "dump_tensor_data" / path.name
        a, b = (torch.load(p, weights_only=True) for p in (path, twin))
        assert torch.equal(a, b)


def test_the_check_of_a_dump_of_msprobe(tmp_path: Path) -> None:
    theirs = dump(tmp_path / "theirs", "peer", level="L1", task="tensor")
    checked = tp.check(theirs / "step0", tmp_path / "out", device="cpu")
    assert checked.passed
    assert checked.counts["pass"] >= 5


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    theirs = dump(tmp_path / "theirs", "peer", level="L1", task="statistics")
    again = dump(tmp_path / "again", "peer", level="L1", task="statistics")
    for step in again.iterdir():
        for process in step.iterdir():
            shutil.copytree(process, theirs / step.name / f"{process.name}7")
    capture = tp.load(theirs)
    assert len(capture.gaps) == 2
    assert tp.compare(capture, again).verdict.verdict == "match"


# NaN and infinity, in both directions

NONFINITE = """
import torch
from torch import nn
from {package} import PrecisionDebugger

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)
    def forward(self, x):
        h = torch.log({given})                                     # NaN
        y = torch.tensor([1.0, 2.0]) / torch.tensor([0.0, 1.0])    # inf
        z = torch.neg(y) + y                                       # NaN again
        m = torch.masked_fill(x, x > 0, float("-inf"))
        return self.fc2(h) * float("inf")

torch.manual_seed(0)
model = Net()
x = torch.randn(2, 4)
debugger = PrecisionDebugger(dump_path="./dump", task="{task}", level="mix")
debugger.start(model=model)
model(x).sum().backward()
debugger.stop()
debugger.step()
"""


def dump_nonfinite(
    folder: Path, who: str, task: str = "statistics", given: str = "self.fc1(x)"
) -> Path:
    folder.mkdir(parents=True)
    package = "msprobe.pytorch" if who == "peer" else "tensorprobe.msprobe.pytorch"
    (folder / "script.py").write_text(NONFINITE.format(package=package, task=task, given=given))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if who != "peer":
        environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [PEER if who == "peer" else sys.executable, "script.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "dump"


def peer_says(*words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = str(Path(PEER).with_name("msprobe"))
    done = subprocess.run(
        [command, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def statistics(dump: Path) -> dict[str, str]:
    """Every statistic of a dump that is not finite, by its place."""

    def walk(value: object, place: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield from walk(part, f"{place}.{key}")
        elif isinstance(value, list):
            for i, part in enumerate(value):
                yield from walk(part, f"{place}.{i}")
        elif isinstance(value, float) and not math.isfinite(value):
            yield place, str(value)

    return dict(walk(data(dump), ""))


def test_nan_and_infinity_are_written_as_the_peer_writes_them(tmp_path: Path) -> None:
    ours = dump_nonfinite(tmp_path / "ours", "us")
    theirs = dump_nonfinite(tmp_path / "theirs", "peer")
    a, b = statistics(ours), statistics(theirs)
    same = [place for place in b if not differs_on_purpose(place.removeprefix("."))]
    assert len(same) > 40
    assert {place: a.get(place) for place in same} == {place: b[place] for place in same}
    # to our files and back nothing of that is lost
    from tensorprobe.cli.main import main

    assert main(["convert", str(theirs), "--to", "native", "-o", str(tmp_path / "n")]) == 0
    assert main(["convert", str(tmp_path / "n"), "--to", "msprobe", "-o", str(tmp_path / "m")]) == 0
    assert statistics(tmp_path / "m") == b


def test_the_peers_tools_find_what_is_in_our_dumps(tmp_path: Path) -> None:
    found, levels = {}, {}
    for who in ("us", "peer"):
        dump = dump_nonfinite(tmp_path / who, who)
        out = tmp_path / f"overflow_{who}"
        peer_says("overflow_check", "-i", str(dump / "step0"), "-o", str(out))
        (path,) = out.glob("anomaly_analyze_*.json")
        found[who] = [node["op_name"] for node in json.loads(path.read_text())["rank_0"]]
        # and ours says the same of both
        from tensorprobe.overflow.across_ranks import find_first

        assert [origin.name for origin in find_first(tp.load(dump)).first] == found[who]
        graph = tmp_path / f"graph_{who}"
        peer_says("graph_visualize", "-tp", str(dump / "step0"), "-o", str(graph), "-oc")
        (db,) = graph.glob("*.vis.db")
        with sqlite3.connect(db) as nodes:
            query = "select node_name from tb_nodes where overflow_level = 'critical'"
            levels[who] = {name for (name,) in nodes.execute(query)}
    assert found["us"] == found["peer"] == ["Torch.log.0.forward"]
    assert levels["peer"] <= levels["us"]
    assert "Torch.log.0.forward" in levels["us"]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_the_peers_compare_sees_our_nan(tmp_path: Path, task: str) -> None:
    """NaN on one side only: as many errors for our dumps as for its own."""
    errors = {}
    for who in ("us", "peer"):
        spoilt = dump_nonfinite(tmp_path / who / "a", who, task)
        sound = dump_nonfinite(tmp_path / who / "b", who, task, "self.fc1(x).abs() + 1")
        rows = peer_compare(spoilt / "step0", sound / "step0", tmp_path / who / "out")
        errors[who] = {
            row["NPU Name"]
            for row in rows
            if row["Result"] == "error" and not differs_on_purpose(row["NPU Name"])
        }
    assert "Torch.log.0.forward.output.0" in errors["peer"]
    assert len(errors["peer"]) > 3
    assert errors["peer"] <= errors["us"]


def test_the_stages_of_a_profiler_land_in_the_same_folders(tmp_path: Path) -> None:
    from usages import USAGES

    found = {}
    for who in ("us", "peer"):
        folder = tmp_path / who
        folder.mkdir()
        script = USAGES["04 rollout and training of one step, reset in between"].script
        (folder / "script.py").write_text(script)
        words = [PEER, "script.py"]
        if who == "us":
            words = [sys.executable, "-m", "tensorprobe", "run", "--as", "msprobe", "script.py"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if who == "us":
            environment["PYTHONPATH"] = str(ROOT / "src")
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[who] = {
            str(path.parents[1].relative_to(folder)): sorted(json.loads(path.read_text())["data"])
            for path in folder.rglob("dump.json")
        }
    assert found["us"] == found["peer"]
