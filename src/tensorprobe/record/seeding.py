"""The same random numbers on both sides: one seed for every generator a training uses."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping

import numpy as np

from tensorprobe.errors import BadUsage

_LARGEST_SEED = 2**32 - 1  # numpy's and PYTHONHASHSEED's limit


def seed_all(seed: int = 1234, deterministic: bool = False) -> None:
    """Seed Python, numpy, torch and every CUDA and NPU device, before a run that will be compared.

        tp.seed_all(1234)

    cuDNN is told not to benchmark and to be deterministic. PYTHONHASHSEED is set for the processes
    started from here; the hashes of this one are fixed already. `deterministic=True` also turns on
    torch's deterministic algorithms, which are slower and refuse ops that have none. On CUDA those
    need CUBLAS_WORKSPACE_CONFIG, which is set when it is not, and has its effect only if CUDA was
    not in use yet; on NPU, HCCL_DETERMINISTIC and its like. `deterministic=False` leaves them as
    they are.

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
    from tensorprobe.devices import rows

    torch.manual_seed(seed)  # the generators of every device too
    for row in rows():
        row.set_deterministic_flags()
    if deterministic:
        for row in rows():
            _warn_of_late(row.type, row.set_deterministic_variables())
        torch.use_deterministic_algorithms(True)


def _warn_of_late(device: str, variables: Mapping[str, str]) -> None:
    if variables:
        words = " ".join(f"{name}={value}" for name, value in variables.items())
        warnings.warn(
            f"{device.upper()} was in use before seed_all(deterministic=True), so it may not be "
            f"deterministic. Call seed_all first, or start with {words}",
            stacklevel=3,
        )
