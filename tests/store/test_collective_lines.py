"""Collectives in a log: ranks as short text, and calls that have none."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorprobe as tp
from tensorprobe.records import Collective
from tensorprobe.store.collective_lines import (
    MAX_RANKS,
    pack_collective,
    pack_ranks,
    unpack_collective,
    unpack_ranks,
)
from tensorprobe.store.lines import encode


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0,1"),
        (tuple(range(8)), "0-7"),
        ((0, 8, 16, 24, 3), "0-24/8,3"),
        ((3, 2, 1, 0), "3,2,1,0"),
    ],
)
def test_ranks_as_text(ranks: tuple[int, ...], text: str) -> None:
    assert pack_ranks(ranks) == text
    assert unpack_ranks(text) == ranks


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_what_is_packed_is_unpacked(ranks: list[int]) -> None:
    assert unpack_ranks(pack_ranks(tuple(ranks))) == tuple(ranks)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", f"0-{MAX_RANKS}", "0-999999999", "٣"])
def test_text_that_is_no_ranks(text: str) -> None:
    with pytest.raises(ValueError, match="group"):
        unpack_ranks(text)


def test_a_line_and_back() -> None:
    collective = Collective(
        op="broadcast", group=(0, 2, 4), sequence=7, group_name="3", root=2, is_async=True
    )
    line = pack_collective(collective)
    assert unpack_collective(line) == collective
    assert json.loads(encode(line)) == {  # type: ignore[arg-type]
        "op": "broadcast", "group": "0-4/2", "sequence": 7, "group_name": "3", "root": 2,
        "async": True,
    }  # fmt: skip


def test_wrong_ranks_cost_no_more_than_their_call(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "rank0" / "step0"
    folder.mkdir(parents=True)
    good = '{"type":"call","id":%d,"name":"Distributed.send.%d.forward","op":"o","collective":%s}\n'
    wrong = '{"op":"all_reduce","group":"0-999999999","sequence":0}'
    lines = [good % (0, 0, wrong), good % (1, 1, wrong.replace("999999999", "3"))]
    (folder / "calls.jsonl").write_text("".join(lines))
    capture = tp.load(tmp_path / "a")
    assert [call.collective.group for call in capture.calls if call.collective] == [(0, 1, 2, 3)]
    assert any("group of more than" in gap.reason for gap in capture.gaps)
