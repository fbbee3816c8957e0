"""Metrics of two stored tensors: in this process, or in one that was started for it."""

from __future__ import annotations

import pickle
import sys
from typing import IO

from tensorprobe.contents.blob import Blob
from tensorprobe.contents.pieces import open_pieces
from tensorprobe.errors import TensorprobeError
from tensorprobe.numerics.metrics import PairMetrics, measure_pieces

Stored = tuple[str, str, tuple[int, ...], Blob]  # a tensor's name, dtype, shape, and where it is
StoredPair = tuple[Stored, Stored]


def measure_stored(actual: Stored, expected: Stored) -> PairMetrics | str:
    """The metrics of two stored tensors, or why they cannot be had."""
    try:
        a = open_pieces(*actual)
        try:
            e = open_pieces(*expected)
            try:
                return measure_pieces(a, e)
            finally:
                e.close()
        finally:
            a.close()
    except (TensorprobeError, OSError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def serve(stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
    """The child: lists of pairs in, metrics out, until the parent closes the pipe or is gone."""
    source, sink = stdin or sys.stdin.buffer, stdout or sys.stdout.buffer
    while True:
        try:
            pairs: list[StoredPair] = pickle.load(source)
        except EOFError:
            return
        pickle.dump([measure_stored(*pair) for pair in pairs], sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()
