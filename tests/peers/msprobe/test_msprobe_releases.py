"""What msprobe shipped over the years, from its own releases: configurations, words, dumps."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage
from tensorprobe.msprobe import pytorch
from tensorprobe.msprobe.pytorch import PrecisionDebugger
from tensorprobe.peers.msprobe.msprobe_command import INSTEAD, command_line
from tensorprobe.peers.msprobe.msprobe_functions import REFUSED

RELEASES = [
    "1.0.1", "1.0.3", "1.0.4", "1.1.0", "1.1.1", "1.2.0", "1.2.1", "1.2.2", "1.3.0",
    "8.1.0", "8.1.1", "8.1.2", "8.2.0", "8.2.1", "8.3.0", "8.3.1", "8.3.2", "8.3.3",
    "26.0.0", "26.1.0", "26.1.0.post1", "26.2.0",
]  # fmt: skip
# Tasks that are other work here; each answer says which.
ELSEWHERE = {
    "acc_check": "tensorprobe check",
    "run_ut": "tensorprobe check",
    "free_benchmark": "tensorprobe check",
    "grad_probe": "tensorprobe run --monitor DIR",
}
pytestmark = pytest.mark.slow


Archives = Callable[[str], zipfile.ZipFile]
PEER = os.environ.get("TENSORPROBE_PEER_PYTHON", "")


@pytest.fixture(scope="module")
def archive_of(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """The wheel of a release, from the index."""
    folder = tmp_path_factory.mktemp("wheels")

    def archive(release: str) -> zipfile.ZipFile:
        wanted = f"mindstudio-probe=={release}"
        if not list(folder.glob(f"mindstudio_probe-{release}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            if subprocess.run([*command, wanted], capture_output=True).returncode:
                pytest.skip(f"{wanted} cannot be had from the index")
        (wheel,) = folder.glob(f"mindstudio_probe-{release}-*.whl")
        return zipfile.ZipFile(wheel)

    return archive


def template(archive: zipfile.ZipFile) -> dict[str, object]:
    """config.json as this release has it, beside its package."""
    (name,) = {"msprobe/config.json", "msprobe/config/config.json"} & {*archive.namelist()}
    found = json.loads(archive.read(name))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_template_and_each_of_its_tasks(
    tmp_path: Path, release: str, archive_of: Archives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = template(archive_of(release))
    sections = [name for name, value in shipped.items() if isinstance(value, dict)]
    assert "statistics" in sections
    for task in dict.fromkeys([shipped["task"], *sections]):
        Path("config.json").write_text(json.dumps({**shipped, "task": task}))
        if task in ELSEWHERE:
            with pytest.raises(BadUsage, match=ELSEWHERE[str(task)]):
                PrecisionDebugger(config_path="config.json", dump_path="refused")
            continue
        debugger = PrecisionDebugger(config_path="config.json", dump_path=f"dump_{task}")
        try:
            debugger.start()
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
            debugger.stop()
            debugger.step()
        finally:
            PrecisionDebugger.close()
        if task in ("statistics", "tensor"):
            (dump,) = Path(f"dump_{task}").rglob("dump.json")
            assert "Functional.linear.0.forward" in json.loads(dump.read_text())["data"]


# Words on the command line, and names to import

# In which function a release adds the options of a verb, and where.
PARSERS = {
    "_compare_parser": ("core/compare/utils.py", "compare"),
    "_run_ut_parser": ("api_accuracy_checker/run_ut/run_ut.py", "run_ut"),
    "_acc_check_parser": ("api_accuracy_checker/acc_check/acc_check.py", "acc_check"),
    "_run_overflow_check_parser": ("run_overflow_check.py", "run_overflow_check"),
    "_nan_analyze_parser": ("nan_analyze/analyzer.py", "nan_analyze"),
    "_overflow_check_parser": ("overflow_check/analyzer.py", "overflow_check"),
}


def first_arguments(tree: ast.AST, method: str) -> Iterator[list[str]]:
    """The texts that each call of a method begins with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == method:
            yield [str(a.value) for a in node.args if isinstance(a, ast.Constant)]


