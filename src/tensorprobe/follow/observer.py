"""What a program that is followed tells those who observe it: one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from tensorprobe.follow.naming import ApiName

if TYPE_CHECKING:
    from tensorprobe.follow.compiled import Run
    from tensorprobe.follow.dispatch_mode import SeenOperator
    from tensorprobe.follow.module_hooks import ModuleCall


class Observer:
    """Is told what a running program does. Override what you want to know; the rest is nothing.

    Whatever `begin`, `enter` or `optimizer_begins` returns goes to its counterpart when the call
    ends; where that is None, neither the end nor an exception is told.

        class Counting(Observer):
            on = True
            n_calls = 0

            def begin(self, plan, func, args, kwargs, frame):
                self.n_calls += 1
    """

    on = False  # whether calls are to be told; modules that no other calls are told anyway
    sees_small_calls = False  # whether `small_call_raised` is to be told
    makes_calls = False  # whether `make` makes the calls for which `begin` has given something

    # Calls of torch, and operators below them

    def plan(self, api: ApiName) -> Any:
        """What `begin` is given for calls of this API. Asked once for each function."""
        return api

    def begin(
        self,
        plan: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """A call is about to be made; `frame` makes it, None in a thread without Python."""

    def begin_operator(
        self, operator: SeenOperator, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operator is about to run; `node` is the graph node whose backward runs it."""

    def begin_hidden(self, plan: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call is about to be made in the backward of a compiled part, where it has no name."""

    def end(self, call: Any, result: Any) -> None:
        """A call has returned."""

    def raised(self, call: Any, error: BaseException) -> None:
        """A call has raised."""

    def make(
        self,
        call: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        make: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    ) -> Any:
        """Make a call of the program, somewhere else maybe; `make` makes one as it is."""
        return make(func, args, kwargs)

    def small_call_raised(
        self, api: ApiName, args: Any, kwargs: Any, error: Exception, frame: FrameType | None
    ) -> None:
        """A call has raised that is too small to be told: a property, a size."""

    def wrote(self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call that is not told has written to some of its arguments."""

    def compiled_began(self, run: Run, frame: FrameType | None) -> None:
        """A part compiled by torch.compile has begun to run; `frame` makes its first call."""

    def traced(self) -> None:
        """A call was made that torch.jit.trace follows, and that is not told therefore."""

    def gap(self, name: str, reason: BaseException | str) -> None:
        """A call could not be followed."""

    # Modules

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> Any:
        """A module is called."""

    def leave(self, entry: ModuleCall, call: Any, result: Any, error: BaseException | None) -> None:
        """A module has returned, or raised."""

    # Backward

    surrounds_backward = False  # whether `around_backward` is to be told

    def around_backward(self, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Backward is asked for with these arguments of torch's engine; `run` does it."""
        return run()

    def backward_begins(self, roots: Any) -> None:
        """Backward starts from these tensors."""

    def backward_raised(self, error: BaseException, alone: bool) -> None:
        """Backward was left by an exception; `alone`: no other thread goes backward meanwhile."""

    def backward_ended(self, last: bool) -> None:
        """Backward is over in this thread, the outermost; `last`: and in all others."""

    # Steps

    def step_ended(self) -> None:
        """One step of the program has ended."""

    # Optimizers

    def optimizer_begins(self, optimizer: Any, frame: FrameType, has_closure: bool) -> Any:
        """An optimizer's step begins; `frame` has called it, and may have given it a closure. It
        is told whether or not calls are."""

    def optimizer_ended(self, optimizer: Any, call: Any) -> None:
        """The step is over."""

    def optimizers_left(self) -> None:
        """No optimizer steps in this thread any more: those that did were left by an exception."""


class Several(Observer):
    """Lets several observers follow a program in one pass; each is told as if it were alone.

        Follower(Several([recorder, watch]), place)

    They are told in their order, and of ends in that order too. One of them may make calls.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self.sees_small_calls = any(each.sees_small_calls for each in observers)
        self.surrounds_backward = any(each.surrounds_backward for each in observers)
        makers = [number for number, each in enumerate(observers) if each.makes_calls]
        if len(makers) > 1:
            raise ValueError("one observer makes the calls of a program, not two")
        self._maker = makers[0] if makers else None
        self.makes_calls = bool(makers)

    @property
    def on(self) -> bool:  # type: ignore[override]
        """Whether one of them is on; those that are not are told nothing."""
        return any(each.on for each in self._observers)

    def plan(self, api: ApiName) -> list[Any]:
        return [each.plan(api) for each in self._observers]

    def begin(
        self,
        plan: list[Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> list[Any] | None:
        told = zip(self._observers, plan, strict=True)
        return _calls(
            each.begin(its, func, args, kwargs, frame) if each.on else None for each, its in told
        )

    def begin_operator(
        self, operator: SeenOperator, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        return _calls(
            each.begin_operator(operator, node, args, kwargs) if each.on else None
            for each in self._observers
        )

    def begin_hidden(
        self, plan: list[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        told = zip(self._observers, plan, strict=True)
        return _calls(
            each.begin_hidden(its, args, kwargs) if each.on else None for each, its in told
        )

    def end(self, call: list[Any], result: Any) -> None:
        for each, its in zip(self._observers, call, strict=True):
            if its is not None:
                each.end(its, result)

    def raised(self, call: list[Any], error: BaseException) -> None:
        for each, its in zip(self._observers, call, strict=True):
            if its is not None:
                each.raised(its, error)

    def make(self, call: list[Any], func: Any, args: Any, kwargs: Any, make: Any) -> Any:
        number = self._maker
        if number is None or call[number] is None:
            return make(func, args, kwargs)
        return self._observers[number].make(call[number], func, args, kwargs, make)

    def small_call_raised(
        self, api: ApiName, args: Any, kwargs: Any, error: Exception, frame: FrameType | None
    ) -> None:
        for each in self._observers:
            if each.sees_small_calls:
                each.small_call_raised(api, args, kwargs, error, frame)

    def wrote(self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for each in filter(_is_on, self._observers):
            each.wrote(api, args, kwargs)

    def compiled_began(self, run: Run, frame: FrameType | None) -> None:
        for each in filter(_is_on, self._observers):
            each.compiled_began(run, frame)

    def traced(self) -> None:
        for each in self._observers:
            each.traced()

    def gap(self, name: str, reason: BaseException | str) -> None:
        for each in self._observers:
            each.gap(name, reason)

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> list[Any] | None:
        return _calls(each.enter(entry, args) if each.on else None for each in self._observers)

    def leave(
        self, entry: ModuleCall, call: list[Any], result: Any, error: BaseException | None
    ) -> None:
        for each, its in zip(self._observers, call, strict=True):
            if its is not None:
                each.leave(entry, its, result, error)

    def around_backward(self, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        for each in self._observers:
            if each.surrounds_backward:
                run = partial(each.around_backward, run, args)
        return run()

    def backward_begins(self, roots: Any) -> None:
        for each in self._observers:
            each.backward_begins(roots)

    def backward_raised(self, error: BaseException, alone: bool) -> None:
        for each in self._observers:
            each.backward_raised(error, alone)

    def backward_ended(self, last: bool) -> None:
        for each in self._observers:
            each.backward_ended(last)

    def step_ended(self) -> None:
        for each in self._observers:
            each.step_ended()

    def optimizer_begins(
        self, optimizer: Any, frame: FrameType, has_closure: bool
    ) -> list[Any] | None:
        return _calls(
            each.optimizer_begins(optimizer, frame, has_closure) for each in self._observers
        )

    def optimizer_ended(self, optimizer: Any, call: list[Any]) -> None:
        for each, its in zip(self._observers, call, strict=True):
            if its is not None:
                each.optimizer_ended(optimizer, its)

    def optimizers_left(self) -> None:
        for each in self._observers:
            each.optimizers_left()


def _calls(calls: Iterable[Any]) -> list[Any] | None:
    """What each observer has given; None where none has."""
    found = list(calls)
    return None if all(call is None for call in found) else found


def _is_on(observer: Observer) -> bool:
    return observer.on
