"""The npu row of the device table, against the simulated NPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tensorprobe.devices import (
    accelerator,
    check_environment,
    device_layer,
    explain,
    rng_kept,
    sim_npu,
)
from tensorprobe.record.facts import environment_facts
from tensorprobe.record.seeding import seed_all


def test_the_row() -> None:
    npu = device_layer("npu")
    assert accelerator() is npu
    assert npu.is_available()
    assert npu.count() == 1
    assert npu.current() == torch.device("npu:0")
    npu.synchronize()
    assert not npu.can_pin_memory()
    event = npu.new_event()
    event.record()
    event.synchronize()
    assert npu.current_stream() is not None
    facts = environment_facts()
    assert facts["npu"]["devices"] == ["Simulated NPU"]
    assert facts["npu"]["torch_npu"] == torch_npu.__version__
    assert (facts["npu"]["inf_nan_mode"], facts["npu"]["jit_compile"]) == (True, False)
    assert check_environment("npu", {}) == []


def test_random_numbers() -> None:
    seed_all(11)
    first = torch.rand(3), torch.rand(3, device="npu")
    seed_all(11)
    assert torch.equal(first[0], torch.rand(3))
    with rng_kept("npu"):
        torch.rand(3)
        torch.rand(3, device="npu")
    assert torch.equal(first[1], torch.rand(3, device="npu"))
    npu = device_layer("npu")
    state = npu.rng_state(0)
    drawn = torch.rand(3, device="npu")
    npu.set_rng_state(state, 0)
    assert torch.equal(drawn, torch.rand(3, device="npu"))


def test_mixed_up_names_are_explained() -> None:
    with pytest.raises(AttributeError) as caught:
        torch_npu.relu  # noqa: B018
    assert "write torch.relu" in str(explain(caught.value))
    with pytest.raises(RuntimeError) as mixed:
        torch.ones(2, device="npu") + torch.ones(2)
    assert "move the second with .to('npu:0')" in str(explain(mixed.value))


def test_own_work_hides_from_modes() -> None:
    """What a recorder does with tensors of the device, while its own modes are on."""
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                args[0].detach().abs().amax().cpu()
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device="npu")
    with Functions(), Kernels():
        x.exp()
    assert seen == ["exp", "aten.exp.default"]


def test_the_examples_of_the_page_run() -> None:
    page = Path(__file__).parents[3] / "docs" / "devices.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {"tensor": torch.ones(2, device="npu")})


def test_installing_again_changes_nothing_and_uninstalling_takes_back() -> None:
    sim_npu.install()
    assert importlib.util.find_spec("torch_npu") is not None
    sim_npu.plant(op="exp", effect="nan")
    sim_npu.uninstall()
    try:
        assert "torch_npu" not in sys.modules
        assert not torch.__future__.get_swap_module_params_on_conversion()
        assert torch.zeros(1, device="npu").exp().tolist() == [1.0]  # the device itself stays
    finally:
        sim_npu.install()
    assert torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.parametrize(
    ("prelude", "message"),
    [
        ("torch.ones(1, requires_grad=True).sum().backward()", "a backward pass ran in this"),
        pytest.param(
            "torch.utils.rename_privateuse1_backend('toy')",
            "already has a device 'toy'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import sys, types, importlib.machinery as m; t = types.ModuleType('torch_npu'); "
            "t.__spec__ = m.ModuleSpec('torch_npu', None); sys.modules['torch_npu'] = t",
            "torch_npu is installed here",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["backward", "other backend", "real torch_npu"],
)
def test_a_process_where_it_cannot_be_installed(prelude: str, message: str) -> None:
    code = f"import torch\n{prelude}\nfrom tensorprobe.devices import sim_npu\nsim_npu.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DeviceUnusable" in done.stderr
    assert message in done.stderr
