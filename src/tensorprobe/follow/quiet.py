"""Own tensor work that no mode, graph or autocast of the program ever sees."""

from __future__ import annotations

from types import TracebackType

import torch

from tensorprobe.torch_versions import dispatch_modes_off


class Quiet:
    """Inside it torch records no graph and calls no function or dispatch mode.

    Cheaper than a generator-based context manager, and it is entered for every recorded call.
    """

    __slots__ = ("_dispatch", "_function", "grad")

    def __enter__(self) -> Quiet:
        self._function = torch._C.DisableTorchFunction()
        self._dispatch = None
        self.grad = False
        try:
            self._function.__enter__()
            if torch._C._len_torch_dispatch_stack():
                dispatch = dispatch_modes_off()
                dispatch.__enter__()
                self._dispatch = dispatch
            self.grad = torch._C.is_grad_enabled()  # whether it was on around this
            if self.grad:
                torch._C._set_grad_enabled(False)
        except BaseException as error:  # Ctrl-C after any of these calls: nobody else leaves it
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.grad:
            torch._C._set_grad_enabled(True)
        if self._dispatch is not None:
            self._dispatch.__exit__(kind, error, trace)
        self._function.__exit__(kind, error, trace)
