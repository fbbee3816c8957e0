"""What the npu row knows: calls into torch_npu, each with the module that is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensorprobe.errors import DeviceUnusable


def vendor_module() -> Any:
    """torch_npu if something imported it, else None: importing it is the user's decision."""
    return sys.modules.get("torch_npu")


def _required(purpose: str) -> Any:
    module = vendor_module()
    if module is None:
        raise DeviceUnusable(
            f"{purpose} needs torch_npu, and nothing imported it. On an NPU: `import torch_npu` "
            "after torch. On a GPU or CPU there is no such thing; leave it out"
        )
    return module


def saturates() -> bool:
    """Whether this chip clamps overflows, so that only the flag tells of them."""
    module = vendor_module()
    return module is not None and not module._C._npu_is_support_inf_nan()


def overflow_is_flagged() -> bool:
    """Whether a float overflow happened since the flag was cleared."""
    return bool(_flag_call("get_npu_overflow_flag", "_check_overflow_npu")())


def clear_overflow_flag() -> None:
    _flag_call("clear_npu_overflow_flag", "_clear_overflow_npu")()


def _flag_call(name: str, old_name: str) -> Any:
    """A call of torch_npu.npu.utils, or what stood for it in torch_npu._C before."""
    module = _required("the overflow flag")
    return getattr(module.npu.utils, name, None) or getattr(module._C, old_name)


@contextmanager
def kernel_dump(config: Path) -> Iterator[None]:
    """Inside, every kernel writes its inputs and outputs as the dump.json at `config` says."""
    npu = _required("an ACL dump").npu
    npu.synchronize()
    npu.init_dump()
    npu.set_dump(str(config))
    try:
        yield
        npu.synchronize()
    finally:
        npu.finalize_dump()


def versions() -> dict[str, str]:
    """torch_npu, CANN and the device's name, as far as they are there."""
    module = vendor_module()
    if module is None:
        return {}
    found = {"torch_npu": str(module.__version__)}
    cann = cann_version()
    if cann:
        found["cann"] = cann
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found["device"] = str(npu.get_device_name())
    return found


def cann_version() -> str | None:
    """The version line of the CANN toolkit the environment points to."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return None
    for name in ("compiler/version.info", "toolkit/version.info", "version.info"):
        path = Path(home, name)
        if path.is_file():
            for line in path.read_text(errors="replace").splitlines():
                if line.lower().startswith("version="):
                    return line.partition("=")[2].strip()
    return None


def settings() -> dict[str, Any]:
    """INF/NAN mode and the compile mode, where torch_npu tells."""
    module = vendor_module()
    if module is None:
        return {}
    found: dict[str, Any] = {"inf_nan_mode": bool(module._C._npu_is_support_inf_nan())}
    is_compiled_ahead = getattr(module.npu, "is_jit_compile_false", None)
    if callable(is_compiled_ahead):
        found["jit_compile"] = not is_compiled_ahead()
    return found
