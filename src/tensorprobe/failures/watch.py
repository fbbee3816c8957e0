"""The watch for errors: names the forward call behind one, saves its inputs, tries it alone."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tensorprobe import torch_versions
from tensorprobe.devices import block_launches, current_rank
from tensorprobe.errors import TensorprobeError
from tensorprobe.failures.backward_watch import BackwardWatch
from tensorprobe.failures.failed_calls import Failures
from tensorprobe.failures.followed_calls import (
    COMPILED,
    FollowedCalls,
    Told,
    WatchedCall,
)
from tensorprobe.failures.origin import (
    CompiledPart,
    CustomFunction,
    Elsewhere,
    chain,
    is_programs_own,
    origin,
    user_frames,
    words,
)
from tensorprobe.failures.recent_inputs import Kept
from tensorprobe.failures.saved_inputs import SavedInputs
from tensorprobe.follow.follower import Follower
from tensorprobe.follow.naming import ApiName, CallNames, call_name
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.steps import StepOn
from tensorprobe.follow.warning_filters import COMPILED_MODULE, add_filter, remove_filter
from tensorprobe.garbage import rare_searches
from tensorprobe.guarding.guard_options import check_budget
from tensorprobe.record.recorder import say
from tensorprobe.records import Direction
from tensorprobe.trouble import OnTrouble

_MAX_KNOWN = 1000


_Arguments = ParamSpec("_Arguments")


def _shielded(
    method: Callable[Concatenate[ErrorWatch, _Arguments], None],
) -> Callable[Concatenate[ErrorWatch, _Arguments], None]:
    """Whatever goes wrong while an error is looked at is said, and never the program's problem."""

    @functools.wraps(method)
    def shielded(watch: ErrorWatch, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        with OnTrouble(watch.not_looked_at):
            method(watch, *args, **kwargs)

    return shielded


class ErrorWatch:
    """Follows every torch call, and reports those that raise, in forward and in backward.

    The inputs of recent calls are held, within `inputs_budget`, for a backward that fails long
    after its forward. `calls` and `steps` name those to hold instead, however large they are: the
    second run, where the budget was too small. The inputs of failed calls go to a capture in
    `folder`, which all ranks share, their repros to `place`, which is this rank's own.
    """

    def __init__(
        self,
        folder: Path,
        place: Path,
        report: Callable[..., None],
        *,
        step_on: StepOn = "auto",
        rerun: str | None = None,
        log: Callable[[str], None] = say,
        inputs_budget: int | str = "1G",
        calls: Sequence[str] = (),
        steps: Sequence[int] | None = None,
        timeout_s: float = 120,
    ) -> None:
        self.log = log
        self._kept = Kept(check_budget(inputs_budget))
        inputs = SavedInputs(folder / "inputs", current_rank())
        self._calls = FollowedCalls(inputs.writer, self._kept, calls, steps, self._told())
        self._follower = Follower(
            self._calls, self._calls.place, step_on=step_on, stacks=self._calls.stacks
        )
        engine = self._follower.engine
        self._backward = BackwardWatch(self._calls, self._backward_failed, lambda: engine.going)
        self._failures = Failures(
            place,
            inputs,
            self._calls.troubles,
            self._calls.writes,
            report,
            log,
            rerun,
            timeout_s,
        )
        self._step = 0
        # exceptions that were dealt with, by identity: their words, and when that was
        self._known: dict[int, tuple[tuple[str, str], int]] = {}
        self._pid = os.getpid()
        self._left: Any = None
        self._filter: Any = None
        self._set_variables: list[str] = []
        _stop_in_children(self._calls)

    # What the guard calls

    def not_looked_at(self, problem: Exception) -> None:
        """Say that something went wrong while an error was looked at."""
        self.log(f"an error could not be looked at: {type(problem).__name__}: {problem}")

    def enter(self) -> None:
        """Watch from here on."""
        self._set_variables = block_launches()
        self._filter = add_filter(COMPILED_MODULE)
        self._calls.begin_step(self._step)
        self._backward.on = True
        self._left = register_module_forward_hook(self._module_left, always_call=True)
        rare_searches.begin()
        self._follower.install()

    def leave(self, error: BaseException | None) -> None:
        """Watch no more: `error` is what the program leaves by. What failed is tried alone."""
        self._take_away()
        if os.getpid() != self._pid:
            return
        if isinstance(error, Exception):
            self._surfaced(error)
        self._kept.release()
        self._failures.conclude(error)

    def step(self) -> None:
        """One step of the program has ended."""
        self._follower.step()

    def _take_away(self) -> None:
        self._follower.remove()
        self._backward.on = False
        rare_searches.end()
        self._left.remove()
        remove_filter(self._filter)
        for variable in self._set_variables:
            os.environ.pop(variable, None)
        self._set_variables.clear()

    # What the program does

    def _told(self) -> Told:
        return Told(
            raised=self._forward_failed,
            small_call_raised=self._small_call_failed,
            around_backward=lambda run, args: self._backward.around(run, args),
            backward_begins=lambda roots: self._backward.begins(roots),
            step=self._advance,
        )

    def _advance(self) -> None:
        self._step += 1
        self._calls.begin_step(self._step)
        self._backward.forget()

    # What fails

    def _forward_failed(self, call: WatchedCall, error: Exception) -> None:
        if os.getpid() == self._pid:
            self._failed(call, "forward", error)

    @_shielded
    def _small_call_failed(
        self, api: ApiName, args: Any, kwargs: Any, error: Exception, frame: FrameType | None
    ) -> None:
        """One of the calls that a recording leaves out: `size`, `requires_grad_`, `backward`."""
        asked = isinstance(error, AttributeError) or api.stem.endswith((".__get__", ".__set__"))
        if asked or self._is_known(error):
            return
        direction: Direction = "backward" if api.api.endswith(("backward", "grad")) else "forward"
        name = call_name(api, self._calls.counter.next(api), direction)
        names = CallNames(api, name, self._calls.place.module, direction)
        call = self._calls.note(names, args, kwargs, frame)
        if call is not None:
            self._failed(call, direction, error)

    @_shielded
    def _backward_failed(self, error: Exception, node: Any, began: int) -> None:
        """An exception came out of backward; `node` is where it was, None before the first."""
        if self._is_known(error, began):
            return
        if is_programs_own(error):  # a hook of the program's: not torch's failure
            self._remember(error)
            return
        call = None if node is None else self._backward.call_of(node)
        if call is not None:
            self._failed(call, "backward", error, node.name())
        elif node is not None:
            self._unowned_failed(node, error)

    def _unowned_failed(self, node: Any, error: Exception) -> None:
        """A node that no call of the program has made: a leaf's, or one of a C++ extension."""
        name = node.name().rpartition("::")[2]
        names = CallNames(ApiName("Node", name, node.name()), f"Node.{name}", "", "backward")
        call = WatchedCall(names, "tensors", self._step, thread=self._calls.place.thread)
        call.frames = user_frames(error)
        self._failed(call, "backward", error, node.name())

    def _module_left(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch_versions.is_compiling():
            return
        # torch calls this hook from another function when the module has raised
        if result is None and sys._getframe(1).f_code is nn.Module._call_impl.__code__:
            error = sys.exc_info()[1]
            if isinstance(error, Exception):
                self._surfaced(error)

    @_shielded
    def _surfaced(self, error: Exception) -> None:
        """An exception has come up to where it can be seen, whether or not its call was."""
        if self._is_known(error) or type(error).__name__ == "_StopRecomputationError":
            return
        with Quiet():
            place = origin(error)
        if isinstance(place, Elsewhere):
            self.log(place.text)
        elif isinstance(place, CompiledPart):
            self._compiled_failed(place, error)
        elif isinstance(place, CustomFunction):
            self._function_failed(place, error)
        if place is not None:
            self._remember(error)

    def _compiled_failed(self, part: CompiledPart, error: Exception) -> None:
        api = ApiName("Compiled", part.name, part.name)
        call = self._calls.compiled.pop(
            api, None
        )  # seen when it began, where calls were seen in it
        if call is None:
            name = call_name(api, self._calls.counter.next(api))
            names = CallNames(api, name, self._calls.place.module)
            call = WatchedCall(names, "tensors", self._step, thread=self._calls.place.thread)
        call.notes.clear()
        call.frames = part.frames
        call.notes.append(COMPILED)
        self._failed(call, "forward", error)

    def _function_failed(self, place: CustomFunction, error: Exception) -> None:
        """The code of a custom Function raised by itself, in no torch call and no backward."""
        call = self._calls.new_function(place.kind)
        call.frames = user_frames(error)
        self._calls.note_arguments(call, place.args)
        self._failed(call, "forward", error)

    # What was dealt with

    @_shielded
    def _failed(
        self, call: WatchedCall, direction: Direction, error: Exception, node: str = ""
    ) -> None:
        self._remember(error)
        if isinstance(error, TensorprobeError):  # another guard stops the program, or a recorder
            return
        self._failures.add(call, direction, error, node)

    def _is_known(self, error: BaseException, since: int = 0) -> bool:
        """Whether it, or what it was raised from, was dealt with; in a forked child all is."""
        if os.getpid() != self._pid:
            return True
        known = [(each, self._known.get(id(each))) for each in chain(error)]
        return any(k is not None and k[0] == words(each) and k[1] >= since for each, k in known)

    def _remember(self, error: BaseException) -> None:
        # not the exception itself: its frames hold the program's tensors. An identity is used
        # again when an exception is gone, hence the words and the time.
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[id(error)] = (words(error), self._backward.now())


def _stop_in_children(calls: FollowedCalls) -> None:
    """A forked child (a DataLoader worker) has our modes, but nothing of its work is watched."""
    reference = weakref.ref(calls)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive.on = False

    os.register_at_fork(after_in_child=in_child)
