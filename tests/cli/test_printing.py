"""What is printed: names out of files are shown and never obeyed, whatever the terminal can do."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import tensorprobe as tp
from recorded import SRC
from tensorprobe.cli.main import main
from tensorprobe.comparing.mapping import read_mapping
from tensorprobe.errors import BadArtefact, BadUsage
from tensorprobe.store.frames import source_line
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.terminal import printable

EVIL = "\x1b[31m\x07\x9b\x7f\u202e\u200b\u2028\r\nfake[red]x[/red][link=http://a]"
SHOWN = r"\x1b[31m\x07\x9b\x7f\u202e\u200b\u2028\r\nfake[red]x[/red][link=http://a]"


class Ready:
    """A result that is there at once."""

    ready = True
    summary = error = None
    digest = "0123456789abcdef"


def write_evil(root: Path, size: int = 4, text: str = EVIL) -> Path:
    """A capture with that text in every place where there can be one."""
    out = CaptureWriter(root, 0, "run", {}, {})
    out.begin_step(0)
    out.stack(StackLine(1, [f"{text}.py:3 in {text}"]))
    name = f"Torch.{text}.0.forward"
    value = {"tensor": TensorLine("float32", (size,), value=0)}
    out.call(
        CallLine(
            id=0, name=name, op=f"torch.{text}", module=text, thread=text, parent=text, stack=1,
            args=[value, {"special": ["unsupported", text]}, text],
            kwargs={text: {"dict": [[text, text]]}}, notes=[text],
        )
    )  # fmt: skip
    data = np.arange(size, dtype=np.float32)
    out.tensor(0, f"{name}.input.0", "float32", data.shape, data.view(np.uint8))
    out.value(0, Ready())
    out.end(EndLine(id=0, outputs=value, status="raised", error=f"{text}: {text}"))
    out.gap(GapLine(text, text))
    out.close()
    return root


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words],
        env={**os.environ, "PYTHONPATH": str(SRC), **environ},
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_text_is_printable() -> None:
    assert printable("Torch.add.0 é 中 [1, 2]") == "Torch.add.0 é 中 [1, 2]"
    assert printable(EVIL) == SHOWN
    assert printable("a\udcffb\U000e0041") == r"a\udcffb\U000e0041"


def test_control_characters_are_shown_by_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = str(write_evil(tmp_path / "a")), str(write_evil(tmp_path / "b", 5))
    out = str(tmp_path / "out")
    for words in (
        ["show", run],
        ["show", run, "*"],
        ["show", run, "--gaps"],
        ["show", run, "--op", "none"],
        ["show", run, "x[/red]"],
        ["show", f"{tmp_path}/{EVIL[:9]}"],
        ["compare", run, other, "--jobs", "1", "--timeout", "0", "-o", out],
        ["convert", run, "--to", "msprobe", "-o", f"{out}2"],
        ["repro", run, f"Torch.{EVIL}.0.forward", "-o", f"{out}3"],
        ["check", run, "-o", f"{out}4"],
    ):
        assert main(words) in (0, 1, 2, 3)
        said = capsys.readouterr()
        text = said.out + said.err
        assert words[0] == "convert" or r"\x1b[31m" in text, words
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert "\nfake" not in text


def test_a_terminal_table_interprets_no_markup(tmp_path: Path) -> None:
    run = write_evil(tmp_path / "a", text="[red]x[/red]\x1b[31m")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "tensorprobe", "show", str(run)]
    environ = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "300", "NO_COLOR": "1"}
    subprocess.run(words, stdout=theirs, env=environ, check=True, timeout=60)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert r"Torch.[red]x[/red]\x1b[31m.0.forward" in said
    assert "\x1b[31m" not in said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_has_no_letter_for_it(encoding: str, tmp_path: Path) -> None:
    run = write_evil(tmp_path / "a", text="é中\N{GRINNING FACE}")
    done = command("show", str(run), "*", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "é中\N{GRINNING FACE}".encode(encoding, "backslashreplace") in done.stdout
    done = command("show", str(tmp_path / "中"), PYTHONIOENCODING=encoding, LC_ALL="C")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1


def test_a_path_that_is_no_unicode(tmp_path: Path) -> None:
    run = write_evil(tmp_path / "a\udcff", text="x")
    done = command("show", os.fsencode(run).decode("utf-8", "surrogateescape"))
    assert done.returncode == 0, done.stderr
    assert rb"a\udcff" in done.stdout


def test_a_pipe_that_is_closed_is_no_error(tmp_path: Path) -> None:
    run = write_evil(tmp_path / "a")
    words = [sys.executable, "-m", "tensorprobe", "show", str(run)]
    for line in (f"{' '.join(words)} | true", f"{' '.join(words)} | head -1"):
        done = subprocess.run(
            ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"{' '.join(words)} {closed}"],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_reports_run_nothing_in_a_spreadsheet(tmp_path: Path) -> None:
    evil = "=cmd|' /C calc'!A0"
    a, b = write_evil(tmp_path / "a", text=evil), write_evil(tmp_path / "b", text=evil)
    comparison = tp.compare(a, b, jobs=1, timeout=0)
    for columns in ("native", "msprobe", "ptdbg"):
        comparison.save(tmp_path / columns, columns=columns, xlsx=True)
        for line in (tmp_path / columns / "comparison.csv").read_text("utf-8-sig").splitlines():
            assert not any(cell.lstrip('"').startswith(evil[:4]) for cell in line.split(","))
    json.loads((tmp_path / "native" / "verdict.json").read_text())


def test_a_command_to_type_next_holds_names_as_names(tmp_path: Path) -> None:
    evil = "$(touch evil); `touch evil`"
    a, b = write_evil(tmp_path / "a", text=evil), write_evil(tmp_path / "b", 5, text=evil)
    said = str(tp.compare(a, b, jobs=1, timeout=0).verdict)
    assert f"tensorprobe show {a} 'Torch.{evil}.0.forward'" in said


# Files that a stack names


def test_the_source_of_a_stack_is_read_from_python_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "model.py").write_text("x = 1\ny = x\n")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name in ("fifo.py", "secret", "zero.py", "missing.py"):
        assert source_line(str(tmp_path / name), "1") == ""
    assert source_line("/dev/zero", "1") == ""
    assert source_line(str(tmp_path / "model.py"), "2") == "y = x"
    for line in ("0", "3", "²", "-1", "9" * 5000):
        assert source_line(str(tmp_path / "model.py"), line) == ""


# Mapping files


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


HUGE = {
    "an alias": bomb(30),
    "nested deeper than 20": "[" * 100_000,
    "nested deeper than 20; ": "{a: " * 50_000,
    "expected 4194304 at most": "a: b\n" * 900_000,
    "more than 100000 names": "[" + "a," * 100_001 + "]",
}


@pytest.mark.parametrize(
    "reason",
    [pytest.param(each, marks=pytest.mark.slow if "names" in each else ()) for each in HUGE],
)
def test_a_mapping_file_that_would_not_end(reason: str, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(HUGE[reason])
    with pytest.raises(BadArtefact, match=reason):
        read_mapping(tmp_path / "map.yaml")


@pytest.mark.parametrize("text", ["a: \xff\x01", "a: [", "- 1", "a: b\n\tc: d"])
def test_a_mapping_file_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_bytes(text.encode("latin-1", "replace"))
    with pytest.raises(BadUsage) as raised:
        read_mapping(tmp_path / "map.yaml")
    assert "\n" not in str(raised.value)


def test_a_mapping_file_makes_text_only(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(f"model.0: layers.0\nx: !!python/object/apply:os.mkdir ['{tmp_path}/evil']\n")
    assert read_mapping(path).modules["model.0"] == "layers.0"
    assert not (tmp_path / "evil").exists()
    path.write_text(json.dumps({"model.1": "layers.1", "Functional.a.0.forward": "Torch.a.0"}))
    assert read_mapping(path).modules == {"model.1": "layers.1"}
    assert yaml.safe_load(path.read_text())["model.1"] == "layers.1"


def test_a_pipe_of_our_own_that_is_closed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a command whose process has died would end with 0, its work not done."""

    def lose_a_process(args: object) -> int:
        reader, writer = os.pipe()
        os.close(reader)
        return os.write(writer, b"to nobody")

    monkeypatch.setattr("tensorprobe.cli.show.run", lose_a_process)
    with pytest.raises(BrokenPipeError):
        main(["show", "nothing"])
