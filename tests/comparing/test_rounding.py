"""What two summaries say of the bits that they were made of."""

from __future__ import annotations

import msgspec

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import distance, same_bits
from tensorprobe.records import TensorRecord
from tensorprobe.tensors.summary import TensorSummary

SUMMARY = TensorSummary(-0.083, 0.094, -2.33e-06, 5.136156329544522, 0, 0, 0)
LAST_DIGIT = msgspec.structs.replace(SUMMARY, norm=5.13615632954452)
HOST = TensorRecord("output.0", "output", "float32", (4, 64, 256), summary=SUMMARY)


def test_another_device_sums_in_another_order() -> None:
    there = msgspec.structs.replace(HOST, device="cuda:0", summary=LAST_DIGIT)
    pair = TensorPair("output.0", there, HOST)
    assert same_bits(pair) is None
    assert distance(pair) < 1e-3


def test_one_device_sums_in_one_order() -> None:
    """Equal numbers with another last digit of their sum are in other places."""
    moved = msgspec.structs.replace(HOST, summary=LAST_DIGIT)
    pair = TensorPair("output.0", moved, HOST)
    assert same_bits(pair) is False
    assert distance(pair) == 2.0**24
