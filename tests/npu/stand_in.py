"""What a check asks of the libraries that stand in for CANN, in its own process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager


@functools.cache
def _operators() -> ctypes.CDLL:
    library = ctypes.CDLL("libopapi.so")
    for name in ("cann_plant", "cann_ran"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def operators_run() -> dict[str, int]:
    """How often each operator was run in this process."""
    lines = _operators().cann_ran().decode().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


@contextmanager
def planted(faults: str) -> Iterator[None]:
    """Inside, operators are wrong: "Gelu=scale:1.01;Mm@2=nan"."""
    wrong = _operators().cann_plant(faults.encode())
    if wrong:
        raise ValueError(wrong.decode())
    try:
        yield
    finally:
        _operators().cann_plant(b"")
