"""Stands around the kernels that generated code calls, while a run of it is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Seen = Callable[[str, tuple[Any, ...], Any], None]  # the kernel, its arguments, its `out`


class KernelWatch:
    """Tells each run of generated code which kernels it called; the code stays as it is.

    The code finds its kernels among the global names of its module. Those are replaced while any
    run of the module is watched, in whatever thread; each thread tells the innermost of its runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._watched: dict[int, tuple[int, dict[str, Any]]] = {}  # by module: runs, the originals

    def begin(self, function: Any, seen: Seen) -> dict[str, Any] | None:
        """Watch a run; its module, for `end`. None where the kernels cannot be found."""
        names = _globals_of(function)
        if names is None:
            return None
        with self._lock:
            count, originals = self._watched.get(id(names), (0, {}))
            if not count:
                originals = {name: names[name] for name in names if _is_kernel(name, names[name])}
                names.update({name: self._around(name, each) for name, each in originals.items()})
            self._watched[id(names)] = count + 1, originals
        self._runs().append(seen)
        return names

    def end(self, names: dict[str, Any]) -> None:
        """The run is over."""
        self._runs().pop()
        with self._lock:
            count, originals = self._watched[id(names)]
            if count > 1:
                self._watched[id(names)] = count - 1, originals
            else:
                del self._watched[id(names)]
                names.update(originals)

    def _runs(self) -> list[Seen]:
        if not hasattr(self._mine, "runs"):
            self._mine.runs = []
        runs: list[Seen] = self._mine.runs
        return runs

    def _around(self, name: str, kernel: Any) -> Any:
        if name == "extern_kernels":
            return _WatchedNamespace(kernel, self._around)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            runs = self._runs()
            if runs:
                runs[-1](name, args, kwargs.get("out"))
            return result

        return called


class _WatchedNamespace:
    """Inductor's `extern_kernels`, each function of which is watched."""

    def __init__(self, original: Any, around: Callable[[str, Any], Any]) -> None:
        self._original = original
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return self._around(f"extern_kernels.{name}", getattr(self._original, name))


def _is_kernel(name: str, value: Any) -> bool:
    return name == "extern_kernels" or (name.startswith("cpp_fused") and callable(value))


def _globals_of(function: Any) -> dict[str, Any] | None:
    """The global names of the module that inductor generated, behind torch's wrappers."""
    todo = [function]
    for _ in range(50):
        if not todo:
            return None
        each = todo.pop(0)
        each = getattr(each, "__func__", each)
        names = getattr(each, "__globals__", None)
        if not isinstance(names, dict):
            continue
        if "extern_kernels" in names and "assert_size_stride" in names:
            return names
        cells = getattr(each, "__closure__", None) or ()
        todo += [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return None
