"""Builds the stand-in for the vendor's Python package, so that `import torch_npu` works."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tensorprobe.devices.sim_npu import backend, status_calls
from tensorprobe.replay.decompositions import VENDOR_OPS


class StandIn(ModuleType):
    """The package; a name it lacks is named in a NotImplementedError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise backend.NotSimulated(f"torch_npu.{name} is not part of the simulated NPU")


def op_names() -> list[str]:
    """The ops the stand-in has: npu_linear, fast_gelu, one_, ..."""
    return sorted({name.partition(".")[0] for name in VENDOR_OPS})


def build() -> dict[str, ModuleType]:
    """The modules of the stand-in by their names in sys.modules."""
    package = _module("torch_npu", is_package=True)
    native = _module("torch_npu._C")
    vars(package).update(
        {
            "__version__": f"{torch.__version__.partition('+')[0]}+simulated",
            "_C": native,
            "npu": backend,
            "get_npu_format": lambda tensor: 2,
            **{name: getattr(torch.ops.npu, name) for name in op_names()},
        }
    )
    vars(native).update(
        _npu_is_support_inf_nan=status_calls.is_support_inf_nan,
        _check_overflow_npu=status_calls.check_flag,
        _clear_overflow_npu=status_calls.clear_flag,
        _npu_initDump=backend.init_dump,
        _npu_setDump=backend.set_dump,
        _npu_finalizeDump=backend.finalize_dump,
    )
    return {
        "torch_npu": package,
        "torch_npu._C": native,
        "torch_npu.npu": backend,
        "torch_npu.npu.utils": status_calls,
        "torch_npu.npu.amp": backend.amp,
    }


def _module(name: str, *, is_package: bool = False) -> StandIn:
    module = StandIn(name, "Stand-in of the simulated NPU.")
    # importlib.util.find_spec, which libraries probe with, refuses a module without a spec.
    module.__spec__ = ModuleSpec(name, _Ready(module), is_package=is_package)
    if is_package:
        module.__path__ = []
    return module


class _Ready(Loader):
    """The loader of a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Let `import torch_npu` find the stand-in."""
    sys.modules.update(build())


def uninstall() -> None:
    """Let `import torch_npu` find what it would have found."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
        del sys.modules[name]
