"""Whatever happens to a recording, the program prints and ends as its unrecorded twin does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tensorprobe as tp
from recorded import SRC, run_script, start_script
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage, NothingRecorded, RecordingStopped, WriteFailed

STEPS = 9
STATUS = 7
TRAIN = f"""
import os, shutil, signal, sys, torch
out, trouble = sys.argv[1:3]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for step in range({STEPS}):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
    if step == 4 and trouble == "deleted":
        shutil.rmtree(out, ignore_errors=True)
    if step == 4 and trouble == "read-only":
        for folder, _, _ in list(os.walk(out)):
            os.chmod(folder, 0o555)
    if step == 4 and trouble == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
print(sum(float(each.detach().sum()) for each in model.parameters()))
"""
BARE = TRAIN + f"sys.exit({STATUS})\n"
RECORDED = f"""
import sys
import tensorprobe as tp
with tp.Recorder(sys.argv[1], step_on="auto", level=sys.argv[3], keep=sys.argv[4]) as rec:
    exec({TRAIN!r})
assert rec.failed is None or isinstance(rec.failed, Exception)
sys.exit({STATUS})
"""
# Runs each case in a child of a process that has torch: a fork is there at once.
FORKS = """
import ctypes, json, os, resource, sys
import torch, torch._dynamo, tensorprobe as tp, tensorprobe.record.recorder
from tensorprobe.cli.main import main

def drop_override():  # root would write to what is read-only
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~0b110
    libc.capset(header, sets)

def limit(which, value):
    resource.setrlimit(which, (value, value))

for name, program, argv, trouble in json.load(open("cases.json")):
    pid = os.fork()
    if pid:
        print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
        continue
    for number, ending in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{name}.{ending}", os.O_WRONLY | os.O_CREAT, 0o644), number)
    if trouble == "read-only":
        drop_override()
    if trouble == "few files":
        limit(resource.RLIMIT_NOFILE, 24)
    if trouble == "little memory":
        pages = int(open("/proc/self/statm").read().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + 150_000_000)
    sys.argv = [program, *argv]
    if program == "run":
        sys.exit(main(sys.argv[1:]))
    exec(open(program).read(), {"__name__": "__main__"})
    os._exit(99)  # it ends by itself
