"""The module in C++ is looked for, trusted, built and kept where it belongs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorprobe import native
from tensorprobe.native import background, build, builder

TAG = "cpython-311-x86_64-linux-gnu.so"
NEW = f"tensorprobe_native-2.13.0-bbbb.{TAG}"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place where the module may lie."""
    path = tmp_path / "folder" / NEW
    monkeypatch.setattr(native, "places", lambda: [path])
    monkeypatch.setattr(build, "places", lambda: [path])
    monkeypatch.setattr(builder, "LOCK", f"\0tensorprobe-test-{os.getpid()}")
    return path


# Looking for it


def test_without_a_module_the_recorder_is_in_python(elsewhere: Path) -> None:
    assert native.load() is None
    elsewhere.parent.mkdir(mode=0o755)
    elsewhere.write_bytes(b"no library")
    elsewhere.chmod(0o644)
    assert native.is_there(elsewhere)
    assert native.load() is None


def test_it_can_be_switched_off() -> None:
    code = "import tensorprobe.native as n; print(n.MODULE)"
    environ = {**os.environ, native.SWITCH: "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


def test_it_is_of_one_torch_and_of_these_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    here, cache = native.places()
    assert here.parent == native.FOLDER
    assert here.name == cache.name
    assert f"-{torch.__version__}-" in here.name
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert native.places()[0].name != here.name


def test_it_is_found_without_importing_torch() -> None:
    code = (
        "import sys, json; from tensorprobe import native\n"
        "print(json.dumps([str(path) for path in native.places()]))\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(path) for path in native.places()]


@pytest.mark.parametrize("home", ["~nobody-of-that-name", "relative/home", "/nonexistent/home"])
def test_nobodys_home(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """A container's user may have none; nothing is loaded from the folder one happens to be in."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    monkeypatch.setenv("HOME", home)
    assert native.cache_folder() is None
    assert [path.parent for path in native.places()] == [native.FOLDER]


# Trusting it


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("part", ["file", "folder", "file behind a link"])
def test_what_others_can_write_to_is_not_loaded(elsewhere: Path, part: str, mode: int) -> None:
    elsewhere.parent.mkdir(mode=0o755)
    file = elsewhere
    if part == "file behind a link":
        file = elsewhere.parent.parent / "apart" / "module.so"
        file.parent.mkdir(mode=0o755)
        elsewhere.symlink_to(file)
    file.touch(mode=0o644)
    assert native.is_there(elsewhere)
    loose = elsewhere.parent if part == "folder" else file
    loose.chmod(loose.stat().st_mode | mode)
    assert not native.is_there(elsewhere)
    assert native.distrust(elsewhere) == (
        f"{loose} can be written to by others: chmod go-w {loose}"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_not_loaded(elsewhere: Path) -> None:
    elsewhere.parent.mkdir(mode=0o755)
    elsewhere.touch(mode=0o644)
    os.chown(elsewhere, 12345, 12345)
    assert not native.is_there(elsewhere)
    assert "belongs to user 12345" in str(native.distrust(elsewhere))


def test_a_folder_of_others_is_no_place_to_build(elsewhere: Path) -> None:
    elsewhere.parent.mkdir(mode=0o755)
    assert build.targets() == [elsewhere]
    elsewhere.parent.chmod(0o777)
    assert build.targets() == []
    assert "chmod go-w" in str(build.main())


# Building it


def compiler(folder: Path, script: str) -> str:
    """A program in place of a compiler; $out is the file that it is to make."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nfor out in "$@"; do :; done\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_building_leaves_the_modules_of_others(elsewhere: Path, tmp_path: Path) -> None:
    folder = elsewhere.parent
    folder.mkdir(mode=0o755)
    stale = NEW.replace("bbbb", "aaaa")
    others = [stale.replace("2.13.0", "2.11.0"), stale.replace("311", "312")]
    for name in (stale, stale.replace(".so", ".failed"), *others):
        (folder / name).touch()
    command = compiler(tmp_path, 'echo module >"$out"')
    made = builder.make(
        builder.Plan([str(elsewhere)], [command], ["true"], build.superseded(NEW), 0)
    )
    assert made == str(elsewhere)
    assert {path.name for path in folder.iterdir()} == {NEW, *others}
    assert native.is_there(elsewhere)


def test_no_compiler(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert build.main() == "the recorder stays in Python: no-such-compiler: no such compiler"
    monkeypatch.setenv("CXX", 'c++ "')
    assert "CXX=" in str(build.main())
    assert capsys.readouterr().out == ""
    assert not elsewhere.exists()


def test_what_is_kept_is_trusted_whatever_the_umask(elsewhere: Path, tmp_path: Path) -> None:
    plan = builder.Plan([str(elsewhere)], [compiler(tmp_path, 'echo >"$out"')], ["true"], "", 0)
    usual = os.umask(0)
    try:
        builder.remember(str(elsewhere), "no luck")
        failure = background.read_failure()
        builder.make(plan)
    finally:
        os.umask(usual)
    assert failure is not None
    assert failure.reason == "no luck"
    assert native.is_there(elsewhere)


def test_no_headers_of_python(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CXX", "sh")
    assert f"no Python.h in {tmp_path}" in str(build.main())


def test_an_error_of_the_compiler_is_one_line(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "echo 'In file included from here'; echo 'a.h:3: error: what is this'; exit 1"
    command = compiler(tmp_path, said)
    monkeypatch.setenv("CXX", command)
    assert build.main() == (f"the recorder stays in Python: {command}: a.h:3: error: what is this")
    assert [path.suffix for path in elsewhere.parent.iterdir()] == [".failed"]


def test_what_cannot_be_loaded_is_not_kept(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'echo no library >"$out"'))
    assert "it was built, and cannot be loaded: ImportError: " in str(build.main())
    assert not elsewhere.exists()


def test_a_folder_that_cannot_be_written_to(elsewhere: Path) -> None:
    elsewhere.parent.write_text("a file where the folder should be")
    assert "folder" in str(build.main())
