"""The tensor of the simulated NPU: an npu:0 tensor to PyTorch, its numbers held by a CPU tensor."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from tensorprobe.devices.sim_npu.chip import CHIP, MemoryBlock

# Parts of torch that have no types.
_tensor_text: Any = torch._tensor_str
_rebuild: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor
_share_storage: Any = torch._functionalize_unsafe_set


class NpuTensor(torch.Tensor):
    """A tensor on "npu:0". Users never build one: `.npu()`, `.to("npu")` and factories do.

    `raw` is the CPU tensor that holds the numbers; `block` stands for the device memory, and is
    shared by all views of it. A view's `raw` is a view of its base's `raw`, so writing through one
    is seen through the other.
    """

    raw: torch.Tensor
    block: MemoryBlock

    # A wrapper with a torch function of its own would make every call appear twice to a function
    # mode; disabled, it is as invisible there as a tensor of a real device.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from tensorprobe.devices.sim_npu.dispatch import execute

        return execute(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        # torch's own setter swaps the outer tensor only and would leave the old numbers inside.
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        if isinstance(other, NpuTensor):
            self.raw, self.block = other.raw, other.block

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        # The outer storage has no bytes and no address; this one has, and views share it alike.
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        with torch._C.DisableTorchFunction():
            return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        if getattr(self, "_is_param", False):
            plain = self.detach().requires_grad_(self.requires_grad)
            return f"Parameter containing:\n{plain!r}"
        with torch._C.DisableTorchFunction():
            if tensor_contents is None and self.numel():
                tensor_contents = _tensor_text._tensor_str(self.raw, len("tensor("))
            text = _tensor_text._str(self, tensor_contents=tensor_contents)
        return text.replace("NpuTensor(", "tensor(", 1)

    def __format__(self, format_spec: str) -> str:
        # torch formats a 0-d tensor as a number only when its type is exactly torch.Tensor.
        return format(self.item() if self.dim() == 0 else str(self), format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Travels as a CPU tensor and the name of its device, so that map_location decides.
        parts = (self.raw.detach(), self.dtype, str(self.device), self.requires_grad)
        if not getattr(self, "_is_param", False):
            return _rebuild, parts
        return _rebuild_parameter, parts

    def __deepcopy__(self, memo: dict[int, Any]) -> NpuTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        with torch.no_grad():
            twin = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        if self.grad is not None:
            twin.grad = deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin  # type: ignore[return-value]


def _rebuild_parameter(
    data: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool
) -> torch.nn.Parameter:
    """What a pickled npu parameter unpickles to, on the device map_location chose."""
    tensor = _rebuild(data, dtype, device, False)
    return torch.nn.Parameter(tensor, requires_grad)


def wrap(raw: torch.Tensor, base: NpuTensor | None = None) -> NpuTensor:
    """`raw` as a tensor on the device; a view of `base` when that is given."""
    if raw.layout is not torch.strided:
        raise NotImplementedError(f"{raw.layout} tensors are not on the simulated NPU")
    if base is not None and torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):  # a view of an ordinary tensor is one, there too
            return wrap(raw, base)
    tensor = torch.Tensor._make_wrapper_subclass(
        NpuTensor,
        raw.size(),
        strides=raw.stride(),
        storage_offset=raw.storage_offset(),
        dtype=raw.dtype,
        layout=raw.layout,
        device=torch.device("npu", 0),
        requires_grad=False,
    )
    tensor.raw = raw
    if base is None:
        CHIP.has_context = True
        tensor.block = CHIP.memory.allocate(raw.nbytes)
    else:
        tensor.block = base.block
        _share_storage(tensor, base)
    return tensor


def follow_raw(tensor: NpuTensor) -> None:
    """Give `tensor` the size and strides its `raw` has taken on by resize_, t_, set_ or out=."""
    raw = tensor.raw
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
        raw.shape,
        raw.stride(),
        raw.storage_offset(),
    ):
        return
    outer_storage = torch.Tensor.untyped_storage(tensor)
    if raw.untyped_storage().nbytes() > outer_storage.nbytes():
        fresh = wrap(raw)
        _share_storage(tensor, fresh)
        tensor.block = fresh.block
    # Only the outer tensor's metadata may move, so the call must reach no kernel of ours: the meta
    # kernel is the one that changes metadata and nothing else.
    was_included = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            tensor.as_strided_(raw.shape, raw.stride(), raw.storage_offset())
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was_included)
