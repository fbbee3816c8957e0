"""How the autograd engine, which is C++, sees a device that is Python."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tensorprobe.errors import DeviceUnusable

_TYPES: Any = torch._C._autograd.DeviceType


class StreamGuard(torch._C._acc.DeviceGuard):
    """Tells PyTorch which kind of device the streams of the backend belong to.

    While backward runs a node, C++ holds a guard on the node's stream, and letting go of it asks
    here. If that happens because Python code in the node raised, the asking itself fails under the
    pending exception, inside a destructor, and the process aborts. So streams are said to be the
    host's, whose guard asks nobody. Only the engine, which starts one thread a device at its first
    backward, and torch.accelerator are told the truth. `Tensor.to` asks as well, for the number of
    a device named without one: `number_devices` answers that before it is asked.
    """

    streams_are_the_hosts = False

    def type_(self) -> Any:
        if self.streams_are_the_hosts and not _asked_by_torch_accelerator():
            return _TYPES.CPU
        return _TYPES.PrivateUse1


def _asked_by_torch_accelerator() -> bool:
    caller = sys._getframe(1).f_back  # None when a thread of the engine asks
    return caller is not None and caller.f_globals.get("__name__") == "torch.accelerator"


_GUARD = StreamGuard()


def register_backend(module: Any) -> None:
    """Name the backend npu, `module` being torch.npu, and let the engine start its threads."""
    _setup_privateuseone_for_python_backend("npu", backend_module=module, device_guard=_GUARD)
    _backward_on("cpu")
    StreamGuard.streams_are_the_hosts = True


def number_devices(aten: Any) -> None:
    """Make `.to("npu")` mean `.to("npu:0")` before PyTorch asks the guard, on either device."""
    for overload in (torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device):
        for key in ("CPU", "AutogradCPU", "PrivateUse1", "AutogradPrivateUse1"):
            aten.impl(overload, _with_numbered_device(overload), key)


def _with_numbered_device(overload: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            args = tuple(_numbered(argument) for argument in args)
            if "device" in kwargs:
                kwargs["device"] = _numbered(kwargs["device"])
            return overload.decompose(*args, **kwargs)

    return kernel


def _numbered(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "npu" and argument.index is None:
        return torch.device("npu", 0)
    return argument


def check_backward() -> None:
    """Refuse a process whose engine started before it could know of the device."""
    try:
        _backward_on("npu")
    except RuntimeError as error:
        raise DeviceUnusable(
            "a backward pass ran in this process before the simulated NPU was installed, and "
            "PyTorch starts its backward threads once. Install it right after importing torch"
        ) from error


def _backward_on(device: str) -> None:
    with torch.enable_grad():
        loss: Any = torch.ones((), device=device, requires_grad=True).mul(1)
        loss.backward()
