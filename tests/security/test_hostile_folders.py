"""The tool started as a user starts it, in folders that hold an attacker's Python files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attacks
import pytest
from hostile_captures import Attack, Base, lay_out_bait, write_native
from victims import STATUSES, Sandbox

from tensorprobe.errors import BadUsage
from tensorprobe.store.outputs import check_output

SRC = Path(__file__).parent.parent.parent / "src"
# Modules that the tool or its scripts import by themselves, late or early.
SHADOWED = ("torch", "json", "argparse", "itertools", "math", "pathlib", "contextlib", "numpy")
SHADOWED += ("custom_ops", "sitecustomize", "usercustomize", "tensorprobe", "msgspec", "pickle")
SHADOWED += ("torch_npu", "tqdm", "typing_extensions", "struct", "random", "tensorprobe_native")
PLAIN = Attack("made of others", {}, like="made")


def shadow(folder: Path, marker: Path) -> None:
    """A file in place of each of these, that leaves a marker when it is imported."""
    for name in SHADOWED:
        text = f"open({str(marker)!r} + {name!r}, 'w').close()\nraise ImportError({name!r})\n"
        (folder / f"{name}.py").write_text(text)


def start(sandbox: Sandbox, *words: str, flags: tuple[str, ...] = ()) -> str:
    """As the command `tensorprobe` does, in the sandbox; what it printed."""
    command = sandbox.folder.parent / "bin" / "tensorprobe"
    command.parent.mkdir(exist_ok=True)
    command.write_text("import sys\nfrom tensorprobe.cli.main import main\nsys.exit(main())\n")
    return run(sandbox, [sys.executable, *flags, str(command), *words])


def run(sandbox: Sandbox, words: list[str]) -> str:
    done = subprocess.run(
        words,
        cwd=sandbox.folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode in STATUSES, told
    assert "Traceback" not in told
    return told


@pytest.fixture
def watched(sandbox: Sandbox) -> Sandbox:
    lay_out_bait(sandbox)
    return sandbox


def assert_untouched(sandbox: Sandbox, before: dict[str, tuple[int, int]]) -> None:
    after = sandbox.seen()
    assert {path for path in after if after[path] != before.get(path)} == set()
    assert before.keys() <= after.keys()


_SLOW = [pytest.param(verb, marks=pytest.mark.slow) for verb in ("compare", "check", "convert")]


@pytest.mark.parametrize("verb", ["show", "repro", *_SLOW])
def test_modules_in_the_working_directory(base: Base, watched: Sandbox, verb: str) -> None:
    """`cd capture; tensorprobe VERB .`: what lies there is not imported, by no process of ours."""
    (name,) = write_native(base, watched, "a", [PLAIN])
    write_native(base, watched, "b", [PLAIN], wrong=True)
    shadow(watched.folder, watched.marker("shadow-"))
    before = watched.seen()
    words = {
        "show": ["a", name],
        "compare": ["a", "b", "--jobs", "2", "-o", "out/c"],
        "check": ["a", "-o", "out/c"],
        "repro": ["a", name, "-o", "out/r"],
        "convert": ["a", "--to", "msprobe", "-o", "out/m"],
    }
    start(watched, verb, *words[verb])
    assert_untouched(watched, before)


def test_modules_in_the_folder_of_a_repro(base: Base, watched: Sandbox) -> None:
    """A folder that holds a repro already, and a torch.py beside it."""
    (name,) = write_native(base, watched, "a", [PLAIN])
    folder = watched.out / "r"
    folder.mkdir()
    (folder / "repro.py").write_text("")
    shadow(folder, watched.marker("shadow-"))
    before = watched.seen()
    start(watched, "repro", "a", name, "-o", "out/r")
    assert_untouched(watched, before)


WORST = [
    attacks.WALKS[0],
    next(each for each in attacks.TYPES if each.name == "namedtuple subprocess.Popen"),
    next(each for each in attacks.MODULES if each.name == "made as: a call of the call"),
    next(each for each in attacks.MODULES if each.name == "made with: forward is load"),
    next(each for each in attacks.MODULES if each.name == "made with: a key"),
    next(each for each in attacks.NO_SPACES if each.name == "key of an output, code"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["python", "python -O"])
def test_the_worst_attacks_in_processes_of_their_own(
    base: Base, watched: Sandbox, flags: tuple[str, ...]
) -> None:
    names = write_native(base, watched, "a", WORST)
    write_native(base, watched, "b", WORST, wrong=True)
    before = watched.seen()
    start(watched, "check", "a", "-o", "out/c", flags=flags)
    start(watched, "compare", "a", "b", "-o", "out/d", flags=flags)
    start(watched, "repro", "a", names[4], "-o", "out/r4", flags=flags)
    start(watched, "repro", "a", names[5], "-o", "out/r5", flags=flags)
    for script in sorted(watched.out.rglob("repro.py")):
        run(watched, [sys.executable, *flags, str(script)])
    assert_untouched(watched, before)


@pytest.mark.parametrize("name", ["comparison.csv", "check.json", "repro.py", "README.md"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO"])
def test_nothing_is_written_through_what_lies_in_the_output(
    tmp_path: Path, name: str, kind: str
) -> None:
    """A folder for the results may come along with a capture."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    if kind == "FIFO":
        os.mkfifo(out / name)
    else:
        (out / name).symlink_to(victim)
    if kind == "link":
        victim.write_text("precious")
    with pytest.raises(BadUsage, match=f"'{name}' in it is no regular file; give another folder"):
        check_output(out)
    assert not victim.exists() or victim.read_text() == "precious"


def test_a_folder_with_files_and_folders_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "report.csv").write_text("")
    (tmp_path / "older").mkdir()
    (tmp_path / "venv").symlink_to(tmp_path / "older")
    check_output(tmp_path)
