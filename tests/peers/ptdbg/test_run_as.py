"""run --as: an unedited script finds the doors, whatever else has their names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import SRC
from tensorprobe.peers.ptdbg import ptdbg_layout as ptdbg
from tensorprobe.records import Capture

SCRIPT = """\
from ptdbg_ascend import *
import torch
seed_all()
set_dump_path("./npu_dump.pkl", dump_tag="all")
model = torch.nn.Linear(4, 2)
register_hook(model, acc_cmp_dump)
set_dump_switch("ON", mode="api_stack")
model(torch.ones(3, 4)).sum().backward()
"""


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_unedited_script_dumps_and_nothing_else_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all_v2.3", "train.py"]
    index = tmp_path / "all_v2.3" / "rank0" / "api_stack_npu_dump.pkl"
    assert len(ptdbg.read(index).calls) >= 3
    assert "tensorprobe run: ptdbg_ascend is tensorprobe.ptdbg_ascend\n" in done.stderr


def test_it_wins_over_a_shadowing_package_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    other = tmp_path / "ptdbg_ascend"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    done = run(tmp_path, "--as", "ptdbg_ascend,msprobe", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"instead of {other / '__init__.py'}" in done.stderr
    assert (tmp_path / "all_v2.3").is_dir()


def test_msprobe_is_found_with_all_that_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from msprobe.pytorch import PrecisionDebugger, seed_all\n"
        "import msprobe.pytorch as door, tensorprobe.msprobe.pytorch as ours\n"
        "assert door is ours and ours.__spec__.name == 'tensorprobe.msprobe.pytorch'\n"
        "debugger = PrecisionDebugger(task='statistics', dump_path='./d', level='L1')\n"
        "debugger.start()\ntorch.ones(2).abs()\ndebugger.stop()\ndebugger.step()\n"
    )
    done = run(tmp_path, "--as", "msprobe", "train.py")
    assert done.returncode == 0, done.stderr
    assert "tensorprobe run: msprobe is tensorprobe.msprobe\n" in done.stderr
    assert tp.load(tmp_path / "d").layout == "msprobe"


def test_without_it_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nimport msprobe\n")
    done = run(tmp_path, "train.py")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'msprobe'" in done.stderr
    assert "a script of msprobe runs unedited with --as msprobe" in done.stderr


def test_it_wins_over_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    site = tmp_path / "site" / "ptdbg_ascend"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    paths = os.pathsep.join([str(SRC), str(tmp_path / "site")])
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert f"instead of {site / '__init__.py'}" in done.stderr


def test_a_name_that_is_not_there_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import ptdbg_ascend.common.utils\n")
    done = run(tmp_path, "--as", "ptdbg_ascend", "a.py")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'ptdbg_ascend.common'" in done.stderr
    done = run(tmp_path, "--as", "ptdbg", "a.py")
    assert done.returncode == 2
    assert "--as ptdbg: expected ptdbg_ascend or msprobe" in done.stderr


def test_with_an_output_the_run_records_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "--as", "ptdbg_ascend", "-o", "runs/a", "train.py")
    assert done.returncode == 0, done.stderr
    native, dumped = tp.load(tmp_path / "runs" / "a"), tp.load(tmp_path / "all_v2.3")
    assert {c.name for c in dumped.calls} <= {c.name for c in native.calls}


def test_a_comparison_needs_no_torch_and_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(tmp_path, "--as", "ptdbg_ascend", "train.py").returncode == 0
    (tmp_path / "compare.py").write_text(
        "from ptdbg_ascend import *\n"
        "compare_distributed('all_v2.3', 'all_v2.3', './output')\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    done = run(tmp_path, "--as", "ptdbg_ascend", "compare.py")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "output").glob("compare_result_rank0-rank0_*.csv"))) == 1


def test_under_torchrun_every_rank_has_its_folder(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "import torch\n",
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n",
    )
    (tmp_path / "train.py").write_text(text + "dist.destroy_process_group()\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--standalone", "-m", "tensorprobe", "run", "--as", "ptdbg_ascend"),
            "train.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "all_v2.3").iterdir()) == ["rank0", "rank1"]
    assert tp.load(tmp_path / "all_v2.3").ranks == (0, 1)


def is_written(capture: Capture) -> bool:
    """Whether nothing of it waits in a queue."""
    tensors = [record for call in capture.calls for record in call.tensors]
    return not capture.begun and all(record.blob is not None for record in tensors)


def test_what_a_killed_program_dumped_can_be_had(tmp_path: Path) -> None:
    text = SCRIPT.replace('"npu_dump.pkl"', '"a.pkl"') + (
        "print('dumped', flush=True)\nimport time\ntime.sleep(100)\n"
    )
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "tensorprobe", "run", "--as", "ptdbg_ascend", "train.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "dumped\n"
    (recording,) = (tmp_path / "all_v2.3").glob("*.recording-*")
    deadline = time.monotonic() + 60
    while not is_written(tp.load(recording)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py")
    assert done.returncode == 0
    assert "To have its dump: tensorprobe convert" in done.stderr
    (left,) = (tmp_path / "all_v2.3").glob("*.interrupted-*")
    converted = subprocess.run(
        [*command[:3], "convert", str(left), "--to", "ptdbg", "-o", "again"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert converted.returncode == 0, converted.stderr
    names = {call.name for call in tp.load(tmp_path / "again").calls}
    assert {call.name for call in tp.load(tmp_path / "all_v2.3" / "rank0").calls} <= names


def test_processes_that_the_program_forks_write_their_dumps(tmp_path: Path) -> None:
    """Such a process leaves without Python's own end."""
    (tmp_path / "train.py").write_text(
        "import multiprocessing, torch\n"
        "from ptdbg_ascend import *\n"
        "def work(rank):\n"
        "    set_dump_path('./d.pkl')\n"
        "    register_hook(None, acc_cmp_dump, rank=rank)\n"
        "    set_dump_switch('ON')\n"
        "    torch.ones(2).abs()\n"
        "context = multiprocessing.get_context('fork')\n"
        "processes = [context.Process(target=work, args=(rank,)) for rank in (0, 1)]\n"
        "[process.start() for process in processes]\n"
        "[process.join() for process in processes]\n"
    )
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py")
    assert done.returncode == 0, done.stderr
    assert tp.load(tmp_path / "ptdbg_dump_v2.3").ranks == (0, 1)
    assert not list(tmp_path.rglob("*.recording-*"))


def test_a_forked_child_that_ends_leaves_the_dump_to_its_parent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT + "import os, sys\n"
        "if os.fork() == 0:\n    sys.exit(0)\n"
        "os.wait()\nmodel(torch.ones(3, 4)).tanh()\n"
    )
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("calls dumped") == 1
    names = [call.name for call in tp.load(tmp_path / "all_v2.3").calls]
    assert names[0].startswith("Torch.ones.0")
    assert "Tensor.tanh.0.forward" in names


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise SystemExit", "1/0"])
def test_however_a_program_ends_its_dump_is_written(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + f"import sys\n{end}\n")
    done = run(tmp_path, "--as", "ptdbg_ascend", "train.py")
    assert done.returncode == (1 if end == "1/0" else 0)
    assert tp.load(tmp_path / "all_v2.3").calls
