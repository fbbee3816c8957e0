"""A simulated NPU: a device PyTorch believes in, with kernels that can be broken.

`install()` makes `npu:0` and a stand-in `torch_npu`; `plant(...)` breaks a kernel by name, and
`noise(...)` rounds as another chip would. It is a bench for tests and demonstrations, written from
public documentation; nothing here was compared with real hardware.

    from tensorprobe.devices import sim_npu
    sim_npu.install()
    sim_npu.plant(op="native_group_norm_backward", calls=[2], effect="scale:1.01")
    model.to("npu")
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tensorprobe.devices import simulation  # noqa: F401  it says which torch has such a device
from tensorprobe.devices.sim_npu import (
    autocast,
    autograd_engine,
    backend,
    composed,
    library,
    tensor_loading,
    torch_npu,
)
from tensorprobe.devices.sim_npu.chip import CHIP
from tensorprobe.devices.sim_npu.dispatch import KERNELS, execute
from tensorprobe.devices.sim_npu.faults import VARIABLE, Noise, Planted
from tensorprobe.devices.sim_npu.overflow import OverflowMode
from tensorprobe.errors import DeviceUnusable
from tensorprobe.replay.decompositions import VENDOR_OPS

__all__ = [
    "child_environment",
    "clear_faults",
    "describe_faults",
    "idle_faults",
    "install",
    "is_installed",
    "noise",
    "plant",
    "set_overflow_mode",
    "uninstall",
]

# torch.tensor(...) and its like switch the Python key off and so reach the device's own kernels
# with a tensor of ours, where a fallback kernel cannot serve: these need kernels by name. So do
# the last two, which PyTorch takes apart on a device that has none, though CPU and GPU do not.
_KERNELS_BY_NAME = ("copy_", "detach", "alias", "clone", "view", "as_strided", "fill_.Scalar",
                    "zero_", "_local_scalar_dense", "_to_copy",
                    "silu_backward", "mish_backward")  # fmt: skip

# torch.library forgets what a Library registered when the object dies.
_LIBRARIES: list[Any] = []
_FLAG_BEFORE: list[bool] = []


def is_installed() -> bool:
    """Whether this process's npu device is the simulated one."""
    return bool(_LIBRARIES)


def install() -> None:
    """Make the device `npu:0` and the module `torch_npu` in this process.

    Sets `torch.__future__.set_swap_module_params_on_conversion(True)`, without which
    `model.to("npu")` would part tied weights. Calling it again changes nothing. Faults that
    TENSORPROBE_SIM_NPU_FAULTS describes, as `describe_faults` does, are planted.
    """
    if not is_installed():
        _refuse_real_one()
        _register_backend()
        CHIP.faults.plant_described(os.environ.get(VARIABLE, "[]"))
    torch_npu.install()
    _FLAG_BEFORE.append(torch.__future__.get_swap_module_params_on_conversion())
    torch.__future__.set_swap_module_params_on_conversion(True)
    CHIP.status.read_environment()


def uninstall() -> None:
    """Take back what can be: `torch_npu`, faults, noise, dump and the conversion flag.

    The device itself stays until the process ends: PyTorch names its backend once.
    """
    clear_faults()
    backend.finalize_dump()
    torch_npu.uninstall()
    if _FLAG_BEFORE:
        torch.__future__.set_swap_module_params_on_conversion(_FLAG_BEFORE[0])
        _FLAG_BEFORE.clear()


def plant(
    op: str,
    *,
    effect: str | Callable[[torch.Tensor], torch.Tensor],
    calls: Iterable[int] | None = None,
    output: int | None = None,
) -> Planted:
    """Break the kernel `op`, from now on or until the returned fault is removed.

    `op` is a kernel's name ("native_group_norm_backward", "add.Tensor", "npu_rms_norm") or a shell
    pattern. `calls` are the executions to spoil, counted from 0 since planting; None is all of
    them. `effect` is "scale:1.01", "nan", "inf" (one element each), "low-precision", "permute",
    "stale" (what the last execution gave), "raise", "raise:TEXT", or a function from the right
    output to the wrong one. It applies to floating-point outputs, or to number `output` alone.
    """
    return CHIP.faults.plant(op, calls, effect, output)


def noise(ulps: int = 1, *, share: float = 0.5, seed: int = 0) -> Noise:
    """Round as another healthy chip would, until the returned noise is removed.

    A `share` of the numbers that a kernel with rounding freedom gives (matmul, softmax, norms,
    reductions, exp and its like; not +, -, *, copies) moves by up to `ulps` units in the last
    place.
    """
    return CHIP.faults.noise(ulps, share, seed)


def clear_faults() -> None:
    """Cure every planted fault and silence the noise."""
    CHIP.faults.clear()


def describe_faults() -> str:
    """The planted faults as JSON, for TENSORPROBE_SIM_NPU_FAULTS of a process to be started.

    Effects that are functions stay here, as does noise.
    """
    return CHIP.faults.describe()


def child_environment() -> dict[str, str]:
    """The variables that give a process started by this one the same faults."""
    return {VARIABLE: describe_faults()}


def idle_faults() -> list[str]:
    """A sentence for each planted fault that has spoilt nothing, and why that may be."""
    return CHIP.faults.idle()


def set_overflow_mode(mode: OverflowMode) -> None:
    """Choose "inf-nan" (the newer chips) or "saturation"; INF_NAN_MODE_ENABLE=0 does it too."""
    CHIP.status.set_mode(mode)


def _refuse_real_one() -> None:
    if importlib.util.find_spec("torch_npu") is not None:
        raise DeviceUnusable(
            "torch_npu is installed here, and the simulated NPU would take its place. "
            "Use the real device, or run in an environment without torch_npu"
        )
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise DeviceUnusable(
            f"this process already has a device '{name}' where PyTorch has room for one. "
            "Install the simulated NPU in a process of its own"
        )


def _register_backend() -> None:
    autograd_engine.register_backend(backend)
    new_library: Any = torch.library.Library
    everything = new_library("_", "IMPL")
    everything.fallback(_execute, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = new_library("aten", "IMPL")
    for name in _KERNELS_BY_NAME:
        aten.impl(name, functools.partial(_execute, _overload(name)), "PrivateUse1")
    if not torch.cuda.is_available():  # a GPU pins memory by itself
        aten.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    autograd_engine.number_devices(aten)
    autocast.register(aten)
    KERNELS.update(composed.kernels())
    tensor_loading.register()
    npu = new_library("npu", "DEF")
    library.register(VENDOR_OPS.values(), npu)
    autograd_engine.check_backward()
    CHIP.has_context = False
    _LIBRARIES.extend([everything, aten, npu])


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _execute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every op that reaches the device without a tensor of it, as factories do."""
    return execute(op, args, kwargs)
