"""The first NaN or infinity of a recording: in one rank, and over all of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp
from recorded import record
from tensorprobe.cli.main import main
from tensorprobe.errors import UnreadableCapture
from tensorprobe.overflow.across_ranks import FirstNonfinite, find_first
from tensorprobe.records import Call, Capture, Special, TensorRecord, TensorSummary

INF, NAN = math.inf, math.nan


def first_of(tmp_path: Path, program: Callable[[], object], **options: Any) -> FirstNonfinite:
    return find_first(record(tmp_path / "run", program, **options))


class Net(nn.Module):
    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 3), nn.Linear(3, 2)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.middle(self.fc1(x)))


# Programs that are at fault, and the call that is.
FAULTS: dict[str, tuple[Callable[[], object], str, str]] = {
    "log": (lambda: torch.log(torch.tensor([-1.0, 2.0])) * 2, "Torch.log.0.forward", "NaN"),
    "overflow": (lambda: torch.full((2,), 3e38) * 10, "Tensor.mul.0.forward", "inf"),
    "cast": (lambda: torch.full((2,), 1e5).half(), "Tensor.half.0.forward", "inf"),
    "difference of infinities": (
        lambda: torch.tensor([INF, 1.0]) - torch.tensor([INF, 1.0]), "Tensor.sub.0.forward", "NaN",
    ),
    "a row that is masked as a whole": (
        lambda: F.softmax(torch.zeros(2, 2).masked_fill(torch.ones(2, 2, dtype=bool), -INF), -1),
        "Functional.softmax.0.forward", "NaN",
    ),
    "logarithm of zero": (lambda: torch.log(torch.zeros(2)), "Torch.log.0.forward", "-inf"),
    "gradient of a root at zero": (
        lambda: torch.zeros(2, requires_grad=True).sqrt().sum().backward(),
        "Tensor.sqrt.0.backward", "inf",
    ),
    "data": (lambda: torch.tensor([NAN, 1.0]) * 2, "Tensor.mul.0.forward", "NaN"),
}  # fmt: skip

# Programs that put infinity there on purpose, or have none.
HEALTHY: dict[str, Callable[[], object]] = {
    "plain": lambda: torch.ones(2) * 2,
    "mask": lambda: F.softmax(torch.zeros(2, 2) + torch.full((2, 2), -INF).triu(1), -1),
    "masked_fill": lambda: F.softmax(
        torch.zeros(2, 2).masked_fill(torch.eye(2, dtype=torch.bool), -INF), -1
    ),
    "lowest number": lambda: (
        torch.full((2,), torch.finfo(torch.float16).min, dtype=torch.float16)
        + torch.full((2,), -1e4, dtype=torch.float16)
    ),
    "logarithm of a mask": lambda: torch.log(torch.tensor([0.0, 1.0, 1.0])),
    "uninitialised": lambda: torch.empty(5).zero_() + 1,
    "maximum so far": lambda: torch.maximum(torch.full((2,), -INF), torch.zeros(2)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_call_that_makes_it(tmp_path: Path, name: str) -> None:
    program, call, holds = FAULTS[name]
    (origin,) = first_of(tmp_path, program, level="L1", keep="stats").first
    assert (origin.name, origin.holds) == (call, holds)
    assert origin.what == ("reads" if name == "data" else "makes")
    assert origin.stack[0].startswith(__file__)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_on_purpose_is_no_finding(tmp_path: Path, name: str) -> None:
    found = first_of(tmp_path, HEALTHY[name], level="L1", keep="stats")
    assert (found.first, found.later, found.received) == ([], [], [])


@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
def test_a_module_is_named_only_for_what_is_not_recorded_inside(tmp_path: Path, level: str) -> None:
    model = Net(lambda h: torch.log(-h.abs()))
    x = torch.ones(2, 4)
    found = first_of(tmp_path, lambda: model(x).sum().backward(), level=level, keep="stats")
    expected = {
        "L1": "Torch.log.0.forward",
        "mix": "Torch.log.0.forward",
        "L2": "Aten.log.0.forward",
    }
    if level == "L0":  # between fc1 and fc2, where no module is: fc2 is the first to have it
        assert [origin.name for origin in found.first] == ["Module.fc2.Linear.forward.0"]
        assert found.first[0].what == "reads"
    else:
        assert [origin.name for origin in found.first] == [expected[level]]
    assert all(not origin.name.startswith("Module.") for origin in found.later)


def test_later_calls_and_steps_follow(tmp_path: Path) -> None:
    def program() -> None:
        torch.log(torch.zeros(2))
        torch.log(-torch.ones(2))

    found = first_of(tmp_path, program, level="L1", keep="stats")
    assert found.first[0].holds == "-inf"
    assert [(o.name, o.holds) for o in found.later] == [("Torch.log.1.forward", "NaN")]


def test_a_recording_without_statistics_is_refused(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", lambda: torch.ones(2) * 2, level="L1", keep="structure")
    with pytest.raises(UnreadableCapture, match="no statistics of its tensors"):
        find_first(capture)


# Over ranks: recordings made by hand, so that every order can be had


def tensor(name: str, *numbers: float, role: str = "output") -> TensorRecord:
    finite = [n for n in numbers if n == n]
    summary = TensorSummary(
        min(finite, default=None), max(finite, default=None), None, None,
        sum(n != n for n in numbers), sum(math.isinf(n) for n in numbers), 0,
    )  # fmt: skip
    return TensorRecord(name, role, "float32", (len(numbers),), summary=summary)  # type: ignore[arg-type]


def call(name: str, given: float, made: float, *args: Any, step: int = 0, **kwargs: Any) -> Call:
    name = f"{name}.forward"
    read, wrote = tensor(f"{name}.input.0", given, role="input"), tensor(f"{name}.output.0", made)
    op = "torch." + name.split(".")[1]
    return Call(
        index=0, name=name, op=op, step=step, args=(read, *args), kwargs=kwargs, outputs=wrote,
        tensors=(read, wrote),
    )  # fmt: skip


def run_of(*ranks: Sequence[Call]) -> Capture:
    calls = [
        msgspec.structs.replace(each, index=i, rank=rank)
        for rank, found in enumerate(ranks)
        for i, each in enumerate(found)
    ]
    return Capture(Path("run"), "native", calls)


OK, BAD = call("Torch.exp.0", 1, 2), call("Torch.log.0", 1, NAN)
GROUP = Special("process_group", "ranks [0, 1]")


def names(found: FirstNonfinite) -> list[tuple[int, str]]:
    return [(origin.rank, origin.name) for origin in found.first]


def test_the_origin_is_before_those_who_received_it() -> None:
    finite, spoilt = (
        call("Distributed.all_reduce.0", 1, NAN),
        call("Distributed.all_reduce.0", NAN, NAN),
    )
    after = call("Torch.exp.0", NAN, NAN)
    found = find_first(run_of([OK, finite, after], [BAD, spoilt], [OK, finite]))
    assert names(found) == [(1, "Torch.log.0.forward")]
    assert [(o.rank, o.what) for o in found.received] == [(0, "receives"), (2, "receives")]
    assert found.notes == []


def test_the_earlier_step_is_first() -> None:
    late = call("Torch.log.0", 1, NAN, step=0)
    found = find_first(run_of([call("Torch.log.0", 1, NAN, step=1)], [late]))
    assert names(found) == [(1, "Torch.log.0.forward")]


def test_a_collective_puts_two_origins_in_order() -> None:
    reduce = call("Distributed.all_reduce.0", 1, 1, group=GROUP)
    # rank 0 makes it after the collective, rank 1 before
    found = find_first(run_of([reduce, BAD], [call("Torch.log.0", 1, INF), reduce]))
    assert names(found) == [(1, "Torch.log.0.forward")]
    assert [(o.rank, o.name) for o in found.later] == [(0, "Torch.log.0.forward")]


def test_without_one_both_are_named_and_that_is_said() -> None:
    found = find_first(run_of([OK, BAD], [BAD, OK]))
    assert names(found) == [(0, "Torch.log.0.forward"), (1, "Torch.log.0.forward")]
    assert found.notes == ["ranks 0, 1: no collective between them says which was first"]


def test_a_broadcast_tells_of_its_source_only() -> None:
    first = call("Distributed.broadcast.0", 1, 1, src=0)
    # what rank 1 made before the broadcast of rank 0, rank 0 has not heard of
    found = find_first(run_of([first, BAD], [BAD, first]))
    assert names(found) == [(0, "Torch.log.0.forward"), (1, "Torch.log.0.forward")]
    found = find_first(run_of([BAD, first], [first, BAD]))
    assert names(found) == [(0, "Torch.log.0.forward")]


def test_messages_are_linked_by_who_sends_to_whom() -> None:
    send, receive = call("Distributed.send.0", 1, 1, 1), call("Distributed.recv.0", 1, 1, 0)
    found = find_first(run_of([BAD, send], [receive, BAD], [OK]))
    assert names(found) == [(0, "Torch.log.0.forward")]
    # nothing is known of a message from anybody
    anybody = call("Distributed.recv.0", 1, 1)
    found = find_first(run_of([BAD, send], [anybody, BAD]))
    assert len(found.first) == 2
    assert any("recv: it is not known who spoke to whom" in note for note in found.notes)


def test_groups_are_told_apart_and_ranks_that_do_otherwise_do_not_hang() -> None:
    other = Special("process_group", "ranks [2, 3]")
    a = call("Distributed.all_reduce.0", 1, 1, group=GROUP)
    b = call("Distributed.all_reduce.0", 1, 1, group=other)
    # 0 and 2 are in different groups: nothing between them
    found = find_first(run_of([BAD, a], [a], [b, BAD], [b]))
    assert len(found.first) == 2
    # crossed: each waits for the other
    c, d = call("Distributed.barrier.0", 1, 1), call("Distributed.all_gather.0", 1, 1)
    found = find_first(run_of([c, d, BAD], [d, c, BAD]))
    assert len(found.first) == 2
    assert any("it is not known who spoke to whom" in note for note in found.notes)


def test_memory_that_a_collective_writes_to_is_not_what_a_rank_gave() -> None:
    name = "Distributed.all_gather.0.forward"
    buffer = tensor(f"{name}.input.0.0", NAN, role="input")  # nobody has written to it yet
    mine, got = tensor(f"{name}.input.1", 1, role="input"), tensor(f"{name}.output.0.0", NAN)
    gather = Call(
        index=0, name=name, op="torch.distributed.all_gather", tensors=(buffer, mine, got)
    )
    found = find_first(run_of([gather], [BAD, gather]))
    assert names(found) == [(1, "Torch.log.0.forward")]
    assert [(o.rank, o.what) for o in found.received] == [(0, "receives")]


def test_a_gradient_that_ddp_brought_is_said_to_appear() -> None:
    name = "Module.fc.Linear.parameters_grad.0"
    grads = Call(
        index=0, name=name, op="Linear", direction="backward",
        tensors=(tensor(f"{name}.weight", NAN, role="parameter_grad"),),
    )  # fmt: skip
    (origin,) = find_first(run_of([OK, grads])).first
    assert (origin.what, origin.name) == ("appears", name)
    found = find_first(run_of([OK, grads], [BAD, grads]))
    assert names(found) == [(1, "Torch.log.0.forward")]


def test_many_ranks_are_quick_and_the_odd_one_is_found() -> None:
    reduces = [call(f"Distributed.all_reduce.{i}", 1, 1) for i in range(20)]
    spread = [call(f"Torch.mul.{i}", NAN, NAN) for i in range(20)]
    bad = [*reduces[:10], BAD, *reduces[10:], *spread]
    late = [*reduces, call("Torch.log.9", 1, NAN)]
    found = find_first(run_of(*[late] * 37, bad, *[late] * 26))
    assert names(found) == [(37, "Torch.log.0.forward")]


@pytest.mark.parametrize("wrong", [
    call("Distributed.all_reduce.0", 1, 1, group=Special("process_group", "x" * 5000)),
    call("Distributed.send.0", 1, 1, -5), call("Distributed.broadcast.0", 1, 1, src="no"),
    Call(index=0, name="Distributed..forward", op=""), Call(index=0, name="", op=""),
    Call(index=0, name="a.0.forward", op="a", parent="a.0.forward"),
])  # fmt: skip
def test_hostile_records_are_ordered_somehow(wrong: Call) -> None:
    found = find_first(run_of([wrong, BAD], [BAD, wrong], [wrong, wrong, BAD]))
    assert found.first


# The command


def test_the_command_writes_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "bad", FAULTS["log"][0], level="L1", keep="stats")
    record(tmp_path / "good", HEALTHY["plain"], level="L1", keep="stats")
    capsys.readouterr()
    alone = ["--only", "nonfinite"]
    assert main(["ranks", *alone, str(tmp_path / "good")]) == 0
    out = capsys.readouterr().out
    assert out == "no call makes NaN or infinity: 2 calls of 1 rank, 1 step\n"
    assert main(["ranks", *alone, str(tmp_path / "bad"), "-o", str(tmp_path / "out")]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first NaN: Torch.log.0.forward (step 0, rank 0)"
    assert lines[2] == "  its inputs are finite (-1 to 2), and output.0 (float32) holds NaN"
    assert lines[-3].startswith("  next: tensorprobe show ")
    written = json.loads((tmp_path / "out" / "ranks.json").read_text())
    assert (written["format"], written["ranks"], written["steps"]) == (1, [0], [0])
    assert written["nonfinite"]["first"][0]["name"] == "Torch.log.0.forward"
    assert main(["ranks", *alone, str(tmp_path / "bad"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == written
    assert main(["ranks", *alone, str(tmp_path / "none")]) == 1
    assert main(["ranks", *alone, str(tmp_path / "bad"), "-o", str(tmp_path / "bad" / "in")]) == 2


def test_help_and_the_question_itself_need_no_torch(tmp_path: Path) -> None:
    record(tmp_path / "bad", FAULTS["log"][0], level="L1", keep="stats")
    code = (
        "import sys; from tensorprobe.cli.main import main\n"
        f"status = main(['ranks', {str(tmp_path / 'bad')!r}, '--only', 'nonfinite'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr


def test_real_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, tensorprobe as tp\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "with tp.Recorder('run', level='L1', keep='stats') as rec:\n"
        "    for step in range(2):\n"
        "        x = torch.full((3,), float(step))\n"
        "        if rank == 1: x = torch.log(0.5 - x)\n"
        "        dist.all_reduce(x)\n"
        "        x = x * 2\n"
        "        rec.step()\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = find_first(tp.load(tmp_path / "run"))
    assert names(found) == [(1, "Torch.log.0.forward")]
    assert found.first[0].step == 1
    (received,) = found.received
    assert (received.rank, received.name) == (0, "Distributed.all_reduce.0.forward")


class _Dirty(torch.utils._python_dispatch.TorchDispatchMode):
    """Within it `empty` gives memory with NaN in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("empty"):
            result.copy_(torch.arange(float(result.numel())).reshape(result.shape))
            result.view(-1)[0] = NAN
        return result


