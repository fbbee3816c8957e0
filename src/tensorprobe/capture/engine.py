"""The one torch function ever replaced: the entry to the backward engine, restored on exit.

`Tensor.backward` is itself a torch function, so that a function mode is off for the whole backward,
and with it everything that backward calls in Python: recomputation of checkpoints, custom
`Function.backward`. Putting the mode back around the engine is the only place that works.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


class EngineEntry:
    """Keeps `mode` on while backward runs.

    `on_begin` is called with the tensors that a backward begins from, `on_end` when the outermost
    one is over.
    """

    def __init__(
        self, mode: Any, on_begin: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._mode = mode
        self._on_begin = on_begin
        self._on_end = on_end
        self._depth = 0
        self._lock = threading.Lock()
        self._installed = False
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None

    def install(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._installed:
                return original(*args, **kwargs)
            return self._run(original, args, kwargs)

        self._original, self._wrapper = original, run_backward
        self._installed = True
        self._put(run_backward)

    def remove(self) -> None:
        """Restore the function; where someone wrapped ours meanwhile, ours just passes on."""
        self._installed = False
        if torch.autograd.graph._engine_run_backward is self._wrapper and self._original:
            self._put(self._original)

    @staticmethod
    def _put(function: Callable[..., Any]) -> None:
        torch.autograd.graph._engine_run_backward = function
        torch.autograd._engine_run_backward = function  # type: ignore[attr-defined]

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        enter = self._mode not in torch.overrides._get_current_function_mode_stack()
        if enter:
            self._mode.__enter__()
        with self._lock:
            self._depth += 1
        before = self._mode.dispatch_depth
        self._mode.dispatch_depth = torch._C._len_torch_dispatch_stack()
        try:
            self._on_begin(args[0] if args else ())
            return original(*args, **kwargs)
        finally:
            self._mode.dispatch_depth = before
            if enter:
                self._mode.__exit__(None, None, None)
            with self._lock:
                self._depth -= 1
                outermost = self._depth == 0
            if outermost:
                self._on_end()
