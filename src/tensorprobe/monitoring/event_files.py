"""TensorBoard's event files: scalars in a few lines of protobuf, framed with checksums.

Written here and not by torch.utils.tensorboard: that needs the package tensorboard on the machine
of the training, and takes longer. Its own reader opens the files in the tests.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_STRING = 7  # of TensorFlow's dtypes
_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


class EventFile:
    """Writes scalars by step.

    events = EventFile(Path("runs/a"))
    events.write(3, {"loss": 0.5})
    events.close()
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        start, host = time.time(), socket.gethostname()
        for number in itertools.count():
            name = f"events.out.tfevents.{start:.0f}.{host}.{os.getpid()}.{number}"
            try:
                self._file = (folder / name).open("xb", buffering=0)
                break
            except FileExistsError:
                continue
        self._write(_double(1, start) + _text(3, "brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float], at: float | None = None) -> None:
        """Add the scalars of a step; those that are not finite stay as they are."""
        if not scalars:
            return
        values = b"".join(_value(tag, number) for tag, number in scalars.items())
        when = time.time() if at is None else at
        self._write(_double(1, when) + _varint(2 << 3) + _varint(step) + _bytes(5, values))

    def keep(self, name: str, files: Sequence[Path], text: str) -> bool:
        """Add the line of a report: TensorBoard has no place for files."""
        content = _varint(1 << 3) + _varint(_STRING) + _bytes(8, text.encode())
        plugin = _bytes(1, _bytes(1, _text(1, "text")))
        value = _bytes(1, _text(1, f"tensorprobe/{name}") + _bytes(8, content) + _bytes(9, plugin))
        self._write(_double(1, time.time()) + _varint(2 << 3) + _varint(0) + _bytes(5, value))
        return True

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        size = struct.pack("<Q", len(event))
        parts = (
            size,
            struct.pack("<I", masked_crc(size)),
            event,
            struct.pack("<I", masked_crc(event)),
        )
        self._file.write(b"".join(parts))


def _value(tag: str, number: float) -> bytes:
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, number))
    return _bytes(1, _text(1, tag) + _varint(2 << 3 | 5) + packed)


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", "backslashreplace"))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def _tables() -> list[list[int]]:
    first = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        first.append(byte)
    tables = [first]
    for _ in range(7):
        tables.append([each >> 8 ^ first[each & 0xFF] for each in tables[-1]])
    return tables


_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7 = _tables()


def crc32c(content: bytes) -> int:
    """The checksum of the format, eight bytes at a time."""
    crc = 0xFFFFFFFF
    whole = len(content) & ~7
    for low, high in struct.iter_unpack("<II", content[:whole]):
        low ^= crc
        crc = (
            _T7[low & 0xFF] ^ _T6[low >> 8 & 0xFF] ^ _T5[low >> 16 & 0xFF] ^ _T4[low >> 24]
            ^ _T3[high & 0xFF] ^ _T2[high >> 8 & 0xFF] ^ _T1[high >> 16 & 0xFF] ^ _T0[high >> 24]
        )  # fmt: skip
    return _finish(crc, content[whole:])


def _finish(crc: int, rest: Iterable[int]) -> int:
    for byte in rest:
        crc = crc >> 8 ^ _T0[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc(content: bytes) -> int:
    """A checksum as TFRecord files have it."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
