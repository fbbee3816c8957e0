"""Which calls are one communication, by what was recorded of them and without it."""

from __future__ import annotations

from typing import Any

import pytest

from tensorprobe.collectives.bounds import out_of_bounds
from tensorprobe.collectives.links import Key, hears, linked, members_of, reduction_of, speaks, told
from tensorprobe.records import Call, Collective, Special, TensorRecord, TensorSummary


def call(api: str, n: int, *args: Any, rank: int = 0, mean: float = 1.0, **more: Any) -> Call:
    name = f"Distributed.{api}.{n}.forward"
    summary = TensorSummary(0.0, 2.0, mean, 2.0, 0, 0, 0)
    read, wrote = (
        TensorRecord(f"{name}.{side}.0", side, "float32", (4,), summary=summary)  # type: ignore[arg-type]
        for side in ("input", "output")
    )
    collective = more.pop("collective", None)
    return Call(
        index=n, name=name, op=f"torch.distributed.{api}", rank=rank, args=(read, *args),
        kwargs=more, outputs=wrote, tensors=(read, wrote), collective=collective,
    )  # fmt: skip


def keys(*calls: Call) -> list[Key | None]:
    return [key for key, _ in linked(calls)]


def test_without_a_number_it_is_the_nth_of_its_name_and_group() -> None:
    group = Special("process_group", "ranks [0, 2]")
    found = keys(
        call("all_reduce", 0), call("all_reduce", 1, group=group), call("all_reduce", 2),
        call("broadcast", 0, 0), call("recv", 0), call("send", 0, 3),
    )  # fmt: skip
    assert found == [
        Key(0, "", "all_reduce", 0), Key(0, "0, 2", "all_reduce", 0), Key(0, "", "all_reduce", 1),
        Key(0, "", "broadcast", 0), None, Key(0, "0 to 3", "message", 0),
    ]  # fmt: skip
    assert members_of(Key(0, "0, 2", "all_reduce", 0), [0, 1, 2]) == (0, 2)
    assert told(Key(0, "0 to 3", "message", 0), []) == "message #0 from rank 0 to rank 3"


def test_what_was_recorded_of_it_decides() -> None:
    fact = Collective(op="all_reduce", group=(4, 1), sequence=7, group_name="7", reduce="MAX")
    each = call("all_reduce", 0, collective=fact)
    assert keys(each) == [Key(0, "1, 4", "all_reduce", 7, "7")]
    assert reduction_of(each) == "max"
    assert reduction_of(call("all_reduce", 0)) is None  # nobody knows: nothing is said against it


@pytest.mark.parametrize(
    ("api", "args", "rank", "said", "heard"),
    [
        ("broadcast", (0,), 0, True, True), ("broadcast", (0,), 1, False, True),
        ("reduce", (0,), 1, True, False), ("send", (1,), 0, True, False),
        ("irecv", (0,), 1, False, True), ("all_reduce", (), 1, True, True),
    ],
)  # fmt: skip
def test_who_speaks_and_who_hears(
    api: str, args: tuple[int, ...], rank: int, said: bool, heard: bool
) -> None:
    each = call(api, 0, *args, rank=rank)
    (key,) = keys(each)
    assert key is not None
    assert (speaks(each, key.kind), hears(each, key.kind)) == (said, heard)


def test_the_mean_of_a_sum_is_the_sum_of_the_means() -> None:
    here = {rank: call("all_reduce", 0, rank=rank, mean=0.5) for rank in (0, 1)}
    key = Key(0, "", "all_reduce", 0)
    found = out_of_bounds(key, "sum", here, (0, 1), 0)  # each gave 0.5 and got 0.5
    assert found is not None
    assert (found.what, found.found, found.expected) == ("mean", 0.5, 1.0)
    assert out_of_bounds(key, "avg", here, (0, 1), 0) is None
    assert out_of_bounds(key, None, here, (0, 1), 0) is None
