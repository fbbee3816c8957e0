"""What scripts reach for behind msprobe's debugger: debugger.config and debugger.service."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tensorprobe.peers.msprobe.msprobe_config import DoorConfig

# Fields that a script can set between two stages, by where they stand in config.json.
_OF_THE_FILE = (
    "task", "dump_path", "level", "rank", "step", "extra_info", "async_dump", "precision",
    "risk_level", "dump_enable",
)  # fmt: skip
_OF_THE_TASK = ("scope", "list", "data_mode", "summary_mode", "tensor_list", "request_id")


class ConfigFields(SimpleNamespace):
    """The fields of the configuration under the names that scripts read and set."""

    def __init__(self, settings: DoorConfig) -> None:
        content, section = settings.content, settings.section
        super().__init__(
            task=content.get("task", "statistics"),
            dump_path=settings.dump_path,
            level=content.get("level", "L1"),
            rank=list(settings.config.ranks or ()),
            step=list(settings.config.steps or ()),
            extra_info=settings.config.stacks,
            async_dump=content.get("async_dump", False),
            precision=content.get("precision", "low"),
            risk_level=content.get("risk_level", "ALL"),
            dump_enable=settings.dump_enable,
            framework="pytorch",
            scope=list(section.get("scope") or ()),
            list=list(section.get("list") or ()),
            data_mode=list(section.get("data_mode") or ("all",)),
            summary_mode=section.get("summary_mode", "statistics"),
            tensor_list=list(section.get("tensor_list") or ()),
            request_id=section.get("request_id") or None,
        )


class Service:
    """What a script sees of the recording: its configuration, its step, and a way to begin anew.

        debugger.service.config.dump_path = os.path.join(folder, stage)
        debugger.start(model)  # into that folder

    `current_iter` is the step of the last start(), until the next one, and `should_stop_service`
    says whether that was behind the last step to be recorded.
    """

    def __init__(self, settings: DoorConfig, reset: Callable[[], None]) -> None:
        self.config = ConfigFields(settings)
        self.current_iter = 0
        self.should_stop_service = False
        self.current_rank: int | None = None
        self.first_start = True
        self.model: Any = None
        self._known = ConfigFields(settings)
        self._content = settings.content
        self._reset = reset

    def reset_status(self) -> None:
        """Number calls from 0 again, in the same step."""
        self._reset()

    def _reset_status(self) -> None:
        self._reset()

    def changed(self) -> dict[str, Any] | None:
        """The content of a config.json with what the script has set since; None if it has not."""
        now, before = vars(self.config), vars(self._known)
        names = {name for name, value in now.items() if value != before.get(name)}
        if not names & {*_OF_THE_FILE, *_OF_THE_TASK}:
            return None
        content = {**self._content, **{n: now[n] for n in _OF_THE_FILE if n in names}}
        if isinstance(content.get("dump_path"), os.PathLike):
            content["dump_path"] = os.fspath(content["dump_path"])
        if content.get("dump_enable", False) is None:
            del content["dump_enable"]
        task = content.get("task", "statistics")
        section = content.get(task) or {}
        content[task] = {**section, **{n: now[n] for n in _OF_THE_TASK if n in names}}
        return content

    def settle(self, settings: DoorConfig) -> None:
        """These are in effect now."""
        self._known = ConfigFields(settings)
        self._content = settings.content
        self.config.__dict__.update(vars(self._known))
