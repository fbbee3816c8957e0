"""Live tensors to their lines in a capture, which are encoded once for each kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from msgspec import Raw

from tensorprobe import native
from tensorprobe.follow.gradients import ONLY, Path
from tensorprobe.follow.naming import CallNames
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS, POSITIONS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.encode import ATOMS, MAX_TEXT, PLAIN, TensorEncoder
from tensorprobe.record.encode import encode as encode_tree
from tensorprobe.record.selection import Selection
from tensorprobe.record.values import Values
from tensorprobe.records import HOST, Keep, Role, Sharding
from tensorprobe.store.collective_lines import pack_sharding
from tensorprobe.store.lines import ShardingLine, TensorLine, encode
from tensorprobe.tensors.memory import own_part

# What a line says of a plain tensor, its content excepted: dtype, shape, stride, device, whether it
# has a gradient; and what is kept of the call.
_Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, bool, Keep]
# The beginning of the lines of one kind of tensor, as `{"tensor": line}`; the form of the content,
# or -1 where none is wanted; the whole where no content is named.
_Head = tuple[bytes, int, Raw]
_TREE = b'{"tensor":'
_N_TREE = len(_TREE)
_MAX_KINDS = 10_000  # shapes that are new in every step would fill the table without end


class HasTensors(Protocol):
    """A call, forward or backward, whose tensors are written down."""

    names: CallNames
    keep: Keep


class TensorLines:
    """Writes the lines of tensors, and has their contents numbered and kept."""

    def __init__(self, selection: Selection, values: Values) -> None:
        self._selection = selection
        self._values = values
        self._dtypes: dict[torch.dtype, tuple[str, bool]] = {}  # name, and whether it is wanted
        self._heads: dict[_Kind, _Head] = {}
        self._shardings: dict[Any, ShardingLine] = {}  # by mesh, placements and shape
        self.encoded, self.arguments = self._encoded, self._arguments
        self.native: Any = None
        self.swift_named: Any = None  # as `named`, with whether their contents are wanted
        self.swift_results: Any = None  # the tree of results, where they are plain
        if values is not None and values.contents is not None:
            # the same in C++, which asks here for what is not plain
            self.native = lines = native.MODULE.Lines(
                values.contents, Raw, self._head, self._encoded, self.repeated, self.encoder,
                encode_tree, ATOMS, POSITIONS, MAX_TEXT,
            )  # fmt: skip
            self.encoded, self.arguments = lines.encoded, lines.arguments
            self.swift_named, self.swift_results = lines.named, lines.results

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
        part, sharding = tensor, None
        shape: tuple[int, ...] = ()
        stride: tuple[int, ...] | None = None
        try:
            if type(tensor) in PLAIN_TENSORS:
                shape = tensor.shape
                if not tensor.is_contiguous():
                    stride = tensor.stride()
            else:
                with Quiet():
                    part = own_part(tensor)
                    if part is not tensor:
                        sharding = self._sharding_of(tensor)
                    shape = tuple(map(_length, part.shape))
                    if not part.is_contiguous():
                        stride = tuple(map(_length, part.stride()))
        except (RuntimeError, NotImplementedError):
            pass  # sparse tensors have no stride, nested ones not even a shape
        device = HOST if part.is_cpu else str(part.device)
        value = None
        if wanted and wants_dtype and call.keep != "structure":
            form = self._values.form(part, call.keep, stride)
            value = self._values.of(tensor, form, call, role, label, call.keep)
        return TensorLine(
            dtype, shape, stride, device, tensor.requires_grad, value, sharding=sharding
        )

    def _sharding_of(self, tensor: Any) -> ShardingLine:
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
        kind = (mesh, placements, shape)
        known = self._shardings.get(kind)
        if known is None:
            if len(self._shardings) >= _MAX_KINDS:
                self._shardings.clear()
            sharding = Sharding(
                shape=shape,
                placements=tuple(map(repr, placements)),
                mesh_shape=tuple(mesh.mesh.shape),
                ranks=tuple(mesh.mesh.flatten().tolist()),
                mesh_names=tuple(mesh.mesh_dim_names or ()),
            )
            known = self._shardings[kind] = pack_sharding(sharding)
        return known

    def kept(self, tensor: torch.Tensor, call: HasTensors, role: Role, label: str) -> TensorLine:
        """The line of a tensor whose content is kept, whatever is selected of its call."""
        line = self.line(tensor, call, role, label, False)
        form = self._values.form(tensor, "tensors", line.stride)
        line.value = self._values.of(tensor, form, call, role, label, "tensors")
        return line

    def _encoded(
        self,
        tensor: torch.Tensor,
        call: HasTensors,
        role: Role,
        label: str | Path,
        wanted: bool,
        grad: bool | None = None,
    ) -> Any:
        """The same ready to be written, as `{"tensor": line}`, the part of a tree.

        `grad` stands in for what the tensor says.
        """
        if grad is None:
            grad = tensor.requires_grad
        keep = call.keep
        if type(tensor) in PLAIN_TENSORS:
            try:
                head = self._head(tensor, grad, keep)
            except (RuntimeError, NotImplementedError):
                pass  # sparse tensors have no strides, nested ones not even a shape
            else:
                in_tree, form, without = head
                if form < 0 or not wanted:
                    return without
                value = self._values.of(tensor, form, call, role, label, keep)
                return Raw(b'%b,"value":%d}}' % (in_tree, value))
        line = self.line(tensor, call, role, label, wanted)
        line.grad = grad
        return {"tensor": line}

    def repeated(
        self, tensor: torch.Tensor, call: HasTensors, role: Role, path: Path, first: Path
    ) -> Any:
        """The part of a tree for a tensor that was met before in the same role, at `first`."""
        line = self.line(tensor, call, role, path, self._selection.wants_side(role))
        line.same = f"{role}.{'.'.join(first)}"
        return {"tensor": line}

    def _arguments(
        self, call: OpenCall, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """The trees of a call's arguments, whose tensors are added to `call.inputs`."""
        inputs = call.inputs
        seen: dict[int, Path] = {}
        positional: list[Any] = []
        for arg, path in zip(args, POSITIONS):  # noqa: B905 a keyword makes it dear
            kind = type(arg)
            if kind in PLAIN_TENSORS:
                inputs.append((arg, path))
                first = seen.setdefault(id(arg), path)
                if first is path:
                    positional.append(self.encoded(arg, call, "input", path, wanted))
                else:
                    positional.append(self.repeated(arg, call, "input", path, first))
            elif kind in PLAIN:
                positional.append(arg)
            elif kind in ATOMS:
                positional.append(ATOMS[kind](arg))
            else:
                encoder = self.encoder(call, "input", wanted, inputs, seen)
                positional.append(encode_tree(arg, encoder, path))
        for position in range(len(POSITIONS), len(args)):  # torch.stack of a long list by `*`
            encoder = self.encoder(call, "input", wanted, inputs, seen)
            positional.append(encode_tree(args[position], encoder, (str(position),)))
        keywords: dict[str, Any] = {}
        for name, arg in kwargs.items():
            kind = type(arg)
            if kind in PLAIN:
                keywords[name] = arg
            elif kind in ATOMS:
                keywords[name] = ATOMS[kind](arg)
            else:
                encoder = self.encoder(call, "input", wanted, inputs, seen)
                keywords[name] = encode_tree(arg, encoder, (name,))
        return positional, keywords

    def encoder(
        self,
        call: HasTensors,
        role: Role,
        wanted: bool,
        tensors: list[tuple[torch.Tensor, Path]],
        seen: dict[int, Path],
    ) -> TensorEncoder:
        """Encodes the tensors of one side of a call and collects them with their paths.

        `seen` has those met already by identity.
        """

        def encode_tensor(tensor: torch.Tensor, path: Path) -> Any:
            path = path or ONLY
            tensors.append((tensor, path))
            first = seen.setdefault(id(tensor), path)
            if first is path:
                return self.encoded(tensor, call, role, path, wanted)
            return self.repeated(tensor, call, role, path, first)

        return encode_tensor

    def named(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        call: HasTensors,
        role: Role,
        wanted: bool | None = None,
    ) -> dict[str, Any]:
        """The lines of tensors that a call has by name; `wanted` where the role does not say it."""
        if wanted is None:
            wanted = self._selection.wants_side(role)
        if self.swift_named is not None:
            found: dict[str, Any] = self.swift_named(tensors, call, role, wanted)
            return found
        lines: dict[str, Any] = {}
        for name, tensor in tensors:
            part = self.encoded(tensor, call, role, name, wanted)
            # without the tree around it
            lines[name] = Raw(bytes(part)[_N_TREE:-1]) if type(part) is Raw else part["tensor"]
        return lines

    def _head(self, tensor: torch.Tensor, grad: bool, keep: Keep) -> _Head:
        kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, grad, keep)
        return self._heads.get(kind) or self._new_head(kind, tensor)

    def _new_head(self, kind: _Kind, tensor: torch.Tensor) -> _Head:
        dtype, shape, stride, device, grad, keep = kind
        name, wanted = self._dtypes.get(dtype) or self._look_up(dtype)
        order = None if tensor.is_contiguous() else stride
        line = encode(TensorLine(name, shape, order, str(device), grad)).rstrip(b"\n}")
        form = self._values.form(tensor, keep, order) if wanted and keep != "structure" else -1
        if len(self._heads) >= _MAX_KINDS:
            self._heads.clear()
        in_tree = _TREE + line
        head = self._heads[kind] = (in_tree, form, Raw(in_tree + b"}}"))
        return head

    def _look_up(self, dtype: torch.dtype) -> tuple[str, bool]:
        name = str(dtype).removeprefix("torch.")
        known = self._dtypes[dtype] = (name, self._selection.wants_tensor(name))
        return known


def _length(length: Any) -> int:
    """A size or stride as a number; -1 for one that differs inside a ragged tensor."""
    return length if type(length) is int else -1
