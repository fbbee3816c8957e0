"""What is recorded of collectives and messages, on two gloo processes."""

from pathlib import Path

import pytest
from gloo_ranks import needs_gloo, run_ranks

import tensorprobe as tp
from tensorprobe.records import Call, Collective

pytestmark = needs_gloo


def collectives(capture: tp.Capture, rank: int) -> list[Collective]:
    return [call.collective for call in capture.calls(rank=rank) if call.collective is not None]


def told(collective: Collective) -> tuple[object, ...]:
    c = collective
    return c.op, c.group, c.description, c.sequence, c.reduce, c.root, c.peer, c.tag


@pytest.mark.parametrize("level", ["L1", pytest.param("L2", marks=pytest.mark.slow)])
def test_a_collective_has_the_same_facts_on_each_rank(tmp_path: Path, level: str) -> None:
    run_ranks(tmp_path, "every_collective.py", level)
    capture = tp.load(tmp_path / level)
    assert capture.gaps == ()
    ranks = [collectives(capture, rank) for rank in (0, 1)]
    world = (0, 1), "default_pg"
    pair = (0, 1), "undefined"
    shared = [
        ("all_reduce", *world, 0, "MAX", None, None, None),
        ("all_reduce", *pair, 0, "SUM", None, None, None),
        ("broadcast", *world, 1, None, 1, None, None),
        ("reduce", *world, 2, "PRODUCT", 1, None, None),
        ("all_gather", *world, 3, None, None, None, None),
        ("all_gather_into_tensor", *world, 4, None, None, None, None),
        ("reduce_scatter_tensor", *world, 5, "SUM", None, None, None),
        ("all_to_all_single", *world, 6, None, None, None, None),
        ("gather", *world, 7, None, 0, None, None),
        ("scatter", *world, 8, None, 0, None, None),
        ("all_reduce", *world, 9, "SUM", None, None, None),
    ]
    messages = [
        [("send", *world, 0, None, None, 1, 0), ("send", *world, 0, None, None, 1, 5)],
        [("recv", *world, 0, None, None, 0, 0), ("recv", *world, 0, None, None, 0, 5)],
    ]
    assert [[told(each) for each in found] for found in ranks] == [
        shared + messages[0], shared + messages[1],
    ]  # fmt: skip
    assert ranks[0][0].group_name == ranks[1][0].group_name != ranks[0][1].group_name
    assert [each.is_async for each in ranks[0]][:11] == [False] * 10 + [True]


def output(call: Call) -> list[float]:
    return call.tensor("output.0").load().tolist()
