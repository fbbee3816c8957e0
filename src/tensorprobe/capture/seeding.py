"""The same random numbers on both sides: one seed for every generator a training uses."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np

from tensorprobe.errors import BadUsage

_LARGEST_SEED = 2**32 - 1  # numpy's and PYTHONHASHSEED's limit
_CUBLAS_WORKSPACE = ":4096:8"


def seed_all(seed: int = 1234, deterministic: bool = False) -> None:
    """Seed Python, numpy, torch and every CUDA and NPU device, before a run that will be compared.

        tp.seed_all(1234)

    cuDNN is told not to benchmark and to be deterministic. PYTHONHASHSEED is set for the processes
    started from here; the hashes of this one are fixed already. `deterministic=True` also turns on
    torch's deterministic algorithms, which are slower and refuse ops that have none. On CUDA those
    need CUBLAS_WORKSPACE_CONFIG, which is set when it is not, and has its effect only if CUDA was
    not in use yet; on NPU, HCCL_DETERMINISTIC likewise. `deterministic=False` leaves them as they
    are.

    It does not make two devices draw the same numbers: turn shuffling and dropout off, or carry
    one run's start to the other. Nor does it switch cuDNN off: the assignment to `cudnn.enable` in
    the guide of ptdbg_ascend is a misspelling that never had an effect, and is not repeated here.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _LARGEST_SEED:
        raise BadUsage(f"seed={seed!r}: expected a whole number from 0 to {_LARGEST_SEED}")
    if not isinstance(deterministic, bool):
        raise BadUsage(f"deterministic={deterministic!r}: expected True or False")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        import torch
    except ImportError:  # nothing of it to seed
        return
    _seed_torch(torch, seed)
    if deterministic:
        _be_deterministic(torch)


def _seed_torch(torch: Any, seed: int) -> None:
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)  # waits for CUDA to be used; nothing without it
    npu: Any = getattr(torch, "npu", None)  # there once torch_npu is imported
    if hasattr(npu, "manual_seed_all"):
        npu.manual_seed_all(seed)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def _be_deterministic(torch: Any) -> None:
    if torch.version.cuda and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACE
        if torch.cuda.is_initialized():
            warnings.warn(
                "CUDA was in use before seed_all(deterministic=True), so cuBLAS may not be "
                "deterministic. Call seed_all first, or start with "
                f"CUBLAS_WORKSPACE_CONFIG={_CUBLAS_WORKSPACE}",
                stacklevel=3,
            )
    if hasattr(torch, "npu"):
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.use_deterministic_algorithms(True)
