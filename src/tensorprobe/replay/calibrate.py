"""Makes the table of how kernels round: python -m tensorprobe.replay.calibrate CAPTURE...

The captures are of healthy runs, recorded with keep="tensors" on the device that the table is for:
forward and backward, of many shapes and sizes of numbers. Every call is replayed in float64.

    python -m tensorprobe.replay.calibrate runs/healthy-* --out npu.json
    TENSORPROBE_CALIBRATION=npu.json tensorprobe compare actual expected
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.calibration import (
    TABLE,
    CalibratedKernel,
    Section,
    key_of,
    read_table,
    strictest,
    sum_length,
)
from tensorprobe.replay.departures import can_judge, settle
from tensorprobe.replay.kinds import kind_of
from tensorprobe.replay.pairing import pair
from tensorprobe.replay.reference import replay
from tensorprobe.replay.rounding_laws import Departure
from tensorprobe.replay.shaking import differences
from tensorprobe.store.loading import load


class MeasuredCall(msgspec.Struct, frozen=True):
    """One result of a healthy call."""

    call: Call
    record: TensorRecord
    key: str
    length: float
    departure: Departure


def measure(calls: Iterable[Call]) -> Iterator[MeasuredCall]:
    """The departures of every result that has a float64 reference."""
    for forward, backward in pair(calls):
        kind = kind_of(forward)
        if kind in ("random", "dropout", "uninitialised"):
            continue
        if kind not in ("exact", "conversion", "selection"):
            yield from _measure(forward, None)
        if backward is not None:
            yield from _measure(forward, backward)


def _measure(forward: Call, backward: Call | None) -> Iterator[MeasuredCall]:
    subject = backward or forward
    records = [
        record
        for record in subject.tensors
        if record.role == "output" and record.blob is not None and record.numel
        and can_judge(getattr(torch, record.dtype))
    ]  # fmt: skip
    if not records:
        return
    try:
        outputs = replay(forward, backward=backward, noise=False).outputs
    except (NotReplayable, UnreadableCapture):
        return
    moved = differences(forward, backward, outputs)
    for record in records:
        name = record.name.removeprefix(f"{subject.name}.")
        reference = outputs.get(name)
        if reference is None or tuple(reference.shape) != record.shape:
            continue
        length = sum_length(forward, backward, record)
        law = strictest(record.dtype)
        found, _ = settle(record.load(), reference, law, length, moved(name))
        yield MeasuredCall(subject, record, key_of(forward, backward, record), length, found)


def calibrate(sections: list[Section], captures: Iterable[Path], made_by: dict[str, str]) -> int:
    """Add what captures show to the sections of a table; how many results there were."""
    count = 0
    by_device = {section.device: section for section in sections}
    for path in captures:
        for each in measure(load(path).calls):
            device = each.record.device.partition(":")[0]
            if device not in by_device:
                by_device[device] = Section(device, made_by, {})
                sections.append(by_device[device])
            kernel = by_device[device].kernels.setdefault(each.key, CalibratedKernel())
            kernel.add(each.departure, each.length)
            count += 1
    return count


def main() -> None:
    """Read the command line, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorprobe.replay.calibrate", description="See docs/calibrating.md."
    )
    parser.add_argument("captures", type=Path, nargs="+", help="captures of healthy runs")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table (default: the built-in)")
    parser.add_argument("--add", action="store_true", help="keep what the table already has")
    parser.add_argument("--library", default="", help="what the kernels are of: cuBLAS 12.8 ...")
    options = parser.parse_args()
    sections = read_table(options.out) if options.add else []
    made_by = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "library": options.library,
    }
    count = calibrate(sections, options.captures, made_by)
    for section in sections:
        section.kernels = dict(sorted(section.kernels.items()))
    encoded = msgspec.json.format(msgspec.json.encode(sections), indent=1)
    options.out.write_bytes(encoded + b"\n")
    n = sum(len(section.kernels) for section in sections)
    print(f"{count} results of healthy calls, {n} kernels: {options.out}")  # noqa: T201 its answer


if __name__ == "__main__":
    main()
