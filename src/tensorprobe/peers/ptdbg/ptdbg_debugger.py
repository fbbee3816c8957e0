"""PrecisionDebugger, with the defaults of releases 4.0 to 6.0 and the files of release 5.0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tensorprobe.config import parse_numbers
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.peers.ptdbg.ptdbg_session import (
    caller_line,
    close_at_exit,
    device_number,
    end_dump,
    read_acl_config,
    read_overflow_nums,
)
from tensorprobe.peers.ptdbg.ptdbg_settings import DumpTarget, Switch, read_on_off, read_switch
from tensorprobe.peers.ptdbg.ptdbg_telling import import_torch, say
from tensorprobe.store.outputs import check_writable

if TYPE_CHECKING:
    from tensorprobe.peers.ptdbg.ptdbg_dump import PtdbgDump
    from tensorprobe.peers.ptdbg.ptdbg_overflow import OverflowCheck

_HOOKS = ("dump", "overflow_check")


class PrecisionDebugger:
    """Dumps or watches the steps between start() and stop(); a process has one.

        debugger = PrecisionDebugger(dump_path="./dump", hook_name="dump", step=[0, 2])
        for batch in data:
            debugger.start()
            loss = model(batch); loss.backward(); optimizer.step()
            debugger.stop()
            debugger.step()

    With `model` its modules are dumped and not the torch calls; with `enable_dataloader` nothing
    needs to be called, a step ends when the optimizer steps. After the last of `step` recording
    stops and the program goes on.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        hook_name: str | None = None,
        rank: int | None = None,
        step: list[int] | None = None,
        enable_dataloader: bool = False,
        model: Any = None,
    ) -> None:
        if hook_name not in _HOOKS:
            raise BadUsage(f"hook_name={hook_name!r}: expected 'dump' or 'overflow_check'")
        if not isinstance(enable_dataloader, bool):
            raise BadUsage(f"enable_dataloader={enable_dataloader!r}: expected True or False")
        asked = (str(dump_path), hook_name, rank, str(step), enable_dataloader)
        first: PrecisionDebugger | None = PrecisionDebugger._instance
        if first is not None and first._asked != asked:
            raise BadUsage(
                f"a PrecisionDebugger was made in {first._line} with other arguments: "
                "a process has one. Use that, or remove it"
            )
        self._asked: tuple[Any, ...] = asked
        self._line: str = caller_line()
        self._hook_name = hook_name
        self._rank = None if rank is None else parse_numbers("rank", rank)
        self._steps = None if step is None else parse_numbers("step", step)
        self._automatic = enable_dataloader
        self._model = model
        self._folder = _dump_folder(dump_path)
        self._switch: Switch | None = None
        self._acl: Path | None = None
        self._backward_input: list[Path] = []
        self._overflow_nums = 1
        self._is_filtered = False
        self._dump: PtdbgDump | None = None
        self._overflow: OverflowCheck | None = None
        self._published: set[Path] = set()
        self._step = 0
        if first is not None:
            self.__dict__ = first.__dict__  # the same one, made twice
            return
        PrecisionDebugger._instance = self
        if enable_dataloader:
            self._start()

    def configure_hook(
        self,
        mode: str | None = None,
        scope: list[str] | None = None,
        api_list: list[str] | None = None,
        filter_switch: str = "OFF",
        input_output_mode: list[str] | None = None,
        acl_config: str | os.PathLike[str] | None = None,
        backward_input: list[str] | None = None,
        summary_only: bool = False,
        summary_mode: str | None = None,
        overflow_nums: int = 1,
        need_replicate: bool = False,
    ) -> None:
        """What is dumped; without it everything, with stacks."""
        if self._dump is not None and not self._automatic:
            raise BadUsage("configure_hook after start(): write it before the first start()")
        if self._hook_name == "overflow_check":
            self._configure_overflow(mode, acl_config, overflow_nums, filter_switch)
            if need_replicate:
                say("need_replicate is not needed: tensorprobe repro runs an overflow alone")
            return
        if (mode == "acl") != (acl_config is not None):
            raise BadUsage("mode='acl' and acl_config='./dump.json' go together: give both")
        self._switch = read_switch(
            "api_stack" if mode is None else mode,
            scope,
            api_list,
            filter_switch,
            input_output_mode or ["all"],
            summary_only=summary_only,
            summary_mode=summary_mode,
            release="5.0",
        )
        if acl_config is not None:
            self._acl = read_acl_config("acl", acl_config)
            self._backward_input = [Path(path) for path in backward_input or ()]
        if self._automatic and self._dump is not None:
            self._dump.discard()
            self._dump = None
            self._start()

    def _configure_overflow(
        self, mode: str | None, acl_config: Any, overflow_nums: int, filter_switch: str
    ) -> None:
        self._acl = read_acl_config(mode or "api", acl_config)
        self._overflow_nums = read_overflow_nums(overflow_nums)
        self._is_filtered = read_on_off("filter_switch", filter_switch)

    @classmethod
    def start(cls) -> None:
        """Record from here on, in the steps that are wanted."""
        _the(cls)._start()

    @classmethod
    def stop(cls) -> None:
        """Record no more until start()."""
        self = _the(cls)
        if self._dump is not None:
            self._dump.stop()
        if self._overflow is not None:
            self._overflow.stop()

    @classmethod
    def step(cls) -> None:
        """One step has ended: it is written out, and numbers begin anew."""
        self = _the(cls)
        self._step += 1
        if self._dump is not None:
            self._dump.recorder.step()
            self._dump.publish_steps()
        if self._overflow is not None:
            self._overflow.step()

    def _start(self) -> None:
        import_torch()
        if self._hook_name == "overflow_check":
            self._watch()
            return
        if self._dump is None:
            self._dump = self._make()
        self._dump.start()
        close_at_exit(self._close_at_exit)

    def _make(self) -> PtdbgDump:
        from tensorprobe.peers.ptdbg.ptdbg_acl import dump_folder
        from tensorprobe.peers.ptdbg.ptdbg_dump import PtdbgDump

        switch = self._switch or read_switch("api_stack", filter_switch="OFF", release="5.0")
        target = DumpTarget(self._folder, release="5.0")
        if self._acl is not None:
            target = DumpTarget(dump_folder(self._acl), stem="acl", release="5.0")
        options: dict[str, Any] = {"steps": self._steps, "ranks": self._rank}
        if self._model is not None:
            options["level"] = "L0"
        dump = PtdbgDump(
            target,
            switch,
            self._rank_number,
            self._published,
            step_on="auto" if self._automatic else "explicit",
            **options,
        )
        for _ in range(self._step):
            dump.recorder.step()
        return dump

    def _watch(self) -> None:
        if self._steps is not None and self._step not in self._steps:
            return
        if self._overflow is None:
            from tensorprobe.peers.ptdbg.ptdbg_overflow import OverflowCheck

            self._overflow = OverflowCheck(
                DumpTarget(self._folder, release="5.0"),
                self._rank_number,
                self._overflow_nums,
                self._acl,
                say_ignored=say,
                first_step=None if self._automatic else self._step,
            )
            self._overflow.is_filtered = self._is_filtered
        self._overflow.start()
        close_at_exit(self._close_at_exit)

    def _rank_number(self) -> int:
        from tensorprobe.devices import current_rank

        return current_rank() or device_number(self._model)

    @property
    def dump(self) -> PtdbgDump | None:
        """The dump that is under way."""
        return self._dump

    def close(self) -> None:
        """Write out what is left; the end of the program calls it."""
        dump, self._dump = self._dump, None
        end_dump(dump, self._acl, self._backward_input)
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            overflow.close()
        PrecisionDebugger._instance = None

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except TensorprobeError as error:
            say(str(error))


def _the(cls: type[PrecisionDebugger]) -> PrecisionDebugger:
    if cls._instance is None:
        raise BadUsage(
            "there is no PrecisionDebugger yet: write "
            "debugger = PrecisionDebugger(dump_path='./dump', hook_name='dump')"
        )
    return cls._instance


def _dump_folder(dump_path: Any) -> Path:
    if dump_path is None:
        work = os.environ.get("ASCEND_WORK_PATH")
        return Path(work) / "dump_data" if work else Path.cwd()
    if not isinstance(dump_path, str | os.PathLike) or not os.fspath(dump_path):
        raise BadUsage(f"dump_path={dump_path!r}: expected a folder")
    folder = Path(dump_path).absolute()
    check_writable(folder)
    return folder
