"""A script under `tensorprobe run` is the script it was, and is recorded."""

import itertools
import multiprocessing.process
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import tensorprobe as tp
from tensorprobe.cli.main import main

SRC = str(Path(__file__).parents[2] / "src")
TRAIN = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(times=1):
    for _ in range(times):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Workshop:
    """An empty folder, and Python started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def python(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "tensorprobe", "run", *words, **environ)

    def load(self, name: str) -> Any:
        return tp.load(self.folder / name)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


class Here(Workshop):
    """The same in this process, where torch is there already: for what needs none of its own."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        super().__init__(folder)
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        with self._monkeypatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", sys.argv[:])
            patch.setattr(sys, "path", sys.path[:])
            # processes that tests before this one have started are not the program's
            patch.setattr(multiprocessing.process, "_process_counter", itertools.count(1))
            patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
            status: Any
            try:
                status = main(["run", *words])
            except SystemExit as leaving:
                status = leaving.code
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(words, status, out, err)


@pytest.fixture
def here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Here:
    return Here(tmp_path, capsys, monkeypatch)


def test_the_command_of_the_manual(workshop: Workshop) -> None:
    script = workshop.write(
        "train.py",
        "import sys\nprint(sys.argv[1:], __name__, sys.path[0] == sys.argv.pop())\n"
        + TRAIN
        + "\ntrain(3)",
    )
    words = ["--level", "mix", "--keep", "stats", "--steps", "0-1", "-o", "runs/a", script]
    done = workshop.run(*words, "--lr", "0.1", "--level", "7", "--help", str(workshop.folder))
    given = ["--lr", "0.1", "--level", "7", "--help", str(workshop.folder)]
    assert done.stdout == f"{given} __main__ True\n"
    assert done.returncode == 0
    assert "Next: tensorprobe show runs/a" in done.stderr
    capture = workshop.load("runs/a")
    assert capture.steps == (0, 1)
    assert capture.calls(name="Module.Sequential.forward")
    assert capture.calls(name="Optimizer.SGD.step.0")
    linear = capture.call("Functional.linear.0.forward", step=0)
    assert linear.stack[-1].endswith("train.py:14 in <module>")  # nothing of ours below it
    assert capture.facts["command"][-len(given) - 1 :] == [script, *given]


def test_main_is_real(workshop: Workshop) -> None:
    """Pickles, threads, spawned workers, exit functions and later imports find `__main__`."""
    workshop.write("beside.py", "value = 5")
    script = workshop.write(
        "odd.py",
        """
        from __future__ import annotations
        import os
        os.environ["OMP_NUM_THREADS"] = "2"  # must count: set before torch is imported
        import atexit, inspect, pickle, threading, sys
        import torch
        import beside
        from torch.utils.data import DataLoader, Dataset

        class Thing(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.full((2,), float(i))

        def late():
            print("exit", Thing.__name__, model is not None)

        def work():
            model(torch.ones(1, 2))

        if __name__ == "__main__":
            model = torch.nn.Linear(2, 2)
            atexit.register(late)
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            assert sys.modules["__main__"].Thing is Thing
            assert "class Thing" in inspect.getsource(Thing)
            assert __file__ == os.path.abspath("odd.py") and sys.argv == ["odd.py"]
            assert __spec__ is None and __package__ is None
            assert type(torch.__loader__).__name__ == "SourceFileLoader"
            print("threads", torch.get_num_threads())
            for context in ("spawn", "fork"):
                loader = DataLoader(Thing(), num_workers=1, multiprocessing_context=context)
                print(context, sum(float(model(x).shape[0]) for x in loader))
            threading.Thread(target=work, name="later").start()
            print("end")
        """,
    )
    done = workshop.run("-o", "out", script)
    assert done.stdout.splitlines() == [
        "threads 2",
        "spawn 4.0",
        "fork 4.0",
        "end",
        "exit Thing True",
    ]
    assert done.returncode == 0, done.stderr
    threads = {call.thread for call in workshop.load("out").calls(name="Module.Linear.forward")}
    assert "later" in threads


