"""Suspects are replayed in a process that may hang, crash or run out of memory without harm."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import tensorprobe as tp
from recorded import record
from tensorprobe.comparing.evidence import Replayer, UserCode
from tensorprobe.comparing.verdict import Culprit, next_command
from tensorprobe.errors import BadUsage
from tensorprobe.records import Call

SLOW_AND_DEADLY = """
import os
import shlex
import time

import torch

library = torch.library.Library("replayed_ns", "DEF")
library.define("slow(Tensor x) -> Tensor")
library.define("deadly(Tensor x) -> Tensor")


def deadly(x):
    os.abort()


def slow(x):
    time.sleep(100)


library.impl("slow", slow, "CPU")
library.impl("deadly", deadly, "CPU")
"""


@pytest.fixture(scope="module")
def replayer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replayer]:
    file = tmp_path_factory.mktemp("code") / "ops.py"
    file.write_text(SLOW_AND_DEADLY)
    made = Replayer(UserCode(imports=(str(file),)))
    yield made
    assert made._child is not None
    made._child.end()


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Call:
    weight = torch.ones(3, 4)
    folder = tmp_path_factory.mktemp("run")
    capture = record(folder, lambda: torch.nn.functional.linear(torch.ones(2, 4), weight))
    return capture.call("Functional.linear.0.forward")


def renamed(call: Call, op: str) -> Call:
    """The call with its first tensor for an operator that takes one."""
    return Call(
        index=0, name="Ops.x.0.forward", op=op, args=call.args[:1], tensors=call.tensors[:1]
    )


def test_a_healthy_call_has_no_error_of_its_own(replayer: Replayer, linear: Call) -> None:
    found = replayer.own_error(linear, seconds=60)
    assert found.problem is None
    assert found.errors["output.0"].size == 0


def test_a_call_that_hangs_is_given_up_and_the_next_one_is_replayed(
    replayer: Replayer, linear: Call
) -> None:
    slow = renamed(linear, "torch.ops.replayed_ns.slow.default")
    begin = time.monotonic()
    assert replayer.own_error(slow, seconds=1).problem == (
        "Ops.x.0.forward has no replay: no answer in 1 s"
    )
    assert time.monotonic() - begin < 50
    assert replayer.matters(linear, linear, seconds=60) == 0.0


def test_a_call_that_kills_its_process_is_a_problem_of_that_call(
    replayer: Replayer, linear: Call
) -> None:
    deadly = renamed(linear, "torch.ops.replayed_ns.deadly.default")
    assert replayer.own_error(deadly, seconds=60).problem == (
        "Ops.x.0.forward has no replay: the process that ran it died (signal 6)"
    )
    assert replayer.matters(deadly, deadly, seconds=60) is None
    assert replayer.own_error(linear, seconds=60).problem is None


@pytest.mark.parametrize("has_file", [True, False])
def test_a_program_may_close_the_files_of_others(
    replayer: Replayer, linear: Call, tmp_path: Path, has_file: bool
) -> None:
    """And have its own file under the number that was the replayer's."""
    replayer.start()
    assert replayer._child is not None
    descriptor = replayer._child._connection.fileno()
    with (tmp_path / "log").open("w") as log:
        if has_file:
            os.dup2(log.fileno(), descriptor)
        else:
            os.close(descriptor)
    assert replayer.own_error(linear, seconds=60).problem is None
    if has_file:
        os.write(descriptor, b"of the program")
        os.close(descriptor)
        assert (tmp_path / "log").read_text() == "of the program"


@pytest.mark.parametrize("op", ["torch.zeros", "torch.ones", "torch.arange", "torch.randperm"])
def test_a_call_that_wants_all_memory_gets_none(replayer: Replayer, op: str) -> None:
    numbers = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 5  # of four bytes or more
    for many in (numbers, 10**15):
        call = Call(index=0, name="Torch.x.0.forward", op=op, args=(many,))
        problem = replayer.own_error(call, seconds=60).problem
        assert problem is not None
        assert "allocate" in problem or "random and its state" in problem, problem


def test_what_is_wrong_with_a_users_code_is_told_before_the_work(tmp_path: Path) -> None:
    record(tmp_path / "run", lambda: torch.ones(2).relu())
    file = tmp_path / "bad.py"
    file.write_text("1 / 0")
    for options, reason in (
        ({"references": file}, r"bad\.py': ZeroDivisionError: .* by zero \(.*bad\.py:1\)"),
        (
            {"imports": ["no_such_package"]},
            "imports='no_such_package': no package and no",
        ),
        ({"imports": ["os"]}, "imports='os': it holds no operators"),
        ({"references": tmp_path / "none.py"}, "no file '.*none.py': `references` takes a Python"),
    ):
        with pytest.raises(BadUsage, match=reason):
            tp.compare(tmp_path / "run", tmp_path / "run", **options)  # type: ignore[arg-type]


def test_commands_to_type_next_are_safe_to_paste(tmp_path: Path) -> None:
    record(tmp_path / "run", lambda: torch.ones(2).relu())
    verdict = tp.compare(tmp_path / "run", tmp_path / "run").verdict
    culprit = Culprit(
        name="Functional.relu.0.forward; touch MARKER", kind="output", direction="forward", step=1,
        rank=0, module="", op="torch.relu", stack=[], reason="", own_error=1.0,
        inherited_error=0.0, metrics={}, affected=0,
    )  # fmt: skip
    for mode, kind in (("tensors", "output"), ("tensors", "input"), ("stats", "output")):
        changed = msgspec.structs.replace(verdict, mode=mode, actual="$(touch MARKER)")
        command = next_command(changed, msgspec.structs.replace(culprit, kind=kind))
        words = shlex.split(command)
        assert "Functional.relu.0.forward; touch MARKER" in words
        assert mode == "stats" or "$(touch MARKER)" in words


def test_the_repro_to_type_next_allows_what_the_comparison_did(tmp_path: Path) -> None:
    (tmp_path / "my ops.py").write_text("")
    record(tmp_path / "run", lambda: torch.ones(2).relu())
    allowed = [str(tmp_path / "my ops.py")]
    verdict = tp.compare(tmp_path / "run", tmp_path / "run", imports=allowed).verdict
    verdict.mode = "tensors"
    culprit = Culprit(
        name="Module.Scale.forward.0", kind="output", direction="forward", step=0, rank=0,
        module="", op="mylib.Scale", stack=(), reason="", own_error=1.0, inherited_error=0.0,
    )  # fmt: skip
    words = shlex.split(next_command(verdict, culprit))
    assert words[-4:] == ["-o", "repro", "--import", *allowed]
    own = msgspec.structs.replace(culprit, op="torch.relu")
    assert "--import" not in next_command(verdict, own)
