"""What a user gets to read for a wrong path, name or folder: one line that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import record, run_script
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage, WriteFailed

NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    record(folder / "runs" / "a", lambda: torch.relu(torch.ones(2, 3)) * 2)
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("hello")
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("hello")
    return folder


@pytest.fixture
def here(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy: what a command leaves behind must not help or hinder the next one."""
    folder = shutil.copytree(workshop, tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


NO_CAPTURE = "expected a folder with capture.json, or a folder of ranks or steps in one; or a dump"
WRONG = {
    "compare empty runs/a": (1, f"'empty' is not a capture: it is an empty folder; {NO_CAPTURE}"),
    "compare runs/a file.txt": (1, f"'file.txt' is not a capture: it is a file; {NO_CAPTURE}"),
    "compare nope runs/a": (1, "no capture at 'nope': there is no such path. To record one: "),
    "show nope": (1, "no capture at 'nope': there is no such path. To record one: "),
    "show runs/a Torch.rleu.0": (1, "no call 'Torch.rleu.0' among 3 in 'runs/a'; near names: "),
    "repro runs/a Torch.rleu.0 -o out": (1, "no call 'Torch.rleu.0' among 3 in 'runs/a'; near "),
    "repro runs/a Torch.relu.0 --step 7 -o out": (1, "it has steps [0] and ranks [0]"),
    "repro runs/a Torch.relu.0 --import no.py -o out": (2, "no file 'no.py': --import takes a"),
    "check runs/a --device tpu -o out": (1, "PyTorch knows no device 'tpu'. Devices here: cpu"),
    "check runs/a --only zzz -o out": (2, "no call of 'runs/a' is left to check: see --only"),
    "convert runs/a --to msprobe -o full": (2, "'full' is there already: -o takes a new folder"),
    "bisect -- nope.py": (2, "no script at 'nope.py'. To run a module: -- -m nope.py"),
    "run --guard overfow file.txt": (2, "unknown guard 'overfow': expected overflow or errors"),
    "run --reroute x=tpu file.txt": (2, "cannot reroute to 'tpu'"),
    "run --as foo file.txt": (2, "--as foo: expected ptdbg_ascend or msprobe"),
}
OUTPUTS = {
    "compare runs/a runs/a -o": "compare",
    "check runs/a -o": "check",
    "repro runs/a Torch.relu.0 -o": "repro",
    "bisect -o {} -- file.txt": "bisect",
    "run --guard overflow --guard-output {} -o out file.txt": "run",
    "demo -o": "demo",
}


@pytest.mark.parametrize("words", WRONG)
def test_one_line_says_what_is_wrong(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = WRONG[words]
    assert main(words.split()) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"tensorprobe {words.split()[0]}: ")
    assert text in said.err
    assert said.err.count("\n") == 1
    assert not any((here / "out").glob("*.py"))


@pytest.mark.parametrize("words", OUTPUTS)
@pytest.mark.parametrize("folder", ["file.txt", "file.txt/in/it"])
def test_a_file_is_no_folder_to_write_to(
    words: str, folder: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = OUTPUTS[words]
    command = words.format(folder) if "{}" in words else f"{words} {folder}"
    assert main(command.split()) == 2
    said = f"cannot write to '{folder}': 'file.txt' is a file; give a folder"
    assert capsys.readouterr().err == f"tensorprobe {verb}: {said}\n"
    assert (here / "file.txt").read_text() == "hello"


@NOT_ROOT
def test_a_folder_that_may_not_be_written_to(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").chmod(0o555)
    assert main(["compare", "runs/a", "runs/a", "-o", "empty/out"]) == 2
    assert "cannot write to 'empty/out': 'empty' is not writable" in capsys.readouterr().err


@NOT_ROOT
@pytest.mark.parametrize("option", ["-o", "--save-start", "--guard overflow --guard-out"])
def test_a_strict_run_ends_with_1_before_a_program_whose_recording_cannot_be_written(
    option: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").chmod(0o555)
    (here / "train.py").write_text("print('begun')")
    assert main(["run", "--strict", *option.split(), "empty/out", "train.py"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("tensorprobe run: cannot write to 'empty/out': 'empty' is not writable\n")


def test_a_strict_run_ends_with_1_where_its_guard_cannot_write(here: Path) -> None:
    (here / "train.py").write_text("import torch; torch.ones(2).log()")
    words = [sys.executable, "-m", "tensorprobe", "run", "--guard", "overflow"]
    for strict, status in ((["--strict"], 1), ([], 0)):
        done = subprocess.run(
            [*words, *strict, "--guard-out", "/proc/nope", "train.py"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert "/proc/nope" in done.stderr


def test_a_script_after_two_dashes(here: Path) -> None:
    (here / "train.py").write_text("import sys, torch; torch.ones(2).log(); print(sys.argv)")
    words = [sys.executable, "-m", "tensorprobe", "run", "-o", "new", "--", "train.py", "--", "-x"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "['train.py', '--', '-x']\n"


@pytest.mark.parametrize("place", ["", "/report", "/rank0", "/rank0/step0/deep"])
@pytest.mark.parametrize("verb", ["compare", "check", "repro", "convert"])
def test_a_report_does_not_go_into_a_capture(
    verb: str, place: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    words = {
        "compare": ["runs/a", "runs/a"],
        "check": ["runs/a"],
        "repro": ["runs/a", "Torch.relu.0"],
        "convert": ["runs/a", "--to", "native"],
    }[verb]
    assert main([verb, *words, "-o", f"runs/a{place}"]) == 2
    said = capsys.readouterr()
    known = "is in the capture 'runs/a" in said.err and "give a folder outside" in said.err
    assert known or (verb == "convert" and "is there already" in said.err)
    assert sorted(here.rglob("*")) == before


def test_a_report_does_not_go_into_a_dump_either(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "runs/a", "--to", "msprobe", "-o", "dump"]) == 0
    assert main(["compare", "dump", "runs/a", "-o", "dump/report"]) == 2
    assert "it is in the capture 'dump'" in capsys.readouterr().err


def test_a_file_of_another_tool_makes_no_capture_of_a_folder(here: Path) -> None:
    (here / "rank.json").write_text('{"rank": 3}')
    (here / "capture.json").write_text("not even JSON")
    assert main(["compare", "runs/a", "runs/a", "-o", "report"]) == 0


def test_a_file_that_cannot_be_read_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "a" / "rank0" / "rank.json").unlink()
    (here / "runs" / "a" / "rank0" / "rank.json").mkdir()
    assert main(["show", "runs/a"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rank.json" in said


def test_python_says_it_before_the_program_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "cannot write to 'file.txt': 'file.txt' is a file; give a folder"
    with pytest.raises(WriteFailed, match=f"^{said}$"):
        tp.Recorder("file.txt", strict=True)
    for kind in (tp.Recorder, tp.Guard):  # a program that is hours under way goes on
        held = kind("file.txt")
        assert said in str(held.failed)
        assert capsys.readouterr().err == f"tensorprobe: {held.failed}. The program goes on\n"
    for wrong, said in {
        "level": "level='L9': expected one of L0, L1, L2, mix",
        "keep": "keep='L9': expected one of structure, stats, digest, tensors",
        "steps": "steps='L9': expected numbers from 0 and ranges",
        "levl": "unknown argument 'levl'. Did you mean 'level'?",
    }.items():
        with pytest.raises(BadUsage) as caught:
            tp.Recorder("out", **{wrong: "L9"})
        assert str(caught.value).startswith(said)
    with pytest.raises(KeyError, match=r"near names: Torch\.relu\.0\.forward"):
        tp.load("runs/a").call("Torch.rleu.0.forward")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"task": "statistics", "levl": "L1"}', "config.json: unknown field 'levl'. Did you mean"),
        ('{"task": "statistics",', "config.json is not JSON: Input data was truncated"),
        (None, "no configuration can be read from 'config.json': No such file or directory"),
    ],
)
def test_a_wrong_config_of_msprobe_is_one_traceback(
    text: str | None, said: str, tmp_path: Path
) -> None:
    """The script's own line, and not that the door read the file with the help of others."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    done = run_script(
        tmp_path,
        "from tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "PrecisionDebugger(config_path='config.json')\n",
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].startswith(f"tensorprobe.errors.BadUsage: {said}")
