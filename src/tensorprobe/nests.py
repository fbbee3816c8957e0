"""Nests of lists, tuples and dicts: arguments of calls, what they return, JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

_SEQUENCES = (list, tuple)


def change_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest of the same kind, with what `change` makes of each leaf: a named tuple is one."""
    kind = type(value)
    if kind in _SEQUENCES:
        return kind([change_leaves(item, change) for item in value])
    if kind is dict:
        return {key: change_leaves(item, change) for key, item in value.items()}
    return change(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves in order: everything that is no list, tuple (also a named one) or dict."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, _SEQUENCES):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def strict_json(value: Any) -> Any:
    """A nest as strict JSON can hold it: NaN and infinity are "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, _SEQUENCES):
        return [strict_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
