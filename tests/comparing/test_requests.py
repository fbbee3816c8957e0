"""Rows that are told apart by the request that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorprobe as tp

Span = tuple[Any, int, int]
REQUESTS = {"a": [3, 1, 4, 1], "b": [5, 9, 2]}


class Sums(nn.Module):
    """A token's result is made of that token alone, whatever it lies beside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor, off: float = 0.0) -> Tensor:
        return self.head(self.embed(ids) + off)


def record(folder: Path, calls: Sequence[tuple[list[list[int]], list[Span], str, float]]) -> Path:
    model = Sums()
    with tp.Recorder(folder, level="L0", keep="tensors", log=lambda text: None) as recorder:
        for ids, spans, layout, off in calls:
            recorder.save_requests(spans, layout=layout)
            model(torch.tensor(ids), off)
            recorder.step()
    return folder


PADDED = ([[3, 1, 4, 1], [5, 9, 2, 0]], [("a", 0, 4), ("b", 0, 3)], "right", 0.0)


def packed(off: float = 0.0) -> list[Any]:
    """One token of b with the first of a; then the rest, in one row."""
    return [
        ([[5, 3]], [("b", 0, 1), ("a", 0, 1)], "packed", 0.0),
        ([[1, 4, 1, 9, 2]], [("a", 1, 4), ("b", 1, 3)], "packed", off),
    ]


def test_packed_against_padded(tmp_path: Path) -> None:
    a, e = record(tmp_path / "a", packed()), record(tmp_path / "e", [PADDED])
    verdict = tp.compare(a, e, at="outputs", rows="saved").verdict
    assert verdict.ok
    assert verdict.rows is not None
    assert (verdict.rows.compared, verdict.rows.only_actual, verdict.rows.only_expected) == (
        7,
        0,
        0,
    )
    left = ([[3, 1, 4, 1], [0, 5, 9, 2]], [("a", 0, 4), ("b", 0, 3)], "left", 0.0)
    other = record(tmp_path / "left", [left])
    assert tp.compare(other, e, at="outputs", rows="saved").ok


def test_the_token_that_parts_is_named(tmp_path: Path) -> None:
    calls = [
        ([[3, 1]], [("a", 0, 2)], "packed", 0.0),
        ([[4]], [("a", 2, 3)], "packed", 0.5),
        ([[1]], [("a", 3, 4)], "packed", 0.0),
    ]
    verdict = tp.compare(
        record(tmp_path / "a", calls), record(tmp_path / "e", [PADDED]), at="outputs", rows="saved"
    ).verdict
    assert verdict.culprits[0].step == 1
    assert "the worst row is token 2 of request a" in verdict.culprits[0].reason


def test_a_request_of_another_name_has_no_partner(tmp_path: Path) -> None:
    other = ([[3, 1, 4, 1]], [("c", 0, 4)], "packed", 0.0)
    verdict = tp.compare(
        record(tmp_path / "a", [other]),
        record(tmp_path / "e", [PADDED]),
        at="outputs",
        rows="saved",
    ).verdict
    assert not verdict.ok


@pytest.mark.parametrize(
    ("spans", "layout", "expected"),
    [
        ([("a", 0)], "packed", r"found \('a', 0\); expected \(request, first token, end\)"),
        ([("a", 3, 3)], "packed", r"found \('a', 3, 3\)"),
        ([("a", -1, 3)], "packed", r"found \('a', -1, 3\)"),
        ([(1.5, 0, 3)], "packed", r"found \(1.5, 0, 3\)"),
        ([], "packed", "found none"),
        ([("a", 0, 1)], "middle", "layout='middle': expected one of packed, left, right"),
    ],
)
def test_wrong_spans(tmp_path: Path, spans: Any, layout: Any, expected: str) -> None:
    with tp.Recorder(tmp_path, log=lambda text: None) as recorder:
        torch.ones(2)
        with pytest.raises(tp.BadUsage, match=expected):
            recorder.save_requests(spans, layout=layout)


def test_saving_is_no_call_of_the_program_and_needs_no_recording(tmp_path: Path) -> None:
    recorder = tp.Recorder(tmp_path / "a", level="L1", log=lambda text: None)
    recorder.save_requests([(7, 0, 2)])  # not started: nothing to say it to
    with recorder:
        torch.ones(2)
        recorder.save_requests([(7, 0, 2)])
    names = [call.name for call in tp.load(tmp_path / "a").calls]
    assert names == ["Torch.ones.0.forward", "Saved.requests.0.forward"]


def test_damaged_names_label_nothing(tmp_path: Path) -> None:
    a, e = record(tmp_path / "a", packed()), record(tmp_path / "e", [PADDED])
    for log in a.rglob("calls.jsonl"):
        text = log.read_text()
        assert '["b","a"]' in text or '["a","b"]' in text
        log.write_text(text.replace('["b","a"]', '["b"]').replace('["a","b"]', "null"))
    with pytest.raises(tp.BadUsage, match="has saved none"):
        tp.compare(a, e, at="outputs", rows="saved")
