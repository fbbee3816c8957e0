"""The files in a step's folder: their names, and whether a shard's header is whole."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensorprobe.tensors.opening import open_file

LOG_FILE = "calls.jsonl"
_MAX_HEADER_NBYTES = 16 << 20  # ours have room for 256 kB
_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])  # nothing is made of what is in them


def shard_name(number: int) -> str:
    return f"tensors-{number}.safetensors"


def header_problem(path: Path) -> str | None:
    """What is wrong with a shard's header, None when it is as it should be."""
    with open_file(path) as file:
        nbytes = int.from_bytes(file.read(8), "little")
        text = file.read(nbytes) if nbytes <= _MAX_HEADER_NBYTES else b""
    if not text or len(text) != nbytes:
        return f"its header, from byte 8, should have {nbytes} bytes"
    try:
        _entries.decode(text)
    except (ValueError, RecursionError) as error:
        return f"its header is damaged: {error}, counted from byte 8"
    return None
