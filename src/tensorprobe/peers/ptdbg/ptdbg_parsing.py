"""parse: what a dump says of a call, as text."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.peers.ptdbg.ptdbg_layout import spelt_name
from tensorprobe.peers.ptdbg.ptdbg_names import tensor_suffix
from tensorprobe.records import Call, Capture
from tensorprobe.store.frames import source_line
from tensorprobe.store.loading import load
from tensorprobe.terminal import say

_FRAME = re.compile(r"(.*):(\d+) in (.*)", re.DOTALL)


def describe(pkl_file: str | os.PathLike[str], prefix: str | None) -> None:
    """Print every call whose name begins with `prefix`."""
    if not isinstance(prefix, str) or not prefix:
        raise BadUsage(
            f"parse: module_name_prefix={prefix!r}: expected the beginning of a name, such as "
            "'Torch_norm_1_forward'"
        )
    path = Path(pkl_file)
    if not path.exists():
        raise UnreadableCapture(f"parse: there is no file '{path}'")
    capture = load(path)
    calls = [call for call in capture.calls if spelt_name(call).startswith(prefix)]
    if not calls:
        raise BadUsage(
            f"parse: '{path}' has no call that begins with '{prefix}'{_near(capture, prefix)}"
        )
    for call in calls:
        say(*_lines(call))


def _near(capture: Capture, prefix: str) -> str:
    names = [spelt_name(call) for call in capture.calls]
    near = difflib.get_close_matches(prefix, names, n=3) or names[:3]
    return f". It has {', '.join(near)}" if near else ""


def _lines(call: Call) -> Iterator[str]:
    yield f"{spelt_name(call)}"
    if call.tensors:
        yield "Statistic Info:"
    for record in call.tensors:
        s = record.summary
        numbers = "" if s is None else f" max {s.max} min {s.min} mean {s.mean}"
        suffix = tensor_suffix(call, record)
        yield f"  {suffix}: torch.{record.dtype} {list(record.shape)}{numbers}"
    if call.stack:
        yield "Stack, outermost first:"
    for frame in reversed(call.stack):
        found = _FRAME.fullmatch(frame)
        if found is None:
            yield f"  {frame}"
            continue
        path, line, function = found.groups()
        yield f'  File "{path}", line {line}, in {function}'
        if source := source_line(path, line):
            yield f"    {source}"
