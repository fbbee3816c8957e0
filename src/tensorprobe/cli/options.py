"""Options: their former names, and how an argument of a Python function is spelled as one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any

# In texts that Python callers read too, an argument is `jobs` or `jobs=2`, or begins the text.
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`\n]*))?`|\A(\w+)=('[^'\n]*'|[^\s:]*)")


def add_json(parser: argparse._ActionsContainer, what: str = "the result") -> None:
    """The option --json of a verb."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON, not lines")


def say_json(value: Any) -> None:
    """Print a result as strict JSON: NaN and infinity are "nan", "inf" and "-inf"."""
    from tensorprobe.nests import strict_json
    from tensorprobe.terminal import say

    say(*json.dumps(strict_json(value), indent=1, allow_nan=False, default=str).split("\n"))


def former_name(parser: argparse._ActionsContainer, option: str, dest: str, **more: Any) -> None:
    """Take an option by its former name too, without a word about it."""
    parser.add_argument(
        option, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more
    )


def option_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The option for each argument of a verb: {"jobs": "--jobs", "imports": "--import"}."""
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    return {each.dest: max(each.option_strings, key=len) for each in shown if each.option_strings}


def as_options(text: str, names: Mapping[str, str]) -> str:
    """A text with the arguments in it as one types them: `jobs=2` is --jobs 2."""

    def spelled(found: re.Match[str]) -> str:
        option = names.get(found[1] or found[3])
        value = found[2] if found[1] else found[4]
        if option is None:
            return found[0]
        if value in (None, "", "True", "False", "None"):
            return option
        return f"{option} {value.strip(chr(39))}"

    return _ARGUMENT.sub(spelled, text)
