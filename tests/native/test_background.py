"""The first recording builds the parts in C++ beside the program, which notices nothing of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorprobe import native
from tensorprobe.native import background, build, builder

SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 60.0  # of a test that waits for a process; nothing is measured

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="built on Linux only")


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_gone(process: int) -> bool:
    """Ended; nobody here can be sure that init has buried it already."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def compiler(folder: Path, script: str) -> Path:
    """A program in place of a compiler; $out is the file that it is to make."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nfor out in "$@"; do :; done\n{script}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Not that of the machine: its users may be building."""
    name = f"\0{tmp_path}"[:100]
    monkeypatch.setattr(builder, "LOCK", name)
    return name


@pytest.fixture
def place(tmp_path: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module belongs, which is not there; a recording here would build it."""
    path = tmp_path / "package" / "tensorprobe_native-2.13.0-bbbb.cpython-311-x86_64-linux-gnu.so"
    monkeypatch.setattr(native, "places", lambda: [path])
    monkeypatch.setattr(build, "places", lambda: [path])
    monkeypatch.setattr(native, "MODULE", None, raising=False)
    monkeypatch.setattr(build, "GRACE_S", 0.0)
    monkeypatch.setenv(background.SWITCH, "1")
    monkeypatch.setenv(native.SWITCH, "1")
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "exit 1")))
    return path


# Beside a program


PROGRAM = """\
import os, sys
from tensorprobe.native import background, builder
lock_name, compiler, target, way = sys.argv[1:]
builder.LOCK = "\\0" + lock_name
if way == "old kernel":
    del os.pidfd_open
lock = builder.take_lock()
if lock is not None:
    plan = builder.Plan([target], [compiler], ["true"], "nothing", 0)
    with lock:
        background._start_process(plan, lock.fileno())
try:
    os.wait()
except ChildProcessError:
    print("no children", flush=True)
sys.stdin.read()
"""


class Program:
    """One that has a build started beside it, without torch."""

    def __init__(self, folder: Path, lock: str, way: str = "") -> None:
        self.target = folder / "package" / "module.so"
        words = [lock[1:], str(folder / "compiler"), str(self.target), way]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> None:
        assert self.process.communicate("")[0] == "no children\n"


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Iterator[Path]:
    """One that writes down its process, and that of the builder, and does not end."""
    started = tmp_path / "started"
    script = f"sleep 1000 & echo $$ $PPID $! >>{started}.new; mv {started}.new {started}; wait"
    compiler(tmp_path, script)
    yield started
    for process in started.read_text().split() if started.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@pytest.mark.parametrize("end", ["its end", "SIGKILL", "old kernel"])
def test_the_build_ends_with_the_program(
    tmp_path: Path, lock: str, slow_compiler: Path, end: str
) -> None:
    program = Program(tmp_path, lock, end)
    wait_for(slow_compiler.exists)
    mine, parent, helper = map(int, slow_compiler.read_text().split())
    for process in (mine, parent, helper):
        assert os.getpriority(os.PRIO_PROCESS, process) == 19
        assert os.getsid(process) != os.getsid(program.process.pid)
    assert Path(f"/proc/{mine}/oom_score_adj").read_text() == "1000\n"
    assert builder.take_lock() is None
    if end == "its end":
        program.end()
    else:
        program.process.kill()
        program.process.communicate()
    for process in (mine, parent, helper):
        wait_for(lambda process=process: is_gone(process))
    assert list(program.target.parent.iterdir()) == []
    freed = builder.take_lock()
    assert freed is not None
    freed.close()


def test_a_builder_that_is_told_to_end_takes_the_compiler_along(
    tmp_path: Path, lock: str, slow_compiler: Path
) -> None:
    program = Program(tmp_path, lock)
    wait_for(slow_compiler.exists)
    mine, parent, helper = map(int, slow_compiler.read_text().split())
    os.kill(parent, signal.SIGTERM)
    for process in (mine, parent, helper):
        wait_for(lambda process=process: is_gone(process))
    assert list(program.target.parent.iterdir()) == []
    program.end()


def test_what_a_killed_build_left_goes_with_the_next(
    tmp_path: Path, lock: str, slow_compiler: Path
) -> None:
    program = Program(tmp_path, lock)
    wait_for(slow_compiler.exists)
    mine, parent, helper = map(int, slow_compiler.read_text().split())
    os.kill(parent, signal.SIGKILL)  # as a batch system does with all that is left of a job
    wait_for(lambda: is_gone(mine))
    os.kill(helper, signal.SIGKILL)
    program.end()
    (left,) = program.target.parent.iterdir()
    assert left.is_dir()
    compiler(tmp_path, 'echo module >"$out"')
    again = Program(tmp_path, lock)
    wait_for(again.target.exists)
    wait_for(lambda: list(again.target.parent.iterdir()) == [again.target])
    again.end()


def test_several_ranks_start_one_build(tmp_path: Path, lock: str, slow_compiler: Path) -> None:
    count = tmp_path / "count"
    compiler(tmp_path, f'echo one >>{count}\nuntil test -e {tmp_path}/go; do sleep 0.05; done\n'
             'echo module >"$out"')  # fmt: skip
    ranks = [Program(tmp_path, lock) for _ in range(4)]
    for rank in ranks:
        assert rank.process.stdout is not None
        assert rank.process.stdout.readline() == "no children\n"
    (tmp_path / "go").touch()
    wait_for(ranks[0].target.exists)
    for rank in ranks:
        rank.process.communicate("")
    assert count.read_text() == "one\n"


# What is said, and what is remembered


def test_one_line_and_a_failure_that_is_not_repeated(place: Path) -> None:
    said: list[str] = []
    background.start(said.append)
    assert said == [
        "building the C++ parts in the background: recordings after that cost about half. "
        "To build them now: tensorprobe doctor --fix"
    ]
    wait_for(lambda: background.read_failure() is not None)
    failure = background.read_failure()
    assert failure is not None
    assert failure.reason.endswith("compiler: exit code 1")
    wait_for(lambda: [path.suffix for path in place.parent.iterdir()] == [".failed"])
    wait_for_lock()
    background.start(said.append)
    assert len(said) == 1


def wait_for_lock() -> None:
    def is_free() -> bool:
        found = builder.take_lock()
        if found is not None:
            found.close()
        return found is not None

    wait_for(is_free)


def test_a_compiler_that_comes_later_is_used(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        background.start(said.append)
        background.start(said.append)
    assert said == [
        "recording without its C++ parts, at twice the cost: no-such-compiler: no such compiler "
        "(tensorprobe doctor)"
    ]
    background.start(said.append)
    assert len(said) == 2
    wait_for(lambda: getattr(background.read_failure(), "missing", True) is False)
    wait_for_lock()


@pytest.mark.parametrize("why", ["switch", "no native", "built", "file", "other's", "nowhere"])
def test_nothing_is_started_or_said(place: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "switch":
        monkeypatch.setenv(background.SWITCH, "0")
    elif why == "no native":
        monkeypatch.setenv(native.SWITCH, "0")
    elif why == "built":
        monkeypatch.setattr(native, "MODULE", object())
    elif why == "file":
        place.parent.mkdir(mode=0o755)
        place.touch(mode=0o755)
    elif why == "other's":
        place.parent.mkdir()
        place.parent.chmod(0o777)
    else:
        place.parent.write_text("a file where the folder should be")
    said: list[str] = []
    background.start(said.append)
    assert said == []
    free = builder.take_lock()
    assert free is not None
    free.close()


# A recording


TRAINING = """\
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from tensorprobe.native import build, builder
builder.LOCK, build.GRACE_S = "\\0" + sys.argv[1][:90], 0.0
import torch, tensorprobe as tp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
with tp.Recorder(sys.argv[2]) as rec:
    until = time.monotonic() + 60
    while len(sys.argv) > 3 and not pathlib.Path(sys.argv[3]).exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        rec.step()
        print(loss.item().hex())
print(torch.rand(1).item().hex(), tp.__file__)
sys.exit(7)
"""


def fresh_package(folder: Path) -> Path:
    """This package where nothing has been built yet; a folder for sys.path."""
    package = folder / "site" / "tensorprobe"
    package.mkdir(parents=True)
    for entry in (SRC / "tensorprobe").iterdir():
        if entry.name != "native":
            (package / entry.name).symlink_to(entry)
    ignored = shutil.ignore_patterns("*.so", "*.failed", ".building-*")
    shutil.copytree(SRC / "tensorprobe" / "native", package / "native", ignore=ignored)
    return package.parent


def train(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAINING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", native.SWITCH: "1", **environ}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, "train.py", str(folder / "site"), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_losses_and_status_are_the_same_while_it_builds(
    tmp_path: Path, slow_compiler: Path
) -> None:
    fresh_package(tmp_path)
    alone = train(tmp_path, "runs/alone")
    beside = train(
        tmp_path, "runs/beside", str(slow_compiler),
        CXX=str(tmp_path / "compiler"), **{background.SWITCH: "1"},
    )  # fmt: skip
    assert alone.returncode == 7, alone.stderr
    assert (beside.returncode, beside.stdout) == (7, alone.stdout)
    assert str(tmp_path) in beside.stdout
    lines = beside.stderr.replace("runs/beside", "runs/alone").splitlines()
    assert lines[0].startswith("tensorprobe: building the C++ parts in the background: ")
    assert lines[1:] == alone.stderr.splitlines()
    for process in map(int, slow_compiler.read_text().split()):
        wait_for(lambda process=process: is_gone(process))
    assert list((tmp_path / "site" / "tensorprobe" / "native").glob(".building-*")) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.timeout(1800)
def test_the_next_recording_has_them(tmp_path: Path) -> None:
    site = fresh_package(tmp_path)
    code = (
        "import sys, time, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from tensorprobe.native import builder, places\n"
        "builder.LOCK = '\\0' + sys.argv[1][:90]\n"
        "import torch, tensorprobe as tp; from tensorprobe import native\n"
        "with tp.Recorder(sys.argv[2]): torch.ones(3) + 1\n"
        "print(native.MODULE is not None)\n"
        "until = time.monotonic() + 1700\n"
        "while not places()[0].exists(): assert time.monotonic() < until; time.sleep(0.2)\n"
    )
    environ = {**os.environ, background.SWITCH: "1", native.SWITCH: "1"}
    environ.pop("PYTHONPATH", None)
    for run, expected in (("a", "False\n"), ("b", "True\n")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(site), run], cwd=tmp_path, env=environ,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
        assert done.stderr.count("in the background") == (run == "a")
