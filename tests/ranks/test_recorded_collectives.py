"""What is recorded of collectives and messages, on two gloo processes."""

from pathlib import Path

import pytest

import tensorprobe as tp
from ranks.gloo_ranks import needs_gloo, run_ranks
from tensorprobe.records import Call, Collective

pytestmark = needs_gloo


WORLD, PAIR = ((0, 1), "default_pg"), ((0, 1), "undefined")
SHARED = [
    ("all_reduce", *WORLD, 0, "MAX", None, None, None),
    ("all_reduce", *PAIR, 0, "SUM", None, None, None),
    ("broadcast", *WORLD, 1, None, 1, None, None),
    ("reduce", *WORLD, 2, "PRODUCT", 1, None, None),
    ("all_gather", *WORLD, 3, None, None, None, None),
    ("all_gather_into_tensor", *WORLD, 4, None, None, None, None),
    ("reduce_scatter_tensor", *WORLD, 5, "SUM", None, None, None),
    ("all_to_all_single", *WORLD, 6, None, None, None, None),
    ("gather", *WORLD, 7, None, 0, None, None),
    ("scatter", *WORLD, 8, None, 0, None, None),
    ("all_reduce", *WORLD, 9, "SUM", None, None, None),
]


def message(op: str, peer: int, tag: int) -> tuple[object, ...]:
    return (op, *WORLD, 0, None, None, peer, tag)


def collectives(capture: tp.Capture, rank: int) -> list[Collective]:
    return [call.collective for call in capture.calls(rank=rank) if call.collective is not None]


def told(collective: Collective) -> tuple[object, ...]:
    c = collective
    return c.op, c.group, c.description, c.sequence, c.reduce, c.root, c.peer, c.tag


def contents(call: Call, role: str) -> list[list[float]]:
    return [t.load().flatten().tolist() for t in call.tensors if t.role == role]


def check_results(capture: tp.Capture) -> None:
    """Results are read when they are there."""
    for rank in (0, 1):
        calls = {call.name: call for call in capture.calls(rank=rank)}

        def reduced(number: int, calls: dict[str, Call] = calls) -> list[list[float]]:
            return contents(calls[f"Distributed.all_reduce.{number}.forward"], "output")

        later = calls["Distributed.all_reduce.2.forward"]
        assert contents(later, "input") == [[rank + 1.0] * 4]
        assert reduced(2) == [[3.0] * 4]
        for once, twice in ((3, 5), (4, 6)):
            assert reduced(twice) == [[2 * number for number in reduced(once)[0]]]
        received = calls[f"Distributed.irecv.{rank}.forward"]
        assert contents(received, "output") == [[2.0 - rank] * 2]
        assert contents(calls["Tensor.mul_.2.forward"], "input") == [[2.0 - rank] * 2]


@pytest.mark.parametrize("level", ["L1", pytest.param("L2", marks=pytest.mark.slow)])
def test_collectives_and_messages(tmp_path: Path, level: str) -> None:
    run_ranks(tmp_path, "every_collective.py", level)
    capture = tp.load(tmp_path / level)
    assert capture.gaps == ()
    for rank, word in ((0, "send"), (1, "recv")):
        found = collectives(capture, rank)
        last = 4 if level == "L1" else 2  # the operator takes both at once
        assert [told(each) for each in found[: -last - 2]] == [
            *SHARED, message(word, 1 - rank, 0), message(word, 1 - rank, 5),
        ]  # fmt: skip
        assert [told(each) for each in found[-2:]] == [
            message("send", 1 - rank, 7), message("recv", 1 - rank, 7),
        ]  # fmt: skip
        coalesced = [each.sequence for each in found[-last - 2 : -2]]
        assert coalesced == list(range(10, 10 + last))
        assert [each.is_async for each in found[:11]] == [False] * 10 + [True]
    if level == "L1":
        check_results(capture)
    names = [[each.group_name for each in collectives(capture, rank)[:2]] for rank in (0, 1)]
    assert names[0] == names[1]
    assert names[0][0] != names[0][1]


@pytest.mark.parametrize("level", ["L1", pytest.param("L2", marks=pytest.mark.slow)])
def test_functional_collectives_are_read_when_they_are_there(tmp_path: Path, level: str) -> None:
    run_ranks(tmp_path, "functional_collectives.py", level)
    capture = tp.load(tmp_path / level)
    for rank in (0, 1):
        calls = {call.name: call for call in capture.calls(rank=rank)}

        def outputs(name: str, number: int, calls: dict[str, Call] = calls) -> list[list[float]]:
            return contents(calls[f"Distributed.{name}.{number}.forward"], "output")

        three = [3.0] * 4
        assert [outputs("all_reduce", n)[0][0] for n in range(4)] == [3, 2, 3, 3]
        assert outputs("all_gather_into_tensor", 0) == [[1.0] * 4 + [2.0] * 4]
        assert outputs("all_reduce_coalesced", 0) == [three, [6.0] * 4]
        assert outputs("reduce_scatter_tensor", 0) == [[3.0] * 2]
        assert outputs("all_reduce_", 0) == [three]
        assert contents(calls["Distributed.all_reduce.0.forward"], "input") == [[rank + 1.0] * 4]
        # what waits for a collective has its result, too
        assert outputs("_wrap_tensor_autograd", 0) == [three]
        add = calls["Tensor.add.0.forward" if level == "L1" else "Aten.add.0.forward"]
        assert contents(add, "input") == [three]
        scaled = calls["Tensor.mul_.0.forward" if level == "L1" else "Aten.mul_.0.forward"]
        assert contents(scaled, "input") == [three]
        assert contents(scaled, "output") == [[30.0] * 4]
        views = [c for c in calls.values() if c.name.split(".")[1] == "view"]
        assert contents(views[0], "output") == contents(views[-1], "output") == [three]
        never = calls["Distributed.all_reduce.4.forward"].tensor("output.0")
        assert never.gap == "asynchronous, and not waited for when the step ended"
    assert {gap.name for gap in capture.gaps} == {"Distributed.all_reduce.4.forward"}
