"""`tensorprobe doctor` tells what is active, what is missing and why, and builds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from tensorprobe import native
from tensorprobe._version import __version__
from tensorprobe.cli.main import main
from tensorprobe.native import background, build, builder
from tensorprobe.tensors import tally

FILE = "tensorprobe_native-2.13.0-bbbb.cpython-311-x86_64-linux-gnu.so"


REAL_PLACES = native.places()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module belongs, which is not there."""
    path = tmp_path / "package" / FILE
    monkeypatch.setattr(native, "places", lambda: [path])
    monkeypatch.setattr(build, "places", lambda: [path])
    monkeypatch.setattr(native, "MODULE", None, raising=False)
    monkeypatch.setattr(builder, "LOCK", f"\0tensorprobe-doctor-{os.getpid()}")
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv(background.SWITCH, raising=False)
    monkeypatch.setenv("CXX", "false")
    return path


def parts(
    capsys: pytest.CaptureFixture[str], *words: str, status: int
) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json", *words]) == status
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["version"]) == (1, __version__)
    return {part["name"]: part for part in told["parts"]}


@pytest.mark.skipif(
    not hasattr(torch, "_import_device_backends"), reason="torch loads nothing by itself before 2.5"
)
def test_a_package_that_torch_loads_by_itself_and_that_is_broken(tmp_path: Path) -> None:
    """As a torch_npu without the libraries of CANN."""
    entry = tmp_path / "broken_npu-1.0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-npu\nVersion: 1.0\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nbroken_npu = broken_npu:load\n")
    (tmp_path / "broken_npu.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')"
    )
    source = Path(native.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{source}"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    why = (
        "torch cannot be imported: it loads broken_npu by itself, and that fails: libhccl.so: "
        "cannot open shared object file. Mend broken_npu (the one for this torch, with the "
        "libraries of its driver), or leave it out: export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )
    program = tmp_path / "program.py"
    program.write_text("import torch")
    done = run("-m", "tensorprobe", "run", "-o", str(tmp_path / "out"), str(program))
    assert done.returncode == 1
    assert f"tensorprobe run: {why}" in done.stderr.splitlines()
    with tp.Recorder(tmp_path / "capture", keep="tensors", log=lambda text: None):
        torch.ones(2).exp()
    words = (str(tmp_path / "capture"), "Tensor.exp.0.forward", "-o", str(tmp_path / "repro"))
    done = run("-m", "tensorprobe", "repro", *words)
    assert (done.returncode, done.stderr) == (1, f"tensorprobe repro: {why}\n")
    assert why in run("-m", "tensorprobe", "doctor").stdout
    done = run("-c", "import tensorprobe; tensorprobe.Recorder")
    assert done.stderr.splitlines()[-1] == f"tensorprobe.errors.UnsupportedTorch: {why}"


def test_versions_that_were_tried_and_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(version: str) -> str:
        monkeypatch.setattr(native, "find_torch", lambda: native.Torch(version, ""))
        main(["doctor"])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "  torch  " in line]
        return line.split("torch", 1)[1].strip()

    assert said("2.1.0+cu121").startswith("2.1.0+cu121 (tried")
    assert said("9.9.0").startswith("9.9.0 (not tried: 2.1")


def test_what_is_missing_is_told_with_what_it_would_bring(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 3
    told = capsys.readouterr().out
    assert (
        "missing  C++ parts       not built yet; the next recording starts the build\n"
        "                         would bring: L1 on an H200 takes 1.19x to 1.41x of a step, "
        "not 1.82x to 2.39x\n"
        "                         next: tensorprobe doctor --fix\n"
    ) in told
    assert "active   torch           " in told


@pytest.mark.skipif(native.MODULE is None or tally.LIBRARY is None, reason="not built")
def test_where_all_is_built_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    told = parts(capsys, status=0)
    assert told["C++ parts"]["state"] == "active"
    assert told["C++ parts"]["why"] in map(str, native.places())
    assert told["C library"] == {
        "name": "C library",
        "state": "active",
        "why": str(tally.PATH),
        "brings": "statistics of CPU tensors at 9.1 GB/s a thread, not 2.3",
        "remedy": "",
    }


def test_the_reasons(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(status: int = 3) -> str:
        return parts(capsys, status=status)["C++ parts"]["why"]

    with monkeypatch.context() as patch:
        patch.setenv(background.SWITCH, "0")
        assert "TENSORPROBE_BUILD=0 is set" in why()
    lock = builder.take_lock()
    assert lock is not None
    with lock:
        assert why() == "a build is going on on this machine"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert why() == "no-such-compiler: no such compiler"
        assert parts(capsys, status=3)["C++ compiler"]["state"] == "missing"
        patch.setenv(native.SWITCH, "0")
        told = parts(capsys, status=0)
        assert told["C++ parts"]["state"] == "off"
        assert told["C++ compiler"]["state"] == "unused"
    builder.remember(str(place), "c++: the disk is full")
    assert why() == "the build failed: c++: the disk is full"
    Path(builder.failure_file(str(place))).unlink()
    place.write_bytes(b"no library")
    place.chmod(0o644)
    assert why().startswith("cannot be loaded: ")
    place.chmod(0o646)
    assert why() == f"not loaded: {native.distrust(place)}"


def test_a_fix_that_fails(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--fix"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(
        "tensorprobe doctor: the C++ parts could not be built: "
    )
    assert "the build failed: " in said.out


@pytest.mark.skipif(native.MODULE is None, reason="not built")
def test_a_fix_that_succeeds(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a build failed before. The compiler copies what was built already: 30 s less."""
    built = next(filter(native.is_there, REAL_PLACES))
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor out in "$@"; do :; done\ncp "{built}" "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    builder.remember(str(place), "no luck")
    told = parts(capsys, "--fix", status=0)
    assert (told["C++ parts"]["state"], told["C++ parts"]["why"]) == ("active", str(place))
    assert list(place.parent.iterdir()) == [place]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from tensorprobe.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_version_and_help_import_no_torch() -> None:
    done = run("doctor", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    off = run("--version", TENSORPROBE_NATIVE="0")
    assert off.stdout == f"tensorprobe {__version__} (C++ parts off: TENSORPROBE_NATIVE=0)\n"
    there = any(map(native.is_there, native.places()))
    said = "C++ parts active" if there else "C++ parts not built: see tensorprobe doctor"
    on = run("--version", TENSORPROBE_NATIVE="1")
    assert (on.returncode, on.stdout) == (0, f"tensorprobe {__version__} ({said})\n"), on.stderr


def test_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is gone')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9'")
    source = str(native.FOLDER.parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{source}", native.SWITCH: "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")
    told = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    assert (told["torch"]["state"], told["torch"]["why"]) == ("missing", "libtorch.so is gone")
    assert told["C++ parts"]["state"] == "missing"
