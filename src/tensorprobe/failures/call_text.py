"""A call in one line: its function and its arguments, tensors by dtype and shape."""

from __future__ import annotations

from typing import Any

from tensorprobe.failures.followed_calls import WatchedCall
from tensorprobe.records import HOST
from tensorprobe.store.lines import TensorLine

_MOST = 400


def describe_call(call: WatchedCall) -> str:
    """`torch.nn.functional.group_norm(float32[2, 32, 8] on npu:0, 32, None, None, 1e-05)`."""
    words = [describe(arg) for arg in call.args]
    words += [f"{key}={describe(value)}" for key, value in call.kwargs.items()]
    text = f"{call.names.api.op}({', '.join(words)})"
    return text if len(text) <= _MOST else text[: _MOST - 4] + "...)"


def describe(tree: Any) -> str:
    """One argument, from its tree in a call line."""
    if isinstance(tree, list):
        return f"[{', '.join(map(describe, tree))}]"
    if not isinstance(tree, dict) or len(tree) != 1:
        return repr(tree)
    ((kind, value),) = tree.items()
    if isinstance(value, TensorLine):
        place = "" if value.device == HOST else f" on {value.device}"
        return f"{value.dtype}{list(value.shape)}{place}"
    if kind == "tuple":
        items = ", ".join(map(describe, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if kind == "special":
        return str(value[1])
    if kind == "slice":
        return ":".join("" if part is None else describe(part) for part in value)
    if kind == "dict":
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value) + "}"
    if kind == "fields":
        return f"{value[1]}(...)"
    return "..." if kind == "ellipsis" else str(value)
