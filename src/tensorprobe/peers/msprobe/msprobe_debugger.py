"""msprobe's PrecisionDebugger and module_dump, over one session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from tensorprobe.errors import BadUsage
from tensorprobe.peers.msprobe.msprobe_config import DoorConfig, from_door_arguments, read_door
from tensorprobe.peers.msprobe.msprobe_seeding import seed_all
from tensorprobe.peers.msprobe.msprobe_service import ConfigFields, Service
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

    Arguments beat the fields of config.json. There is one for a process: one that is made again is
    the same one, and says so where it was asked for something else.
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
        model: Any = None,
    ) -> None:
        if _is_model(step) or (step is None and model is not None and not _is_model(model)):
            step, model = model, step  # releases before 26 have the model before the step
        given = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        arguments = {name: value for name, value in given.items() if value is not None}
        if dump_path is not None:
            arguments["dump_path"] = str(dump_path)
        request = (str(config_path) if config_path is not None else None, arguments)
        if PrecisionDebugger._instance is self:
            if request != self._request:
                self._say_once(
                    f"PrecisionDebugger is there already, made with {_shown(self._request)}: it "
                    f"stays as it is, and {_shown(request)} has no effect. To end it: "
                    "PrecisionDebugger.close()"
                )
            return
        self._request = request
        self._told: set[str] = set()
        self._settings = self._read()
        self._looked = (time.monotonic(), self._stamp())
        self._models = _models(model)
        if model is not None:
            self._say_once("PrecisionDebugger(model=...) is of releases before 26: start() uses it")
        self._said: set[Path | str] = set()  # by the sessions: notes, and folders that were written
        self.session = _session(self._settings, 0, self._said)
        self.config = ConfigFields(self._settings)
        self.service = Service(self._settings, self._begin_anew)
        self._tokens: _Tokens | None = None
        self._custom: set[str] = set()
        PrecisionDebugger._instance = self
        if self._settings.seed is not None:
            seed_all(*self._settings.seed)

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
        debugger._look_again()
        debugger._follow_script()
        debugger._models = _models(model) or debugger._models
        debugger._end_tokens()
        service = debugger.service
        service.current_iter = debugger.session.step_number
        last = max(debugger._settings.config.steps or (service.current_iter,))
        service.should_stop_service = service.current_iter > last
        service.model = model if model is not None else service.model
        service.first_start = False
        service.current_rank = rank_id if rank_id is not None else service.current_rank
        if not debugger._is_scheduled(scheduled_tokens):
            return
        if token_range is None:
            debugger.session.start(debugger._models, rank_id)
            return
        first, last = _range(token_range)
        if not debugger._models:
            raise BadUsage("token_range needs the model whose calls are counted: start(model, ...)")
        debugger._tokens = _Tokens(debugger.session, debugger._models, first, last, rank_id)

    @classmethod
    def stop(cls) -> None:
        """See no more calls; backward of those seen is recorded until step()."""
        debugger = cls._get()
        debugger._end_tokens()
        debugger.session.stop()
        debugger._look_again()

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """What releases before 26 call stop() by."""
        cls.stop()

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
        debugger.session.save(name, variable, gradient=save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """The number of the first step."""
        if type(step) is not int or step < 0:
            raise BadUsage(f"set_init_step({step!r}): expected a whole number from 0 on")
        cls._get()._begin_anew(step)

    @classmethod
    def monitor(cls, model: Any) -> None:
        """Refused: the task grad_probe of releases before 26."""
        raise BadUsage(
            "monitor(model) is not supported: dump with level 'L0', whose parameters_grad has the "
            "statistics of each gradient"
        )

    @classmethod
    def restore_api(cls) -> None:
        """Nothing was replaced, so nothing is restored."""

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

    def _say_once(self, text: str) -> None:
        about = text.partition(":")[0]
        if about not in self._told:
            self._told.add(about)
            say(text)

    def _begin_anew(self, step: int | None = None) -> None:
        """End what is recorded so far; from the next start() on calls are numbered from 0."""
        self._end_tokens()
        step = self.session.step_number if step is None else step
        self.session.close(goes_on=True)
        self.session = _session(self._settings, step, self._said)

    def _follow_script(self) -> None:
        """What the script has set in service.config is in effect from the next start() on."""
        content = self.service.changed()
        if content is None:
            return
        try:
            settings = read_door(content)
            if settings.dump_path is None:
                raise BadUsage("dump_path is None")
        except BadUsage as error:
            self._say_once(f"service.config: {error}; recording goes on as before")
            return
        self._settings = settings
        self.service.settle(settings)
        self._begin_anew()

    def _is_scheduled(self, scheduled_tokens: Any) -> bool:
        """Whether the request that is asked for is among those of this step."""
        if scheduled_tokens is None:
            return True
        request = self.service.config.request_id
        self._say_once(
            "start(scheduled_tokens=...): tensors are recorded whole, rows of requests are not "
            "told apart"
        )
        return not request or request in scheduled_tokens

    def _stamp(self) -> tuple[int, int] | None:
        path = self._request[0]
        if path is None:
            return None
        try:
            stat = Path(path).stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _maybe_reload_config(self, force: bool = False) -> bool:
        """By this name servers ask for the file at once, after they have changed it."""
        return self._look_again(at_once=force)

    def _look_again(self, *, at_once: bool = False) -> bool:
        """With dump_enable in it, the file is read anew when it has changed; whether it was."""
        if self._settings.dump_enable is None:
            return False
        when, stamp = self._looked
        now = time.monotonic()
        if now - when < _LOOK_AGAIN_S and not at_once:
            return False
        new = self._stamp()
        self._looked = (now, new)
        if new is None or new == stamp:
            return False
        try:
            settings = self._read()
        except BadUsage as error:
            say(f"{error}; recording is off until it is mended")
            settings = self._settings._replace(dump_enable=False)
        if settings.dump_enable is None:
            settings = settings._replace(dump_enable=self._settings.dump_enable)
        self._settings = settings
        self.service.settle(settings)
        self._begin_anew()
        state = "on" if settings.dump_enable else "off"
        say(f"{self._request[0]} has changed: recording is {state}")
        return True

    def _end_tokens(self) -> None:
        if self._tokens is not None:
            self._tokens.remove()
            self._tokens = None


def _session(
    settings: DoorConfig, step: int, told: set[Path | str]
) -> MsprobeSession | OverflowSession:
    if settings.overflow_nums is not None:
        return OverflowSession(settings)
    return MsprobeSession(settings, step, told)


class _Tokens:
    """Counts the calls of the first model, and records from one to another, both included."""

    def __init__(
        self,
        session: MsprobeSession | OverflowSession,
        models: Sequence[nn.Module],
        first: int,
        last: int,
        rank_id: int | None,
    ) -> None:
        self._session = session
        self._models = models
        self._first, self._last = first, last
        self._rank_id = rank_id
        self._count = -1
        self._handle = models[0].register_forward_pre_hook(self._called)

    def _called(self, model: nn.Module, args: Any) -> None:
        self._count += 1
        if self._count == self._first:
            self._session.start(self._models, self._rank_id)
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


def _is_model(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(item, nn.Module) for item in items)


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


def _shown(request: tuple[str | None, dict[str, Any]]) -> str:
    path, arguments = request
    given = {**({"config_path": path} if path is not None else {}), **arguments}
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no arguments"