"""
SETTINGS = [("L0", "structure"), ("L1", "stats"), ("mix", "digest"), ("L2", "tensors")]
TROUBLES = ["full", "few files", "little memory", "deleted", "read-only", "killed"]


class Ended(NamedTuple):
    status: int
    stdout: str
    said: list[str]
    capture: Path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user cannot mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def run_all(folder: Path, disk: Path, settings: list[tuple[str, str]]) -> dict[Any, Ended]:
    """Each trouble, in both ways, at each level and with each keep; and the bare twins."""
    (folder / "bare.py").write_text(BARE)
    (folder / "recorded.py").write_text(RECORDED)
    cases: dict[Any, list[Any]] = {}
    for trouble in TROUBLES:
        cases[trouble] = ["bare.py", ["nowhere", trouble], trouble]
        for level, keep in settings:
            name = "-".join([trouble.replace(" ", "-"), level, keep])
            out = str((disk if trouble == "full" else folder) / name)
            cases[trouble, "recorder", level, keep] = [
                "recorded.py", [out, trouble, level, keep], trouble,
            ]  # fmt: skip
            options = ["--level", level, "--keep", keep, "-o", out + "-run"]
            cases[trouble, "run", level, keep] = [
                "run", ["run", *options, "bare.py", out + "-run", trouble], trouble,
            ]  # fmt: skip
    (folder / "cases.json").write_text(
        json.dumps([[str(number), *case] for number, case in enumerate(cases.values())])
    )
    process = start_script(folder, FORKS)
    stdout, stderr = process.communicate()  # however long it takes on a machine that is busy
    statuses = dict(json.loads(line) for line in stdout.splitlines())
    assert len(statuses) == len(cases), stderr
    ended = {}
    for number, (key, (_, argv, _)) in enumerate(cases.items()):
        said = (folder / f"{number}.err").read_text().splitlines()
        out = Path(argv[argv.index("-o") + 1] if "-o" in argv else argv[0])
        stdout = (folder / f"{number}.out").read_text()
        ended[key] = Ended(statuses[str(number)], stdout, said, out)
    return ended


def check_all(ended: dict[Any, Ended]) -> None:
    for key, case in ended.items():
        if isinstance(key, str):
            assert case.status == (-9 if key == "killed" else STATUS), case
            continue
        twin = ended[key[0]]
        assert (case.status, case.stdout) == (twin.status, twin.stdout), (key, case.said)
        if key[0] == "killed":
            check_killed(case)
        else:
            check_told(key, case)


def check_killed(case: Ended) -> None:
    capture = tp.load(case.capture)
    assert set(capture.steps) >= set(range(4))
    assert capture.facts["unfinished"]
    assert len(capture.gaps) <= 1, "at most a line that was being written"


def check_told(key: Any, case: Ended) -> None:
    """What is said at the end, what `load` finds, and its gaps agree."""
    closing = [line for line in case.said if re.match("tensorprobe: (recorded|nothing was)", line)]
    assert len(closing) == 1, case.said
    stopped = [line for line in case.said if line.endswith("The program goes on")]
    if key[0] == "few files":
        assert stopped == [], case.said
    else:
        assert len(stopped) == 1, (key, case.said)
    if closing[0].startswith("tensorprobe: nothing"):
        lines = case.capture.glob("rank0/step*/calls.jsonl")  # a full disk still takes their names
        assert not any(path.stat().st_size for path in lines)
        return
    capture = tp.load(case.capture)
    found = re.match(
        r"tensorprobe: recorded (\d+) calls in (\d+) steps?( and after them)?(?:, (\d+) gaps?)?, ",
        closing[0],
    )
    assert found is not None, closing
    calls, steps, after, gaps = found.groups()
    assert (int(calls), int(gaps or 0)) == (len(capture.calls), len(capture.gaps)), closing
    assert int(steps) + bool(after) == len(capture.steps), closing
    lost = {gap.step: int(gap.reason.split()[0]) for gap in capture.gaps if gap.name == "calls"}
    for step, count in lost.items():
        assert f"{count} call{'' if count == 1 else 's'} of step {step}" in closing[0]
    assert bool(stopped) == ("Recording ended early: " in closing[0])
    assert bool(stopped) == bool(capture.gaps)


def test_the_program_ends_as_its_twin(tmp_path: Path, disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(14_000_000))
    check_all(run_all(tmp_path, disk, [("mix", "tensors")]))


@pytest.mark.slow
def test_the_program_ends_as_its_twin_at_every_level(tmp_path: Path, disk: Path) -> None:
    for setting in SETTINGS:
        level, keep = setting
        folder = tmp_path / f"{level}-{keep}"
        folder.mkdir()
        room = 4_000_000 if keep == "tensors" else 60_000
        (disk / "filler").write_bytes(bytes(20 * 2**20 - room))
        check_all(run_all(folder, disk, [setting]))
        for path in disk.iterdir():
            subprocess.run(["rm", "-r", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recorder", "run"])
@pytest.mark.parametrize("limit", ["-n 24", "-v {}"])
def test_limits_of_the_shell(tmp_path: Path, way: str, limit: str) -> None:
    """From the first line on, which imports torch; memory a tenth above what the twin needs."""
    (tmp_path / "bare.py").write_text(BARE)
    (tmp_path / "recorded.py").write_text(RECORDED)
    (tmp_path / "peak.py").write_text(
        "import atexit, re\n"
        "told = lambda: re.search(r'VmPeak:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "atexit.register(lambda: open('peak', 'w').write(told()))\n" + BARE
    )

    def run(limit: str, *words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", sys.executable, *words],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    run("-n 1024", "peak.py", "nowhere", "none")
    limit = limit.format(int(int((tmp_path / "peak").read_text()) * 1.1))
    twin = run(limit, "bare.py", "nowhere", "none")
    assert twin[0] == STATUS, twin
    if way == "recorder":
        ended = run(limit, "recorded.py", "out", "none", "mix", "tensors")
    else:
        options = ["--keep", "tensors", "-o", "out"]
        ended = run(limit, "-m", "tensorprobe", "run", *options, "bare.py", "out", "none")
    assert ended[:2] == twin[:2], ended


# What a program sees of it


def relu(times: int = 1) -> None:
    import torch

    for _ in range(times):
        torch.ones(2).relu()


def relu_and_raise(*computed: Any) -> None:
    relu()
    raise ValueError("mine")


def test_the_programs_own_error_goes_first(capsys: pytest.CaptureFixture[str]) -> None:
    for strict in (False, True):
        recorder = tp.Recorder("/proc/nope", strict=strict)
        with pytest.raises(ValueError, match="mine"), recorder:
            relu_and_raise()
        assert isinstance(recorder.failed, WriteFailed)
    reason = "[Errno 2] No such file or directory: '/proc/nope'"
    closing = f"tensorprobe: nothing was recorded to /proc/nope, lost: 2 calls of step 0. {reason}"
    stopped = f"tensorprobe: recording to /proc/nope stopped: {reason}. The program goes on"
    assert capsys.readouterr().err.splitlines() == [stopped, closing, closing]


def test_what_follows_the_block_is_done(tmp_path: Path) -> None:
    said: list[str] = []
    with tp.Recorder("/proc/nope", log=said.append) as recorder:
        for _ in range(3):
            relu()
            recorder.step()
        recorder.save("value", 1)
        recorder.pause()
        recorder.start()
        recorder.drain()
        recorder.stop()
    assert len(said) == 2
    assert str(recorder.failed) in said[0]
    recorder.close()
    assert len(said) == 2


def test_strict_raises_at_the_end_of_a_step(tmp_path: Path) -> None:
    recorder = tp.Recorder("/proc/nope", strict=True, log=lambda text: None).start()
    relu()
    with pytest.raises(WriteFailed, match="recording to /proc/nope stopped: "):
        recorder.step()
    relu()
    recorder.close()  # once is enough


def test_strict_raises_where_the_recording_is_closed(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed), tp.Recorder("/proc/nope", strict=True):
        relu()
    with pytest.raises(NothingRecorded), tp.Recorder(tmp_path, strict=True, apis="nothing"):
        relu()


def test_nothing_recorded_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with tp.Recorder(tmp_path, apis="rellu", log=said.append) as recorder:
        relu()
    assert isinstance(recorder.failed, NothingRecorded)
    assert said == [str(recorder.failed)]


def test_the_old_word_for_strict(tmp_path: Path) -> None:
    assert tp.Recorder(tmp_path, on_write_error="stop").config.strict
    assert not tp.Recorder(tmp_path, on_write_error="continue").config.strict
    with pytest.raises(BadUsage, match="on_write_error='halt': expected one of continue, stop"):
        tp.Recorder(tmp_path, on_write_error="halt")


def test_trouble_that_is_not_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised inside of ours ends the recording, and is in it."""
    said: list[str] = []
    with tp.Recorder(tmp_path, log=said.append) as recorder:
        relu()
        recorder.step()
        relu()
        assert recorder._tape is not None
        monkeypatch.setattr(recorder._tape, "begin_step", lambda *given: 1 / 0)
        recorder.step()
        relu()
    assert isinstance(recorder.failed, RecordingStopped)
    text = f"recording to {tmp_path} stopped: ZeroDivisionError: division by zero"
    assert said[0] == f"{text}. The program goes on"
    assert "recorded 4 calls in 2 steps, 1 gap, " in said[1]
    capture = tp.load(tmp_path)
    assert len(capture.calls) == 4
    assert [gap.reason for gap in capture.gaps] == ["ended early: division by zero"]