def test_a_module_and_a_package(workshop: Workshop) -> None:
    workshop.write("pack/__init__.py", "")
    workshop.write("pack/part.py", "size = 3")
    workshop.write(
        "pack/__main__.py",
        "import sys\nfrom .part import size\nimport torch\n"
        "torch.ones(size).relu()\nprint(__package__, __spec__.name, sys.argv[1:])",
    )
    done = workshop.run("-m", "pack", "-m", "x")
    assert done.stdout == "pack pack.__main__ ['-m', 'x']\n", done.stderr
    assert "runs/pack" in done.stderr  # where it went when nobody said
    assert [c.name for c in workshop.load("runs/pack").calls] == [
        "Torch.ones.0.forward",
        "Tensor.relu.0.forward",
    ]


LEAVING = {
    "status": ("import sys; sys.exit(7)", 7, ""),
    "text": ("raise SystemExit('no data')", 1, "no data\n"),
    "nothing": ("raise SystemExit", 0, ""),
    "hard": (
        "import os, pathlib, time\n"
        "log = pathlib.Path('out/rank0/step0/calls.jsonl')\n"
        'while \'"type":"end","id":1\' not in log.read_text(): time.sleep(0.01)\n'
        "os._exit(9)",
        9,
        "",
    ),
    "interrupt": ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
}


@pytest.mark.parametrize("how", LEAVING)
def test_leaving_early(workshop: Workshop, here: Here, how: str) -> None:
    code, status, text = LEAVING[how]
    script = here.write("leave.py", f"import torch\ntorch.ones(2).relu()\n{code}\n")
    own_process = how in ("hard", "interrupt", "text")
    done = (workshop if own_process else here).run("-o", "out", script)
    assert (done.returncode or 0) == status, done.stderr
    assert text in done.stderr
    capture = here.load("out")
    assert capture.call("Tensor.relu.0.forward").tensor("output.0").summary.max == 1.0


def test_an_exception_is_shown_as_python_shows_it(here: Here) -> None:
    script = here.write(
        "fail.py",
        """
        import torch
        def inner(x):
            return torch.relu(x) + torch.ones(3)
        inner(torch.ones(2))
        """,
    )
    bare = here.python(script)
    done = here.run("-o", "out", script)
    assert done.returncode == bare.returncode == 1
    shown = [line for line in done.stderr.splitlines() if not line.startswith("tensorprobe:")]
    assert shown == bare.stderr.splitlines()
    failed = here.load("out").call("Tensor.add.0.forward")
    assert failed.status == "raised"


def test_nothing_recorded_is_said_and_leaves_nothing(here: Here) -> None:
    script = here.write("train.py", TRAIN + "\ntrain(2)")
    for strict, status in ([], 0), (["--strict"], 1):  # the program's own, unless it was asked for
        done = here.run(*strict, "--apis", "rellu", "-o", "out", script)
        assert done.returncode == status
        (said,) = done.stderr.splitlines()
        assert "nothing was recorded: apis='rellu' matched none" in said
        assert "Functional.relu" in said
        assert not (here.folder / "out").exists()


@pytest.mark.slow
def test_processes_that_the_program_forks_are_said_to_be_missing(workshop: Workshop) -> None:
    script = workshop.write(
        "fork.py",
        """
        import multiprocessing
        import torch
        def work():
            torch.ones(2).relu()
        if __name__ == "__main__":
            for _ in range(2):
                process = multiprocessing.get_context("fork").Process(target=work)
                process.start()
                process.join()
        """,
    )
    done = workshop.run("-o", "out", script)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-2:] == [
        "tensorprobe: nothing was recorded: no call was made while recording was on.",
        "tensorprobe run: the program started 2 processes of its own, which are not recorded: "
        "start its ranks with torchrun ... -m tensorprobe run, or use tp.Recorder in them",
    ]


