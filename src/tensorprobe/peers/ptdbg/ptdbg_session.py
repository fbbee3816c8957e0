"""The one session of the door: what was asked for so far, and the dump that is under way."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.peers.ptdbg.ptdbg_settings import (
    DumpTarget,
    Switch,
    read_on_off,
    read_switch,
    read_target,
)
from tensorprobe.peers.ptdbg.ptdbg_telling import import_torch, say

if TYPE_CHECKING:
    from tensorprobe.follow.naming import Counter
    from tensorprobe.peers.ptdbg.ptdbg_dump import Counting, PtdbgDump
    from tensorprobe.peers.ptdbg.ptdbg_overflow import OverflowCheck

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
Kind = Literal["acc_cmp_dump", "overflow_check"]
AnyPath = str | os.PathLike[str]


class Hook(NamedTuple):
    """What register_hook was given."""

    kind: Kind
    overflow_nums: int
    acl_config: Path | None  # of dump_mode='acl'
    rank: int | str | None
    line: str  # where it was called


class PtdbgSession:
    """Everything between two calls of the door; the functions of the package are its methods."""

    def __init__(self) -> None:
        self._target: DumpTarget | None = None
        self._target_line = ""
        self._hook: Hook | None = None
        self._model_rank = 0
        self._switch: Switch | None = None  # what ON asked for; None while it is OFF
        self._dump: PtdbgDump | None = None
        self._backward_input: list[Path] = []
        self._published: set[Path] = set()
        self._counter: Counter | None = None
        self._counting: Counting | None = None  # while the switch is off
        self._overflow: OverflowCheck | None = None
        self._overflow_on = True
        self._overflow_filtered = True
        self._told: set[str] = set()
        self._pid = os.getpid()

    # What the user calls

    def set_dump_path(self, fpath: AnyPath | None = None, dump_tag: str = "ptdbg_dump") -> None:
        """Dumps go to {folder of fpath}/{dump_tag}_v2.3/rankN/{name of fpath}."""
        target = read_target(fpath, dump_tag)
        busy = self._dump is not None or (self._overflow is not None and self._overflow.is_on)
        if busy and self._target is not None and target != self._target:
            raise BadUsage(
                f"set_dump_path names another place than in {self._target_line}, and a dump to "
                f"'{self._target.root}' is under way. End it first: set_dump_switch('OFF')"
            )
        self._target, self._target_line = target, caller_line()
        if self._dump is not None and self._dump.switch.mode != "acl":
            self._dump.target = target
        if self._overflow is not None and self._hook is not None and not self._hook.acl_config:
            self._overflow.target = target

    def register_hook(
        self,
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

        `dump_mode="acl"` dumps kernels, as the dump.json `dump_config` says; `rank` names the
        folder. The model may come later: only its device is asked.
        """
        for name in others:
            if name != "dump_step":  # of release 2.3: it numbers the lines of an index
                raise BadUsage(
                    f"register_hook has no argument '{name}'; it has overflow_nums, dump_mode, "
                    "dump_config and rank"
                )
        new = Hook(
            _kind(hook),
            read_overflow_nums(overflow_nums),
            read_acl_config(dump_mode, dump_config),
            _rank(rank),
            caller_line(),
        )
        old = self._hook
        self._pid = os.getpid()
        if old is not None and old.kind != new.kind:
            raise BadUsage(
                f"register_hook({new.kind}) here, and register_hook({old.kind}) in {old.line}: "
                "one program does one of the two. Remove one"
            )
        self._hook = new
        self._model_rank = device_number(model)
        if new.kind == "overflow_check":
            self._watch()
        else:
            self._begin()

    def set_dump_switch(
        self,
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
        if not read_on_off("switch", switch):
            self._switch = None
            self._end()
            self._begin()
            return
        if self._hook is not None and self._hook.kind == "overflow_check":
            raise BadUsage(
                f"set_dump_switch with register_hook(overflow_check) in {self._hook.line}: write "
                "set_overflow_check_switch('ON'), or register acc_cmp_dump"
            )
        wanted = read_switch(
            mode, scope, api_list, filter_switch, dump_mode,
            summary_only=summary_only, summary_mode=summary_mode,
        )  # fmt: skip
        if self._dump is not None and wanted == self._switch:
            return
        self._end()
        self._switch = wanted
        self._begin()

    def set_overflow_check_switch(self, switch: str, filter_switch: str = "ON") -> None:
        """Look for overflows from here on ("ON"), or no more ("OFF"); without it, always."""
        self._overflow_on = read_on_off("switch", switch)
        self._overflow_filtered = read_on_off("filter_switch", filter_switch)
        if self._hook is not None and self._hook.kind != "overflow_check":
            raise BadUsage(
                f"set_overflow_check_switch with register_hook(acc_cmp_dump) in {self._hook.line}: "
                "write register_hook(model, overflow_check)"
            )
        self._watch()

    def set_backward_input(self, backward_input: list[str]) -> None:
        """The .npy files with which mode "acl" runs a backward call."""
        given: object = backward_input
        if isinstance(given, str | os.PathLike):
            given = [given]
        if not isinstance(given, list | tuple) or not given:
            raise BadUsage(
                f"set_backward_input({backward_input!r}): expected a list of .npy files, one for "
                "each output of the call"
            )
        paths = [Path(path) for path in given]
        for path in paths:
            if not path.is_file():
                raise BadUsage(
                    f"set_backward_input: there is no file '{path}'. It is dumped with the whole "
                    "network, as NAME_backward_input.0.npy"
                )
        self._backward_input = paths

    @property
    def dump(self) -> PtdbgDump | None:
        """The dump that is under way."""
        return self._dump

    def close(self) -> None:
        """Write out what is there; the end of the program calls it."""
        self._stop_counting()
        self._end()
        if self._overflow is not None:
            self._overflow.close()
            self._overflow = None

    # Behind it

    def _begin(self) -> None:
        """Record, if everything is known that has to be; else count, from register_hook on."""
        if self._hook is None or self._dump is not None:
            return
        import_torch()
        from tensorprobe.follow.naming import Counter
        from tensorprobe.peers.ptdbg.ptdbg_dump import Counting, PtdbgDump

        self._counter = self._counter or Counter()
        if self._switch is None:
            self._counting = self._counting or Counting(self._counter)
            close_at_exit(self.close_at_exit)
            return
        target = self._target or DumpTarget(Path.cwd())
        if (self._hook.acl_config is None) != (self._switch.mode != "acl"):
            raise BadUsage(
                "for ACL data write both register_hook(model, acc_cmp_dump, dump_mode='acl', "
                "dump_config='./dump.json') and set_dump_switch('ON', mode='acl', scope=[NAME])"
            )
        if self._hook.acl_config is not None:
            target = self._acl_target(self._hook.acl_config)
        elif self._target is None:
            self._tell(f"no set_dump_path: the dump goes to '{target.root}'")
        self._stop_counting()
        dump = PtdbgDump(target, self._switch, self.rank, self._published, counter=self._counter)
        dump.start()
        self._dump = dump
        close_at_exit(self.close_at_exit)

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()
            self._counting = None

    def _end(self) -> None:
        dump, self._dump = self._dump, None
        end_dump(dump, self._hook.acl_config if self._hook else None, self._backward_input)

    def _watch(self) -> None:
        """Look for overflows, if they were asked for and are switched on."""
        hook = self._hook
        if hook is None:
            return
        if self._overflow is None:
            if not self._overflow_on:
                return
            import_torch()
            from tensorprobe.peers.ptdbg.ptdbg_overflow import OverflowCheck

            # Without a path they go to the folder the program runs in, as they always did.
            target = self._target or DumpTarget(Path.cwd())
            self._overflow = OverflowCheck(
                target, self.rank, hook.overflow_nums, hook.acl_config, say_ignored=self._tell
            )
            close_at_exit(self.close_at_exit)
        self._overflow.is_filtered = self._overflow_filtered
        if self._overflow_on:
            self._overflow.start()
        else:
            self._overflow.stop()

    def _acl_target(self, config: Path) -> DumpTarget:
        from tensorprobe.peers.ptdbg.ptdbg_acl import dump_folder

        folder = dump_folder(config)
        if self._target is not None:
            self._tell(f"set_dump_path is not used: ACL data goes to dump_path of '{config}'")
        return DumpTarget(folder, stem="acl")

    def rank(self) -> int | str:
        """Which process this is: as register_hook was told, else by the launcher, else the card."""
        if self._hook is not None and self._hook.rank is not None:
            return self._hook.rank
        from tensorprobe.devices import current_rank, world_size

        return current_rank() if world_size() > 1 else (current_rank() or self._model_rank)

    def _tell(self, text: str) -> None:
        """Say it, once."""
        if text not in self._told:
            self._told.add(text)
            say(text)

    def close_at_exit(self) -> None:
        """Close; at the end of a program there is nobody to catch an error."""
        if os.getpid() != self._pid:  # a forked child: the dump is its parent's
            return
        try:
            self.close()
        except TensorprobeError as error:
            self._tell(str(error))
        if self._switch is not None and self._hook is None:
            self._tell(
                "nothing was dumped: set_dump_switch('ON') was called, register_hook was not. "
                "Write register_hook(model, acc_cmp_dump)"
            )


def end_dump(dump: PtdbgDump | None, acl: Path | None, gradients: list[Path]) -> None:
    """Write out a dump; in mode acl, run its call again while the device dumps kernels."""
    if dump is None:
        return
    if dump.switch.mode != "acl" or acl is None:
        dump.close()
        return
    from tensorprobe.peers.ptdbg.ptdbg_acl import dump_kernels_of

    dump_kernels_of(dump, acl, gradients)


def close_at_exit(close: Any) -> None:
    """Call `close` at the end of this process, before what is registered already.

    A process forked by multiprocessing leaves without Python's own end.
    """
    atexit.unregister(close)
    atexit.register(close)
    multiprocessing = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and process is not None and process.parent_process() is not None:
        multiprocessing.Finalize(None, close, exitpriority=100)


def _kind(hook: Any) -> Kind:
    name = getattr(hook, "__name__", "")
    if name == "overflow_check":
        return "overflow_check"
    if name == "acc_cmp_dump":
        return "acc_cmp_dump"
    raise BadUsage(f"hook={name or hook!r}: expected acc_cmp_dump or overflow_check")


def read_overflow_nums(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == -1):
        return value
    raise BadUsage(f"overflow_nums={value!r}: expected a number from 1, or -1 to never stop")


def read_acl_config(dump_mode: object, dump_config: object) -> Path | None:
    if dump_mode == "api":
        return None
    if dump_mode == "model":
        raise BadUsage("dump_mode='model': write PrecisionDebugger(dump_path, 'dump', model=model)")
    if dump_mode != "acl":
        raise BadUsage(f"dump_mode={dump_mode!r}: expected 'api' or 'acl'")
    if not isinstance(dump_config, str | os.PathLike):
        raise BadUsage("dump_mode='acl' needs dump_config: write dump_config='./dump.json'")
    from tensorprobe.peers.ptdbg.ptdbg_acl import check_config, check_device

    path = Path(dump_config)
    check_device()
    check_config(path)
    return path


def _rank(rank: object) -> int | str | None:
    if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0):
        return rank
    if isinstance(rank, str) and rank.isalnum():
        return rank
    raise BadUsage(f"rank={rank!r}: expected a number from 0")


def device_number(model: Any) -> int:
    """The number of the card the model is on; 0 on the host, and while it has no parameters."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    index = getattr(getattr(first, "device", None), "index", None)
    return index if isinstance(index, int) else 0


def caller_line() -> str:
    """The user's line, as "train.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
