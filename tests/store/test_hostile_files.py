"""Something else in place of each file of a capture: said in one line, waited for never."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import SRC, record
from tensorprobe.cli.main import main
from tensorprobe.errors import BadArtefact, TensorprobeError
from tensorprobe.peers.ptdbg import accuracy_checker

LAYOUTS = ("native", "msprobe", "ptdbg")
SECRET = "of somebody else"
LOG = "rank0/step0/calls.jsonl"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in each layout."""
    folder = tmp_path_factory.mktemp("captures")
    x = torch.arange(6.0).reshape(2, 3)
    record(folder / "native", lambda: torch.relu(x) @ x.T, compress=True)
    for layout in LAYOUTS[1:]:
        words = ["convert", str(folder / "native"), "--to", layout, "-o", str(folder / layout)]
        assert main(words) == 0
    return folder


@pytest.fixture
def here(captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(captures, tmp_path / "here"))
    monkeypatch.chdir(folder)
    (tmp_path / "secret").write_text(SECRET)
    return folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    """Without a right to make one: a link to it, which leads out of the capture as well."""
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def in_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # a path of a socket may have 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def folder(path: Path) -> None:
    path.mkdir()


def link_out(path: Path) -> None:
    path.symlink_to(os.path.relpath(Path.cwd().parent / "secret", path.parent))


KINDS: dict[Callable[[Path], None], tuple[str, ...]] = {
    fifo: ("is a FIFO",),
    device: ("is a device", "leads out of the capture"),
    in_socket: ("is a socket",),
    folder: ("is a folder",),
    link_out: ("leads out of the capture",),
}


def files_of(layout: str) -> Iterator[Path]:
    for path in sorted(Path(layout).rglob("*")):
        # a lock has no content, and neither has the mark of our writer
        if path.is_file() and path.name not in (".lock", ".tensorprobe"):
            yield path


def all_there_is() -> dict[str, bytes]:
    paths = Path.cwd().parent.rglob("*")
    return {str(p): p.read_bytes() for p in paths if p.is_file() and not p.is_symlink()}


