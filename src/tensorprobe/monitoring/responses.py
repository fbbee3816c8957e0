"""What is done when an alarm is raised: the next steps are recorded, or guarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.monitor_options import RECORDED_STEPS

if TYPE_CHECKING:
    from tensorprobe.guarding.guard import Guard
    from tensorprobe.record.recorder import Recorder

MOST = 3  # times in one training


class Response:
    """Records or guards the steps that follow an alarm.

    It begins and ends where the program calls its model: nowhere else may hooks be put in and
    taken away, since torch goes through those of optimizers when a step ends.
    """

    def __init__(
        self, what: str | None, options: Mapping[str, Any], folder: Path, log: Callable[[str], None]
    ) -> None:
        self._what = what
        self._options = dict(options)
        self._steps = int(self._options.pop("n_steps", RECORDED_STEPS))
        self._folder = folder
        self._log = log
        self._times = 0
        self._wanted: Path | None = None
        self._recorder: Recorder | None = None
        self._guard: Guard | None = None
        self._left = 0

    def alarm(self, alarm: Alarm, step: int) -> Path | None:
        """An alarm is raised while the program is in this step; says where the answer goes."""
        if self._what is None or self._is_busy or self._times >= MOST:
            return None
        self._times += 1
        self._wanted = self._folder / f"alarm-{alarm.rule}-step{step}"
        return self._wanted

    @property
    def _is_busy(self) -> bool:
        return self._wanted is not None or self._recorder is not None or self._guard is not None

    def root_called(self, step: int) -> None:
        """The program calls its model, in this step."""
        if not self._is_busy:
            return
        if self._left <= 0 and self._wanted is None:
            self.close()
        if self._wanted is None:
            return
        folder, self._wanted = self._wanted, None
        try:
            self._begin(folder, step)
        except TensorprobeError as error:
            self._log(f"monitor: the steps after the alarm are not seen: {error}")
            self.close()

    def _begin(self, folder: Path, step: int) -> None:
        self._left = self._steps
        if self._what == "guard":
            from tensorprobe.guarding.guard import Guard

            self._guard = Guard(
                folder, watch=("overflow",), overflow_nums=-1, step_on="explicit", log=self._log,
            ).start()  # fmt: skip
            return
        from tensorprobe.record.recorder import Recorder

        options = {**self._options, "step_on": "explicit", "first_step": step}
        self._recorder = Recorder(folder, log=self._log, **options).start()

    def step_ended(self) -> None:
        """A step is over. The last one that is wanted stays open until the model is called."""
        if self._recorder is None and self._guard is None:
            return
        self._left -= 1
        if self._left > 0:
            for part in (self._recorder, self._guard):
                if part is not None:
                    part.step()

    def close(self) -> None:
        """End what is under way."""
        recorder, self._recorder = self._recorder, None
        guard, self._guard = self._guard, None
        if recorder is not None:
            recorder.close()
        if guard is not None:
            guard.close()


def check_response(
    what: str | None,
    options: Mapping[str, Any] | None,
    folder: Path,
    log: Callable[[str], None],
) -> Response:
    """The response for these arguments; BadUsage names the one that is wrong."""
    if what not in (None, "record", "guard"):
        raise BadUsage(f"on_alarm={what!r}: expected 'record' or 'guard'")
    if options and what != "record":
        raise BadUsage("`recording` says how the steps after an alarm are recorded: give "
                       "`on_alarm='record'` too")  # fmt: skip
    given = dict(options or {})
    steps = given.get("n_steps", RECORDED_STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BadUsage(f"recording n_steps={steps!r}: expected a number of steps from 1")
    return Response(what, given, folder, log)
