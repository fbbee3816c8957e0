"""A switch that one rank alone has: its products are not judged by it, and it is the cause."""

from typing import Any

from tensorprobe.comparing.rank_switches import RankSwitches
from tensorprobe.comparing.verdict import Culprit


def facts(*is_on: bool) -> dict[str, Any]:
    ranks: dict[str, Any] = {
        str(rank): {"rank": rank, "numerics": {"matmul_tf32": on}} for rank, on in enumerate(is_on)
    }
    return {"ranks": ranks, "numerics": {"a": 1}}


def culprit(rank: int, op: str, error: float) -> Culprit:
    return Culprit(
        name="Functional.linear.0.forward", kind="output", direction="forward", step=0, rank=rank,
        module="", op=op, stack=(), reason="off", own_error=error, inherited_error=0.0,
    )  # fmt: skip


def test_a_rank_alone_is_judged_as_the_others() -> None:
    switches = RankSwitches((facts(False, True, False), facts(False, False, False)), (0, 1, 2))
    assert switches.facts(1) == ({}, {})
    assert switches.facts(0)[0]["numerics"] == {"matmul_tf32": False}
    found = [culprit(1, "torch.nn.functional.linear", 2000.0), culprit(0, "torch.matmul", 2000.0),
             culprit(1, "torch.tanh", 2000.0), culprit(1, "torch.matmul", 1e6)]  # fmt: skip
    switches.name(found)
    assert [each.cause for each in found] == ["flag", "result", "result", "result"]
    assert found[0].reason == (
        "numerics.matmul_tf32 is True on rank 1, False expected, as on the other ranks; off"
    )


def test_what_all_ranks_have_is_meant() -> None:
    switches = RankSwitches((facts(True, True), facts(False, False)), (0, 1))
    assert switches.facts(1)[0]["numerics"] == {"matmul_tf32": True}
    found = [culprit(1, "torch.matmul", 2000.0)]
    switches.name(found)
    assert found[0].cause == "result"
