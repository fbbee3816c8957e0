"""One op on the simulated NPU: take the CPU tensors out, run the kernel, wrap what comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tensorprobe.devices.sim_npu.chip import CHIP
from tensorprobe.devices.sim_npu.tensor import NpuTensor, follow_raw, wrap
from tensorprobe.nests import change_leaves, leaves_of

# Kernels that stand in for the CPU's own: ops that only accelerators have.
KERNELS: dict[Any, Callable[..., Any]] = {}

# Ops that move data between devices, and those that take indices from the host, as CUDA does.
_MIXES_DEVICES = {
    "_has_compatible_shallow_copy_type", "copy_", "_to_copy", "_foreach_copy_", "_copy_from",
    "set_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index",
    "_unsafe_index_put", "_pack_padded_sequence", "_pack_padded_sequence_backward",
}  # fmt: skip
# Results that stay on the host on every device: (op, number of the result).
_HOST_RESULTS = {("_pack_padded_sequence", 1)}


@dataclass(frozen=True)
class OpPlan:
    """What one op's schema says about its tensors."""

    name: str
    is_random: bool
    makes_tensor: bool  # takes device=, so that argument says where the result lies
    mixes_devices: bool
    view_of: tuple[int | None, ...]  # for each return, the argument it is a view of
    written: tuple[tuple[int, str], ...]  # arguments written to: position and name
    returns_written: bool  # an in-place op returns its argument, an out= op its out

    @property
    def is_view(self) -> bool:
        return any(argument is not None for argument in self.view_of)

    def written_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of this call that the op writes to."""
        return [
            args[position] if position < len(args) else kwargs[name]
            for position, name in self.written
            if position < len(args) or name in kwargs
        ]


_PLANS: dict[Any, OpPlan] = {}


def _read_plan(func: Any) -> OpPlan:
    """The plan of an op, read off its schema."""
    schema = func._schema
    arguments = [argument.alias_info for argument in schema.arguments]
    name = schema.name.split("::")[1]
    takes_device = any(argument.name == "device" for argument in schema.arguments)
    return OpPlan(
        name=name,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        makes_tensor=takes_device,
        mixes_devices=takes_device or name in _MIXES_DEVICES,
        view_of=tuple(_viewed(arguments, result.alias_info) for result in schema.returns),
        written=tuple(
            (position, schema.arguments[position].name)
            for position, alias in enumerate(arguments)
            if alias is not None and alias.is_write
        ),
        returns_written=any(
            r.alias_info is not None and r.alias_info.is_write for r in schema.returns
        ),
    )


def _viewed(arguments: list[Any], result: Any) -> int | None:
    """Which argument a result is a view of; `Tensor(a -> *)` says: all results are."""
    for position, alias in enumerate(arguments):
        if alias is None or alias.is_write:
            continue
        shares = result is not None and alias.before_set & result.before_set
        if shares or "*" in alias.after_set:
            return position
    return None


def execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the device."""
    plan = _PLANS.get(func)
    if plan is None:
        plan = _PLANS[func] = _read_plan(func)
    # Our own tensor work must be invisible to a recorder's function mode.
    with torch._C.DisableTorchFunction():
        strangers: list[torch.Tensor] = []
        raw_args: tuple[Any, ...]
        raw_kwargs: dict[str, Any]
        raw_args, raw_kwargs = change_leaves((args, kwargs), partial(_unwrap, strangers))
        if strangers and not plan.mixes_devices:
            _refuse_host_tensors(plan, strangers)
        to_device = True
        if plan.makes_tensor and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            to_device = device.type == "npu"
            if to_device:
                CHIP.check_index(device.index)
                raw_kwargs["device"] = torch.device("cpu")
                raw_kwargs.pop("pin_memory", None)
        result = _compute(func, plan, raw_args, raw_kwargs)
        return _wrap_result(plan, args, kwargs, result, to_device)


def _compute(func: Any, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernel's result, as the chip's faults and float status leave it."""
    faults = CHIP.faults.of(func)
    dump = None if plan.is_view else CHIP.dump
    inputs = [tensor.clone() for tensor in _dense_in((args, kwargs))] if dump else []
    for fault in faults:
        fault.before(func)
    with CHIP.random.drawing() if plan.is_random else nullcontext():
        result = _run_kernel(func, args, kwargs)
    if plan.is_view or not (faults or dump or CHIP.status.mode == "saturation"):
        return result
    written = plan.written_in(args, kwargs)
    outputs = _dense_in(written if written else result)
    changed = outputs
    for fault in faults:
        changed = fault.after(changed)
    changed = CHIP.status.settle(func, changed)
    for output, change in zip(outputs, changed, strict=True):
        if change is not output:
            output.copy_(change)
    if dump:
        dump.write(func, inputs, outputs)
    return result


def _run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kernel = KERNELS.get(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{func} is not on the simulated NPU for these arguments: the CPU, which does its "
            f"work, says {error}"
        ) from error


def _unwrap(strangers: list[torch.Tensor], value: Any) -> Any:
    """The CPU tensor of a device tensor; tensors of other devices go to `strangers`."""
    if isinstance(value, NpuTensor):
        return value.raw
    if isinstance(value, torch.Tensor):
        strangers.append(value)
    return value


def _refuse_host_tensors(plan: OpPlan, strangers: list[torch.Tensor]) -> None:
    """PyTorch's own words for tensors on two devices; a 0-d host tensor counts as a number."""
    for tensor in strangers:
        if tensor.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"npu:0 and {tensor.device}! (when checking the arguments of {plan.name})"
            )


def _dense_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest of lists, tuples and dicts, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _wrap_result(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, to_device: bool
) -> Any:
    written = plan.written_in(args, kwargs)
    for tensor in tensors_in(written):
        if isinstance(tensor, NpuTensor):
            follow_raw(tensor)
    if plan.returns_written:
        return written[0] if len(plan.view_of) == 1 else tuple(written)
    if not to_device:
        return result
    if len(plan.view_of) == 1:
        return _wrap_one(result, plan.view_of[0], args)
    if isinstance(result, tuple):
        return tuple(
            part if (plan.name, number) in _HOST_RESULTS else _wrap_one(part, of, args)
            for number, (part, of) in enumerate(zip(result, plan.view_of, strict=True))
        )
    return result


def _wrap_one(result: Any, view_of: int | None, args: tuple[Any, ...]) -> Any:
    base = None if view_of is None else args[view_of]
    base = base if isinstance(base, NpuTensor) else None
    return change_leaves(
        result, lambda leaf: wrap(leaf, base) if isinstance(leaf, torch.Tensor) else leaf
    )
