"""The examples of CONTRIBUTING.md, run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(heading: str) -> list[str]:
    """The Python of one section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{folder}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_how_to_add_a_dump_format(tmp_path: Path) -> None:
    module, use = blocks("How to add a dump format")
    (tmp_path / "csv_layout.py").write_text(module)
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "calls.csv").write_text(
        "torch.relu,0.0,2.5\ntorch.tanh,no number,1\ntorch.tanh,-1,1\n"
    )
    assert run(tmp_path, use) == "torch.relu.0.forward 2.5\ntorch.tanh.1.forward 1.0\nmatch\n"
    more = """
print(*capture.gaps)
from tensorprobe.cli.main import main
main(["convert", "dump", "--to", "csv", "-o", "copy"])
print(tp.load("copy/calls.csv").calls[1].tensor("output.0").summary.min)
assert "torch" not in __import__("sys").modules
"""
    said = run(tmp_path, use + more)
    assert "Gap(name='line 2', reason=\"could not convert string to float: 'no number'\"" in said
    assert "2 calls of dump (csv) are in copy (csv)" in said
    assert "not as it was: inputs, shapes and dtypes" in said
    assert said.endswith("\n-1.0\n")


def test_how_to_watch_a_program(tmp_path: Path) -> None:
    (use,) = blocks("How to watch a program")
    assert run(tmp_path, use) == "1 1\n"


def test_how_to_add_a_tensor_subclass(tmp_path: Path) -> None:
    (use,) = blocks("How to add a tensor subclass")
    assert run(tmp_path, use) == "1.0\n"
    without = use.replace("register_subclass(Meters", "str((Meters").replace(
        "numbers)\n\nwith", "numbers))\n\nwith"
    )
    unregistered = without.replace('"run"', '"other"').replace(".summary.max", ".summary")
    assert run(tmp_path, unregistered) == "None\n"


def test_how_to_add_an_overflow_rule(tmp_path: Path) -> None:
    (use,) = blocks("How to add an overflow rule")
    assert run(tmp_path, use) == "['Ops.mine.mask_scores.0.forward']\n[]\n"


def test_how_to_add_a_verb(tmp_path: Path) -> None:
    (module,) = blocks("How to add a verb")
    (tmp_path / "ops.py").write_text(module)
    use = """
import sys, torch, ops, tensorprobe as tp
from tensorprobe.cli import main
main.VERBS["ops"] = "how often each operator was called"
sys.modules["tensorprobe.cli.ops"] = ops
with tp.Recorder("run", level="L1"):
    torch.exp(torch.exp(torch.zeros(2)))
main.main(["ops", "run"])
"""
    assert run(tmp_path, use) == "    2 torch.exp\n    1 torch.zeros\n"
