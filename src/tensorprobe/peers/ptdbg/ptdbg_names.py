"""Names as ptdbg_ascend writes them, and as a native capture has them. Pure."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from tensorprobe.operators import NATIVE_NAMES
from tensorprobe.records import Call, Direction, TensorRecord

Separator = Literal["_", "."]

_KINDS = (
    "Tensor", "Torch", "Functional", "NPU", "VF", "Aten", "Distributed", "Module",
    "Optimizer", "Saved", "Ops", "Function", "Compiled",
)  # fmt: skip
_HOMES = {
    "Tensor": "torch.Tensor.",
    "Torch": "torch.",
    "Functional": "torch.nn.functional.",
    "NPU": "torch_npu.",
    "VF": "torch.",
    "Aten": "torch.ops.aten.",
    "Distributed": "torch.distributed.",
    "Ops": "torch.ops.",
}
_NAME = re.compile(
    rf"(?P<kind>{'|'.join(_KINDS)})_(?P<api>.+)_(?P<number>\d+)"
    r"_(?P<direction>forward|backward)(?:_(?P<rest>.+))?"
)
# Release 6.0 writes dots, and neither it nor 4.0's module_dump says that a module is one.
_DOTTED = re.compile(
    r"(?P<api>.+)\.(?P<number>\d+|abnormal)\.(?P<direction>forward|backward)(?:\.(?P<rest>.+))?"
)
_MODULE = re.compile(
    r"(?P<api>.+)_(?P<number>\d+|abnormal)_(?P<direction>forward|backward)(?:_(?P<rest>.+))?"
)
_PARAMETER_GRADS = ".parameters_grad"


class Name(NamedTuple):
    """A name taken apart; `rest` is what follows the direction: "input.0", "stack_info" or ""."""

    kind: str
    api: str
    number: str
    direction: Direction
    rest: str
    separator: Separator

    @property
    def stem(self) -> str:
        """The name of the call itself, as the dump spells it."""
        parts = (self.api, self.number, self.direction)
        spelt = self.separator.join(parts)
        return f"{self.kind}{self.separator}{spelt}" if self.kind else spelt


def parse_name(text: str) -> Name | None:
    """Any name of any release; None when it is none."""
    found = _NAME.fullmatch(text)
    if found:
        return _name(found, found["kind"], found["api"], "_")
    found = _DOTTED.fullmatch(text)
    if found:
        kind, _, api = found["api"].partition(".")
        if kind not in _KINDS or not api:
            kind, api = "", found["api"]
        return _name(found, kind, api, ".")
    found = _MODULE.fullmatch(text)
    return _name(found, "", found["api"], "_") if found else None


def _name(found: re.Match[str], kind: str, api: str, separator: Separator) -> Name:
    direction: Direction = "forward" if found["direction"] == "forward" else "backward"
    return Name(kind, api, found["number"], direction, found["rest"] or "", separator)


def native_name(name: Name) -> str:
    """The name of the call in a native capture; dunders stay, as selectors know them."""
    kind = name.kind or "Module"
    if kind == "Module":
        if name.api.endswith(_PARAMETER_GRADS):
            return f"Module.{name.api}.{name.number}"
        return f"Module.{name.api}.{name.direction}.{name.number}"
    if kind == "Optimizer":
        return f"Optimizer.{name.api}.{name.number}"
    return f"{kind}.{name.api}.{name.number}.{name.direction}"


def native_op(name: Name) -> str:
    """torch's own name for what is called, where the dump tells."""
    kind = name.kind or "Module"
    if kind == "Module":
        return name.api.rpartition(".")[2]
    method = NATIVE_NAMES.get(name.api, name.api) if kind == "Tensor" else name.api
    return _HOMES.get(kind, "") + method


def module_path(name: Name) -> str:
    """Where a module is in its model; only a name with its path tells."""
    if name.kind in ("", "Module"):
        return name.api.removesuffix(_PARAMETER_GRADS).rpartition(".")[0]
    return ""


def stem_of(call: Call, number: str | None = None) -> str:
    """The name ptdbg_ascend gives a call: Functional_linear_0_forward."""
    return name_of(call, number).stem


def name_of(call: Call, number: str | None = None) -> Name:
    """A native call's name taken apart, with another number where one is given."""
    kind, _, rest = call.name.partition(".")
    direction = call.direction
    if kind in ("Module", "Optimizer"):
        api, _, own = rest.rpartition(".")
        if kind == "Module":
            api = api.removesuffix(f".{direction}")
    else:
        api, _, own = rest.removesuffix(f".{direction}").rpartition(".")
    return Name(kind, api, own if number is None else number, direction, "", "_")


def tensor_suffix(call: Call, record: TensorRecord) -> str:
    """What follows the call's name in that of one of its tensors: "input.0", "output"."""
    suffix = record.name.removeprefix(call.name + ".")
    lone = isinstance(call.outputs, TensorRecord) and call.direction == "forward"
    return "output" if suffix == "output.0" and lone else suffix
