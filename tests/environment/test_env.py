"""`tp.env` and `tensorprobe env`: what is collected, and what two environments differ by."""

# ruff: noqa: E501 lines as they are printed

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import random
import re
import shlex
import subprocess
import sys
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe.cli.main import main
from tensorprobe.environment.effects import effect_of
from tensorprobe.environment.environment_comparison import arguments_of, compare_environments, lines
from tensorprobe.errors import BadArtefact, BadUsage
from tensorprobe.record.program_facts import found_hyperparameters, installed, plain

FACTS: dict[str, Any] = {
    "format": 1,
    "kind": "environment",
    "python": "3.11.7",
    "host": "a",
    "torch": {"version": "2.13.0", "num_threads": 8},
    "numerics": {"matmul_tf32": False, "sdpa_flash": True},
    "environment": {"OMP_NUM_THREADS": "8"},
    "installed": {"torch": "2.13.0", "flash-attn": "2.6.3", "rich": "15.0"},
    "hyperparameters": {"args": {"lr": 0.1, "output_dir": "a"}},
}


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**FACTS, **changes}))
    return path


# Collecting


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class TrainingConfig:
    lr: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    api_key: str = "abc"


def test_what_is_collected(tmp_path: Path) -> None:
    args = argparse.Namespace(
        lr=0.5, hub_token="hf_" + "a" * 20, color=Color.RED, url="x://me:pw@h"
    )
    train_config = TrainingConfig()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = torch.get_rng_state(), random.getstate()
    made = tp.env(tmp_path / "env.json", model=model)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    facts = json.loads((tmp_path / "env.json").read_text())
    assert facts == made.facts
    assert facts["hyperparameters"]["args"] == {
        "lr": 0.5, "hub_token": "***", "color": "Color.RED", "url": "x://***@h",
    }  # fmt: skip
    expected = {"lr": 0.1, "dtype": "torch.bfloat16", "api_key": "***"}
    assert facts["hyperparameters"]["train_config"] == expected
    assert facts["model"]["modules"] == {"": "Sequential", "0": "Linear", "1": "BatchNorm1d"}
    assert facts["model"]["weights"]["0.weight"].startswith("float32 [2, 2] ")
    assert facts["model"]["weights"]["1.num_batches_tracked"].startswith("int64 [] ")
    assert facts["torch"]["version"] == torch.__version__
    assert set(facts["random"]) >= {"python", "torch"}
    assert facts["installed"]["msgspec"]
    assert args.lr == train_config.lr + 0.4


def test_a_configuration_that_is_said(tmp_path: Path) -> None:
    made = tp.env(
        config={"train": {"lr": 1e-3}, "secret_key": "x", "password": 3, "n": float("inf")}
    )
    assert made.facts["hyperparameters"]["config"] == {
        "train": {"lr": 1e-3}, "secret_key": "***", "password": "***", "n": "inf",
    }  # fmt: skip
    with pytest.raises(BadUsage, match="is a folder"):
        tp.env(tmp_path)


def test_secrets_in_lists_and_mappings() -> None:
    found = tp.env(
        config={
            "pairs": [("password", "xxx"), ["api_key", "xxx"], ("key", "value")],
            "extra": ["--token", "xxx", "--lr", "1"],
            "credentials": {"user": "xxx", "id": 7},
            "query": {"key": {"width": 8}},
        }
    ).facts["hyperparameters"]["config"]
    assert found == {
        "pairs": [["password", "***"], ["api_key", "***"], ["key", "value"]],
        "extra": ["--token", "***", "--lr", "1"],
        "credentials": {"user": "***", "id": "***"},
        "query": {"key": {"width": 8}},
    }


def test_no_part_of_a_configuration_is_lost() -> None:
    """What is nested deeply, or stands at the end of a long text, still differs."""

    def of(deep: int, end: str) -> Any:
        nested: Any = deep
        for _ in range(10):
            nested = {"inner": nested}
        return tp.env(config={"deep": nested, "text": "x" * 600 + end}).facts["hyperparameters"]

    one, other = of(1, "a")["config"], of(2, "b")["config"]
    assert one["deep"] != other["deep"]
    assert one["text"] != other["text"]
    assert len(one["text"]) < 600


