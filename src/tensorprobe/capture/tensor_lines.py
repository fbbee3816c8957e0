"""Live tensors to their lines in a capture, which are encoded once for each kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import Raw

from tensorprobe.capture.encode import PLAIN_TENSORS, TensorEncoder
from tensorprobe.capture.gradients import Path
from tensorprobe.capture.naming import CallNames
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.selection import Selection
from tensorprobe.capture.values import Values
from tensorprobe.records import HOST, Keep, Role
from tensorprobe.store.lines import TensorLine, encode

_ONLY: Path = ("0",)  # the path of a result that is one tensor
# What a line says of a plain tensor, its content excepted: dtype, shape, stride, device, whether it
# has a gradient; and what is kept of the call.
_Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, bool, Keep]
_MAX_KINDS = 10_000  # shapes that are new in every step would fill the table without end


class HasTensors(Protocol):
    """A call, forward or backward, whose tensors are written down."""

    names: CallNames
    keep: Keep


class _Head(NamedTuple):
    """The beginning of the lines of one kind of tensor."""

    in_tree: bytes  # as `{"tensor": line}`
    alone: bytes
    form: int  # of the content, or -1 where none is wanted


class TensorLines:
    """Writes the lines of tensors, and has their contents numbered and kept."""

    def __init__(self, selection: Selection, values: Values) -> None:
        self._selection = selection
        self._values = values
        self._dtypes: dict[torch.dtype, tuple[str, bool]] = {}  # name, and whether it is wanted
        self._heads: dict[_Kind, _Head] = {}

    def line(
        self,
        tensor: torch.Tensor,
        call: HasTensors,
        role: Role,
        label: str | Path,
        wanted: bool = True,
    ) -> TensorLine:
        """One tensor of a call; its content is numbered and kept where the selection wants it.

        `label` is its name within its role, or the parts of that.
        """
        dtype, wants_dtype = self._dtypes.get(tensor.dtype) or self._look_up(tensor.dtype)
        shape: tuple[int, ...] = ()
        stride: tuple[int, ...] | None = None
        try:
            if type(tensor) in PLAIN_TENSORS:
                shape = tensor.shape
                if not tensor.is_contiguous():
                    stride = tensor.stride()
            else:
                with Quiet():
                    shape = tuple(map(_length, tensor.shape))
                    if not tensor.is_contiguous():
                        stride = tuple(map(_length, tensor.stride()))
        except (RuntimeError, NotImplementedError):
            pass  # sparse tensors have no stride, nested ones not even a shape
        device = HOST if tensor.is_cpu else str(tensor.device)
        value = None
        if wanted and wants_dtype and call.keep != "structure":
            form = self._values.form(tensor, call.keep, stride)
            value = self._values.of(tensor, form, call.names.name, role, label, call.keep)
        return TensorLine(dtype, shape, stride, device, tensor.requires_grad, value)

    def kept(self, tensor: torch.Tensor, call: HasTensors, role: Role, label: str) -> TensorLine:
        """The same of a tensor whose content is kept whatever is wanted of the call."""
        line = self.line(tensor, call, role, label, False)
        form = self._values.form(tensor, "tensors", line.stride)
        line.value = self._values.of(tensor, form, call.names.name, role, label, "tensors")
        return line

    def in_tree(
        self,
        tensor: torch.Tensor,
        call: HasTensors,
        role: Role,
        path: Path,
        wanted: bool,
        grad: bool | None = None,
        same: Path | None = None,
    ) -> Any:
        """The same as a part of a tree, encoded.

        `grad` stands in for what the tensor says; `same` is where in its role it was met before.
        """
        head = None
        if same is None and type(tensor) in PLAIN_TENSORS:
            head = self._head(tensor, tensor.requires_grad if grad is None else grad, call.keep)
        if head is None:
            line = self.line(tensor, call, role, path, wanted)
            if grad is not None:
                line.grad = grad
            if same is not None:
                line.same = f"{role}.{'.'.join(same)}"
            return {"tensor": line}
        text, _, form = head
        if form < 0 or not wanted:
            return Raw(text + b"}}")
        value = self._values.of(tensor, form, call.names.name, role, path, call.keep)
        return Raw(b'%b,"value":%d}}' % (text, value))

    def named(
        self, tensors: Iterable[tuple[str, torch.Tensor]], call: HasTensors, role: Role
    ) -> dict[str, Any]:
        """The lines of tensors that a call has by name."""
        wanted = self._selection.wants_side(role)
        lines: dict[str, Any] = {}
        for name, tensor in tensors:
            head = None
            if type(tensor) in PLAIN_TENSORS:
                head = self._head(tensor, tensor.requires_grad, call.keep)
            if head is None:
                lines[name] = self.line(tensor, call, role, name, wanted)
                continue
            _, text, form = head
            if form < 0 or not wanted:
                lines[name] = Raw(text + b"}")
            else:
                value = self._values.of(tensor, form, call.names.name, role, name, call.keep)
                lines[name] = Raw(b'%b,"value":%d}' % (text, value))
        return lines

    def encoder(
        self,
        call: HasTensors,
        role: Role,
        wanted: bool,
        tensors: list[tuple[torch.Tensor, Path]],
    ) -> TensorEncoder:
        """Encodes the tensors of one side of a call and collects them with their paths."""
        seen: dict[int, Path] = {}
        in_tree = self.in_tree

        def encode_tensor(tensor: torch.Tensor, path: Path) -> Any:
            path = path or _ONLY
            tensors.append((tensor, path))
            first = seen.setdefault(id(tensor), path)
            same = None if first is path else first
            return in_tree(tensor, call, role, path, wanted, None, same)

        return encode_tensor

    def _head(self, tensor: torch.Tensor, grad: bool, keep: Keep) -> _Head | None:
        """None for a tensor that has no strides: sparse, nested."""
        try:
            kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, grad, keep)
        except (RuntimeError, NotImplementedError):
            return None
        return self._heads.get(kind) or self._new_head(kind, tensor)

    def _new_head(self, kind: _Kind, tensor: torch.Tensor) -> _Head:
        dtype, shape, stride, device, grad, keep = kind
        name, wanted = self._dtypes.get(dtype) or self._look_up(dtype)
        order = None if tensor.is_contiguous() else stride
        alone = encode(TensorLine(name, shape, order, str(device), grad)).rstrip(b"\n}")
        form = self._values.form(tensor, keep, order) if wanted and keep != "structure" else -1
        if len(self._heads) >= _MAX_KINDS:
            self._heads.clear()
        head = self._heads[kind] = _Head(b'{"tensor":' + alone, alone, form)
        return head

    def _look_up(self, dtype: torch.dtype) -> tuple[str, bool]:
        name = str(dtype).removeprefix("torch.")
        known = self._dtypes[dtype] = (name, self._selection.wants_tensor(name))
        return known


def _length(length: Any) -> int:
    """A size or stride as a number; -1 for one that differs inside a ragged tensor."""
    return length if type(length) is int else -1
