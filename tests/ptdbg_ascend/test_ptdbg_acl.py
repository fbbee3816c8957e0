"""Mode acl on the simulated NPU: one call again under ACL dump, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_run_as import run

import tensorprobe as tp

PRELUDE = """\
from ptdbg_ascend import *
import torch, torch_npu
import torch.nn.functional as F
seed_all(mode=True)
conv = torch.nn.Conv2d(3, 4, 3, padding=1).npu()
def train():
    x = torch.randn(2, 3, 6, 6).npu()
    y = conv(x).permute(0, 2, 3, 1)
    y = F.batch_norm(y.transpose(1, 3), None, None, training=True)
    y.sort(dim=-1)[0].pow(2).sum().backward()
"""
SIM = ("--as", "ptdbg_ascend", "--sim-npu", "train.py")
FILE = re.compile(r"(\w+)\.\1(_\d+)?\.\d+\.\d+\.\d{16}")


def config(folder: Path, **fields: object) -> None:
    dump = {"dump_list": [], "dump_path": "./dump/output", "dump_op_switch": "on", **fields}
    (folder / "dump.json").write_text(json.dumps({"dump": dump}))


def dumped(folder: Path) -> list[Path]:
    """The files of the device, by time."""
    found = [p for p in (folder / "dump" / "output").rglob("*") if FILE.fullmatch(p.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition(".")[2]))


def script(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(PRELUDE + text)


HOOK = "register_hook(conv, acc_cmp_dump, dump_mode='acl', dump_config='./dump.json')\n"


def test_a_forward_call(tmp_path: Path) -> None:
    config(tmp_path, dump_mode="all")
    script(
        tmp_path,
        "set_dump_path('./npu_dump1.pkl', dump_tag='forward')\n" + HOOK +
        "set_dump_switch('ON', mode='acl', scope=['Functional_conv2d_0_forward'],"
        " filter_switch='OFF')\ntrain()\nset_dump_switch('OFF')\n",
    )  # fmt: skip
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert [path.name.partition(".")[0] for path in dumped(tmp_path)] == ["Conv2D"]
    # {dump_path}/{time}/{deviceid}/{model_id}
    place = dumped(tmp_path)[0].relative_to(tmp_path / "dump" / "output")
    assert re.fullmatch(r"\d{14}/0/0", str(place.parent))
    assert done.stderr.count("set_dump_path is not used") == 1
    assert "was run again under ACL dump: 1 files" in done.stderr
    assert not list(tmp_path.rglob("*.recording-*"))
    read = run_ascend(tmp_path, place)
    assert read == 4  # x, weight, bias and the output


def run_ascend(folder: Path, place: Path) -> int:
    """How many tensors `ascend convert` finds in a file."""
    import subprocess
    import sys

    from recorded import SRC

    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "ascend", "convert"]
        + [str(folder / "dump" / "output" / place), "-o", str(folder / "npy")],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return len(list((folder / "npy").rglob("*.npy")))


def test_a_call_that_calls_others_is_one_dump(tmp_path: Path) -> None:
    """F.batch_norm calls torch.batch_norm: the original starts ACL twice for it."""
    config(tmp_path)
    script(
        tmp_path,
        HOOK + "set_dump_switch('ON', mode='acl', scope=['Functional_batch_norm_0_forward'])\n"
        "train()\n",
    )
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert len({path.parent for path in dumped(tmp_path)}) == 1
    assert dumped(tmp_path)


def test_a_backward_call_with_its_input_from_a_file(tmp_path: Path) -> None:
    config(tmp_path)
    script(
        tmp_path,
        "set_dump_path('./first.pkl')\nregister_hook(conv, acc_cmp_dump)\n"
        "set_dump_switch('ON', mode='api_list', api_list=['conv2d'])\ntrain()\n",
    )
    assert run(tmp_path, *SIM).returncode == 0
    saved = "ptdbg_dump_v2.3/rank0/first//Functional_conv2d_0_backward_input.0.npy"
    script(
        tmp_path,
        HOOK + "set_dump_switch('ON', mode='acl', scope=['Functional_conv2d_0_backward'])\n"
        f"set_backward_input(['{saved}'])\ntrain()\nset_dump_switch('OFF')\n",
    )
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert any("Grad" in path.name or "Backward" in path.name for path in dumped(tmp_path))


def test_an_output_that_is_no_tensor_gets_a_warning_and_a_repro(tmp_path: Path) -> None:
    config(tmp_path)
    script(
        tmp_path,
        HOOK + "set_dump_switch('ON', mode='acl', scope=['Torch_nested_0_backward'])\n"
        "def nested(x): return {'a': x * 2}\n"
        "x = torch.ones(3, requires_grad=True).npu()\n"
        "train()\n",
    )
    script(
        tmp_path,
        HOOK + "set_dump_switch('ON', mode='acl', scope=['Tensor_tolist_0_backward'])\n"
        "x = torch.ones(3, requires_grad=True).npu()\nx.tolist()\n",
    )
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert "is not of tensor type and cannot be automatically derived" in done.stderr
    command = re.search(r"tensorprobe repro (\S+) (\S+) -o (\S+)", done.stderr)
    assert command is not None
    assert tp.load(command[1]).call(command[2]).op == "torch.Tensor.tolist"


REFUSED = [
    ({}, "export TASK_QUEUE_ENABLE=0"),
    ({"TASK_QUEUE_ENABLE": "1"}, "export TASK_QUEUE_ENABLE=0"),
]


@pytest.mark.parametrize(("environ", "message"), REFUSED)
def test_a_task_queue_is_refused_before_training(
    environ: dict[str, str], message: str, tmp_path: Path
) -> None:
    config(tmp_path)
    script(tmp_path, HOOK + "print('training')\ntrain()\n")
    done = run(tmp_path, *SIM, **environ)
    assert done.returncode == 1
    assert message in done.stderr
    assert "training" not in done.stdout


def test_without_torch_npu_it_is_refused_and_level_l2_named(tmp_path: Path) -> None:
    config(tmp_path)
    text = PRELUDE.replace(", torch_npu", "").replace(".npu()", "") + HOOK
    (tmp_path / "train.py").write_text(text)
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 1
    assert "tensorprobe run --level L2" in done.stderr


def test_half_of_the_settings_say_the_other_half(tmp_path: Path) -> None:
    config(tmp_path)
    script(tmp_path, "register_hook(conv, acc_cmp_dump)\n"
                     "set_dump_switch('ON', mode='acl', scope=['Tensor_permute_0_forward'])\n")  # fmt: skip
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 1
    assert "dump_config='./dump.json'" in done.stderr
    (tmp_path / "dump.json").write_text("{}")
    script(tmp_path, HOOK)
    done = run(tmp_path, *SIM, TASK_QUEUE_ENABLE="0")
    assert "has no dump_path. It holds" in done.stderr
