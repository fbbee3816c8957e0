"""The one torch function ever replaced: the entry to the backward engine, restored on exit.

`Tensor.backward` is itself a torch function, so that a function mode is off for the whole backward,
and with it everything that backward calls in Python: recomputation of checkpoints, custom
`Function.backward`. Putting the mode back around the engine is the only place that works.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorprobe.capture.mode_stack import enter_missing


class _Thread(threading.local):
    depth = 0


class EngineEntry:
    """Keeps `modes` on while backward runs, and calls `on_end` when the outermost one is over.

    `on_begin` is given the tensors that backward starts from, `on_error` what it is left by.
    """

    def __init__(
        self,
        modes: Sequence[Any],
        on_begin: Callable[[Any], None],
        on_end: Callable[[bool], None],
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._modes = modes
        self._on_end = on_end
        self._on_error = on_error
        self._on_begin = on_begin
        # by thread, one more when a backward begins there and when `on_end` is done: odd between
        self.rounds: dict[int, int] = {}
        self._running = 0  # in all threads
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._wrapper: Callable[..., Any] | None = None

    def install(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._wrapper is not run_backward:  # removed while another wrapper was around it
                return original(*args, **kwargs)
            return self._run(original, args, kwargs)

        run_backward._entry = self  # type: ignore[attr-defined]
        self._wrapper = run_backward
        _put(run_backward)

    def remove(self) -> None:
        """Restore the function; where someone wrapped ours meanwhile, ours just passes on."""
        self._wrapper = None
        function = torch.autograd.graph._engine_run_backward
        while (entry := getattr(function, "_entry", None)) and entry._wrapper is not function:
            function = function.__wrapped__  # type: ignore[attr-defined]
        _put(function)

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        entered = enter_missing(self._modes)
        # one that runs inside of another may have a thread of its own, as nodes of a device have
        inside = self._running and torch._C._current_graph_task_id() != -1
        outermost = not inside and self._thread.depth == 0
        self._thread.depth += 1
        if outermost:
            self._turn()
            with self._lock:
                self._running += 1
        calls = [mode for mode in self._modes if hasattr(mode, "dispatch_depth")]
        before = [mode.dispatch_depth for mode in calls]
        for mode in calls:
            mode.dispatch_depth = torch._C._len_torch_dispatch_stack()
        try:
            self._on_begin(args[0] if args else ())
            return original(*args, **kwargs)
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            for mode, depth in zip(calls, before, strict=True):
                mode.dispatch_depth = depth
            while entered:
                entered.pop().__exit__(None, None, None)
            self._thread.depth -= 1
            if outermost:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        try:
            self._on_end(last)
        finally:
            self._turn()

    def _turn(self) -> None:
        ident = threading.get_ident()
        self.rounds[ident] = self.rounds.get(ident, 0) + 1


def _put(function: Callable[..., Any]) -> None:
    torch.autograd.graph._engine_run_backward = function
    torch.autograd._engine_run_backward = function  # type: ignore[attr-defined]
