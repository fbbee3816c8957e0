"""`tensorprobe bisect` and `run --reroute` on scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recorded import SRC

# A module that costs nothing but its ops: what it prints is the check.
TRAIN = """\
import os
import torch
import torch.nn.functional as F
from tensorprobe.devices import sim_npu

for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
    kernel, effect = fault.split("=")
    sim_npu.plant(op=kernel, effect=effect)
x = torch.linspace(-1, 1, 32).reshape(2, 4, 4).npu().requires_grad_()
w = torch.linspace(0.5, 2, 4).npu().requires_grad_()
hidden = F.group_norm(x, 2, w)
hidden = F.softmax(hidden, -1) * x
loss = F.softmax(hidden @ hidden.mT, 1).square().sum()
loss.backward()
print(f"{loss.item():.6f} {w.grad.sum().item():.5f}")
"""


def tensorprobe(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )


def healthy(folder: Path) -> str:
    (folder / "train.py").write_text(TRAIN)
    done = tensorprobe(folder, "run", "--sim-npu", "--no-record", "--reroute", "softmax=cpu",
                       "train.py")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "tensorprobe: rerouted softmax to cpu: 2 calls\n"
    return done.stdout.strip()


def state_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "out" / "bisect.json").read_text())


def names(folder: Path) -> list[str]:
    return [culprit["name"] for culprit in state_of(folder)["culprits"]]


def test_the_op_whose_backward_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = tensorprobe(
        tmp_path, "bisect", "--sim-npu", "--apis", "*norm*", "-o", "out", "--", "train.py",
        FAULTS="native_group_norm_backward=raise",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first == "the check fails; it passes with this one on cpu:"
    assert second == "  Functional.group_norm.0.forward, train.py:11 in <module>"
    cure = "run --sim-npu --no-record --reroute Functional.group_norm.0=cpu train.py"
    assert f"  tensorprobe {cure}\n" in done.stdout
    assert names(tmp_path) == ["Functional.group_norm.0.forward"]
    assert state_of(tmp_path)["verdict"] == "found"
    assert [probe["passed"] for probe in state_of(tmp_path)["probes"]] == [False, True]


@pytest.mark.slow
def test_a_module_may_be_all_that_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "class Loss(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.mse_loss(x, x * 0)\n"
        "net = torch.nn.Module()\n"
        "net.a, net.b = Loss(), Loss()\n"
        "net.forward = lambda x: (net.a(x / 300), net.b(torch.tanh(x) * 300))\n"
        "x = torch.zeros(100).half()\n"
        "x[3] = 300\n"
        "assert net(x)[1].isfinite()\n"
    )
    done = tensorprobe(tmp_path, "bisect", "--apis", "b", "-o", "out", "--", "train.py")
    assert done.returncode == 3, done.stderr
    assert names(tmp_path) == ["Functional.mse_loss.1.forward"]


@pytest.mark.slow
def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["bisect", "--sim-npu", "--apis", "group_norm,softmax", "-o", "out", "--", "train.py"]
    faults = {"FAULTS": "native_group_norm_backward=raise"}
    done = tensorprobe(tmp_path, *words, **faults)
    assert done.returncode == 3, done.stderr
    probes = state_of(tmp_path)["probes"]
    assert done.stderr.count("probe ") == len(probes)

    state = state_of(tmp_path)
    state["probes"] = probes[:-1]  # as if it had been interrupted there
    (tmp_path / "out" / "bisect.json").write_text(json.dumps(state))
    again = tensorprobe(tmp_path, *words, **faults)
    assert again.returncode == 3
    assert again.stdout == done.stdout
    assert again.stderr.count("probe ") == 1

    other = tensorprobe(tmp_path, "bisect", "-o", "out", "--", "train.py")
    assert other.returncode == 2
    assert "holds the bisection of another command or check" in other.stderr


@pytest.mark.slow
def test_two_faults_are_both_named_and_nothing_else(tmp_path: Path) -> None:
    """The check compares with what the healthy run prints."""
    expected = healthy(tmp_path)
    done = tensorprobe(
        tmp_path, "bisect", "--sim-npu", "--check", f"grep -qx -e '{expected}'", "-o", "out",
        "--", "train.py", FAULTS="native_group_norm_backward=scale:1.5,_softmax=permute",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert names(tmp_path) == [
        "Functional.group_norm.0.forward",
        "Functional.softmax.0.forward",
        "Functional.softmax.1.forward",
    ]


@pytest.mark.slow
def test_one_call_of_an_api_is_told_from_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "x = torch.full((4,), 0.1, dtype=torch.float16)\n"
        "y = torch.mul(x, 2)\n"
        "z = torch.nn.functional.mse_loss(torch.tensor([300.0] + [0] * 99).half(),"
        " torch.zeros(100).half())\n"
        "u = torch.nn.functional.mse_loss(x, y)\n"
        "assert z.isfinite()\n"
    )
    done = tensorprobe(tmp_path, "bisect", "-o", "out", "--", "train.py")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("the check fails; it passes with this one in float64:\n")
    assert names(tmp_path) == ["Functional.mse_loss.0.forward"]


def test_a_check_that_passes_leaves_nothing_to_find(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.relu(torch.ones(3))\nprint('fine')\n")
    done = tensorprobe(tmp_path, "bisect", "--check", "grep -q fine", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "nothing to find: the check passes as it is. 1 probe; runs/bisect/bisect.json\n"
    )


def test_what_no_op_cures_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.relu(torch.ones(3))\n")
    done = tensorprobe(
        tmp_path, "bisect", "--check", "test -e $TENSORPROBE_PROBE_DIR/nothing", "--", "train.py"
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(
        "no set of ops cures it: the check fails with all of them in float64, too. What that run "
        "said is in runs/bisect/probes/002. 2 probes;"
    )


@pytest.mark.slow
def test_an_op_without_a_kernel_there_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('lib::only32', mutates_args=())\n"
        "def only32(x: torch.Tensor) -> torch.Tensor:\n"
        "    if x.dtype != torch.float32:\n"
        "        raise RuntimeError('no kernel')\n"
        "    return x + 1\n"
        "x = only32(torch.full((4,), 0.1))\n"
        "y = torch.cumsum(x.half(), 0)\n"
        "z = torch.nn.functional.mse_loss(torch.tensor([300.0] + [0] * 99).half(),"
        " torch.zeros(100).half())\n"
        "assert z.isfinite()\n"
    )
    done = tensorprobe(tmp_path, "bisect", "-o", "out", "--", "train.py")
    assert done.returncode == 3, done.stderr
    assert "everything in float64, without 1 that cannot: passes" in done.stderr
    assert names(tmp_path) == ["Functional.mse_loss.0.forward"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bisect"], "no script given"),
        (["bisect", "--", "missing.py"], "no script at 'missing.py'"),
        (["bisect", "--to", "float16", "--", "train.py"], "'float16' is no higher precision"),
        (["bisect", "--repeat", "0", "--", "train.py"], "--repeat 0"),
        (["run", "--reroute", "relu", "train.py"], "--reroute relu: expected NAME=TARGET"),
        (["run", "--reroute", "relu=gpu", "train.py"], "'gpu' is neither a device"),
        (["run", "--no-record", "train.py"], "--no-record without --reroute"),
        (["run", "--reroute-file", "train.py", "train.py"], "'train.py' is not JSON"),
    ],
)
def test_wrong_usage_is_said_in_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from tensorprobe.cli.main import main

    (tmp_path / "train.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_a_name_that_matches_nothing_ends_a_good_run_with_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\ntorch.relu(torch.ones(3))\nsys.exit(int(sys.argv[1]))\n"
    )
    for own, status in (("0", 2), ("7", 7)):
        done = tensorprobe(
            tmp_path, "run", "--no-record", "--reroute", "rellu=float64", "train.py", own
        )
        assert done.returncode == status
        assert done.stderr == (
            "tensorprobe run: reroute: 'rellu' matched no call. Near names: Torch.relu\n"
        )