def test_stopping_after_the_last_wanted_step(here: Here) -> None:
    script = here.write("train.py", TRAIN + "\ntrain(1000000)")
    done = here.run("--steps", "0-1", "--stop-after-last-step", "-o", "out", script)
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()
    assert first == "tensorprobe: steps 0-1 are recorded: ending the program"
    assert last.startswith("tensorprobe: recorded")
    assert here.load("out").steps == (0, 1)


def test_gradients_without_any_optimizer(workshop: Workshop) -> None:
    script = workshop.write(
        "manual.py",
        """
        import torch
        model = torch.nn.Linear(2, 1)
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        """,
    )
    workshop.run("-o", "out", script)
    steps = [call.step for call in workshop.load("out").calls(name="Module.Linear.forward")]
    assert steps == [0, 1, 2]
    workshop.run("--steps", "2", "-o", "last", script)  # counted in steps that are not wanted, too
    steps = [call.step for call in workshop.load("last").calls(name="Module.Linear.forward")]
    assert steps == [2]


def test_a_config_file_and_options_on_top(here: Here) -> None:
    script = here.write("train.py", TRAIN + "\ntrain(3)")
    here.write(
        "config.json",
        '{"task": "statistics", "dump_path": "there", "level": "L1", "step": [0, 1], '
        '"statistics": {"list": ["linear"]}}',
    )
    done = here.run("--config", "config.json", "--steps", "1", script)
    assert done.returncode == 0, done.stderr
    capture = here.load("there")
    assert capture.steps == (1,)
    assert {call.op for call in capture.calls} == {"torch.nn.functional.linear"}
    done = here.run("--config", "config.json", "--between", "a,b", script)
    assert done.returncode == 2
    assert "--between contradicts the list in 'config.json'" in done.stderr


def test_threads_that_wait_for_work_do_not_keep_the_program(workshop: Workshop) -> None:
    """An executor that nobody shuts down."""
    script = workshop.write(
        "pool.py",
        """
        from concurrent.futures import ThreadPoolExecutor
        import time, torch

        def work(n):
            time.sleep(0.2)
            return torch.ones(n).sum().item()

        pool = ThreadPoolExecutor(2)
        print(pool.submit(work, 3).result(), torch.ones(2).max().item())
        pool.submit(work, 4).add_done_callback(lambda late: print("late", late.result()))
        """,
    )
    done = workshop.run("-o", "out", script)
    assert (done.returncode, done.stdout) == (0, "3.0 1.0\nlate 4.0\n"), done.stderr
    assert workshop.load("out").call("Tensor.max.0.forward")


def test_a_range_of_calls(here: Here) -> None:
    script = here.write(
        "two.py",
        "import sys, torch\nx = torch.ones(2).relu().tanh().exp()\n" + "print(sys.argv[1:])",
    )
    names = ["Tensor.relu.0.forward", "Tensor.tanh.0.forward"]
    done = here.run("--between", ",".join(names), "-o", "out", script, "--between", "a", "b")
    assert (done.returncode, done.stdout) == (0, "['--between', 'a', 'b']\n"), done.stderr
    assert [call.name for call in here.load("out").calls] == names


