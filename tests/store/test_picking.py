"""Calls that are picked in one pass are the calls of the whole capture, and so are the counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from store_making import Ready, open_writer, tensor, write_capture, write_relu

import tensorprobe as tp
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Call, Gap
from tensorprobe.store.lines import CallLine, EndLine, StackLine
from tensorprobe.store.picking import CaptureCounts, open_picker

LOG = "rank0/step0/calls.jsonl"


def assert_same(path: Path) -> CaptureCounts:
    """All calls, picked, and the counts are those of the capture that is loaded as a whole."""
    capture = tp.load(path)
    gaps: list[Gap] = []
    picker = open_picker(path)
    picked, tally = picker.pick(lambda call: True, on_gap=gaps.append)
    assert [repr(call) for call in picker.whole(picked)] == [repr(call) for call in capture.calls]
    assert sorted(map(repr, gaps)) == sorted(map(repr, capture.gaps))
    assert tally == CaptureCounts(
        len(capture.calls),
        len(capture.begun),
        len(capture.gaps),
        set(capture.steps),
        set(capture.ranks),
        capture.facts["unfinished"],
    )
    assert picker.count() == tally  # a small one is read for it
    assert picker.pick(lambda call: False) == ([], tally)
    return tally


def test_a_recorded_training(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tp.Recorder(tmp_path / "a", level="mix", keep="tensors") as rec:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            rec.step()
    tally = assert_same(tmp_path / "a")
    assert tally.steps == {0, 1, 2}
    assert tally.is_read
    counted = open_picker(tmp_path / "a").count(read_nbytes=0)
    assert (counted.calls, counted.gaps, counted.is_read) == (tally.calls, tally.gaps, False)


def write_resumed(root: Path) -> Path:
    """Two ranks; each has a step that was stopped and started: ids begin anew each time."""
    for rank in range(2):
        out = open_writer(root, rank, "run")
        for step in (0, 1, 1, 1):
            out.begin_step(step)
            out.stack(StackLine(0, [f"model.py:{len(out._begun_steps)} in forward"]))
            out.call(CallLine(id=5, name="Module.m", op="Net", stack=0, args=[tensor(1, (200,))]))
            for n in range(2):
                write_relu(out, n, np.full(200, 10 * step + n, np.float32))
            out.end(EndLine(id=5, outputs=tensor(0, (200,))))
            out.call(CallLine(id=6, name="begun", op="op", stack=0, args=[tensor(0, (200,))]))
        out.close()
    return root


def test_a_step_that_was_stopped_and_started(tmp_path: Path) -> None:
    root = write_resumed(tmp_path / "a")
    tally = assert_same(root)
    assert (tally.calls, tally.begun, tally.ranks) == (32, 8, {0, 1})
    # The line at the end of a step that was resumed does not tell of all of it: lines are counted.
    counted = open_picker(root).count(read_nbytes=0)
    assert (counted.calls, counted.unfinished) == (32, [])


@pytest.mark.parametrize(
    "damage",
    [
        b"\0\0\0\0", b'{"type":"call"}', b'{"type":"nonsense","id":1}', b"[1,2", b"\xff\xfe",
        b'{"type":"call","id":1,"name":"x","op":"y","args":[{"what":1}]}',
        b'{"type":"call","id":1,"name":"x","op":"y","args":[{"tensor":{"shape":[1]}}]}',
        b'{"type":"call","id":1,"name":"x","op":"y","kwargs":{"k":{"tensor":1}}}',
        b'{"type":"end","id":77}', b'{"type":"stack","id":1,"frames":["\xff"]}',
        b'{"type":"value","id":800,"summary":[1,2]}', b'{"type":"value","id":800,"summary":["x"]}',
        b'{"type":"closed","calls":1,"gaps":0}',
    ],
)  # fmt: skip
def test_a_damaged_line(tmp_path: Path, damage: bytes) -> None:
    root = write_capture(tmp_path / "a", n_calls=4)
    whole = (root / LOG).read_bytes().splitlines()
    for position in (0, len(whole) // 2, len(whole)):
        (root / LOG).write_bytes(b"\n".join([*whole[:position], damage, *whole[position:], b""]))
        assert_same(root)


@pytest.mark.parametrize(
    "outputs", [b'{"what":1}', b'{"tensor":{"shape":[1]}}', b'{"tensor":1}', b'{"tuple":1}']
)
def test_an_end_that_cannot_be_read_leaves_its_call(tmp_path: Path, outputs: bytes) -> None:
    root = write_capture(tmp_path / "a")
    whole = (root / LOG).read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(whole) if line.startswith(b'{"type":"end","id":1,'))
    whole[at] = b'{"type":"end","id":1,"outputs":%s}\n' % outputs
    (root / LOG).write_bytes(b"".join(whole))
    capture = tp.load(root)
    assert [call.status for call in capture.calls] == ["complete", "begun", "complete"]
    (gap,) = capture.gaps
    assert gap.name == f"{LOG}:{at + 1}"
    assert gap.reason.startswith("the end of call 1: ")
    assert_same(root)


def test_cut_off_anywhere(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a")
    whole = (root / LOG).read_bytes()
    for end in range(1, len(whole), 97):
        (root / LOG).write_bytes(whole[:end])
        tally = assert_same(root)
        assert tally.unfinished == ["rank0/step0"]
        counted = open_picker(root).count(read_nbytes=0)
        assert (counted.calls, counted.begun, counted.gaps, counted.unfinished) == (
            tally.calls, tally.begun, tally.gaps, tally.unfinished,
        )  # fmt: skip


def test_no_more_is_read_than_is_picked(tmp_path: Path) -> None:
    """Until the calls that are picked have ended; all that comes behind could be anything."""
    out = open_writer(tmp_path / "a")
    for step in range(2):
        out.begin_step(step)
        out.call(CallLine(id=90, name="Module.m", op="Net"))
        for n in range(4):
            write_relu(out, n)
        out.end(EndLine(id=90, outputs=tensor(0)))
        write_relu(out, 4)
    out.close()
    log = tmp_path / "a" / LOG
    whole = log.read_bytes().splitlines(keepends=True)
    end = next(i for i, line in enumerate(whole) if line.startswith(b'{"type":"end","id":90'))
    log.write_bytes(b"".join([*whole[: end + 1], b"no line of ours\n"]))
    gaps: list[Gap] = []
    picker = open_picker(tmp_path / "a")
    picked, _ = picker.pick(lambda call: True, on_gap=gaps.append, most=2)
    assert [each.call.name for each in picked] == ["Module.m", "Torch.relu.0.forward"]
    assert [each.call.status for each in picked] == ["complete", "complete"]
    assert gaps == []


def test_a_call_that_is_picked_alone_has_all_it_holds(tmp_path: Path) -> None:
    """Its value may be written long before it, or long after."""
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    out.value(7, Ready())
    for n in range(3):
        write_relu(out, n)
    out.call(CallLine(id=9, name="late", op="op", args=[tensor(7), tensor(8)]))
    for n in range(3, 6):
        write_relu(out, n)
    out.value(8, Ready())
    out.close()
    picker = open_picker(tmp_path / "a")
    picked, _ = picker.pick(lambda call: call.name == "late")
    (call,) = picker.whole(picked)
    assert call == tp.load(tmp_path / "a").call("late")
    assert all(record.summary for record in call.tensors)


def test_what_is_asked_of_a_call_is_known_before_it_ends(tmp_path: Path) -> None:
    root = write_resumed(tmp_path / "a")
    asked: list[Call] = []
    open_picker(root).pick(lambda call: bool(asked.append(call)))
    for ours, theirs in zip(asked, tp.load(root).calls, strict=True):
        for field in ("index", "name", "op", "module", "direction", "step", "rank"):
            assert getattr(ours, field) == getattr(theirs, field)


def test_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    """Alone it is refused, as by `load`; beside another step it is a gap."""
    root = write_resumed(tmp_path / "a")
    log = root / LOG
    log.unlink()
    os.mkfifo(log)
    assert assert_same(root).gaps == 1
    counted = open_picker(root).count(read_nbytes=0)
    assert (counted.calls, counted.gaps) == (28, 1)
    for other in (root / "rank0/step1", *root.glob("rank1/step*")):
        shutil.rmtree(other)
    for whole in (tp.load, lambda path: open_picker(path).count()):
        with pytest.raises(UnreadableCapture, match="is a FIFO; expected a regular file"):
            whole(root)
