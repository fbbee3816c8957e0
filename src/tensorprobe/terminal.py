"""Lines for a person to read: what came out of a file is shown as it is, and never obeyed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_PATIENCE_S = 2.0


def printable(text: str) -> str:
    r"""The text in one line: what a terminal would obey, hide or turn round is escaped (\x1b)."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def say(*lines: str) -> None:
    """Lines of a command's result."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


def warn(*lines: str) -> None:
    """Lines beside it: errors, and what is being done."""
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stderr.flush()


@contextlib.contextmanager
def busy(text: str) -> Iterator[None]:
    """Say on a terminal what takes more than two seconds, with the time so far; nothing is printed
    elsewhere, and nothing is left when it is over. Print no lines inside."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_show_until, args=(text, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show_until(text: str, over: threading.Event) -> None:
    if over.wait(_PATIENCE_S):
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(printable(text), total=None)
        over.wait()
