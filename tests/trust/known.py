"""The failures that are known: a name a line in known_failures.txt."""

from __future__ import annotations

from pathlib import Path

from trust.harness import Outcome

FILE = Path(__file__).parent / "known_failures.txt"
HEAD = """\
# Runs that fail today: case, keep and level. With "(cause)" the verdict and the call are right, and
# only the cause or the number of culprits is not. Each is a strict xfail: a mended one must go.
# Written by: python tests/trust/table.py --accept
"""


def failure_of(said: Outcome) -> str:
    """The line of a failure; empty if all is well."""
    if said.wrong:
        return said.name
    return f"{said.name} (cause)" if said.wrong_cause else ""


def read() -> set[str]:
    lines = FILE.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def write(failures: list[str]) -> None:
    FILE.write_text(HEAD + "".join(f"{line}\n" for line in failures))
