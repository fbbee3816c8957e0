"""The kernels that generated code calls, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CALL = re.compile(r"^\s+(cpp_fused\w*|extern_kernels\.\w+)\((.*)\)\s*$")
_OUT = re.compile(r"\bout=(\w+)\)?$")


def kernel_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """The kernels that generated code calls in its order, each with the names of its tensors."""
    start = text.rfind("def call(")
    for line in text[max(start, 0) :].splitlines():
        found = _CALL.match(line)
        if not found:
            continue
        name, arguments = found.groups()
        out = _OUT.search(arguments)
        if name.startswith("extern_kernels"):
            yield name, [out[1]] if out else []
        else:
            yield name, [each.strip() for each in _split(arguments)]


def _split(arguments: str) -> list[str]:
    """Arguments at their commas, those inside of brackets left out."""
    parts, depth, current = [], 0, ""
    for letter in arguments:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]
