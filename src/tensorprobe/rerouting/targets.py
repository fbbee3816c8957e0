"""Where a call is to run instead: a device, a dtype, or both. Parsed without torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tensorprobe.errors import BadUsage, DeviceUnusable

DTYPES = ("float32", "float64")
_DEVICES = ("cpu", "cuda", "npu", "xpu", "mps", "hpu")
_LOWER = ("float16", "bfloat16", "half", "float8")
_EXAMPLE = "For example torch.group_norm=cpu, F.softmax=float32 or F.linear=cpu:float64"


class Target(NamedTuple):
    """A place to compute: `device` None is where the call is, `dtype` None is what it has."""

    device: str | None
    dtype: str | None

    def __str__(self) -> str:
        return ":".join(filter(None, (self.device, self.dtype))) or "home"


HOME = Target(None, None)  # not rerouted, whatever a wider name says


def parse_target(text: str) -> Target:
    """The target in "cpu", "float32", "cuda:1", "cpu:float64" or "home"; BadUsage says what is
    wrong."""
    if text.strip() == "home":
        return HOME
    device = dtype = None
    for word in re.findall(r"[^:,]+(?::\d+)?", text.strip()):
        if word in DTYPES and dtype is None:
            dtype = word
        elif re.fullmatch(r"[a-z]+(:\d+)?", word) and device is None and _is_device(word):
            device = word
        else:
            raise BadUsage(f"cannot reroute to '{text}': {_what_is_wrong(word)}")
    if device is None and dtype is None:
        raise BadUsage(f"rerouting needs a target. {_EXAMPLE}")
    return Target(device, dtype)


def parse_rules(rules: Mapping[str, str]) -> dict[str, Target]:
    """The target of each name."""
    if not rules:
        raise BadUsage(f"nothing to reroute: no name was given. {_EXAMPLE}")
    return {name.strip(): parse_target(target) for name, target in rules.items()}


def parse_options(options: Iterable[str]) -> dict[str, str]:
    """Names and targets from what is typed: ["a=cpu,b=float32", "c=cpu"]. Targets are checked."""
    rules: dict[str, str] = {}
    for option in options:
        for part in option.split(","):
            name, equals, target = part.strip().rpartition("=")
            if not equals and part.strip() in DTYPES and rules:  # the dtype of "a=cpu,float64"
                last = next(reversed(rules))
                rules[last] = f"{rules[last]}:{part.strip()}"
                continue
            if not name:
                raise BadUsage(f"--reroute {option}: expected NAME=TARGET. {_EXAMPLE}")
            parse_target(target)
            rules[name] = target
    return rules


def check_present(targets: Iterable[Target]) -> None:
    """DeviceUnusable where a device that is asked for is not there."""
    from tensorprobe.devices import device_layer

    for device in dict.fromkeys(target.device for target in targets):
        if device is None:
            continue
        row = device_layer(device)
        _, _, index = device.partition(":")
        if row.is_available() and int(index or 0) < row.count():
            continue
        there = f"{row.count()} of that kind are there" if row.is_available() else "it is not there"
        raise DeviceUnusable(
            f"cannot reroute to '{device}': {there}. Give a device of this machine, or cpu"
        )


def _is_device(word: str) -> bool:
    kind = word.partition(":")[0]
    if kind in _DEVICES:
        return True
    if difflib.get_close_matches(kind, (*_DEVICES, *DTYPES), cutoff=0.75):
        return False
    import torch  # a device of another vendor: only torch knows its name

    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _what_is_wrong(word: str) -> str:
    if word in DTYPES or word.partition(":")[0] in _DEVICES:
        return "give one device and one dtype at most, as in cpu:float64"
    if word.startswith(_LOWER):
        return f"'{word}' is no higher precision; say {' or '.join(DTYPES)}"
    near = difflib.get_close_matches(word, (*_DEVICES, *DTYPES), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"'{word}' is neither a device (cpu, cuda:1, npu) nor {' or '.join(DTYPES)}.{hint}"
