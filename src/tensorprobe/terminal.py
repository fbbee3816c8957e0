"""Lines for a person to read: what came out of a file is shown as it is, and never obeyed."""

from __future__ import annotations

import sys


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
