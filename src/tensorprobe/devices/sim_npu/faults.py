"""Faults to plant in the kernels of the simulated NPU, and the rounding noise of another chip."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tensorprobe.devices.sim_npu.arithmetic import rounds_freely
from tensorprobe.errors import BadUsage

Effect = Callable[[torch.Tensor], torch.Tensor]

# Faults that a process gives to those it starts: a list of what `plant` takes, as JSON.
VARIABLE = "TENSORPROBE_SIM_NPU_FAULTS"

_WORDS = {"op", "effect", "calls", "output"}
_EXAMPLE = 'For example [{"op": "exp", "effect": "nan", "calls": [3]}]'

# The integer of the same width, and how many of the lowest mantissa bits "low-precision" clears.
_LOW_BITS = {
    torch.float64: (torch.int64, 45),
    torch.float32: (torch.int32, 16),
    torch.float16: (torch.int16, 6),
    torch.bfloat16: (torch.int16, 4),
}


class Planted:
    """A fault in one kernel; leaving it as a context manager, or `remove()`, cures it.

    `seen` counts the executions of the kernel since planting, `hits` those that were spoilt.
    """

    def __init__(
        self,
        faults: Faults,
        op: str,
        calls: frozenset[int] | None,
        effect: str | Effect,
        output: int | None,
    ) -> None:
        self.op = op
        self.effect = effect
        self.seen = 0
        self.hits = 0
        self._faults = faults
        self._calls = calls
        self._output = output
        self._due = False  # whether the execution under way is one to spoil
        self._stale: list[torch.Tensor] = []
        self._spoil = effect if callable(effect) else _effect(effect)

    def __enter__(self) -> Planted:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the fault out of the kernel again."""
        self._faults.remove(self)

    @property
    def words(self) -> dict[str, Any] | None:
        """What to plant it again with; None where its effect is a function."""
        if callable(self.effect):
            return None
        calls = None if self._calls is None else sorted(self._calls)
        return {"op": self.op, "calls": calls, "effect": self.effect, "output": self._output}

    def matches(self, func: Any) -> bool:
        """Whether `func` is the op this fault sits in; names may be shell patterns."""
        namespace, name = str(func._schema.name).split("::")
        overload = func._schema.overload_name or "default"
        names = (name, f"{name}.{overload}", f"{namespace}::{name}",
                 f"{namespace}::{name}.{overload}", f"{namespace}.{name}.{overload}")  # fmt: skip
        return any(fnmatch.fnmatchcase(each, self.op) for each in names)

    def before(self, func: Any) -> None:
        """Called ahead of each execution; a fault that raises does it here."""
        number, self.seen = self.seen, self.seen + 1
        self._due = self._calls is None or number in self._calls
        if self._due and isinstance(self.effect, str) and self.effect.startswith("raise"):
            self.hits += 1
            text = self.effect.partition(":")[2] or (
                f"NPU error, error code is 507015 (planted): aicore exception in {func}, "
                f"execution {number}"
            )
            raise RuntimeError(text)

    def after(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of an execution as this fault leaves them."""
        spoilt = list(outputs)
        if self._due:
            self.hits += 1
            for index, tensor in enumerate(outputs):
                if tensor.is_floating_point() and self._output in (None, index):
                    spoilt[index] = self._spoil_one(index, tensor)
        if self.effect == "stale":
            self._stale = [tensor.clone() for tensor in outputs]
        return spoilt

    def _spoil_one(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if self.effect != "stale":
            return self._spoil(tensor).to(tensor.dtype)
        last = self._stale[index] if index < len(self._stale) else None
        if last is None or last.shape != tensor.shape:
            return torch.zeros_like(tensor)  # a buffer nobody wrote to
        return last.clone()


class Noise:
    """Rounding as another chip would do it: neighbouring numbers where IEEE 754 leaves it free."""

    def __init__(self, faults: Faults, ulps: int, share: float, seed: int) -> None:
        if ulps < 1 or not 0 < share <= 1:
            raise BadUsage(f"noise needs ulps >= 1 and 0 < share <= 1, got {ulps} and {share}")
        self.ulps = ulps
        self.share = share
        self._faults = faults
        self._generator = torch.Generator().manual_seed(seed)

    def __enter__(self) -> Noise:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Round as the CPU does again."""
        self._faults.remove(self)

    def matches(self, func: Any) -> bool:
        return rounds_freely(func)

    def before(self, func: Any) -> None:
        """Noise has nothing to do ahead of a kernel."""

    def after(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._shake(t) if t.dtype in _LOW_BITS and t.numel() else t for t in outputs]

    def _shake(self, tensor: torch.Tensor) -> torch.Tensor:
        integer, _ = _LOW_BITS[tensor.dtype]
        drawn = torch.rand(tensor.shape, generator=self._generator)
        steps = torch.randint(-self.ulps, self.ulps + 1, tensor.shape, generator=self._generator)
        # Adding k to the bits of a float moves it by k units in the last place. Zero, and the
        # largest exponent (whose neighbour may be infinity), stay as they are.
        may_move = (
            (drawn < self.share)
            & (tensor != 0)
            & (tensor.abs() < torch.finfo(tensor.dtype).max / 2)
        )
        moved = tensor.contiguous().view(integer) + steps.to(integer)
        return torch.where(may_move, moved.view(tensor.dtype), tensor)


class Faults:
    """The faults of one chip, in the order they were planted."""

    def __init__(self) -> None:
        self._active: tuple[Planted | Noise, ...] = ()
        self._by_op: dict[Any, tuple[Planted | Noise, ...]] = {}

    def plant(
        self, op: str, calls: Iterable[int] | None, effect: str | Effect, output: int | None
    ) -> Planted:
        wanted = None if calls is None else frozenset(calls)
        fault = Planted(self, op, wanted, effect, output)
        _check_op(op)
        self._add(fault)
        return fault

    def noise(self, ulps: int, share: float, seed: int) -> Noise:
        noise = Noise(self, ulps, share, seed)
        self._add(noise)
        return noise

    def clear(self) -> None:
        self._active, self._by_op = (), {}

    def describe(self) -> str:
        """The faults that words can carry to another process."""
        planted = [fault.words for fault in self._active if isinstance(fault, Planted)]
        return json.dumps([words for words in planted if words is not None])

    def plant_described(self, text: str) -> None:
        """Plant what `describe` says of another process."""
        for words in _read(text):
            self.plant(words["op"], words.get("calls"), words["effect"], words.get("output"))

    def idle(self) -> list[str]:
        """What to tell of each planted fault that has spoilt nothing."""
        planted = [fault for fault in self._active if isinstance(fault, Planted)]
        return [self._why_idle(fault) for fault in planted if not fault.hits]

    def _why_idle(self, fault: Planted) -> str:
        text = f"the fault planted in '{fault.op}' has spoilt nothing: "
        if fault.seen:
            return f"{text}the kernel ran {fault.seen} times, numbered from 0"
        ran = {str(func._schema.name).partition("::")[2] for func in self._by_op}
        near = difflib.get_close_matches(fault.op, sorted(ran))
        hint = f". Near names that ran: {', '.join(near)}" if near else ""
        return f"{text}no such kernel ran{hint}. A recording at L2 shows those that do"

    def of(self, func: Any) -> tuple[Planted | Noise, ...]:
        """The faults that sit in the kernel of `func`."""
        if not self._active:
            return ()
        if func not in self._by_op:
            self._by_op[func] = tuple(fault for fault in self._active if fault.matches(func))
        return self._by_op[func]

    def remove(self, fault: Planted | Noise) -> None:
        self._active = tuple(each for each in self._active if each is not fault)
        self._by_op = {}

    def _add(self, fault: Planted | Noise) -> None:
        self._active = (*self._active, fault)
        self._by_op = {}


def _read(text: str) -> list[dict[str, Any]]:
    try:
        faults = json.loads(text)
    except ValueError as error:
        raise BadUsage(f"{VARIABLE} is not JSON: {error}. {_EXAMPLE}") from None
    if not isinstance(faults, list):
        raise BadUsage(f"{VARIABLE}: expected a list of faults. {_EXAMPLE}")
    for fault in faults:
        if not isinstance(fault, dict) or not {"op", "effect"} <= fault.keys() <= _WORDS:
            raise BadUsage(f"{VARIABLE}: {fault!r} is no fault. {_EXAMPLE}")
    return faults


def _effect(text: str) -> Effect:
    """The effect a word names."""
    kind, _, value = text.partition(":")
    if kind == "scale" and value:
        try:
            factor = float(value)
        except ValueError:
            raise BadUsage(f"effect '{text}': '{value}' is no number; say 'scale:1.01'") from None
        return lambda tensor: tensor * factor
    effects: dict[str, Effect] = {
        "nan": lambda tensor: _with_one(tensor, float("nan")),
        "inf": lambda tensor: _with_one(tensor, float("inf")),
        "low-precision": _low_precision,
        "permute": lambda tensor: tensor.flip(-1) if tensor.dim() else tensor,
        "stale": torch.clone,
        "raise": torch.clone,
    }
    if kind not in effects or (value and kind != "raise"):
        raise BadUsage(
            f"effect '{text}' is unknown. Known: 'scale:FACTOR', 'raise', 'raise:TEXT', "
            "'nan', 'inf', 'low-precision', 'permute', 'stale', or a function of the output"
        )
    return effects[kind]


def _with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """`tensor` with its middle element replaced."""
    spoilt = tensor.clone(memory_format=torch.contiguous_format)
    if spoilt.numel():
        spoilt.view(-1)[spoilt.numel() // 2] = value
    return spoilt


def _low_precision(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` cut to about half its digits, as a kernel with a narrow accumulator leaves it."""
    if tensor.dtype not in _LOW_BITS:
        return tensor
    integer, bits = _LOW_BITS[tensor.dtype]
    return (tensor.contiguous().view(integer) >> bits << bits).view(tensor.dtype)


def _check_op(op: str) -> None:
    """Refuse a name no op has, and a view, which has no kernel to break."""
    if any(sign in op for sign in "*?["):
        return
    plain = op.replace("::", ".").removeprefix("aten.").removeprefix("npu.")
    name, _, overload = plain.partition(".")
    packets = [getattr(space, name, None) for space in (torch.ops.aten, torch.ops.npu)]
    found = [packet for packet in packets if packet is not None]
    if not found or (overload and not any(hasattr(packet, overload) for packet in found)):
        raise BadUsage(
            f"no op '{op}' to plant a fault in. Names are those of the kernels, as in "
            "'native_layer_norm', 'addmm', 'convolution_backward', 'npu_rms_norm'; "
            "record at L2 to see which a model runs, or give a pattern such as '*layer_norm*'"
        )
    overloads = [getattr(packet, each) for packet in found for each in packet.overloads()]
    if all(each.is_view for each in overloads):
        raise BadUsage(f"'{op}' is a view: it calculates nothing, so there is nothing to break")
