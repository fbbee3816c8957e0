"""The facts of a run are read without touching it, and secrets stay out."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorprobe.record import facts as facts_module
from tensorprobe.record.facts import environment_facts, mask_arguments, mask_value


def test_facts_are_json_and_name_what_explains_a_difference() -> None:
    facts = json.loads(json.dumps(environment_facts()))
    assert facts["torch"]["version"] == torch.__version__
    assert facts["packages"]["torch"]
    assert {
        "float32_matmul_precision",
        "matmul_tf32",
        "cudnn_tf32",
        "fp16_reduced_precision_reduction",
        "bf16_reduced_precision_reduction",
        "sdpa_flash",
        "sdpa_math",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "deterministic_algorithms",
        "autocast",
    } <= facts["numerics"].keys()
    assert {"host", "platform", "python", "command", "environment", "time"} <= facts.keys()
    assert facts["torch"]["num_threads"] == torch.get_num_threads()


def test_facts_follow_the_switches() -> None:
    torch.manual_seed(99)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            facts = environment_facts()
    finally:
        torch.set_float32_matmul_precision(precision)
    assert facts["numerics"]["float32_matmul_precision"] == "medium"
    assert facts["numerics"]["autocast"] == {"cpu": "torch.bfloat16"}
    assert facts["seed"] == {"torch": 99}
    assert environment_facts()["numerics"]["autocast"] == {}


def test_asking_changes_nothing() -> None:
    before = (torch.get_rng_state(), random.getstate(), environment_facts()["numerics"])
    modules = set(sys.modules)
    environment_facts()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert environment_facts()["numerics"] == before[2]
    assert set(sys.modules) == modules
    assert not torch.cuda.is_initialized()


def test_without_torch_its_facts_are_absent() -> None:
    code = (
        "import json, sys\n"
        "from tensorprobe.record.facts import environment_facts\n"
        "facts = environment_facts()\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(facts))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--password", "hunter2"],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert not {"torch", "numerics", "cuda", "npu"} & facts.keys()
    assert facts["command"][-2:] == ["--password", "***"]
    assert "hunter2" not in done.stdout


def test_only_named_variables_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    monkeypatch.setenv("MY_OWN", "value")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("ASCEND_OPP_PATH", "https://me:word@host/opp")
    environment = environment_facts()["environment"]
    assert environment["NVIDIA_TF32_OVERRIDE"] == "0"
    assert environment["ASCEND_OPP_PATH"] == "https://***@host/opp"
    assert not {"HF_TOKEN", "MY_OWN", "PATH"} & environment.keys()


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["--api-key=xxx"], ["--api-key=***"]),
        (["--api-key", "xxx", "--lr", "0.1"], ["--api-key", "***", "--lr", "0.1"]),
        (["--hf_token", "-xxx"], ["--hf_token", "***"]),
        (["--use-auth-token", "--lr", "1"], ["--use-auth-token", "--lr", "1"]),
        (["--password=my own words"], ["--password=***"]),
        (["HF_TOKEN=xxx"], ["HF_TOKEN=***"]),
        (["wandb.apiKey=xxx"], ["wandb.apiKey=***"]),
        (["-Ddb.password=xxx"], ["-Ddb.password=***"]),
        (['{"api_key": "xxx", "lr": 0.1}'], ['{"api_key": "***", "lr": 0.1}']),
        (["https://user:pass@host/x"], ["https://***@host/x"]),
        (["s3://bucket/x?token=xxx&part=1"], ["s3://bucket/x?token=***&part=1"]),
        (["hf_abcdefghijklmnopqrstuvwx"], ["***"]),
        (["Authorization: Bearer abc.def"], ["Authorization: ***"]),
        (["Authorization: Basic abc="], ["Authorization: ***"]),
        (["Cookie: a=xxx; b=yyy"], ["Cookie: ***"]),
        (['{"password": "a b&c", "lr": 1}'], ['{"password": "***", "lr": 1}']),
        (["curl -u me:xxx --token yyy host"], ["curl -u *** --token *** host"]),
        (["curl", "-u", "me:xxx", "host"], ["curl", "-u", "***", "host"]),
        (["https://me:p@ss@host/x"], ["https://***@host/x"]),
        (["https://host/x?sv=1&sig=xxx&se=2"], ["https://host/x?sv=1&sig=***&se=2"]),
        (["-----BEGIN RSA PRIVATE KEY-----\nMII\nxxx\n"], ["***"]),
        (["a -----BEGIN PRIVATE KEY-----\nxxx\n-----END PRIVATE KEY----- b"], ["a *** b"]),
        (["sk-proj-abcdefghijklmnopqrst"], ["***"]),
        (["ghp_abcdefghijklmnopqrst1234"], ["***"]),
    ],
)
def test_secrets_are_masked(typed: list[str], shown: list[str]) -> None:
    assert mask_arguments(typed) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "512"],
        ["python", "-u", "C:\\train.py"],
        ["git+https://host:443/o/r@v1"],
        ["--loss_keys=a,b"],
        ["--tokenizer=gpt2", "--num_tokens", "3"],
        ["--eos-token", "</s>", "--pad_token=<pad>"],
        ["--label-key", "y", "--sort_key=size"],
        ["train.py", "--lr", "0.1", "--name=a:b", "model.layers=3"],
        ["torchrun", "--rdzv-endpoint=localhost:29500"],
        ["--data", "s3://bucket/path", "--author", "me", "--compass", "1"],
        ["--keywords", "a", "--monkey=1"],
    ],
)
def test_ordinary_arguments_stay(arguments: list[str]) -> None:
    assert mask_arguments(arguments) == arguments


def test_values_are_masked_by_name() -> None:
    assert mask_value("AWS_SECRET_ACCESS_KEY", "abc") == "***"
    assert mask_value("OMP_NUM_THREADS", "4") == "4"


class SupposedNpu:
    """What torch_npu answers, with one question failing as on a broken installation."""

    __version__ = "2.11.0"

    class npu:  # as it is spelt there
        class matmul:
            allow_hf32 = False

        class utils:
            @staticmethod
            def is_support_inf_nan() -> bool:
                return True

        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def is_jit_compile_false() -> bool:
            return True

        @staticmethod
        def device_count() -> int:
            return 2

        @staticmethod
        def get_device_name(index: int) -> str:
            return f"Ascend910B{index}"

        @staticmethod
        def initial_seed() -> int:
            raise RuntimeError("the driver is gone")


def test_npu_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "version.info").write_text("Version=8.0.RC1\nother=1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    found: dict[str, Any] = facts_module._npu_facts(SupposedNpu)
    assert found == {
        "cann": "8.0.RC1",
        "torch_npu": "2.11.0",
        "matmul_hf32": False,
        "inf_nan_mode": True,
        "devices": ["Ascend910B0", "Ascend910B1"],
        "jit_compile": False,
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("version.cfg", "# of the toolkit\nruntime_running_version=[7.0.0.1:8.0.RC1]\n"),
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=toolkit\nversion=8.0.RC1\n"),
        ("compiler/version.info", "Version=8.0.RC1\n"),
    ],
)
def test_cann_version_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert facts_module._cann_version() == "8.0.RC1"


def test_nvidia_files(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert facts_module._nvidia_driver(version) == "570.86.15"
    card = tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t 1\n")
    assert facts_module._nvidia_devices(tmp_path / "gpus") == ["NVIDIA H200"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_not_initialised_by_asking() -> None:
    code = (
        "import os, torch\n"
        "from tensorprobe.record.facts import environment_facts\n"
        "cuda = environment_facts()['cuda']\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert cuda['runtime'] and cuda['driver'] and cuda['devices'], cuda\n"
        "pid = os.fork()\n"  # a child can only use CUDA when its parent has not
        "if pid == 0: os._exit(int(torch.ones(1, device='cuda').item()) - 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "torch.ones(1, device='cuda')\n"
        "assert environment_facts()['cuda']['capability']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