def test_nothing_of_the_program_is_called() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError

        __str__ = __repr__

        def __iter__(self) -> Any:
            raise AssertionError

    nested: dict[str, Any] = {"a": Loud()}
    nested["b"] = nested
    shown = plain(nested, [100])
    assert shown["a"].endswith("Loud>")
    assert len(json.dumps(plain({str(n): n for n in range(5000)}, [100]))) < 200_000


def test_the_first_batches(tmp_path: Path) -> None:
    def run(name: str, order: list[int]) -> Path:
        made = tp.env(tmp_path / name)
        made.facts["random"] = {}
        loader = [{"x": torch.full((2, 3), float(n)), "y": [torch.tensor(n)]} for n in order]
        assert [batch["x"][0, 0].item() for batch in made.batches(loader)] == order
        return tmp_path / name

    first = run("a.json", [*range(12)])
    facts = json.loads(first.read_text())
    assert len(facts["batches"]) == 8
    assert set(facts["batches"][0]) == {"x", "y.0"}
    found = compare_environments(run("b.json", [0, 1, 2, 4, 3, 5, 6, 7]), first)
    (row,) = [row for row in found.differences if row.effect == "numbers"]
    assert (row.fact, row.why) == (
        "batches.3",
        "the same data in another order from batch 3, 1 more",
    )
    found = compare_environments(run("b.json", [0, 9, 2, 3, 4, 5, 6, 7]), first)
    assert found.differences[0].why == "other data from batch 1"


def test_batches_that_one_side_lacks_are_said(tmp_path: Path) -> None:
    batches = [{"batch": f"float32 [2] {n}"} for n in range(4)]
    one = written(tmp_path / "a.json", batches=batches[:2])
    other = written(tmp_path / "b.json", batches=batches)
    found = compare_environments(one, other)
    assert (found.verdict, found.not_compared) == ("match", ["batches from 2 on (expected only)"])


_SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--api-key")
args = parser.parse_args()
import helper
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
"""


def test_a_recording_has_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, lr, helper in (("a", "0.1", "x = 1"), ("b", "0.2", "x = 2")):
        (tmp_path / "helper.py").write_text(helper)
        words = ["run", "-o", name, "--seed", "1", "train.py", "--lr", lr, "--api-key", "hush"]
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "hush" not in (tmp_path / "a" / "capture.json").read_text()
    found = compare_environments(tmp_path / "a", tmp_path / "b")
    told = {row.fact: (row.actual, row.expected) for row in found.differences}
    assert told["hyperparameters.args.lr"] == (0.1, 0.2)
    assert "program.modules.helper" in told
    assert "random.python" not in told
    assert found.verdict == "differ"


def test_collect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "env.json"
    assert main(["env", "collect", "-o", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"written: {file}: Python ")
    assert main(["env", "compare", str(file), str(file)]) == 0
    assert capsys.readouterr().out.startswith("match: ")
    assert main(["env", "collect", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["installed"] == installed()
    assert main(["env", "collect"]) == 2
    assert main(["env", "collect", "-o", str(tmp_path)]) == 2


# Comparing


def test_what_can_change_numbers_comes_first(tmp_path: Path) -> None:
    expected = written(tmp_path / "e.json")
    actual = written(
        tmp_path / "a.json",
        host="b",
        numerics={"matmul_tf32": True, "sdpa_flash": True},
        installed={"torch": "2.13.0", "flash_attn": "2.7.0", "rich": "14.0"},
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        hyperparameters={"args": {"lr": 0.2, "output_dir": "b"}},
        torch={"version": "2.13.0", "num_threads": 8, "git": "abc"},
    )
    found = compare_environments(actual, expected)
    assert [*lines(found)] == [
        "differ: 4 can change numbers, 2 may, 2 cannot; 7 facts equal",
        "  numbers  numerics.matmul_tf32: true here, false there (TF32: products of float32 keep 10 bits)",
        "  numbers  installed.flash-attn: 2.7.0 here, 2.6.3 there (other kernels of attention)",
        "  numbers  hyperparameters.args.lr: 0.2 here, 0.1 there (another hyperparameter)",
        "  numbers  environment.CUBLAS_WORKSPACE_CONFIG: :4096:8 here, not set there (other kernels)",
        "  maybe    environment.OMP_NUM_THREADS: not set here, 8 there (threads: sums in another order)",
        "  maybe    installed.rich: 14.0 here, 15.0 there (another version of a package)",
        "  none     host: b here, a there (where and when it ran)",
        "  none     hyperparameters.args.output_dir: b here, a there (names and places)",
        "  not compared: torch.git (actual only)",
    ]


def test_what_cannot_change_numbers_is_a_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, e = written(tmp_path / "a.json", host="b"), written(tmp_path / "e.json")
    assert main(["env", "compare", str(a), str(e)]) == 0
    assert "1 difference that cannot change numbers" in capsys.readouterr().out
    b = written(tmp_path / "b.json", numerics={"matmul_tf32": True})
    assert main(["env", "compare", str(b), str(e), "--json", "-o", str(tmp_path / "d.json")]) == 3
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "d.json").read_text())


@pytest.mark.parametrize(
    ("fact", "effect"),
    [
        ("hyperparameters.args.logit_scale", "numbers"),
        ("hyperparameters.args.prune_ratio", "numbers"),
        ("hyperparameters.args.model_name", "numbers"),
        ("arguments.data_path", "numbers"),
        ("arguments.output_dir", "none"),
        ("hyperparameters.args.wandb_project", "none"),
        ("packages.flash_attn", "numbers"),
        ("installed.torch-npu", "numbers"),
        ("environment.ASCEND_HOME_PATH", "maybe"),
        ("environment.NVIDIA_TF32_OVERRIDE", "numbers"),
        ("something.new", "maybe"),
        ("model.weights.a.weight", "numbers"),
        ("random.python", "maybe"),
    ],
)
def test_effects(fact: str, effect: str) -> None:
    assert effect_of(fact)[1].effect == effect


def test_arguments_of_a_command() -> None:
    words = [
        "python",
        "-m",
        "tensorprobe",
        "run",
        "-o",
        "x",
        "train.py",
        "--lr",
        "0.1",
        "--flag",
        "--n=3",
        "data",
        "-v",
        "--off",
        "-1",
    ]
    assert arguments_of(words) == {
        "lr": "0.1", "flag": "given", "n": "3", "0": "data", "v": "given", "off": "-1",
    }  # fmt: skip
    assert arguments_of(["python", "-c", "x"]) == {}


def test_many_weights_are_one_difference(tmp_path: Path) -> None:
    def model(word: str) -> dict[str, Any]:
        return {"modules": {"": "Net"}, "weights": {f"w{n}": f"{word}{n}" for n in range(50)}}

    a, e = (written(tmp_path / f"{word}.json", model=model(word)) for word in "ae")
    (row,) = compare_environments(a, e).differences
    assert (row.fact, row.why) == (
        "model.weights.w0", "another model, or other weights; 49 more of model.weights",
    )  # fmt: skip


# Packages of msprobe


def package(path: Path, lr: str, **env: str) -> Path:
    """As config_check writes them."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("env", json.dumps({"HCCL_ALGO": "ring", "SSH_CLIENT": "me", **env}))
        archive.writestr("pip", "torch=2.6.0\nflash_attn=2.6.3\nodd line\n")
        hyper = {"lr": lr, "seed": 1}
        archive.writestr("hyperparameters/hyperparameters_static.json", json.dumps(hyper))
        data = {"args": {"0": {"max": 1.0, "min": float("nan"), "mean": 0.0, "norm": 2.0}}}
        archive.writestr("dataset/step0/rank0/dataset.json", json.dumps(data))
        weights = {"fc.weight": {"max": float(len(lr)), "min": 0.0, "mean": 0.0, "norm": 1.0}}
        archive.writestr("weights/step0/rank0/weight.json", json.dumps(weights))
        calls = {"torch.rand": [{"count": 2, "stack": ["x"]}]}
        archive.writestr("random/rank0.json", json.dumps(calls))
    return path


def test_packages_of_msprobe(tmp_path: Path) -> None:
    token = "hf_" + "b" * 20
    a = package(tmp_path / "a.zip", "0.10", HCCL_DETERMINISTIC="true", NPU_HUB_TOKEN=token)
    e = package(tmp_path / "e.zip", "0.1", SSH_CLIENT="you")
    found = compare_environments(a, e)
    assert {row.fact: row.effect for row in found.differences} == {
        "weight_statistics.step0.rank0.fc.weight.max": "numbers",
        "hyperparameters.static.lr": "numbers",
        "environment.HCCL_DETERMINISTIC": "numbers",
        "environment.NPU_HUB_TOKEN": "maybe",
    }
    assert token not in "\n".join(lines(found))
    ours = written(tmp_path / "ours.json")
    mixed = compare_environments(ours, e)
    assert {"installed.torch", "installed.rich"} <= {row.fact for row in mixed.differences}


