"""`tensorprobe show`: what a reader of a capture reads."""

# ruff: noqa: E501 the tables are as wide as they are
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from tensorprobe.cli.main import main
from tensorprobe.records import TensorSummary
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine
from tensorprobe.store.writer import CaptureWriter


class Ready:
    ready = True
    error = None

    def __init__(self, *fields: float | None, digest: str | None = None) -> None:
        self.summary = TensorSummary(*fields)  # type: ignore[arg-type]
        self.digest = digest


def tensor(value: int, dtype: str, *shape: int, **more: object) -> dict[str, TensorLine]:
    return {"tensor": TensorLine(dtype, shape, value=value, **more)}  # type: ignore[arg-type]


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two steps of three calls; the last one never came back."""
    monkeypatch.chdir(tmp_path)
    out = CaptureWriter(Path("runs/a"), 0, "run", {}, {})
    for step in range(2):
        out.begin_step(step)
        out.stack(StackLine(0, ["model.py:12 in forward", "train.py:7 in <module>"]))
        linear = CallLine(
            id=0, name="Functional.linear.0.forward", op="torch.nn.functional.linear",
            module="fc", parent="Module.fc.Linear.forward.0", stack=0,
            args=[
                tensor(0, "float32", 2, 3, device="cuda:0"), tensor(1, "float32", 4, 3, grad=True),
            ],
            kwargs={"bias": None},
        )  # fmt: skip
        out.call(linear)
        data = np.arange(6, dtype=np.float32).view(np.uint8)
        out.tensor(0, "x", "float32", (2, 3), data)
        out.value(0, Ready(0.0, 5.0, 2.5, 7.4161984, 0, 0, 1, digest="00c0ffee00c0ffee"))
        out.value(1, Ready(-1.25, float("inf"), 0.1, 12345678.9, 2, 1, 0))
        out.end(EndLine(id=0, outputs=tensor(1, "float32", 2, 4)))
        index = CallLine(
            id=1, name="Tensor.__getitem__.0.forward", op="torch.Tensor.__getitem__", stack=0,
            args=[
                tensor(1, "float32", 2, 4),
                {"tuple": [tensor(2, "bool", 2), {"slice": [0, 3, None]}, {"ellipsis": True}]},
                {"special": ["unsupported", "<Thing at 0x7f>"]},
                None,
                [1, {"float": "nan"}],
                {"fields": ["dataclass", "lib.Options", {"dtype": {"special": ["dtype", "int8"]}}]},
                tensor(1, "float32", 2, 4, same="input.0"),
            ],
        )  # fmt: skip
        out.call(index)
        out.value(2, Ready(False, True, None, None, 0, 0, 1))
        out.end(EndLine(id=1, status="raised", error="IndexError: too many indices"))
        out.gap(GapLine("Torch.quantize.0.forward", "a quantised tensor"))
    out.call(CallLine(id=2, name="Torch.exp.0.forward", op="torch.exp", args=[tensor(9, "int8")]))
    out.close()
    return "runs/a"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def test_the_table_of_calls(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, capture) == dedent("""\
        runs/a: native, steps 0-1, rank 0, 5 calls, 2 gaps, 3.1 kB
        1 call begun, values missing

        index  step  rank  name                          module  op                             input         output        status
            0     0     0  Functional.linear.0.forward   fc      torch.nn.functional.linear     float32[2,3]  float32[2,4]  complete
            1     0     0  Tensor.__getitem__.0.forward          torch.Tensor.__getitem__ ([])  float32[2,4]                raised
            2     1     0  Functional.linear.0.forward   fc      torch.nn.functional.linear     float32[2,3]  float32[2,4]  complete
            3     1     0  Tensor.__getitem__.0.forward          torch.Tensor.__getitem__ ([])  float32[2,4]                raised
            4     1     0  Torch.exp.0.forward                   torch.exp                      int8[]                      begun
        """)


def test_one_call(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, capture, "Functional.linear.0", "--step", "0") == dedent("""\
        Functional.linear.0.forward
          op          torch.nn.functional.linear
          module      fc
          parent      Module.fc.Linear.forward.0
          where       step 0, rank 0, index 0, MainThread
          status      complete
          stack       model.py:12 in forward
                      train.py:7 in <module>
          input.0     tensor float32[2,3] on cuda:0
          input.1     tensor float32[4,3], requires grad
          input.bias  None
          output.0    tensor float32[2,4]
        tensor    dtype    shape     min  max  mean         norm  nan  inf  zero  kept
        input.0   float32  [2, 3]      0    5   2.5       7.4162    0    0     1  digest 00c0ffee00c0ffee, 24 bytes stored
        input.1   float32  [4, 3]  -1.25  inf   0.1  1.23457e+07    2    1     0
        output.0  float32  [2, 4]  -1.25  inf   0.1  1.23457e+07    2    1     0

        """)


def test_none_unsupported_and_bool_are_three_things(
    capture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, capture, "Tensor.__getitem__.0.forward", "--step", "1") == dedent("""\
        Tensor.__getitem__.0.forward
          op             torch.Tensor.__getitem__ ([])
          where          step 1, rank 0, index 3, MainThread
          status         raised: IndexError: too many indices
          stack          model.py:12 in forward
                         train.py:7 in <module>
          input.0        tensor float32[2,4]
          input.1.0      tensor bool[2]
          input.1.1      slice(0, 3, None)
          input.1.2      ...
          input.2        unsupported type: <Thing at 0x7f>
          input.3        None
          input.4        [1, nan]
          input.5        dataclass lib.Options
          input.5.dtype  dtype int8
          input.6        tensor float32[2,4]
        tensor     dtype    shape     min   max  mean         norm  nan  inf  zero  kept
        input.0    float32  [2, 4]  -1.25   inf   0.1  1.23457e+07    2    1     0
        input.1.0  bool     [2]     False  True     -            -    0    0     1
        input.6    float32  [2, 4]  -1.25   inf   0.1  1.23457e+07    2    1     0  same tensor as input.0

        """)


def test_gaps(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, capture, "--gaps") == dedent("""\
        runs/a: native, steps 0-1, rank 0, 5 calls, 2 gaps, 3.1 kB
        1 call begun, values missing

        step  rank  name                      reason
           0     0  Torch.quantize.0.forward  a quantised tensor
           1     0  Torch.quantize.0.forward  a quantised tensor
        """)


def test_filters_and_pages(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*words: str) -> list[str]:
        lines = shown(capsys, capture, *words).splitlines()[3:]
        return [line.split()[0] if line[0] == " " else line for line in lines[1:]]

    assert names("--step", "1", "--op", "*linear") == ["2"]
    for same in ("linear", "F.linear", "functional.linear", "torch.nn.functional.linear"):
        assert names("--step", "1", "--op", same) == ["2"]
    assert names("--module", "f*", "--rank", "0") == ["0", "2"]
    assert names("--name", "Torch.exp") == ["4"]
    assert names("--limit", "2", "--offset", "1") == ["1", "2", "2 more: --offset 3"]
    assert names("--direction", "forward", "--offset", "4") == ["4"]
    text = shown(capsys, capture, "--direction", "backward")
    assert text.partition("\n\n")[2] == dedent("""\
        no call passes these filters. There is:
          --step       0, 1
          --rank       0
          --direction  forward
          --name       Functional.*, Tensor.*, Torch.*
          --op         torch.nn.functional.linear, torch.Tensor.__getitem__, torch.exp
          --module     fc
        """)


@pytest.mark.parametrize(
    "wanted",
    [
        "Tensor.__getitem__.0.forward", "Tensor.__getitem__", "Tensor.__get", "Tensor.*",
        "Tensor.__getitem__.0.forward.input.1.0",
    ],
)  # fmt: skip
def test_a_call_by_any_of_its_names(
    capture: str, capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    text = shown(capsys, capture, wanted)
    assert text.count("\nTensor.__getitem__.0.forward\n") + text.startswith("Tensor.__get") == 2
    assert "Functional" not in text


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("exp", "near names: Torch.exp.0.forward"),
        ("Functional.liner.0.forward", "near names: Functional.linear.0.forward"),
        ("zzz", "to see all: leave the name out"),
    ],
)
def test_a_name_that_is_not_there(
    capture: str, capsys: pytest.CaptureFixture[str], wanted: str, hint: str
) -> None:
    assert main(["show", capture, wanted]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"tensorprobe show: no call '{wanted}' among 5 in 'runs/a'; {hint}\n"


def test_a_capture_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "no")]) == 1
    assert "there is no such path" in capsys.readouterr().err
    assert main(["show", str(tmp_path), "--limit", "0"]) == 2


def test_piped_output_is_plain_whole_lines_without_torch(capture: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from tensorprobe.cli.main import main; main()"
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "20"}
    done = subprocess.run(
        [sys.executable, "-c", code, "show", capture],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 9


def test_on_a_terminal_it_fits_the_window(capture: str) -> None:
    parent, child = os.openpty()
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "70", "TERM": "xterm"}
    code = "import sys; from tensorprobe.cli.main import main; main()"
    command = [sys.executable, "-c", code, "show", capture]
    done = subprocess.run(command, env=environ, stdout=child, check=True)
    os.close(child)
    text = os.read(parent, 100_000).decode()
    os.close(parent)
    assert done.returncode == 0
    plain = re.sub(r"\x1b\[[0-9]*m", "", text)
    assert "\x1b" not in plain
    assert all(len(line) <= 70 for line in plain.splitlines())
    assert "complete" in text
