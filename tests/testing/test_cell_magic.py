"""`%%probe`, and recorders that are started and stopped in cells, in a real IPython."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import run_script

pytest.importorskip("IPython", reason="no IPython: pip install ipython")

NOTEBOOK = """\
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell()


def cell(text):
    ended = shell.run_cell(text, store_history=True)
    print("=>", type(ended.error_in_exec).__name__, repr(ended.result))
"""


def notebook(folder: Path, *cells: str) -> tuple[list[str], str]:
    """What the cells of a notebook gave, and what was printed."""
    text = NOTEBOOK + "".join(f"cell({each!r})\n" for each in cells)
    done = run_script(folder, text, IPYTHONDIR=str(folder / "ipython"))
    assert done.returncode == 0, done.stderr
    given = [line for line in done.stdout.splitlines() if line.startswith("=> ")]
    return given, done.stdout + done.stderr


MODEL = """\
import torch
layer = torch.nn.Linear(2, 2)
def double(x):
    return layer(x) * 2
"""


def test_a_cell_is_recorded(tmp_path: Path) -> None:
    given, said = notebook(
        tmp_path,
        "%load_ext tensorprobe",
        MODEL,
        "%%probe runs/a --level L1 --keep tensors\nlast = double(torch.ones(1, 2))\nlast.shape",
        "double(torch.ones(1, 2))",
        "%%probe runs/b --guard overflow\ndouble(torch.full((1, 2), 3e38) * 2)",
        "%%probe runs/c\nlayer(torch.ones(3))",
        "last.shape",
    )
    assert "Out[3]: torch.Size([1, 2])\nOut[3]: <Capture runs/a: 3 calls in 1 step>" in said
    assert "recorded 3 calls in 1 step" in said
    capture = tp.load(tmp_path / "runs" / "a")
    assert [call.name for call in capture.calls] == [
        "Torch.ones.0.forward",
        "Functional.linear.0.forward",
        "Tensor.mul.0.forward",
    ]
    assert "Out[5]: <Guard runs/b-guard: closed overflow, 1 finding>" in said
    found = json.loads((tmp_path / "runs/b-guard/findings.json").read_text())["findings"]
    assert found[0]["name"] == "Tensor.mul.0.forward"
    for stack in (*(call.stack for call in capture.calls), *(each["stack"] for each in found)):
        assert stack
        assert not [line for line in stack if "IPython" in line or "script0" in line]
    assert len(capture.call("Tensor.mul.0.forward").stack) == 2  # double, and the cell
    assert "RuntimeError" in said  # of the cell that fails, as without us
    assert given[6].endswith("torch.Size([1, 2])")


def test_start_and_stop_in_cells(tmp_path: Path) -> None:
    given, said = notebook(
        tmp_path,
        MODEL + "import tensorprobe as tp\nrec = tp.Recorder('runs/a', level='L1')\nrec.start()",
        "double(torch.ones(1, 2))",
        "rec.stop()",
        "double(torch.ones(1, 2))",
        "rec.start(); y = double(torch.ones(1, 2)); rec.close()",
    )
    assert all(each.startswith("=> NoneType") for each in given), said
    calls = tp.load(tmp_path / "runs" / "a").calls
    assert [call.name for call in calls if "linear" in call.name] == [
        "Functional.linear.0.forward",
        "Functional.linear.1.forward",
    ]
    assert not [line for call in calls for line in call.stack if "IPython" in line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--levle L1", "unrecognized arguments: --levle"),
        ("--level L9", "--level L9: expected one of L0, L1, L2, mix"),
        ("--guard both", "unknown guard 'both'"),
        ("'runs", "No closing quotation"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, line: str, expected: str) -> None:
    _, said = notebook(tmp_path, "%load_ext tensorprobe", f"%%probe {line}\n1 + 1")
    assert f"UsageError: %%probe: {expected}" in said
    assert "Traceback" not in said