WRONG = {
    "no script at 'nope.py'": ["nope.py"],
    "is a folder, not a script": ["."],
    "no script given": [],
    "no module named 'nope'": ["-m", "nope"],
    "--level L9: expected one of": ["--level", "L9", "train.py"],
    "--step-on each: expected auto, module": ["--step-on", "each", "train.py"],
    "--stop-after-last-step needs --steps": ["--stop-after-last-step", "train.py"],
    "save in one, load in the other": ["--save-start", "a", "--load-start", "b", "train.py"],
    "give that too": ["--start-batches", "2", "train.py"],
    "'train.py' is a file; give a folder": ["-o", "train.py/x", "train.py"],
    "tensorprobe run: no configuration can be read from 'none.json': No such file or directory\n": [
        *("--config", "none.json", "train.py"),
    ],
    "tensorprobe run: train.py is not JSON": ["--config", "train.py", "train.py"],
    "--load-start: there is no 'nowhere'. To save one": ["--load-start", "nowhere", "train.py"],
    "unrecognized arguments: --levle": ["--levle", "train.py"],
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_usage_is_one_line_and_status_2(here: Here, text: str) -> None:
    here.write("train.py", "import torch\n")
    done = here.run(*WRONG[text])
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_syntax_error_is_shown_as_python_shows_it(here: Here) -> None:
    script = here.write("bad.py", "x = (1\ny = 2\n")
    done = here.run(script)
    assert done.returncode == 1
    assert f'File "{here.folder / script}", line 1' in done.stderr
    assert done.stderr.endswith("SyntaxError: '(' was never closed\n")


def test_without_torch(workshop: Workshop) -> None:
    script = workshop.write("train.py", "import torch")
    code = (
        "import sys\n"
        "from tensorprobe.cli.main import main\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return None\n"
        "import importlib.machinery as m\n"
        "keep = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(\n"
        "    lambda cls, name, *a: None if name == 'torch' else keep(name, *a))\n"
        f"sys.exit(main(['run', '{script}']))"
    )
    done = workshop.python("-c", code)
    assert done.returncode == 1
    assert done.stderr.startswith("tensorprobe run: tensorprobe run needs torch, which is not")


MUCH = """
for _ in range(40):
    model(torch.ones(2, 3))
train(2)
print("trained")
"""


@pytest.mark.parametrize("strictness", ["", "--strict", "--on-write-error stop"])
def test_a_disk_that_refuses(workshop: Workshop, strictness: str) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
    script = workshop.write("train.py", limit + TRAIN + MUCH)
    done = workshop.run(*strictness.split(), "-o", "out", script)
    assert "recording to out stopped: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == ((1, "") if strictness else (0, "trained\n"))
    capture = workshop.load("out")
    (gap,) = capture.gaps
    assert gap.reason.endswith(" lost: [Errno 27] File too large")
    closing = next(line for line in done.stderr.splitlines() if ": recorded " in line)
    assert f": recorded {len(capture.calls)} calls in 1 step, 1 gap, " in closing
    assert f", lost: {gap.reason.split()[0]} calls of step 0. Recording ended early: " in closing


# The same start

SEEDED = """
import random, sys
import torch
torch.manual_seed(int(sys.argv[1])); random.seed(sys.argv[1])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.b = torch.nn.Dropout(), torch.nn.Linear(8, int(sys.argv[2]))
    def forward(self, x, *, scale):
        return self.b(self.drop(self.norm(self.a(x)))) * scale

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data, targets = torch.randn(10, 4), torch.randint(0, 3, (10,))
for _ in range(3):
    chosen = torch.randperm(10)[:5]
    out = model(data[chosen], scale=torch.rand(1))
    torch.nn.functional.cross_entropy(out, targets[chosen]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def digests(capture: Any, step: int) -> list[tuple[str, str | None]]:
    """All tensors from the first call of the model on."""
    calls = list(capture.calls(step=step))
    names = [call.name for call in calls]
    first = names.index("Module.Net.forward.0")
    own = "Tensor.__getitem__"  # the program's own way to its batches
    calls = [call for call in calls[first:] if not call.name.startswith(own)]
    return [(t.name, t.digest) for call in calls for t in call.tensors]


def test_two_runs_begin_equal(here: Here) -> None:
    script = here.write("seeded.py", SEEDED)
    options = ["--keep", "digest", "--steps", "0-1"]
    done = here.run(*options, "-o", "a", "--save-start", "start", script, "1", "3")
    assert "saved the start (weights and inputs of Net, random states) to 'start'" in done.stderr
    done = here.run(*options, "-o", "b", "--load-start", "start", script, "2", "3")
    assert "the saved start has 2 batches: from here on this run's own data" in done.stderr
    here.run(*options, "-o", "c", script, "2", "3")
    a, b, c = (here.load(name) for name in "abc")
    assert digests(a, 0) == digests(b, 0)
    assert digests(a, 0) != digests(c, 0)
    assert digests(a, 1) == digests(b, 1)

    done = here.run("-o", "d", "--load-start", "start", script, "2", "5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "tensorprobe run: the start in 'start' does not fit this Net: of another shape: "
        "b.bias [3] saved, [5] here, b.weight [3, 8] saved, [5, 8] here"
    )
    done = here.run("-o", "d", "--load-start", "a", script, "2", "3")
    assert done.returncode == 2
    assert "'a' is a capture, but no start: make one with --save-start" in done.stderr


def test_a_start_of_another_shape_and_kwargs(here: Here) -> None:
    """An HF model called with keywords, its batches of other lengths."""
    pytest.importorskip("transformers")
    script = here.write(
        "llama.py",
        """
        import sys, torch
        from transformers import LlamaConfig, LlamaForCausalLM
        seed = int(sys.argv[1])
        torch.manual_seed(seed)
        config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2, vocab_size=32)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.randint(0, 32, (2, 4 + seed))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        """,
    )
    options = ["--keep", "digest", "--steps", "0", "--level", "L0"]
    here.run(*options, "-o", "a", "--save-start", "start", script, "1")
    done = here.run(*options, "-o", "b", "--load-start", "start", script, "2")
    assert done.returncode == 0, done.stderr
    a, b = (
        [(t.name, t.digest) for call in here.load(name).calls for t in call.tensors]
        for name in "ab"
    )
    assert a == b


def test_inputs_in_nests_are_carried_and_the_program_s_data_is_left_alone(here: Here) -> None:
    script = here.write(
        "nests.py",
        """
        import dataclasses, sys
        from collections import namedtuple
        import torch

        Pair = namedtuple("Pair", "left right")

        @dataclasses.dataclass(frozen=True)
        class Batch:
            x: torch.Tensor
            more: dict

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.randn(2))
            def forward(self, batch, pair, *, parts):
                return (self.w * (batch.x + batch.more["a.b"] + pair.right) + parts[0][0]).sum()

        seed = int(sys.argv[1])
        torch.manual_seed(seed)
        own = torch.full((2,), float(seed))
        net = Net()
        loss = net(Batch(own, {"a.b": own * 2}), Pair(1, own * 3), parts=[(own * 4, None)])
        (loss - own.sum()).pow(2).backward()
        print(own.tolist(), net.w.grad.tolist())
        """,
    )
    saved = here.run("-o", "a", "--save-start", "start", script, "1")
    loaded = here.run("-o", "b", "--load-start", "start", script, "2")
    assert saved.stdout.startswith("[1.0, 1.0] ")
    assert loaded.stdout.startswith("[2.0, 2.0] "), loaded.stderr
    assert saved.stdout.partition("] ")[2] == loaded.stdout.partition("] ")[2]


def test_two_models_begin_equal_and_what_they_compute_is_their_own(here: Here) -> None:
    script = here.write(
        "gan.py",
        """
        import sys, torch
        class Generator(torch.nn.Linear): pass
        class Judge(torch.nn.Linear): pass
        torch.manual_seed(int(sys.argv[1]))
        generator, judge = Generator(2, 3), Judge(3, 1)
        of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
        fake = generator(torch.randn(4, 2) * float(sys.argv[2])).detach()
        (judge(fake).mean() - judge(torch.randn(4, 3)).mean()).backward()
        of_judge.step()
        """,
    )
    options = ["--keep", "digest", "--level", "L0", "--steps", "0"]
    here.run(*options, "-o", "a", "--save-start", "start", script, "1", "1")
    here.run(*options, "-o", "b", "--load-start", "start", script, "2", "1")
    a, b = (
        {t.name: t.digest for call in here.load(name).calls for t in call.tensors} for name in "ab"
    )
    assert a == b
    # the judge's first input is the generator's output: it is not among what was saved
    saved = here.load("start")
    assert [list(c.kwargs) for c in saved.calls(name="Start.1.Judge")] == [[], ["0"]]
