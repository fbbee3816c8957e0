"""A repro folder is run by a Python that has torch and nothing of ours."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import tensorprobe as tp
from recorded import record
from tensorprobe.cli.main import main
from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.records import Call, Capture, Special

# Runs each script in one process: importing torch takes longer than all of them.
CHILD = """
import sys
folder, tasks = sys.argv[1:]
sys.path.append(folder)
import contextlib, importlib.util, io, json, runpy
others = ("tensorprobe", "safetensors", "numpy", "msgspec", "ml_dtypes", "pytest", "transformers")
assert not [name for name in others if importlib.util.find_spec(name)]
results = []
for folder, arguments in json.loads(tasks):
    sys.argv = ["repro.py", *arguments]
    sys.path.insert(0, folder)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(folder + "/repro.py", run_name="__main__")
        except SystemExit as end:
            status = end.code
    results.append([status, text.getvalue()])
    sys.path.remove(folder)
print(json.dumps(results))
"""


@functools.cache
def torch_only() -> str:
    """A folder with torch and what it requires, and no other package that is installed here."""
    folder = Path(tempfile.mkdtemp(prefix="torch-only-"))
    atexit.register(shutil.rmtree, folder)
    todo, seen = ["torch"], set()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on another platform
        for file in {file.parts[0]: file for file in package.files or ()}.values():
            there = Path(str(package.locate_file(file.parts[0])))
            if file.parts[0] != ".." and there.exists() and not (folder / there.name).exists():
                (folder / there.name).symlink_to(there)
        needs = [text for text in package.requires or () if "extra ==" not in text]
        todo += [found[0] for text in needs if (found := re.match(r"[\w.-]+", text))]
    return str(folder)


class Ran(NamedTuple):
    status: int
    text: str


def run_repros(*runs: tuple[Path, tuple[str, ...]]) -> list[Ran]:
    """-I -S: no PYTHONPATH, no current folder, no installed packages; torch comes by a link."""
    tasks = json.dumps([(str(folder), arguments) for folder, arguments in runs])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, torch_only(), tasks],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ran(*each) for each in json.loads(done.stdout)]


def grad_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def api_call() -> None:
    F.layer_norm(grad_tensor(4, 6), (6,), grad_tensor(6)).square().sum().backward()


def in_place() -> None:
    (grad_tensor(3, 4) * 2).mul_(grad_tensor(4)).sum().backward()


def out_variant() -> None:
    torch.add(torch.ones(3), torch.randn(3), alpha=0.5, out=torch.empty(3))


def nested() -> None:
    torch.cat([grad_tensor(2, 3), grad_tensor(1, 3)], dim=0).square().sum().backward()


def set_item() -> None:
    x = grad_tensor(4, 4).clone()
    x[1] = grad_tensor(4)
    x.sum().backward()


def indexing() -> None:
    x = grad_tensor(4, 6)
    (x[..., 1::2] * 2).sum().backward()


def odd_strides() -> None:
    torch.cumsum(grad_tensor(6, 8).t()[::2], 0).t().contiguous().square().sum().backward()


def expanded() -> None:
    torch.tanh(grad_tensor(1, 4).expand(3, 4)).sum().backward()


def bfloat16() -> None:
    x, weight = (grad_tensor(n, 8, dtype=torch.bfloat16) for n in (4, 3))
    F.linear(x, weight).sum().backward()


def float8() -> None:
    torch.randn(4, 4).to(torch.float8_e4m3fn).to(torch.float32)


def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(grad_tensor(3, 4), grad_tensor(5, 4)).sum().backward()


def dtype_argument() -> None:
    F.softmax(torch.randn(3, 4).bfloat16(), -1, dtype=torch.float32)


def selection() -> None:
    torch.topk(grad_tensor(3, 8), 2)[0].sum().backward()


def property_view() -> None:
    grad_tensor(2, 3).T.square().sum().backward()


def comparison() -> None:
    torch.gt(torch.tensor([0.1, 0.2]), 0.1)


def module() -> None:
    torch.nn.Conv2d(3, 4, 3, padding=1)(grad_tensor(2, 3, 8, 8)).square().sum().backward()


def dropout() -> None:
    F.dropout(grad_tensor(64, 64), 0.2).sum().backward()


def random_numbers() -> None:
    torch.zeros(100).uniform_(-1, 1)


def several_outputs() -> None:
    """Where a backward dump gives up: "is not of tensor type and cannot be derived"."""
    values, indices = torch.sort(grad_tensor(3, 5), dim=1, descending=True)
    (values * indices).sum().backward()


def list_of_outputs() -> None:
    first, _, last = torch.split(grad_tensor(6, 2), [1, 2, 3])
    (first * last).sum().backward()


def no_tensor_comes_out() -> None:
    torch.tensor([0.1, 0.2]).sum().item()


def custom_op() -> None:
    torch.ops.tensorprobe_repro.twice(torch.ones(3))


CUSTOM = """
import torch
library = torch.library.Library("tensorprobe_repro", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
"""
CASES: dict[str, Callable[[], Any]] = {
    "Functional.layer_norm.0": api_call,
    "Tensor.mul_.0": in_place,
    "Torch.add.0": out_variant,
    "Torch.cat.0": nested,
    "Tensor.__setitem__.0": set_item,
    "Tensor.__getitem__.0": indexing,
    "Torch.cumsum.0": odd_strides,
    "Torch.tanh.0": expanded,
    "Functional.linear.0": bfloat16,
    "Functional.linear.0 ": autocast,
    "Functional.softmax.0": dtype_argument,
    "Tensor.to.1": float8,
    "Torch.topk.0": selection,
    "Tensor.T.0": property_view,
    "Torch.gt.0": comparison,
    "Torch.sort.0": several_outputs,
    "Torch.split.0": list_of_outputs,
    "Tensor.item.0": no_tensor_comes_out,
    "Module.Conv2d.forward.0": module,
    "Functional.dropout.0": dropout,
    "Tensor.uniform_.0": random_numbers,
    "Ops.tensorprobe_repro.twice.0": custom_op,
}
# these have a backward that was recorded
DIFFERENTIATED = set(list(CASES)[:2] + list(CASES)[3:10]) | {
    "Torch.topk.0", "Tensor.T.0", "Torch.sort.0", "Torch.split.0",
    "Module.Conv2d.forward.0", "Functional.dropout.0"
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The repro folder of each case."""
    base = tmp_path_factory.mktemp("repros")
    mine = base / "mine.py"
    mine.write_text(CUSTOM)
    names: dict[str, Any] = {}
    exec(CUSTOM, names)
    made = {}
    for number, (name, program) in enumerate(CASES.items()):
        torch.manual_seed(0)
        level = "L0" if program is module else "L1"
        capture = record(base / f"run{number}", program, level=level)
        if program is custom_op:
            names["library"]._destroy()  # the file registers it again
        imports = mine if program is custom_op else ()
        made[name] = tp.repro(capture, name.strip(), base / f"repro{number}", imports=imports)
    yield made
    sys.modules["references_mine"].library._destroy()


@pytest.fixture(scope="module")
def ran(folders: dict[str, Path]) -> dict[str, Ran]:
    """What each script says where only torch is."""
    return dict(zip(folders, run_repros(*((f, ()) for f in folders.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_repro_runs_with_torch_alone(
    name: str, folders: dict[str, Path], ran: dict[str, Ran]
) -> None:
    status, text = ran[name]
    assert status == 0, text
    assert text.endswith("PASS\n")
    assert "ok    recorded" in text
    assert ("gradient of" in text) == (name in DIFFERENTIATED)
    assert len((folders[name] / "README.md").read_text().splitlines()) == 5


def test_the_call_reads_as_a_person_would_type_it(folders: dict[str, Path]) -> None:
    def call(name: str) -> str:
        body = (folders[name] / "repro.py").read_text().partition("def call(")[2]
        return body.partition('"""\n')[2].partition("\n\n\n")[0]

    assert call("Tensor.__getitem__.0") == '    return t["input.0"][..., 1::2]'
    assert call("Functional.softmax.0") == (
        "    return torch.nn.functional.softmax(\n"
        '        t["input.0"],\n'
        "        dim=-1,\n"
        "        _stacklevel=3,\n"
        "        dtype=real(torch.float32),\n"
        "    )"
    )
    assert call("Tensor.__setitem__.0") == (
        '    t["input.0"][1] = t["input.2"]\n    return {"0": t["input.0"]}'
    )
    assert call("Module.Conv2d.forward.0") == (
        "    module = torch.nn.Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))"
        ".to(device)\n"
        '    state = {"weight": t["parameters.weight"], "bias": t["parameters.bias"]}\n'
        '    return torch.func.functional_call(module, state, (t["input.0"], ))'
    )


def test_float8_is_exact(folders: dict[str, Path]) -> None:
    tensors = torch.load(folders["Tensor.to.1"] / "tensors.pt", weights_only=True)
    assert tensors["input.0"].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors["input.0"].float(), tensors["recorded.output.0"])


def test_layout_is_kept(folders: dict[str, Path]) -> None:
    tensors = torch.load(folders["Torch.cumsum.0"] / "tensors.pt", weights_only=True)
    assert tensors["input.0"].stride() == (2, 8)
    assert not tensors["grad.0"].is_contiguous()


def test_wrong_numbers_are_said(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(folders["Functional.layer_norm.0"], wrong)
    tensors = torch.load(wrong / "tensors.pt", weights_only=True)
    tensors["recorded.output.0"] *= 1.01
    torch.save(tensors, wrong / "tensors.pt")
    linear = folders["Functional.linear.0"]
    recorded_wrong, coarse, double = run_repros(
        (wrong, ()), (linear, ("--dtype", "float8_e5m2")), (linear, ("--dtype", "float64"))
    )
    # the recorded run was wrong, this device is not
    assert recorded_wrong.status == 0
    line = next(line for line in recorded_wrong.text.splitlines() if "FAIL" in line)
    assert re.match(r"FAIL  recorded  output\.0 +[\de.+]+ times what rounding explains", line)
    assert coarse.status == 3
    assert coarse.text.endswith("FAIL\n") or "FAIL  raised" in coarse.text
    assert double.status == 0
    assert "ok    cpu       output.0                 0 times" in double.text


def test_from_statistics_inputs_are_generated_and_the_script_says_so(tmp_path: Path) -> None:
    def program() -> None:
        F.gelu(torch.randn(64, 64) * 3 + 1)

    capture = record(tmp_path / "run", program, level="L1", keep="stats")
    call = next(c for c in capture.calls if ".gelu." in c.name)
    folder = tp.repro(capture, call.name, tmp_path / "repro")
    assert "INPUTS ARE GENERATED" in (folder / "repro.py").read_text()
    assert "generated from recorded statistics" in (folder / "README.md").read_text()
    summary = call.tensor("input.0").summary
    made = torch.load(folder / "tensors.pt", weights_only=True)["input.0"]
    assert summary is not None
    assert float(made.min()) == summary.min
    assert float(made.max()) == summary.max
    assert float(made.mean()) == pytest.approx(summary.mean, rel=0.01)
    assert float(made.norm()) == pytest.approx(summary.norm, rel=0.01)
    assert run_repros((folder, ()))[0].status == 0


def test_an_unknown_name_suggests_near_ones(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", api_call, level="L1")
    with pytest.raises(UnreadableCapture, match=r"near names: Functional\.layer_norm\.0\.forward"):
        tp.repro(capture, "Functional.layernorm.0.forward", tmp_path / "repro")


def test_what_cannot_be_run_alone_is_refused(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / 2

    def program() -> None:
        torch.save(torch.ones(2), tmp_path / "file.pt")
        torch.ones(2).numpy()
        Half.apply(weight).exp().sum().backward()
        torch.optim.SGD([weight], 0.1).step()

    capture = record(tmp_path / "run", program)
    reasons = {
        "Tensor.numpy.0": "not run: torch.Tensor.numpy reaches outside of its tensors",
        "Function.Half.0": "cannot be run alone: .*only the graph node is seen, not its inputs",
        "Optimizer.SGD.step.0": "an optimizer step is many calls; those inside it can be replayed",
    }
    for name, reason in reasons.items():
        with pytest.raises(NotReplayable, match=reason):
            tp.repro(capture, name, tmp_path / "repro")
    odd = Call(
        index=0, name="Torch.relu.0.forward", op="torch.relu", args=(Special("unsupported", "a.B"),)
    )
    with pytest.raises(NotReplayable, match=r"argument 0 is of type a\.B, of which only the name"):
        tp.repro(
            Capture(tmp_path / "odd", "native", [odd], [], {}), "Torch.relu.0", tmp_path / "repro"
        )
    assert not (tmp_path / "repro").exists()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run", api_call, level="L1")
    capsys.readouterr()
    run, out = str(tmp_path / "run"), str(tmp_path / "repro")
    assert main(["repro", run, "Functional.layer_norm.0", "-o", out]) == 0
    assert capsys.readouterr().out == f"wrote {out}: python {out}/repro.py --device cpu\n"
    assert main(["repro", run, "Functional.layernorm.0", "-o", out]) == 1
    assert "near names: Functional.layer_norm.0.forward" in capsys.readouterr().err
