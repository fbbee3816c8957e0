"""The line of a call's stack that a person wants to read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_TORCH = f"{os.sep}torch{os.sep}"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


def users_line(stack: Sequence[str]) -> str:
    """The innermost line that is not torch's own, else the innermost; "" where there is none.

    As the person knows it: from the folder they are in, or from the package it is in.
    """
    line = next((frame for frame in stack if _TORCH not in frame), None) or next(iter(stack), "")
    return _PACKAGES.sub("", line).removeprefix(os.getcwd() + os.sep)
