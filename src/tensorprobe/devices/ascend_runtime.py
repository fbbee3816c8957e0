"""What the npu row knows: calls into torch_npu, each with the module that is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """Whether this chip clamps overflows, so that only the flag tells of them.

    Only a device that is in use can be asked; no call has run on another.
    """
    module = vendor_module()
    if module is None or not module.npu.is_initialized():
        return False
    return not module._C._npu_is_support_inf_nan()


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
