"""ptdbg_ascend, as its user guide describes it: the same names, arguments, defaults and files.

    from tensorprobe.peers.ptdbg.ptdbg_functions import *

or, without an edit: `tensorprobe run --as ptdbg_ascend train.py`. The functions are those of
release 2.3, PrecisionDebugger that of the later ones. docs/migrating.md tells what is different.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tensorprobe.errors import BadUsage
from tensorprobe.peers.ptdbg.ptdbg_debugger import PrecisionDebugger
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession

if TYPE_CHECKING:
    from tensorprobe.peers.ptdbg.ptdbg_dump import PtdbgDump

__all__ = [
    "PrecisionDebugger",
    "acc_cmp_dump",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "overflow_check",
    "parse",
    "register_hook",
    "seed_all",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]

_SESSION = PtdbgSession()
AnyPath = str | os.PathLike[str]


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed every generator; with `mode` use deterministic algorithms too."""
    from tensorprobe.record.seeding import seed_all as seed_everything

    seed_everything(seed, deterministic=mode)


set_dump_path = _SESSION.set_dump_path
register_hook = _SESSION.register_hook
set_dump_switch = _SESSION.set_dump_switch
set_overflow_check_switch = _SESSION.set_overflow_check_switch
set_backward_input = _SESSION.set_backward_input


def acc_cmp_dump(*args: Any, **kwargs: Any) -> NoReturn:
    """What register_hook takes to dump calls."""
    raise BadUsage("acc_cmp_dump is not called: write register_hook(model, acc_cmp_dump)")


def overflow_check(*args: Any, **kwargs: Any) -> NoReturn:
    """What register_hook takes to look for overflows."""
    raise BadUsage("overflow_check is not called: write register_hook(model, overflow_check)")


def module_dump(module: Any, dump_name: str) -> None:
    """Dump this module's own calls under a name, and nothing else until module_dump_end()."""
    _dump_under_way().only(module, dump_name)


def module_dump_end() -> None:
    """Dump everything again."""
    _dump_under_way().only(None)


def _dump_under_way() -> PtdbgDump:
    debugger = PrecisionDebugger._instance
    dump = _SESSION.dump if debugger is None else debugger.dump
    if dump is None:
        raise BadUsage(
            "module_dump needs a dump: write set_dump_switch('ON'), or debugger.start(), before it"
        )
    return dump


def compare(
    input_param: Mapping[str, Any] | None = None,
    output_path: AnyPath = "./",
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    *,
    fuzzy_match: bool = False,
    input_parma: Mapping[str, Any] | None = None,
) -> Path:
    """Compare two dumps and write compare_result_{suffix}_{timestamp}.csv; gives its path.

    `stack_mode` and `fuzzy_match` change nothing: stacks are used where they are, and calls are
    aligned whatever their numbers.
    """
    from tensorprobe.peers.ptdbg.ptdbg_compare import compare_dumps

    given = input_param if input_param is not None else input_parma
    return compare_dumps(given, output_path, auto_analyze=auto_analyze, suffix=suffix)


def compare_distributed(
    npu_dump_dir: AnyPath,
    bench_dump_dir: AnyPath,
    output_path: AnyPath,
    *,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    fuzzy_match: bool = False,
    is_print_compare_log: bool = True,
) -> list[Path]:
    """Compare every rank with the one of the same number; gives the paths of the tables."""
    from tensorprobe.peers.ptdbg.ptdbg_compare import compare_ranks

    return compare_ranks(
        npu_dump_dir,
        bench_dump_dir,
        output_path,
        auto_analyze=auto_analyze,
        suffix=suffix,
        is_loud=is_print_compare_log,
    )


def parse(
    pkl_file: AnyPath,
    moudule_name_prefix: str | None = None,
    *,
    module_name_prefix: str | None = None,
) -> None:
    """Print the statistics and stacks of the calls whose names begin so."""
    from tensorprobe.peers.ptdbg.ptdbg_parsing import describe

    prefix = moudule_name_prefix if moudule_name_prefix is not None else module_name_prefix
    describe(pkl_file, prefix)
