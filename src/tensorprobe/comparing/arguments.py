"""Arguments, settings and versions in which two calls or two runs differ, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tensorprobe.comparing.measure import CallPair
from tensorprobe.records import Call, Fields, Special, TensorRecord

# Objects whose text is about the machine or the process and not about numbers.
_SILENT = {
    "device", "generator", "process_group", "function", "storage", "module", "unsupported",
    "numpy", "layout", "memory_format",
}  # fmt: skip
# How an optimizer steps, not what it computes.
_WAYS = {"foreach", "fused", "capturable", "differentiable"}
_MADE_AS = "made as "
_SETTING = re.compile(r"(\w+)=([^,()]+|\([^()]*\))")
# A number that was read off a tensor carries its rounding.
_RELATIVE = 1e-6
_DIGITS, _MANY = re.compile(r"^-?0?\.?0*|\."), 10
# About when, where and by whom, not about numbers.
_SILENT_FACTS = {
    "run", "created", "time", "host", "folder", "command", "ranks", "unfinished", "build", "tool",
    "format", "cpu_count", "platform", "seconds", "path", "converted_from",
    "flush", "queue", "max_disk", "on_write_error", "strict", "stop_after_last_step",
    "keep_last", "stacks", "compress",
    "seed",  # torch's before the program has set one, so it always differs
}  # fmt: skip
_SILENT_VARIABLES = {"RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
# What these lack was not there. Elsewhere a fact that one side lacks was not written down: other
# tools and versions know of others.
_COMPLETE = {"environment.", "packages."}


def differences(actual: Call, expected: Call) -> list[str]:
    """Each argument that differs, as "eps: 1e-05 here, 1e-06 expected"."""
    found: list[str] = []
    # the dispatcher leaves out an argument if and only if it has its default
    is_kernel = actual.op == expected.op and actual.op.startswith("torch.ops.")
    missing = _DEFAULT if is_kernel else _ABSENT
    for i in range(max(len(actual.args), len(expected.args))):
        a = actual.args[i] if i < len(actual.args) else missing
        e = expected.args[i] if i < len(expected.args) else missing
        found += _differ(str(i), a, e)
    for key in {**actual.kwargs, **expected.kwargs}:
        a, e = actual.kwargs.get(key, missing), expected.kwargs.get(key, missing)
        found += _differ(key, a, e)
    if actual.name.startswith("Optimizer."):
        return [text for text in found if text.partition(":")[0].rpartition(".")[2] not in _WAYS]
    return found


def settings(actual: Call, expected: Call) -> Iterator[str]:
    """What modules were made with, and whether they train."""
    evaluates = ["eval" in call.notes for call in (actual, expected)]
    if evaluates[0] != evaluates[1]:
        words = ["in evaluation" if each else "in training" for each in evaluates]
        yield f"mode: {words[0]} here, {words[1]} expected"
    ours, theirs = _made_as(actual), _made_as(expected)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield f"{key}: {ours[key]} here, {theirs[key]} expected"


def _made_as(call: Call) -> dict[str, str]:
    note = next((note for note in call.notes if note.startswith(_MADE_AS)), "")
    return dict(_SETTING.findall(note))


def computed_differences(actual: Call, expected: Call) -> list[float] | None:
    """How far apart arguments are, relative to their size, if all that differ are numbers with so
    many digits that a program computes and nobody writes; else None."""
    found: list[float] = []
    ours, theirs = (actual.args, actual.kwargs), (expected.args, expected.kwargs)
    return found if _are_computed(ours, theirs, found) else None


def _are_computed(a: Any, e: Any, found: list[float]) -> bool:
    if isinstance(a, Fields) and isinstance(e, Fields):
        a, e = a.fields, e.fields
    if isinstance(a, TensorRecord) and isinstance(e, TensorRecord):
        return True
    if isinstance(a, dict) and isinstance(e, dict):
        return all(
            _are_computed(a.get(key, _ABSENT), e.get(key, _ABSENT), found)
            for key in {**a, **e}
            if key not in _WAYS
        )
    if isinstance(a, list | tuple) and isinstance(e, list | tuple):
        return len(a) == len(e) and all(
            _are_computed(x, y, found) for x, y in zip(a, e, strict=True)
        )
    if _same(a, e):
        return True
    if not (isinstance(a, float) and isinstance(e, float) and _has_digits(a) and _has_digits(e)):
        return False
    found.append(abs(a - e) / max(abs(a), abs(e)))
    return True


def _has_digits(value: float) -> bool:
    return math.isfinite(value) and len(_DIGITS.sub("", repr(value).partition("e")[0])) >= _MANY


class _Missing:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


_ABSENT = _Missing("absent")
_DEFAULT = _Missing("its default")


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
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


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


def fact_differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Each as "numerics.matmul_tf32: true here, false expected"."""
    found: list[str] = []
    _compare_facts("", actual, expected, found)
    return found


def _compare_facts(
    prefix: str, actual: Mapping[str, Any], expected: Mapping[str, Any], found: list[str]
) -> None:
    for key in sorted({*actual, *expected}):
        if key in _SILENT_FACTS or key in _SILENT_VARIABLES:
            continue
        if prefix not in _COMPLETE and not (key in actual and key in expected):
            continue
        a, e = actual.get(key), expected.get(key)
        name = f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(e, Mapping):
            _compare_facts(f"{name}.", a, e, found)
        elif a != e and not isinstance(a, Mapping) and not isinstance(e, Mapping):
            found.append(f"{name}: {_fact_text(a)} here, {_fact_text(e)} expected")


def _fact_text(value: Any) -> str:
    if value is None:
        return "not set"
    return _shortened(str(value).lower() if isinstance(value, bool) else str(value))
