"""What every test leaves behind: no mode, no hook, no patch, no filter."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import default_device
from tensorprobe.follow import compiled
from tensorprobe.records import TensorRecord
from tensorprobe.replay import references
from tensorprobe.torch_versions import engine_entry

default_device.choose()
# No test, nor what it starts, builds the parts in C++ by accident; those of the build switch it on.
os.environ["TENSORPROBE_BUILD"] = "0"
# A shell that starts the tests in the background lets them ignore Ctrl-C, and every process they
# start: tests that interrupt one would wait for it for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, however slow the machine. To look for others:
# pytest --hypothesis-profile=search
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

_ENGINE = engine_entry()
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def installed() -> dict[str, Any]:
    """Everything in this process that a recorder puts somewhere and has to take away again."""
    return {
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "module hooks": {name: list(getattr(modules, name, ())) for name in _GLOBAL_HOOKS},
        "optimizer hooks": {name: list(getattr(optimizers, name)) for name in _OPTIMIZER_HOOKS},
        "engine": engine_entry(),
        # ours by its text: what tests import adds filters of its own
        "warning filters": [f for f in warnings.filters if "global hooks" in str(f[1])],
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def nothing_left_installed() -> Iterator[None]:
    """Fails the test after which a mode, hook, patch or warnings filter is still there."""
    before = installed()
    assert before["engine"] == _ENGINE
    yield
    after = installed()
    assert after == before


@pytest.fixture(autouse=True)
def same_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group puts a hook of its own there, for ever."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture(autouse=True)
def same_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered reference keeps all that follows in one process."""
    monkeypatch.setattr(references, "_REGISTERED", dict(references.registered()))


@pytest.fixture(autouse=True)
def nothing_left_compiled() -> Iterator[None]:
    """Where dynamo has compiled something, calls are looked at more closely, and not in C++."""
    yield
    if compiled.may_run():
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def loaded_to_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the host, what a capture holds is moved to where the test computes what it expects."""
    if default_device.ON_SIM_NPU:
        load = TensorRecord.load
        monkeypatch.setattr(TensorRecord, "load", lambda self: load(self).to("npu"))


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