def ways_to_read(layout: str) -> list[list[str]]:
    other = "native" if layout != "native" else "msprobe"
    return [
        ["show", layout],
        ["show", layout, "*", "--gaps"],
        ["compare", layout, other, "--jobs", "1", "--timeout", "0"],
        ["convert", layout, "--to", other, "-o", "out"],
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_no_file_is_said_to_be_none(
    layout: str,
    kind: Callable[[Path], None],
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in [*files_of(layout)]:
        content = path.read_bytes()
        path.unlink()
        kind(path)
        before = all_there_is()
        for words in ways_to_read(layout):
            status = main(words)
            said = capsys.readouterr()
            assert status in (0, 1, 3), (path, words, said)
            assert SECRET not in said.out + said.err
            if status == 1 and said.err:
                assert said.err.count("\n") == 1
                assert path.name in said.err
                assert any(text in said.err for text in KINDS[kind]), (path, words, said.err)
            shutil.rmtree("out", ignore_errors=True)
        assert all_there_is() == before
        if path.name == "program.json":  # which `env` alone reads
            assert main(["env", "compare", layout, layout]) == 1
            said = capsys.readouterr()
            assert SECRET not in said.out + said.err
            assert any(text in said.err for text in KINDS[kind]), (path, said.err)
        else:
            _check_load(Path(layout), path, KINDS[kind])
        path.rmdir() if kind is folder else path.unlink()
        path.write_bytes(content)


def _check_load(capture: Path, path: Path, texts: tuple[str, ...]) -> None:
    """From Python: an error that names the file, a gap, or a tensor that cannot be loaded."""
    reasons: list[str] = []
    try:
        found = tp.load(capture)
    except TensorprobeError as error:
        reasons.append(str(error))
    else:
        reasons += [gap.reason for gap in found.gaps]
        for tensor in (tensor for call in found.calls for tensor in call.tensors):
            reasons.append(tensor.gap or "")
            try:
                tensor.array()
            except TensorprobeError as error:
                reasons.append(str(error))
    assert any(text in reason for text in texts for reason in reasons), (path, reasons)


def test_a_path_that_is_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    for path in ("pipe", "/dev/zero"):
        assert main(["show", path]) == 1
        said = f"'{path}' is not a capture: it is neither a file nor a folder"
        assert capsys.readouterr().err == f"tensorprobe show: {said}\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_that_stay_inside_are_followed(layout: str, here: Path) -> None:
    before = [(call.name, len(call.tensors)) for call in tp.load(layout).calls]
    for path in [*files_of(layout)]:
        target = path.parent / "moved" / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        path.symlink_to(Path("moved", path.name))
    whole = Path(layout).rename("elsewhere")
    Path(layout).symlink_to(whole, target_is_directory=True)  # the user's own link
    after = tp.load(layout)
    assert [(call.name, len(call.tensors)) for call in after.calls] == before
    assert after.gaps == ()
    for tensor in (tensor for call in after.calls for tensor in call.tensors):
        tensor.array()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_that_lead_out_are_not_followed(
    layout: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = sorted(path for path in Path(layout).rglob("*") if path.is_dir())
    for path in inner:
        moved = here.parent / "moved"
        path.rename(moved)
        path.symlink_to(moved, target_is_directory=True)
        _check_load(Path(layout), path, ("leads out of the capture",))
        path.unlink()
        moved.rename(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_that_go_round_in_circles(layout: str, here: Path) -> None:
    folder = Path(layout)
    calls = len(tp.load(folder).calls)
    names = [f"{word}{n}" for word in ("rank", "step") for n in range(7, 12)]
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in names:
            (place / name).symlink_to(".", target_is_directory=True)
    assert len(tp.load(folder).calls) <= calls * 200


def test_records_of_the_accuracy_checker(tmp_path: Path) -> None:
    dump = tmp_path / "step0"
    dump.mkdir()
    (dump / "forward_info_7.json").write_text(json.dumps({"Functional*relu*0": {"args": []}}))
    os.mkfifo(dump / "stack_info_7.json")
    (dump / "backward_info_7.json").symlink_to("/dev/zero")
    (dump / "step0").symlink_to(".", target_is_directory=True)
    capture = accuracy_checker.read(tmp_path)
    assert [call.name for call in capture.calls] == ["Functional.relu.0.forward"]
    assert "is a FIFO" in capture.gaps[0].reason
    assert "leads out" in capture.gaps[1].reason


@pytest.mark.parametrize("option", ["--mapping", "config", "--reroute-file"])
@pytest.mark.parametrize("kind", [fifo, device, folder], ids=lambda kind: kind.__name__)
def test_files_that_options_name(
    option: str, kind: Callable[[Path], None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind(Path("file"))
    words = {
        "--mapping": ["compare", "native", "native", "--jobs", "1", "--mapping", "file"],
        "config": ["run", "--config", "file", "nothing.py"],
        "--reroute-file": ["run", "--reroute-file", "file", "nothing.py"],
    }[option]
    Path("nothing.py").write_text("")
    assert main(words) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'file' is a" in said


# Bounds, in a process that may not go beyond them


BOUNDED = """
import re, sys
from tensorprobe.cli.main import main
status = main(sys.argv[1:])
# not ru_maxrss, which begins with that of the process that started this one
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
sys.exit(status if peak < 500 else f"{peak} MB")
"""


def run_bounded(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BOUNDED, *words],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def put_hole(path: Path, at: int, nbytes: int) -> None:
    """Into a file, without taking room on the disk."""
    content = path.read_bytes()
    with path.open("wb") as file:
        file.write(content[:at])
        file.seek(nbytes, os.SEEK_CUR)
        file.write(content[at:])


def test_a_line_of_a_terabyte_is_a_gap(here: Path) -> None:
    lines = Path("native", LOG).read_bytes().split(b"\n")
    put_hole(Path("native", LOG), len(lines[0]), 1 << 40)
    done = run_bounded("show", "native", "--gaps")
    assert done.returncode == 0, done.stderr
    assert "rank0/step0/calls.jsonl:1  a line of more than" in done.stdout
    assert len(tp.load("native").calls) == len(tp.load("msprobe").calls)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_huge_files_of_nothing(layout: str, here: Path) -> None:
    for path in [*files_of(layout)]:
        content = path.read_bytes()
        for at in {0, 1, len(content) // 2, len(content)}:
            path.write_bytes(content)
            put_hole(path, at, 3 << 30)
            for words in ways_to_read(layout):
                done = run_bounded(*words)
                assert done.returncode in (0, 1, 3), (path, at, words, done.stderr)
                assert "Traceback" not in done.stderr
                shutil.rmtree("out", ignore_errors=True)
        path.write_bytes(content)


def test_a_table_of_contents_of_a_gigabyte(tmp_path: Path) -> None:
    from tensorprobe.tensors.tensor_files import locate

    path = tmp_path / "x.pt"
    torch.save(torch.ones(3), path)
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\x05\x06")
    content[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(BadArtefact, match="a table of contents of"):
        locate(path)