def test_a_program_that_never_closes(tmp_path: Path) -> None:
    program = """
import torch, tensorprobe as tp
rec = tp.Recorder("/proc/nope", strict=True).start()
torch.ones(2).relu()
print("done")
"""
    done = run_script(tmp_path, program)
    assert (done.returncode, done.stdout) == (0, "done\n")
    (closing,) = done.stderr.splitlines()
    assert closing.startswith("tensorprobe: nothing was recorded to /proc/nope, lost: 2 calls")


def test_nothing_is_announced_after_recording_has_stopped() -> None:
    said: list[str] = []
    with tp.Recorder("/proc/nope", keep="tensors", log=said.append) as recorder:
        relu()
        recorder.step()
        relu()
    assert [line.split(" to ")[0] for line in said] == ["recording", "nothing was recorded"]


def test_steps_that_are_there_are_not_called_lost_for_lack_of_handles(tmp_path: Path) -> None:
    """Looking for them takes none: a program may have used up all."""
    program = """
import os, resource, torch, tensorprobe as tp
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with tp.Recorder("out") as rec:
    for step in range(4):
        if step == 2:
            try:
                while True:
                    os.open(os.devnull, os.O_RDONLY)
            except OSError:
                pass
        torch.ones(2).relu()
        rec.step()
"""
    done = run_script(tmp_path, program)
    assert done.returncode == 0
    capture = tp.load(tmp_path / "out")
    there = f"recorded {len(capture.calls)} calls in {len(capture.steps)} steps"
    assert there in done.stderr.splitlines()[-1]


def test_all_ranks_end_after_the_last_step(tmp_path: Path) -> None:
    """Also the one whose disk is full: the others would wait for it."""
    said: list[str] = []
    recorder = tp.Recorder(
        "/proc/nope", steps="0-1", stop_after_last_step=True, log=said.append
    ).start()
    relu()
    recorder.step()
    with pytest.raises(SystemExit):
        recorder.step()
    assert said[1] == "steps 0-1 are over: ending the program"
    recorder.close()


def test_a_guard_that_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    guard = tp.Guard("/proc/nope", overflow_nums=-1)
    with pytest.raises(ValueError, match="mine"), guard:
        relu_and_raise(torch.full((2,), 1e38).mul(1e38))
    assert len(guard.findings) == 1
    assert isinstance(guard.failed, WriteFailed)
    said = capsys.readouterr().err
    assert said.count("The program goes on") == 1
    assert "Tensor.mul.0.forward is not finite" in said
    assert said.splitlines()[-1] == f"tensorprobe: guard: 1 finding. {guard.failed}"


@pytest.mark.parametrize("options", ["-o /proc/nope", "-o out --save-start /proc/nope"])
def test_run_where_a_folder_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    program = "import torch, sys\ntorch.nn.ReLU()(torch.ones(2))\nprint('done')\nsys.exit({})\n"
    for strict, own, status in ("", 0, 0), ("", 5, 5), ("--strict", 0, 1), ("--strict", 5, 5):
        Path("train.py").write_text(program.format(own))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv[:])
            patch.setattr(sys, "path", sys.path[:])
            patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
            assert exit_status(["run", *strict.split(), *options.split(), "train.py"]) == status
        said = capsys.readouterr()
        assert said.out == "done\n"
        assert "/proc/nope" in said.err
        assert "Traceback" not in said.err


def exit_status(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as leaving:
        return int(leaving.code or 0)
