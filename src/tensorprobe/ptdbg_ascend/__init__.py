"""ptdbg_ascend, as its user guide describes it: the same names, arguments, defaults and files.

    from tensorprobe.ptdbg_ascend import *

or, without an edit: `tensorprobe run --as ptdbg_ascend train.py`. The functions are those of
release 2.3, PrecisionDebugger that of the later ones. docs/migrating.md tells what is different.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tensorprobe.errors import BadUsage
from tensorprobe.ptdbg_ascend.debugger import PrecisionDebugger
from tensorprobe.ptdbg_ascend.session import Session

if TYPE_CHECKING:
    from tensorprobe.ptdbg_ascend.dump import Dump

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

_SESSION = Session()
AnyPath = str | os.PathLike[str]


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed every generator; with `mode` use deterministic algorithms too."""
    from tensorprobe.capture.seeding import seed_all as seed_everything

    seed_everything(seed, deterministic=mode)


def set_dump_path(fpath: AnyPath | None = None, dump_tag: str = "ptdbg_dump") -> None:
    """Dumps go to {folder of fpath}/{dump_tag}_v2.3/rankN/{name of fpath}."""
    _SESSION.set_dump_path(fpath, dump_tag)


def register_hook(
    model: Any,
    hook: Any,
    *,
    overflow_nums: int = 1,
    dump_mode: str = "api",
    dump_config: AnyPath | None = None,
    rank: int | None = None,
    **others: Any,
) -> None:
    """Dump calls (acc_cmp_dump), or look for overflows and stop at the N-th (overflow_check).

    `dump_mode="acl"` dumps kernels, as the dump.json `dump_config` says; `rank` names the folder.
    """
    _SESSION.register_hook(
        model,
        hook,
        overflow_nums=overflow_nums,
        dump_mode=dump_mode,
        dump_config=dump_config,
        rank=rank,
        **others,
    )


def set_dump_switch(
    switch: str,
    mode: str = "all",
    scope: list[str] | None = None,
    api_list: list[str] | None = None,
    filter_switch: str = "ON",
    dump_mode: str | list[str] = "all",
    summary_only: bool = False,
    summary_mode: str | None = None,
) -> None:
    """ "ON": dump calls from here on. "OFF": write them out; so does the end of the program."""
    _SESSION.set_dump_switch(
        switch,
        mode=mode,
        scope=scope,
        api_list=api_list,
        filter_switch=filter_switch,
        dump_mode=dump_mode,
        summary_only=summary_only,
        summary_mode=summary_mode,
    )


def set_overflow_check_switch(switch: str, filter_switch: str = "ON") -> None:
    """Look for overflows from here on ("ON"), or no more ("OFF"); without it they always are."""
    _SESSION.set_overflow_check_switch(switch, filter_switch)


def set_backward_input(backward_input: list[str]) -> None:
    """The .npy files with which mode "acl" runs a backward call."""
    _SESSION.set_backward_input(backward_input)


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


def _dump_under_way() -> Dump:
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
    from tensorprobe.ptdbg_ascend.comparing import compare_dumps

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
    from tensorprobe.ptdbg_ascend.comparing import compare_ranks

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
    from tensorprobe.ptdbg_ascend.parsing import describe

    prefix = moudule_name_prefix if moudule_name_prefix is not None else module_name_prefix
    describe(pkl_file, prefix)
