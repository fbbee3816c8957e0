"""The commands of docs/check.md and docs/repro.md, run, print what the pages show."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import ROOT, SRC, record
from tensorprobe.cli.main import main

# Stands for the vendor's package: the simulated device, two of its kernels broken.
TORCH_NPU = """
import os, sys
from tensorprobe.devices import sim_npu
sys.path.remove(os.path.dirname(__file__))  # it takes no other one's place
del sys.modules["torch_npu"]
sim_npu.install()
sim_npu.plant("rsqrt", effect="scale:1.005")
sim_npu.plant("silu_backward", effect="scale:1.001")
"""
MYLIB = """
import torch
library = torch.library.Library("mylib", "DEF")
library.define("fused_gelu(Tensor x, float scale) -> Tensor")
library.impl("fused_gelu", lambda x, scale: torch.nn.functional.gelu(x) * scale, "CPU")
"""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(text: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [body for kind, body in found if kind == language]


def commands(text: str) -> list[list[str]]:
    found = [line for block in blocks(text) for line in block.splitlines()]
    return [shlex.split(line) for line in found if line.startswith(("tensorprobe ", "python "))]


def numberless(text: str) -> str:
    """Numbers differ between versions of torch; what they are about does not."""
    text = re.sub(r"torch [\w.+]+,", "torch N,", text)
    return re.sub(r"-?\b\d+(\.\d+)?(e[+-]?\d+)?\b", "N", re.sub(r" +", " ", text)).strip()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that the pages speak of: a training step of a 2-layer Llama."""
    hf = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("docs")
    (folder / "torch_npu.py").write_text(TORCH_NPU)
    (folder / "mylib_ops.py").write_text(MYLIB)
    config = hf.LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config)
    ids = torch.randint(0, 211, (2, 32))

    def program() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    record(folder / "runs" / "llama", program, level="L1")
    for name in ("npu", "gpu"):
        (folder / "runs" / name).symlink_to(folder / "runs" / "llama")
    return folder


@pytest.fixture
def there(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workshop)
    monkeypatch.syspath_prepend(workshop)
    return workshop


def test_the_commands_of_the_check_page(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, on_cuda, three_way = commands(page("check.md"))
    assert main(first[1:]) == 3
    shown = next(block for block in blocks(page("check.md")) if block.startswith("fail "))
    assert numberless(capsys.readouterr().out) == numberless(shown)
    status, said = main(on_cuda[1:]), capsys.readouterr().err
    if torch.cuda.is_available():
        assert status == 0
    else:
        assert (status, "device 'cuda' is not usable here" in said) == (1, True)
    assert main(three_way[1:]) == 3
    rows = json.loads((there / "checks" / "three-way" / "check.json").read_text())["calls"]
    assert all(row["tensors"][0]["benchmark_error"] is not None for row in rows[:2])
    report = json.loads((there / "checks" / "npu" / "check.json").read_text())
    example = json.loads(
        next(b for b in blocks(page("check.md")) if b.startswith('{"format"')).replace(", ...", "")
    )
    assert example.keys() <= report.keys()
    assert example["calls"][0].keys() <= report["calls"][0].keys()
    assert example["calls"][0]["tensors"][0].keys() <= report["calls"][0]["tensors"][0].keys()


def test_the_reference_of_the_check_page(there: Path, tmp_path: Path) -> None:
    source = next(b for b in blocks(page("check.md"), "python") if "tp.reference" in b)
    (there / "references.py").write_text(source)
    library = torch.library.Library("mylib", "FRAGMENT")
    library.define("fused_gelu(Tensor x, float scale) -> Tensor")
    library.impl("fused_gelu", lambda x, scale: torch.nn.functional.gelu(x) * scale, "CPU")
    record(tmp_path / "run", lambda: torch.ops.mylib.fused_gelu(torch.randn(9), 0.5), level="L1")
    library._destroy()
    checked = tp.check(
        tmp_path / "run", tmp_path / "out", only=["*mylib*"], references="references.py"
    )
    (row,) = checked.rows
    assert (row.verdict, row.reference) == ("pass", "reference fused_gelu")


def test_the_commands_of_the_repro_page(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page("repro.md")
    write, run = commands(text)
    assert main(write[1:]) == 0
    script = (there / run[1]).read_text()
    assert blocks(text, "python")[0] in script
    environ = {**os.environ, "PYTHONPATH": f"{there}{os.pathsep}{SRC}"}
    done = subprocess.run(
        [sys.executable, *run[1:]], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    shown = next(block for block in blocks(text) if block.startswith("torch "))
    assert numberless(done.stdout) == numberless(shown)
    files = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert files == {path.name for path in (there / run[1]).parent.iterdir()}