@pytest.mark.parametrize("is_used", [False, True])
def test_memory_that_nobody_has_written_to_is_no_origin_until_it_is_used(
    tmp_path: Path, is_used: bool
) -> None:
    """A pipeline learns shapes on it, forward and backward."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with _Dirty():
            memory = torch.empty(3, 4)
        made = model(memory)
        if is_used:
            made.sum().backward()
        else:
            torch.autograd.grad(made, list(model.parameters()), torch.rand(3, 2))
            model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    found = first_of(tmp_path, program, level="mix")
    if is_used:
        assert [origin.name for origin in found.first][:1] == ["Functional.layer_norm.0.forward"]
    else:
        assert found.first == []
        assert len(found.notes) == 1
        assert "memory that nobody had written to" in found.notes[0]


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_what_was_written_to_before_it_is_read_is_a_number(tmp_path: Path, level: str) -> None:
    """Weights are initialised in memory from `empty`, and a cache is filled row by row."""

    def program() -> None:
        with _Dirty():
            model = nn.Linear(4, 4)
            cache = torch.empty(3, 4)
            copied = torch.empty(2, 4)
        cache[:2] = model(torch.rand(2, 4))
        copied.copy_(cache[:2])
        torch.log(copied.tanh() - 2)

    found = first_of(tmp_path, program, level=level)
    assert ".log." in found.first[0].name, (found.first, found.notes)
    assert found.notes == []
