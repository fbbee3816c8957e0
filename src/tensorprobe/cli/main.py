"""The command line: finds the verb, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from tensorprobe._version import __version__
from tensorprobe.cli.options import as_options, option_names
from tensorprobe.errors import BadUsage, TensorprobeError, why_no_torch
from tensorprobe.terminal import say, warn

# verb -> one line of help. Each verb is a module here: add_arguments(parser), run(args) -> status.
# Only the module of the verb that was typed is imported, so --help never waits for torch.
VERBS: dict[str, str] = {
    "demo": "the whole story on built-in data, no accelerator needed",
    "run": "record a script without editing it",
    "compare": "align two runs, name the call that made them differ",
    "checkpoints": "two checkpoints: which weights differ, and by rounding only or not",
    "compiled": "inside of torch.compile: the stage that made a wrong result",
    "ranks": "the first call of all ranks that made NaN or infinity",
    "show": "what was recorded: calls, stacks, statistics",
    "check": "each recorded call alone against a high-precision reference",
    "repro": "a script and its tensors that show one call alone",
    "bisect": "the smallest set of ops which, run elsewhere, cures it",
    "view": "reports and recordings in a browser",
    "convert": "a capture in another layout: native, msprobe, ptdbg",
    "monitor": "a whole training, watched: alarms, curves, where two of them part",
    "upload": "a recording, or what is left of it, to object storage",
    "env": "the environment of a run, and what two of them differ by",
    "doctor": "what makes recording quick here, what is missing, and why",
    "ascend": "Ascend artefacts: dumps, graphs, AI Core errors, OpUT cases",
    "completion": "a script by which bash, zsh or fish complete what you type",
}


class _AdvisingParser(argparse.ArgumentParser):
    """One whose errors say what to type next."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}. All options: {self.prog} --help\n")


class _Version(argparse.Action):
    """Prints the version, and whether the C++ parts are built; no torch is imported for that."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from tensorprobe.cli.doctor import describe_native

        say(f"tensorprobe {__version__} ({describe_native()})")
        parser.exit()


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    parser = _AdvisingParser(
        prog="tensorprobe",
        description="A precision debugger for PyTorch: which call did it, on which line, and a "
        "script that shows it alone.",
        epilog="to begin: tensorprobe demo, or with a program of yours: "
        "tensorprobe run -o runs/a train.py. The options of a verb: tensorprobe VERB --help",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it, and what is active")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == verb:
            importlib.import_module(f"tensorprobe.cli.{name}").add_arguments(sub)
            sub.set_defaults(option_names=option_names(sub))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(verb)
    args, rest = parser.parse_known_args(words)
    if args.verb == "show" and args.call is None and rest and not rest[0].startswith("-"):
        args.call = rest.pop(0)  # behind options, where argparse does not look for it
    if rest:
        command = " ".join(filter(None, ("tensorprobe", args.verb)))
        warn(f"{command}: unrecognized arguments: {' '.join(rest)}. All options: {command} --help")
        return 2
    if args.verb is None:
        parser.print_help()
        return 2
    if args.verb != "run":  # whose streams are the program's own
        sys.stdout, sys.stderr = _open_stream(sys.stdout), _open_stream(sys.stderr)
    try:
        status = importlib.import_module(f"tensorprobe.cli.{args.verb}").run(args)
        if args.verb != "run":
            sys.stdout.flush()  # here, where a pipe that was closed is no error
    except TensorprobeError as error:
        warn(f"tensorprobe {args.verb}: {as_options(str(error), args.option_names)}")
        return 2 if isinstance(error, BadUsage) else 1
    except RuntimeError as error:
        why = why_no_torch(error)
        if why is None:
            raise
        warn(f"tensorprobe {args.verb}: {why}")
        return 1
    except MemoryError:
        warn(f"tensorprobe {args.verb}: it takes more memory than there is")
        return 1
    except BrokenPipeError:  # `tensorprobe show ... | head`
        if not _is_reader_gone():  # a process of ours: the work is not done
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a disk that is full, a file that may not be read
        if error.filename is None:
            raise
        warn(f"tensorprobe {args.verb}: '{error.filename}': {error.strerror}")
        return 1
    return int(status)


def _is_reader_gone() -> bool:
    """Whether nobody reads what we print, or what we say beside it."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # io.UnsupportedOperation: no file at all
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open_stream(stream: TextIO | None) -> TextIO:
    """A stream that takes every character, also where the terminal has no letter for it."""
    if stream is None:  # closed by the shell: >&-
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream
