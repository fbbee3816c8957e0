"""Metrics of two stored tensors: in this process, or in one that was started for it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from tensorprobe.errors import TensorprobeError
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.metrics import measure_pieces
from tensorprobe.tensors.pair_metrics import PairMetrics
from tensorprobe.tensors.pieces import open_pieces

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
    except (TensorprobeError, OSError, ValueError, TypeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def serve_all(ends: Sequence[int]) -> None:
    """A process for each of these sockets, until the one that started this ends it or is gone."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on stdin says when to end
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program may ignore it, and we inherit that
    children: list[int] = []
    for i, end in enumerate(ends):
        try:
            child = os.fork()
        except OSError:  # the system's limit: fewer will do
            for left in ends[i:]:
                os.close(left)
            break
        if child == 0:
            for other in ends[i + 1 :]:
                os.close(other)
            _serve(end)
        children.append(child)
        os.close(end)
    sys.stdin.buffer.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def _serve(end: int) -> NoReturn:
    """Lists of pairs in, metrics out, until the other end is closed."""
    with suppress(EOFError, OSError), open(end, "rb") as source, open(end, "wb") as sink:
        while True:
            pairs: list[StoredPair] = pickle.load(source)
            pickle.dump([measure_stored(*pair) for pair in pairs], sink, pickle.HIGHEST_PROTOCOL)
            sink.flush()
    os._exit(0)