def test_packages_that_cannot_be(tmp_path: Path) -> None:
    e = package(tmp_path / "e.zip", "0.1")
    bad = tmp_path / "bad.zip"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("env", bytes(64 << 20))
    with pytest.raises(BadArtefact, match="larger than"):
        compare_environments(bad, e)
    for content in (b"[1]", b"[" * 100_000, b"{", b"\xff"):
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("env", content)
        with pytest.raises(BadArtefact, match="damaged"):
            compare_environments(bad, e)
    bad.write_bytes(b"PK nothing")
    with pytest.raises(BadArtefact, match="neither a capture"):
        compare_environments(bad, e)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(BadArtefact, match="a FIFO"):
        compare_environments(tmp_path / "pipe.json", e)
    (tmp_path / "x.json").write_text("[" * 1000)
    with pytest.raises(BadArtefact):
        compare_environments(tmp_path / "x.json", e)
    with pytest.raises(BadUsage, match="no such file"):
        compare_environments(tmp_path / "none", e)


def test_secrets_in_files_of_others(tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "plain", "http_proxy": "http://me:pw@host", "A": "sk-" + "c" * 20}
    a = written(tmp_path / "a.json", environment=secrets, command=["train.py", "--api-key", "x y"])
    text = "\n".join(lines(compare_environments(a, written(tmp_path / "e.json"))))
    for secret in ("plain", "me:pw", "ccc", "x y"):
        assert secret not in text


def test_msprobes_word_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorprobe.peers.msprobe.msprobe_command import main as msprobe

    a, e = package(tmp_path / "a.zip", "0.2"), package(tmp_path / "e.zip", "0.1")
    out = str(tmp_path / "result.json")
    assert msprobe(["config_check", "-c", str(a), str(e), "-o", out]) == 3
    assert json.loads(Path(out).read_text())["verdict"] == "differ"
    assert msprobe(["config_check", "-c", str(a), str(e), "-o", out]) == 2
    torch.save({"w": torch.ones(3), "n": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.tensor([1.0, 1, 3]), "n": torch.ones(2)}, tmp_path / "e.pt")
    out = str(tmp_path / "ckpt.json")
    words = ["-c", str(tmp_path / "a.pt"), str(tmp_path / "e.pt"), "-o", out]
    assert msprobe(["config_check", *words]) == 3
    assert json.loads(Path(out).read_text())["w"] == {
        "l2": 2.0, "cos": pytest.approx(0.8703882797), "numel": 3, "shape": [3],
    }  # fmt: skip
    capsys.readouterr()
    assert msprobe(["config_check", "-d", "train.sh"]) == 2
    assert "-d is not supported; use tensorprobe env collect" in capsys.readouterr().err


def test_the_example_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "env.md").read_text()
    console = re.search(r"```console\n\$ tensorprobe (.*?)\n(.*?)```", page, re.DOTALL)
    assert console
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "here.json")
    written(
        tmp_path / "there.json",
        host="b",
        numerics={"matmul_tf32": True, "sdpa_flash": True},
        installed={"torch": "2.13.0", "flash_attn": "2.7.0", "rich": "15.0"},
        environment={"OMP_NUM_THREADS": "4"},
        hyperparameters={"args": {"lr": 0.2, "output_dir": "a"}},
    )
    assert main(shlex.split(console[1])) == 3
    assert capsys.readouterr().out == console[2]


def test_looking_for_hyperparameters_keeps_nothing_alive() -> None:
    class Big:
        pass

    def train() -> bool:
        model = Big()
        alive = weakref.ref(model)
        config = {"lr": 0.1}
        assert found_hyperparameters(sys._getframe())["config"] == config
        del model
        return alive() is None

    def own_locals() -> dict[str, Any]:
        config, mine = {"lr": 0.2}, locals()
        assert found_hyperparameters(sys._getframe())["config"] == config
        return mine

    assert train()
    assert own_locals()["config"] == {"lr": 0.2}
