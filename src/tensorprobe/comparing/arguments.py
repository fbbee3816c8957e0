"""Non-tensor arguments, dtypes and shapes of two calls: what is different, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tensorprobe.comparing.measure import CallPair
from tensorprobe.records import Call, Fields, Special, TensorRecord

# Objects whose text is about the machine or the process and not about numbers.
_SILENT = {
    "device", "generator", "process_group", "function", "storage", "module", "unsupported",
    "numpy", "layout", "memory_format",
}  # fmt: skip
# A number that was read off a tensor carries its rounding.
_RELATIVE = 1e-6


def differences(actual: Call, expected: Call) -> list[str]:
    """Each argument that differs, as "eps: 1e-05 here, 1e-06 expected"."""
    found: list[str] = []
    for i in range(max(len(actual.args), len(expected.args))):
        a = actual.args[i] if i < len(actual.args) else _ABSENT
        e = expected.args[i] if i < len(expected.args) else _ABSENT
        found += _differ(str(i), a, e)
    for key in {**actual.kwargs, **expected.kwargs}:
        a, e = actual.kwargs.get(key, _ABSENT), expected.kwargs.get(key, _ABSENT)
        found += _differ(key, a, e)
    return found


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _differ(name: str, a: Any, e: Any) -> Iterator[str]:
    if isinstance(a, Fields) and isinstance(e, Fields):
        a, e = a.fields, e.fields
    if isinstance(a, TensorRecord) or isinstance(e, TensorRecord):
        if (isinstance(a, TensorRecord) != isinstance(e, TensorRecord)) and _ABSENT not in (a, e):
            yield f"{name}: {_text(a)} here, {_text(e)} expected"
    elif isinstance(a, dict) and isinstance(e, dict):
        for key in {**a, **e}:
            yield from _differ(f"{name}.{key}", a.get(key, _ABSENT), e.get(key, _ABSENT))
    elif isinstance(a, list | tuple) and isinstance(e, list | tuple):
        if len(a) != len(e):
            yield f"{name}: {len(a)} items here, {len(e)} expected"
            return
        for i, (x, y) in enumerate(zip(a, e, strict=True)):
            yield from _differ(f"{name}.{i}", x, y)
    elif not _same(a, e):
        yield f"{name}: {_text(a)} here, {_text(e)} expected"


def _same(a: Any, e: Any) -> bool:
    if a is _ABSENT or e is _ABSENT:
        # an argument given by position on one side and by keyword on the other, or left to its
        # default: nobody can tell from here
        return True
    if isinstance(a, Special) and isinstance(e, Special):
        return a == e or (a.kind == e.kind and a.kind in _SILENT)
    if isinstance(a, Special) or isinstance(e, Special):
        either = a if isinstance(a, Special) else e
        return either.kind in _SILENT
    if _is_number(a) and _is_number(e):
        if isinstance(a, float) or isinstance(e, float):
            return math.isclose(a, e, rel_tol=_RELATIVE) or (a != a and e != e)
        return bool(a == e)
    if isinstance(a, slice) and isinstance(e, slice):
        return all(_same(x, y) for x, y in ((a.start, e.start), (a.stop, e.stop), (a.step, e.step)))
    if type(a) is str and type(e) is str and _is_device(a) and _is_device(e):
        return True
    return type(a) is type(e) and bool(a == e)


def absences(actual: Call, expected: Call) -> list[str]:
    """Arguments, tensors apart, that only one side gives: the other may have its default."""
    if len(actual.args) != len(expected.args):
        return []  # given by position here and by keyword there: nobody can tell which is which
    found = []
    for key in {**actual.kwargs, **expected.kwargs}:
        a, e = actual.kwargs.get(key, _ABSENT), expected.kwargs.get(key, _ABSENT)
        if (a is _ABSENT) != (e is _ABSENT) and not isinstance(a, TensorRecord):
            value = e if a is _ABSENT else a
            if value is not None and not (isinstance(value, Special) and value.kind in _SILENT):
                found.append(f"{key}: {_text(a)} here, {_text(e)} expected")
    return found


def transplant(actual: Call, pair: CallPair) -> Call | None:
    """`actual` called as expected was: its own tensors in the other's arguments."""
    import msgspec

    expected = pair.pair.expected
    if expected is None:
        return None
    own = {row.expected.name: row.actual for row in pair.tensors if row.expected and row.actual}
    try:
        args = _swapped(expected.args, own)
        kwargs = _swapped(expected.kwargs, own)
    except KeyError:
        return None
    return msgspec.structs.replace(actual, args=args, kwargs=kwargs)


def _swapped(tree: Any, own: dict[str, TensorRecord]) -> Any:
    if isinstance(tree, TensorRecord):
        return own[tree.name]
    if isinstance(tree, list | tuple):
        return type(tree)(_swapped(part, own) for part in tree)
    if isinstance(tree, dict):
        return {key: _swapped(part, own) for key, part in tree.items()}
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "npu", "xpu", "mps", "privateuseone", "meta")


def _text(value: Any) -> str:
    if isinstance(value, TensorRecord):
        return f"a tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, Special):
        return value.text
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def layout_differences(actual: Call, expected: Call) -> list[str]:
    """Tensors whose dtype, shape or requires_grad differ, as "output.0: float16 here, ..."."""
    found = []
    theirs = {r.name.removeprefix(expected.name): r for r in expected.tensors}
    for record in actual.tensors:
        name = record.name.removeprefix(actual.name)
        other = theirs.get(name)
        if other is None:
            continue
        for what in ("dtype", "shape", "requires_grad"):
            a, e = getattr(record, what), getattr(other, what)
            if a != e:
                a, e = (list(a), list(e)) if what == "shape" else (a, e)
                label = "" if what != "requires_grad" else "requires_grad "
                found.append(f"{name.strip('.')}: {label}{a} here, {label}{e} expected")
    return found


def graft(call: Call, donor: Call) -> Call | None:
    """`call` with the non-tensor arguments of `donor`; None where they do not fit together."""
    import msgspec

    try:
        args = tuple(_graft(d, c) for d, c in zip(donor.args, call.args, strict=True))
        kwargs = {key: _graft(value, call.kwargs[key]) for key, value in donor.kwargs.items()}
    except (KeyError, TypeError, ValueError):
        return None
    return msgspec.structs.replace(call, args=args, kwargs=kwargs)


def _graft(donor: Any, own: Any) -> Any:
    if isinstance(donor, TensorRecord) or isinstance(own, TensorRecord):
        if isinstance(donor, TensorRecord) and isinstance(own, TensorRecord):
            return own
        raise TypeError
    if isinstance(donor, list | tuple) and isinstance(own, list | tuple):
        parts = [_graft(d, o) for d, o in zip(donor, own, strict=True)]
        return type(donor)(parts)
    if isinstance(donor, dict) and isinstance(own, dict):
        return {key: _graft(value, own[key]) for key, value in donor.items()}
    return donor
