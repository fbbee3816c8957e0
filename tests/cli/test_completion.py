"""What the scripts of `tensorprobe completion` offer, asked of the shells themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tensorprobe.cli.main import main


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


OFFERED = [
    ("tensorprobe com", {"compare", "compiled", "completion"}),
    ("tensorprobe run --chi", {"--children"}),
    ("tensorprobe run --children ", {"processes", "all", "none"}),
    ("tensorprobe ascend ", {"convert", "inspect", "graph", "incident", "opcase"}),
    ("tensorprobe ascend inspect --js", {"--json"}),
]


def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f'. "{script("bash", tmp_path, capsys)}"']
    lines += ['offers() { COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _tensorprobe; ']
    lines[-1] += 'echo "${COMPREPLY[*]}"; }'
    for typed, _ in [*OFFERED, ("tensorprobe show ru", set())]:  # nothing: bash completes files
        *words, last = typed.split(" ")
        lines.append(f"offers {' '.join(words)} '{last}'")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stderr == ""
    found = [set(line.split()) for line in done.stdout.split("\n")[:-1]]
    assert found == [*(offered for _, offered in OFFERED), set()]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"source '{script('fish', tmp_path, capsys)}'"
    for typed, offered in OFFERED:
        command = ["fish", "--no-config", "-c", f"{source}; complete -C '{typed}'"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert {line.split("\t")[0] for line in done.stdout.splitlines()} == offered


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("zsh", tmp_path, capsys)
    stand_ins = "compdef() {}; compadd() { shift; print -rl -- $@ }; _files() {}\n"
    stand_ins += "_describe() { print -rl -- ${${(P)argv[-1]}%%:*} }\n"
    for typed, offered in OFFERED:
        asked = f"words=({typed} ''); " if typed.endswith(" ") else f"words=({typed}); "
        asked += "CURRENT=$#words; PREFIX=$words[-1]; _tensorprobe"
        done = subprocess.run(
            ["zsh", "-f", "-c", f"{stand_ins}source '{path}'\n{asked}"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert offered <= set(done.stdout.split()), done.stderr


def test_all_verbs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    (inspect,) = [each for each in commands if each["words"] == ["ascend", "inspect"]]
    assert inspect["help"] == "what is in dumps and npy files, and abnormal"
