"""`%%probe` for notebooks: `%load_ext tensorprobe`, then cells that are recorded."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tensorprobe.cli.options import as_options, option_names
from tensorprobe.cli.run import add_selection, selected
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.guarding.guard_options import check_watches

DEFAULT = Path("runs") / "cell"


class _CellParser(argparse.ArgumentParser):
    """One that raises: a cell must not end the notebook."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message}. To see all options: tensorprobe run --help")


def add_magic(shell: Any) -> None:
    """Make %%probe known to a shell of IPython."""

    def probe(line: str, cell: str) -> Any:
        """Record the calls of this cell: %%probe [DIR] [--level L1] [--keep tensors] ..."""
        return _record(shell, line, cell)

    shell.register_magic_function(probe, magic_kind="cell", magic_name="probe")


def _record(shell: Any, line: str, cell: str) -> Any:
    from IPython.core.error import UsageError

    parser = _parser()
    try:
        args = parser.parse_args(shlex.split(line))
        watches = () if args.guard is None else check_watches(args.guard)
        return _run(shell, cell, args, watches)
    except (TensorprobeError, ValueError) as error:  # ValueError: a quote that is not closed
        text = as_options(str(error), option_names(parser))
        raise UsageError(f"%%probe: {text}") from None


def _run(shell: Any, cell: str, args: argparse.Namespace, watches: Sequence[str]) -> Any:
    """Run the cell as it would be without us; gives what was recorded, to be shown."""
    from tensorprobe.guarding.guard import Guard
    from tensorprobe.record.recorder import Recorder
    from tensorprobe.store.loading import load

    path = Path(args.path)
    recorder = Recorder(path, step_on="auto", **selected(args))
    guard = (
        Guard(f"{path}-guard", watches, overflow_nums=-1, recorder=recorder) if watches else None
    )
    with recorder:
        if guard is not None:
            guard.start()
        ended = shell.run_cell(cell)  # shows what the cell raises
        if guard is not None:
            guard.close(ended.error_in_exec)
    if ended.error_in_exec is not None or ended.error_before_exec is not None:
        return guard
    return load(path) if guard is None and recorder.failed is None else guard


def _parser() -> argparse.ArgumentParser:
    parser = _CellParser(prog="%%probe", add_help=False, allow_abbrev=False)
    parser.add_argument("path", nargs="?", default=str(DEFAULT), metavar="DIR")
    parser.add_argument("--guard", metavar="WHAT", help="overflow, errors or both")
    add_selection(parser.add_argument_group("what to record"))
    parser.add_argument(
        "--no-stacks", dest="stacks", action="store_false", default=argparse.SUPPRESS
    )
    return parser
