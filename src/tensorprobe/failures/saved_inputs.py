"""The inputs of failed calls on disk: a native capture with nothing in it but those calls."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from tensorprobe.failures.followed_calls import Given, WatchedCall
from tensorprobe.follow.naming import split_direction, with_direction
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.encode import as_arguments
from tensorprobe.record.facts import environment_facts
from tensorprobe.records import Direction
from tensorprobe.store.claim import run_identity
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.summarizer import Summarizer


def direction_name(call: WatchedCall, direction: Direction) -> str:
    """What a call, or its backward, is called."""
    return with_direction(split_direction(call.names.name)[0], direction)


class SavedInputs:
    """Writes what calls were given into `folder`, each when it has failed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._summarizer = Summarizer(stats=True, digest=True)
        facts = environment_facts()
        self.writer = CaptureWriter(
            folder,
            rank,
            run_identity(os.environ),
            {**facts, "config": {"level": "L1", "keep": "tensors"}},
            facts,
            results=self._summarizer,
        )
        self._ids = itertools.count(1)
        self._saved: set[tuple[int, str]] = set()

    def save(self, call: WatchedCall, direction: Direction, error: str) -> list[str]:
        """Write a call and, where it failed in backward, its backward; gives what is missing."""
        self.writer.begin_step(call.step)
        missing: list[str] = []
        stack = next(self._ids)
        self.writer.stack(StackLine(id=stack, frames=call.frames))
        if (call.step, call.names.name) not in self._saved:
            self._saved.add((call.step, call.names.name))
            line = self._line(call, "forward", stack)
            line.args, line.kwargs, line.notes = call.args, call.kwargs, list(call.notes)
            missing += self._write(line, call.given, error if direction == "forward" else "")
        if direction == "backward":
            line = self._line(call, "backward", stack)
            tree = {path: {"tensor": given.line} for path, given in call.incoming.items()}
            line.args, line.kwargs = as_arguments(tree)
            missing += self._write(line, list(call.incoming.values()), error)
        self.writer.close()
        if self.writer.error is not None:
            missing.append(f"the disk refused: {self.writer.error}")
        return missing

    def _line(self, call: WatchedCall, direction: Direction, stack: int) -> CallLine:
        return CallLine(
            id=next(self._ids),
            name=direction_name(call, direction),
            op=call.names.api.op,
            module=call.names.module,
            direction=direction,
            thread=call.thread,
            stack=stack,
        )

    def _write(self, line: CallLine, tensors: list[Given], error: str) -> list[str]:
        missing: list[str] = []
        numbers: dict[int, int] = {}
        for given in tensors:
            label = f"{line.name}.input.{'.'.join(given.path)}"
            number = numbers.get(id(given.content))
            if number is None:
                number = numbers[id(given.content)] = next(self._ids)
                problem = self._value(number, label, given)
                if problem:
                    missing.append(f"{label}: {problem}")
            given.line.value = number
        self.writer.call(line)
        for text in missing:
            self.writer.gap(GapLine(*text.split(": ", 1)))
        status: Any = "raised" if error else "complete"
        notes = [] if error else ["what it returned is not kept"]
        self.writer.end(EndLine(id=line.id, status=status, error=error or None, notes=notes))
        return missing

    def _value(self, number: int, label: str, given: Given) -> str:
        """Write the content of one tensor; gives why there is none."""
        try:
            with Quiet():
                copy = given.content.read()
                result = self._summarizer.submit(copy.tensor())
        except Exception as error:  # noqa: BLE001 recording one call: this tensor is missing
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.writer.value(number, gap=reason)
            return reason
        self.writer.tensor(number, label, copy.dtype, copy.shape, copy.get, copy.nbytes)
        self.writer.value(number, result)
        return ""
