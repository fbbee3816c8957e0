"""The one torch function ever replaced: the entry to the backward engine, restored on exit.

`Tensor.backward` is itself a torch function, so that a function mode is off for the whole backward,
and with it everything that backward calls in Python: recomputation of checkpoints, custom
`Function.backward`. Putting the mode back around the engine is the only place that works.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tensorprobe.follow.mode_stack import enter_missing, is_wanted, leave, remove_mode
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.tracebacks import clean
from tensorprobe.torch_versions import engine_entry, put_engine_entry


class _Thread(threading.local):
    depth = 0


class InBackward:
    """A mode that stays on in backward, where dispatch modes do not hide it as in forward: what a
    simulated device, or another tool, calls in their handlers is not the program's."""

    def __init__(self) -> None:
        super().__init__()
        # dispatch modes on the stack while backward runs: the most of all threads, and by thread
        self.dispatch_depth = 0
        self.dispatch_depths: Mapping[int, int] = {}

    def is_in_handler(self) -> bool:
        """Whether a call is made by the handler of a dispatch mode that came by in backward."""
        if not self.dispatch_depth:
            return False
        depth = self.dispatch_depths.get(threading.get_ident())
        if depth is None:  # a thread that does not go backward, unless it is one of a device
            depth = self.dispatch_depth if torch._C._current_graph_task_id() != -1 else 0
        return depth > torch._C._len_torch_dispatch_stack()


class EngineEntry:
    """Keeps `modes` on while backward runs, and tells an observer.

    `on_end` is called when the observer has been told that the outermost backward is over.
    """

    def __init__(
        self,
        modes: Sequence[Any],
        observer: Observer,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._modes = modes
        self._observer = observer
        self._on_end = on_end
        self.going: set[int] = set()  # threads that go backward; `on_end` may not be done yet
        self._running = 0  # of them
        self._depths: dict[int, int] = {}  # by thread, the dispatch modes that its backward has on
        self._thread = _Thread()
        self._lock = threading.RLock()  # a signal's handler may go backward meanwhile
        self._wrapper: Callable[..., Any] | None = None

    def install(self) -> None:
        original = engine_entry()

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                if self._wrapper is not run_backward:  # removed while another wrapper was around it
                    return original(*args, **kwargs)
                if self._observer.surrounds_backward:
                    run = functools.partial(self._run, original, args, kwargs)
                    return self._observer.around_backward(run, args)
                return self._run(original, args, kwargs)
            except BaseException as error:
                clean(error)
                raise

        run_backward._entry = self  # type: ignore[attr-defined]
        self._wrapper = run_backward
        put_engine_entry(run_backward)

    def remove(self) -> None:
        """Restore the function; where someone wrapped ours meanwhile, ours just passes on."""
        self._wrapper = None
        function = engine_entry()
        while (entry := getattr(function, "_entry", None)) and entry._wrapper is not function:
            function = function.__wrapped__  # type: ignore[attr-defined]
        put_engine_entry(function)

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        modes = list(self._modes)
        wanted = [mode for mode in modes if is_wanted(mode)]
        entered = enter_missing(modes)
        # one that runs inside of another may have a thread of its own, as nodes of a device have
        inside = self._running and torch._C._current_graph_task_id() != -1
        outermost = not inside and self._thread.depth == 0
        self._thread.depth += 1
        if outermost:
            with self._lock:
                self.going.add(threading.get_ident())
                self._running += 1
        around = self._depths.get(threading.get_ident())
        try:
            self._set_depth(torch._C._len_torch_dispatch_stack())
            self._observer.backward_begins(args[0] if args else ())
            return original(*args, **kwargs)
        except BaseException as error:
            self._observer.backward_raised(error, self._running <= 1)
            raise
        finally:
            self._set_depth(around)
            # not one that the program has asked for meanwhile
            leave(mode for mode in entered if mode in wanted or not is_wanted(mode))
            for mode in wanted:
                if not is_wanted(mode):  # stopped meanwhile, maybe in a device's own thread
                    remove_mode(mode)
            self._thread.depth -= 1
            if outermost:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        try:
            self._observer.backward_ended(last)
            self._on_end()
        finally:
            with self._lock:
                self.going.discard(threading.get_ident())

    def _set_depth(self, depth: int | None) -> None:
        """Tell the modes how many dispatch modes are on around the backward of this thread."""
        with self._lock:
            if depth is None:
                self._depths.pop(threading.get_ident(), None)
            else:
                self._depths[threading.get_ident()] = depth
            most = max(self._depths.values(), default=0)
            for mode in self._modes:
                if isinstance(mode, InBackward):
                    mode.dispatch_depths, mode.dispatch_depth = self._depths, most
