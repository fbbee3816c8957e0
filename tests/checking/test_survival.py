"""A check goes on: past calls that crash or hang, in several processes, after Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import SRC, record
from tensorprobe.checking.pool import Pool, Task
from tensorprobe.checking.worker import Setting
from tensorprobe.cli.main import main
from tensorprobe.records import Call, Capture
from tensorprobe.replay.pairing import ForwardBackward

# What a call does is in a file that every process of the check runs first: it says who runs it,
# and goes on when it may.
OPS = """
import os, time, torch
from pathlib import Path
import tensorprobe as tp
library = torch.library.Library("tensorprobe_survival", "DEF")
library.define("work(Tensor x) -> Tensor")
here = Path(__file__).parent

def may_go_on():
    pids = (here / "pids").read_text().split()
    return CONDITION

def work(x):
    with (here / "pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    while not may_go_on():
        time.sleep(0.01)
    return x * 2

library.impl("work", work, "CPU")
tp.reference("tensorprobe_survival::work")(lambda x: x * 2)
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A capture of eight calls."""
    library = torch.library.Library("tensorprobe_survival", "FRAGMENT")
    library.define("work(Tensor x) -> Tensor")
    library.impl("work", lambda x: x * 2, "CPU")

    def program() -> None:
        for n in range(8):
            torch.ops.tensorprobe_survival.work(torch.ones(n + 1))

    record(tmp_path / "run", program, level="L1")
    library._destroy()
    go_on_when(tmp_path, "True")
    return tmp_path


def go_on_when(folder: Path, condition: str) -> None:
    (folder / "ops.py").write_text(OPS.replace("CONDITION", condition))


def command(folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "tensorprobe", "check", str(folder / "run"), "-o",
        str(folder / "out"), "--only", "work", "--references", str(folder / "ops.py"), *more,
    ]  # fmt: skip


ENVIRON = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}


def test_several_processes_share_the_work(work: Path) -> None:
    go_on_when(work, "len(set(pids)) == 2")  # neither does all of it before the other is there
    checked = tp.check(
        work / "run", work / "out", only=["work"], jobs=2, references=work / "ops.py"
    )
    assert {row.verdict for row in checked.rows} == {"pass"}
    assert len(checked.rows) == 8
    pids = (work / "pids").read_text().split()
    assert len(pids) == 8
    assert len(set(pids)) == 2
    assert str(os.getpid()) not in pids


def test_ctrl_c_keeps_what_is_done(work: Path) -> None:
    go_on_when(work, "len(pids) < 4 or (here / 'go').exists()")
    process = subprocess.Popen(
        command(work), env=ENVIRON, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    rows = work / "out" / "rows.jsonl"
    deadline = time.monotonic() + 60
    while not rows.exists() or len(rows.read_bytes().splitlines()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "of 8 calls are done and kept in" in stderr
    assert "Traceback" not in stderr
    done = {json.loads(line)["name"] for line in rows.read_bytes().splitlines()[1:]}
    assert len(done) == 3
    (work / "go").touch()
    before = (work / "pids").read_text().split()
    again = subprocess.run(command(work), env=ENVIRON, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "8 calls, 8 different: 8 pass" in again.stdout
    after = (work / "pids").read_text().split()
    assert len(after) - len(before) == 5


@pytest.mark.slow
def test_a_bar_shows_on_a_terminal(work: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(work), env={**ENVIRON, "TERM": "xterm"}, stderr=theirs, stdout=subprocess.PIPE
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        pass  # the other end is closed
    finally:
        os.close(ours)
    process.communicate()
    assert process.returncode == 0
    assert b"Ops.tensorprobe_survival.work.7.forward" in shown
    assert b"100%" in shown


@pytest.mark.gpu
def test_a_device_side_assert_is_survived(tmp_path: Path) -> None:
    """After it nothing works in the process that made the call: the rest runs in another one."""
    names = ["embedding", "tanh", "exp"]

    def program() -> None:
        table = torch.randn(4, 3)
        torch.nn.functional.embedding(torch.tensor([1, 3]), table)
        torch.randn(5).tanh().exp()

    record(tmp_path / "run", program, level="L1")
    capture = tp.load(tmp_path / "run")
    # the index is out of bounds on the device alone: the reference never sees it
    (tmp_path / "break.py").write_text(
        "import torch, tensorprobe.checking.one as one\n"
        "perform = one.perform\n"
        "def broken(call, backward, device, source):\n"
        "    if call.op.endswith('embedding'):\n"
        "        index = torch.tensor([99], device=device)\n"
        "        torch.zeros(4, device=device)[index].sum().item()\n"
        "    return perform(call, backward, device, source)\n"
        "one.perform = broken\n"
    )
    checked = tp.check(
        capture, tmp_path / "out", device="cuda", only=names, references=tmp_path / "break.py"
    )
    rows = {row.op.rpartition(".")[2]: row for row in checked.rows}
    assert rows["embedding"].verdict == "crashed"
    assert "assert" in rows["embedding"].reason
    assert (rows["tanh"].verdict, rows["exp"].verdict) == ("pass", "pass")


def test_a_process_that_dies_after_its_answer_costs_no_other_call(tmp_path: Path) -> None:
    """A call may leave a process that falls over later: the next call is not to blame for it."""

    def program() -> None:
        for n in range(3):
            torch.ones(n + 1).relu()

    calls = record(tmp_path / "run", program, level="L1").calls(op="*relu")
    pool = Pool(Setting(device="cpu"))
    verdicts = []
    for _, row in pool.run([Task(n, ForwardBackward(call, None)) for n, call in enumerate(calls)]):
        verdicts.append(row.verdict)
        (worker,) = pool._workers
        if len(verdicts) == 1:
            worker.process.kill()
            worker.process.wait()
    assert verdicts == ["pass"] * 3


def test_calls_of_a_file_that_want_all_memory_or_are_no_operators_are_skipped(
    tmp_path: Path,
) -> None:
    calls = [
        Call(index=0, name="Torch.zeros.0.forward", op="torch.zeros", args=(10**15,)),
        Call(index=1, name="Torch.ones.0.forward", op="torch.ones", args=(10**12,)),
        Call(index=2, name="Torch.x.0.forward", op="torch.hub.load", args=("a/b", "c")),
        Call(index=3, name="Torch.full.0.forward", op="torch.full", args=((2,), 1.0)),
    ]
    capture = Capture(tmp_path / "run", "native", calls)
    rows = {row.name: row for row in tp.check(capture, tmp_path / "out").rows}
    assert "allocate" in rows["Torch.zeros.0.forward"].reason
    assert "allocate" in rows["Torch.ones.0.forward"].reason
    assert rows["Torch.x.0.forward"].reason == (
        "not run: torch.hub.load is not an operator of torch"
    )
    assert {rows[call.name].verdict for call in calls[:3]} == {"skipped"}
    assert rows["Torch.full.0.forward"].verdict == "pass"


def test_a_package_allowed_later_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason of a skipped call proposes --import; the same command with it must do that."""
    (tmp_path / "taken_up.py").write_text(
        "import torch\n"
        "class Off(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * (2 if x.dtype == torch.float64 else 1)\n"
    )
    monkeypatch.chdir(tmp_path)  # where processes of a check look for packages
    calls = ["Module.Off.forward.0", "Tensor.exp.0.forward"]
    module = "import torch, taken_up; x = taken_up.Off()(torch.ones(3)).exp()"
    (tmp_path / "program.py").write_text(module)
    run = ["run", "--keep", "tensors", "-o", "run", "program.py"]
    subprocess.run([sys.executable, "-m", "tensorprobe", *run], check=True, capture_output=True)

    rows = {row.name: row for row in tp.check("run", "out", only=calls).rows}
    assert rows[calls[0]].reason.endswith("(allow its package with `imports='taken_up'`)")
    checked = tp.check("run", "out", only=calls, imports=["taken_up"])
    rows = {row.name: row for row in checked.rows}
    assert [rows[name].verdict for name in calls] == ["fail", "pass"]
    # the command that it proposes works as typed
    command = rows[calls[0]].repro.split()
    assert command[-2:] == ["--import", "taken_up"]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)


def test_a_package_that_cannot_be_allowed_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", lambda: torch.ones(2).relu())
    words = ["check", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--import", "os"]
    capsys.readouterr()
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "tensorprobe check: --import os: it holds no operators that a capture could call\n"
    )
