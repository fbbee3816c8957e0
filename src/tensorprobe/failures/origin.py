"""Where an exception comes from, read off its traceback: what no mode and no node could tell."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from tensorprobe.follow.tracebacks import is_stand_in
from tensorprobe.trouble import text_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")
_ENTRY = os.path.join(_TORCH, "_dynamo", "eval_frame.py")
_SCRIPT = "operation failed in the TorchScript interpreter"
# Where the code of a compiled part runs: torch.fx's own, inductor's files, what stands around them.
_GENERATED = re.compile(
    r"<eval_with_key>|.*[\\/]torchinductor_|"
    + "|".join(re.escape(os.path.join(_TORCH, room)) for room in ("_inductor", "_functorch"))
)
_OURS = str(Path(__file__).parents[1]) + os.sep
_WORKER = re.compile(r"Caught (\S+) in DataLoader worker process (\d+)\.")
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_ORIGINAL_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class CustomFunction(NamedTuple):
    """A custom autograd.Function whose own code was running."""

    kind: type
    args: tuple[Any, ...]
    direction: str


class CompiledPart(NamedTuple):
    """A part that torch.compile made, or was making."""

    name: str
    frames: list[str]


class Elsewhere(NamedTuple):
    """Where no call of this process is seen: a worker of a DataLoader, TorchScript."""

    text: str


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames that an exception has come through so far, the outermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def user_frames(error: BaseException) -> list[str]:
    """The program's own lines that led to it, the innermost first, as in a recorded stack."""
    trace = error.__traceback__
    outside = traceback.walk_stack(trace.tb_frame.f_back) if trace is not None else ()
    lines = []
    for frame, number in [*reversed([*outside]), *traceback.walk_tb(trace)]:
        code = frame.f_code
        own = not code.co_filename.startswith((_TORCH, _OURS, "<"))
        if own and not _GENERATED.match(code.co_filename) and not is_stand_in(code):
            name = getattr(code, "co_qualname", code.co_name)
            lines.append(f"{code.co_filename}:{number} in {name}")
    return lines[::-1]


def words(error: BaseException) -> tuple[str, str]:
    """The name of its class and its text, which is the program's own code and may fail."""
    return type(error).__name__, text_of(error) or ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those it was raised from or while handling."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def origin(error: BaseException) -> CustomFunction | CompiledPart | Elsewhere | None:
    """What kind of place raised it; None where it is the program's own code."""
    elsewhere = _elsewhere(words(error)[1])
    if elsewhere is not None:
        return elsewhere
    frames = frames_of(error)
    return _compiled(error, frames) or _custom_function(frames)


def is_programs_own(error: BaseException) -> bool:
    """Whether an exception that came out of backward was raised by a hook of the program.

    What C++ raises has no frame below the engine's, what torch's Python raises ends in its files,
    and a device or tensor written in Python is called by `__torch_dispatch__`.
    """
    frames = frames_of(error)
    engine = [n for n, frame in enumerate(frames) if frame.f_code.co_filename == _ENGINE]
    below = frames[engine[-1] + 1 :] if engine else []
    if not below or below[-1].f_code.co_filename.startswith(_TORCH):
        return False
    return not any(
        _is_apply(frame) or frame.f_code.co_name == "__torch_dispatch__" for frame in below
    )


def _custom_function(frames: list[FrameType]) -> CustomFunction | None:
    """The innermost custom Function that the exception came out of."""
    for number in range(len(frames) - 1, -1, -1):
        frame = frames[number]
        if not _is_apply(frame):
            continue
        if number == len(frames) - 1:
            return None  # `apply` itself refused: torch's own words about a wrong use
        local = frame.f_locals
        if "cls" in local:
            return CustomFunction(local["cls"], tuple(local.get("args", ())), "forward")
        kind = getattr(type(local.get("self")), "_forward_cls", None)
        if kind is not None:
            return CustomFunction(kind, tuple(local.get("args", ())), "backward")
    return None


def _is_apply(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _FUNCTION and frame.f_code.co_name.startswith("apply")


def _compiled(error: BaseException, frames: list[FrameType]) -> CompiledPart | None:
    """The part whose generated code, or whose making, the exception came out of."""
    made = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    inside = [frame for frame in frames if _GENERATED.match(frame.f_code.co_filename)]
    if not made and not inside:
        return None
    name = ""
    frame: FrameType | None = inside[0] if inside else frames[-1]
    while frame is not None and not name:  # by the callers: the traceback begins where it is now
        name = _compiled_name(frame)
        frame = frame.f_back
    return CompiledPart(name or "part", user_frames(error)) if name or made else None


def _compiled_name(frame: FrameType) -> str:
    """What was compiled, where the frame is dynamo's entry to it."""
    if frame.f_code.co_filename != _ENTRY or frame.f_code.co_name != "compile_wrapper":
        return ""
    function = frame.f_locals.get("fn")
    module = getattr(function, "__self__", function)
    if isinstance(module, torch.nn.Module):
        return type(module).__name__
    name = getattr(function, "__qualname__", "")
    return str(name).replace(".<locals>", "").replace("<lambda>", "lambda")


def _elsewhere(text: str) -> Elsewhere | None:
    if _SCRIPT in text:
        return Elsewhere(
            "the error is inside TorchScript, whose calls are not visible. To have the one that "
            "failed named, run once more with PYTORCH_JIT=0"
        )
    found = _WORKER.search(text)
    if found:
        lines = _ORIGINAL_FRAME.findall(text)
        theirs = [line for line in lines if not line[0].startswith((_TORCH, _OURS))]
        file, number, name = (theirs or lines or [("?", "0", "?")])[-1]
        return Elsewhere(
            f"{found[1]} was raised in DataLoader worker process {found[2]}, at {file}:{number} in "
            f"{name}: not in a torch call of this process. To watch that code too, run it here: "
            "DataLoader(..., num_workers=0)"
        )
    dead = _DEAD_WORKER.search(text)
    if dead is None:
        return None
    return Elsewhere(
        f"DataLoader worker process {dead[1].strip()} ended without an exception (killed, out of "
        "memory or shared memory, or a crash in C code): not in a torch call of this process. To "
        "see the line, run it here: DataLoader(..., num_workers=0), with python -X faulthandler"
    )
