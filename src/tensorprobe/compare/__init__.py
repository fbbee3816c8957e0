"""Two captures make a comparison: align, measure, judge, blame."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """This room has the name of the function that users call: it can be called for it.

    Whoever imports anything in here sets `tensorprobe.compare` to this module.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        import tensorprobe

        return tensorprobe.__getattr__("compare")(*args, **options)


sys.modules[__name__].__class__ = _Room
