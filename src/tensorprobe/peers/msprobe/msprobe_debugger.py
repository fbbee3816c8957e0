"""msprobe's PrecisionDebugger and module_dump, over one session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from tensorprobe.errors import BadUsage
from tensorprobe.peers.msprobe.msprobe_config import DoorConfig, from_door_arguments
from tensorprobe.peers.msprobe.msprobe_session import MsprobeSession, OverflowSession
from tensorprobe.record.recorder import say

_LOOK_AGAIN_S = 0.5  # how often a configuration with dump_enable is read anew


class PrecisionDebugger:
    """Dumps what a program computes, as msprobe's class of this name does.

        debugger = PrecisionDebugger("config.json")
        debugger.start(model=model)
        loss = model(batch); loss.backward()
        debugger.stop()
        debugger.step()

    Arguments beat the fields of config.json. There is one for a process: made again with the same
    arguments it is the same one, with others it is an error.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _request: tuple[str | None, dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        if cls._instance is None:
            return super().__new__(cls)
        return cls._instance

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | Path | None = None,
        level: str | None = None,
        step: Any = None,
    ) -> None:
        given = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        arguments = {name: value for name, value in given.items() if value is not None}
        if dump_path is not None:
            arguments["dump_path"] = str(dump_path)
        request = (str(config_path) if config_path is not None else None, arguments)
        if PrecisionDebugger._instance is self:
            if request != self._request:
                raise BadUsage(
                    f"PrecisionDebugger was made with {_shown(self._request)}; a second one with "
                    f"{_shown(request)} would change the first. Use the first, or end it: "
                    "PrecisionDebugger.close()"
                )
            return
        self._request = request
        self._settings = self._read()
        self._first_step = 0
        self._looked = (time.monotonic(), self._stamp())
        self.session = _session(self._settings)
        self._tokens: _Tokens | None = None
        self._custom: set[str] = set()
        PrecisionDebugger._instance = self

    # What a script calls; msprobe has them as class methods too

    @classmethod
    def start(
        cls,
        model: nn.Module | Sequence[nn.Module] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Any = None,
    ) -> None:
        """Record from here on; `token_range` [first, last] counts calls of the model from 0."""
        debugger = cls._get()
        if scheduled_tokens is not None:
            raise BadUsage(
                "scheduled_tokens is not supported: tensors are recorded whole, whatever request "
                "their rows belong to; remove it"
            )
        debugger._look_again()
        models = _models(model)
        if token_range is None:
            debugger.session.start(models, rank_id)
            return
        first, last = _range(token_range)
        if len(models) != 1:
            raise BadUsage("token_range needs the model whose calls are counted: start(model, ...)")
        debugger._end_tokens()
        debugger._tokens = _Tokens(debugger.session, models[0], first, last, rank_id)

    @classmethod
    def stop(cls) -> None:
        """See no more calls; backward of those seen is recorded until step()."""
        debugger = cls._get()
        debugger._end_tokens()
        debugger.session.stop()
        debugger._look_again()

    @classmethod
    def step(cls) -> None:
        """The step is over."""
        debugger = cls._get()
        debugger.session.step()
        debugger._look_again()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Save a value under a name, and its gradient when backward comes by."""
        debugger = cls._get()
        if not isinstance(name, str) or not name:
            raise BadUsage(f"save(variable, name): {name!r} is no name")
        value = variable if save_backward else _detached(variable)
        debugger.session.save(name, value)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """The number of the first step."""
        if type(step) is not int or step < 0:
            raise BadUsage(f"set_init_step({step!r}): expected a whole number from 0 on")
        debugger = cls._get()
        debugger.session.close()
        debugger.session = _session(debugger._settings, step)

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Nothing needs to be registered: every torch call is seen, however it was made."""
        debugger = cls._get()
        name = f"{getattr(module, '__name__', module)}.{api}"
        if not hasattr(module, api):
            raise BadUsage(f"register_custom_api: {name} does not exist")
        if name not in debugger._custom:
            debugger._custom.add(name)
            say(f"register_custom_api({name}): not needed, every torch call in it is seen")

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Nothing was replaced, so nothing is restored."""
        cls._get()._custom.discard(f"{getattr(module, '__name__', module)}.{api}")

    @classmethod
    def close(cls) -> None:
        """Write what is left and let another debugger be made; msprobe has no such call."""
        debugger, cls._instance = cls._instance, None
        if debugger is not None:
            debugger._end_tokens()
            debugger.session.close()

    # Behind them

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if PrecisionDebugger._instance is None:
            raise BadUsage(
                "no PrecisionDebugger yet: make one first, PrecisionDebugger(config_path)"
            )
        return PrecisionDebugger._instance

    def _read(self) -> DoorConfig:
        return from_door_arguments(*self._request)

    def _stamp(self) -> tuple[int, int] | None:
        path = self._request[0]
        if path is None:
            return None
        try:
            stat = Path(path).stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _look_again(self) -> None:
        """With dump_enable in it, the file is read anew when it has changed."""
        if self._settings.dump_enable is None:
            return
        when, stamp = self._looked
        now = time.monotonic()
        if now - when < _LOOK_AGAIN_S:
            return
        new = self._stamp()
        self._looked = (now, new)
        if new is None or new == stamp:
            return
        try:
            settings = self._read()
        except BadUsage as error:
            say(f"{error}; recording is off until it is mended")
            settings = self._settings._replace(dump_enable=False)
        if settings.dump_enable is None:
            settings = settings._replace(dump_enable=self._settings.dump_enable)
        self._settings = settings
        step = self.session.step_number
        self.session.close()
        self.session = _session(settings, step)
        state = "on" if settings.dump_enable else "off"
        say(f"{self._request[0]} has changed: recording is {state}")

    def _end_tokens(self) -> None:
        if self._tokens is not None:
            self._tokens.remove()
            self._tokens = None


def _session(settings: DoorConfig, step: int = 0) -> MsprobeSession | OverflowSession:
    if settings.overflow_nums is not None:
        return OverflowSession(settings)
    return MsprobeSession(settings, step)


class _Tokens:
    """Counts the calls of a model, and records from one to another, both included."""

    def __init__(
        self,
        session: MsprobeSession | OverflowSession,
        model: nn.Module,
        first: int,
        last: int,
        rank_id: int | None,
    ) -> None:
        self._session = session
        self._model = model
        self._first, self._last = first, last
        self._rank_id = rank_id
        self._count = -1
        self._handle = model.register_forward_pre_hook(self._called)

    def _called(self, model: nn.Module, args: Any) -> None:
        self._count += 1
        if self._count == self._first:
            self._session.start([self._model], self._rank_id)
        elif self._count == self._last + 1:
            self._session.stop()

    def remove(self) -> None:
        self._handle.remove()


def module_dump(module: nn.Module, dump_name: str) -> None:
    """Dump this module as a black box, under a name; nothing else until module_dump_end()."""
    if not isinstance(module, nn.Module):
        raise BadUsage(f"module_dump(module, dump_name): {type(module).__name__} is no nn.Module")
    if not isinstance(dump_name, str) or not dump_name:
        raise BadUsage(f"module_dump(module, dump_name): {dump_name!r} is no name")
    PrecisionDebugger._get().session.only(module, dump_name)


def module_dump_end() -> None:
    """Dump everything again."""
    PrecisionDebugger._get().session.only(None)


def _models(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    models = [model] if isinstance(model, nn.Module) else list(model or ())
    for item in models:
        if not isinstance(item, nn.Module):
            raise BadUsage(f"start(model): {type(item).__name__} is no nn.Module")
    return models


def _range(token_range: Sequence[int]) -> tuple[int, int]:
    try:
        first, last = token_range
    except (TypeError, ValueError):
        first, last = -1, -1
    if type(first) is not int or type(last) is not int or not 0 <= first <= last:
        raise BadUsage(f"token_range={token_range!r}: expected [first, last], from 0 on")
    return first, last


def _detached(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(item) for item in value)
    return value.detach() if hasattr(value, "detach") else value


def _shown(request: tuple[str | None, dict[str, Any]]) -> str:
    path, arguments = request
    given = {**({"config_path": path} if path is not None else {}), **arguments}
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no arguments"