def known_options() -> dict[str, set[str]]:
    verbs = next(
        action.choices
        for action in command_line()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {verb: {*parser._option_string_actions} for verb, parser in verbs.items()}


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("release", RELEASES)
def test_every_word_and_every_name_of_a_release(release: str, archive_of: Archives) -> None:
    archive = archive_of(release)
    known = known_options()
    command = ast.parse(archive.read("msprobe/msprobe.py"))
    verbs = {words[0] for words in first_arguments(command, "add_parser")}
    assert {"parse", "api_precision_compare"} <= verbs
    assert verbs <= {*known, *INSTEAD}
    found = 0
    for name in archive.namelist():
        if "mindspore" in name or "msaccucmp" in name or not name.endswith(".py"):
            continue
        tree = ast.parse(archive.read(name))
        for function in ast.walk(tree):
            place, verb = PARSERS.get(getattr(function, "name", ""), ("-", ""))
            if name.endswith(place):
                options = {word for ws in first_arguments(function, "add_argument") for word in ws}
                assert options <= known[verb], (name, options - known[verb])
                found += 1
    assert found >= 2
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(archive.read("msprobe/pytorch/__init__.py")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert "PrecisionDebugger" in imported
    assert imported <= {*vars(pytorch), *REFUSED}


# Dumps, made by the release itself

PROGRAM = """
import numpy, sys
numpy.unicode_ = numpy.str_  # which these releases ask numpy for
if sys.argv[1:]:
    sys.path.insert(0, sys.argv[1])
import torch, torch.nn.functional as F
from torch import nn
from msprobe.pytorch import PrecisionDebugger

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        with torch.no_grad():
            idle = self.idle(x)
        return self.head(torch.relu(self.used(x)) + idle)

torch.manual_seed(0)
model = Net()
x = torch.randn(3, 4)
debugger = PrecisionDebugger(config_path="config.json", {model})
for step in range(2):
    debugger.start({first})
    F.cross_entropy(model(x), torch.tensor([0, 1, 0])).backward()
    debugger.stop()
    debugger.step()
    model.zero_grad()
"""


@pytest.mark.skipif(not PEER, reason="no TENSORPROBE_PEER_PYTHON")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", ["1.2.2", "1.3.0", "8.1.2", "8.3.3", "26.0.0"])
def test_a_dump_of_a_release(tmp_path: Path, release: str, archive_of: Archives) -> None:
    """It is read at every depth, and is the same as ours: null gradients are none."""
    archive_of(release).extractall(tmp_path / "release")
    old = not release.startswith("26")
    words = {"model": "model=model" if old else "", "first": "" if old else "model"}
    content = {"task": "statistics", "dump_path": "./dump", "rank": [], "step": [], "level": "mix"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for who, interpreter in (("theirs", PEER), ("ours", sys.executable)):
        folder = tmp_path / who
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**content, "statistics": {}}))
        (folder / "train.py").write_text(PROGRAM.format(**words))
        command = [interpreter, "train.py", str(tmp_path / "release")]
        if who == "ours":
            environment["PYTHONPATH"] = str(Path(tp.__file__).parents[1])
            command = [interpreter, "-m", "tensorprobe", "run", "--as", "msprobe", "train.py"]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    theirs, ours = tp.load(tmp_path / "theirs" / "dump"), tp.load(tmp_path / "ours" / "dump")
    assert theirs.gaps == ()
    assert theirs.steps == (0, 1)
    (unit,) = (tmp_path / "theirs" / "dump" / "step1").iterdir()
    assert len(tp.load(unit).calls) == len(theirs.calls) / 2
    for call in theirs.calls:
        assert not any("msprobe" in frame for frame in call.stack)
        assert call.stack or call.direction == "backward"
    verdict = tp.compare(theirs, ours).verdict
    assert verdict.verdict == "match"
    assert verdict.counts["aligned"] >= 30
    assert main(["convert", str(theirs.path), "--to", "native", "-o", str(tmp_path / "n")]) == 0
    assert tp.compare(tmp_path / "n", theirs).verdict.verdict == "match"
