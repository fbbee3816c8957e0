"""The device table on whatever this machine has, and the host's row in full."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorprobe.devices import (
    accelerator,
    block_launches,
    check_environment,
    check_kernel_dump,
    current_rank,
    device_layer,
    explain,
    failed_device,
    local_rank,
    rng_kept,
    rows,
    world_size,
)
from tensorprobe.errors import DeviceUnusable
from tensorprobe.follow.naming import api_name

SRC = Path(__file__).parents[2] / "src" / "tensorprobe"


def test_rows() -> None:
    assert [row.type for row in rows()] == ["cpu", "cuda", "npu"]
    assert device_layer("npu:3") is device_layer("npu")
    assert device_layer(torch.device("cuda", 1)) is device_layer("cuda")


def test_what_the_rows_say() -> None:
    cpu, cuda, npu = rows()
    assert cpu.launch_blocking is None
    assert cuda.launch_blocking == "CUDA_LAUNCH_BLOCKING"
    assert npu.launch_blocking == "ASCEND_LAUNCH_BLOCKING"
    assert npu.log_folder == "ASCEND_PROCESS_LOG_PATH"
    assert npu.fused_ops is not None
    assert (npu.fused_ops.module, npu.fused_ops.namespace, npu.fused_ops.prefix) == (
        "torch_npu", "npu", "NPU",
    )  # fmt: skip
    assert (cpu.overflow_flag, cuda.overflow_flag) == (None, None)
    assert npu.overflow_flag is not None
    assert not npu.overflow_flag.is_needed()  # nothing imported torch_npu


def test_the_host() -> None:
    cpu = device_layer("cpu")
    assert cpu.is_available()
    assert cpu.count() == 1
    assert cpu.current() == torch.device("cpu")
    cpu.synchronize()
    assert cpu.is_launch_blocking()
    assert cpu.new_event() is None
    assert cpu.current_stream() is None
    assert not cpu.can_pin_memory()
    assert cpu.set_deterministic_variables() == {}


def test_random_states() -> None:
    cpu = device_layer("cpu")
    state = cpu.rng_state()
    drawn = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3))
    before = torch.get_rng_state()
    with rng_kept("cpu"):
        torch.rand(10)
    assert torch.equal(before, torch.get_rng_state())


def test_a_device_that_is_not_there() -> None:
    npu = device_layer("npu")
    assert not npu.is_available()
    assert npu.count() == 0
    npu.synchronize()
    assert npu.new_event() is None
    with pytest.raises(DeviceUnusable, match=r"device 'npu' is not there\. Install the torch_npu"):
        npu.current()
    with pytest.raises(DeviceUnusable, match="the overflow flag needs torch_npu"):
        npu.overflow_flag.is_raised()  # type: ignore[union-attr]
    with pytest.raises(DeviceUnusable, match="PyTorch knows no device 'quantum'"):
        device_layer("quantum")


def test_any_other_accelerator_takes_the_generic_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(SimpleNamespace):
        def current_device(self) -> int:
            return 2

        def synchronize(self) -> None:
            self.waited = True

    module = Module(is_available=lambda: True, device_count=lambda: 4, waited=False)
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    row = device_layer("hpu:2")
    assert row is device_layer("hpu")
    assert row.is_available()
    assert row.count() == 4
    assert str(row.current()) == "hpu:2"
    row.synchronize()
    assert module.waited
    assert row.new_event() is None
    assert row.fused_ops is None


def test_launch_blocking_and_deterministic_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = device_layer("cuda")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert not cuda.is_launch_blocking()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert cuda.is_launch_blocking()
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "0")
    monkeypatch.delenv("CLOSE_MATMUL_K_SHIFT", raising=False)
    assert device_layer("npu").set_deterministic_variables() == {}
    assert os.environ["HCCL_DETERMINISTIC"] == "false"  # the user's word stands
    assert os.environ["CLOSE_MATMUL_K_SHIFT"] == "1"
    monkeypatch.delenv("CLOSE_MATMUL_K_SHIFT")


def test_launches_are_blocked_where_nobody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    assert block_launches() == []
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "0"
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert block_launches() == []  # too late: the device is in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert block_launches() == ["CUDA_LAUNCH_BLOCKING"]
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("CUDA error: device-side assert triggered", "cuda"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuda"),
        ("NPU error, error code is 507015", "npu"),
        ("NPU function error: call aclnnAdd failed, error code is 561103", "npu"),
        ("EZ9999: Inner Error! aicore exception", "npu"),
        ("mat1 and mat2 shapes cannot be multiplied (2x4 and 5x5)", None),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", None),  # nothing is broken by that
        ("size 107002 is too large for HE9999", None),
    ],
)
def test_which_device_has_failed(text: str, device: str | None) -> None:
    row = failed_device(text)
    assert (row.type if row else None) == device


def test_where_the_log_of_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_PROCESS_LOG_PATH", raising=False)
    assert device_layer("npu").find_log() == "~/ascend/log"
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", "/logs")
    assert device_layer("npu").find_log() == "/logs"
    assert device_layer("cuda").find_log() is None


def test_the_accelerator_of_this_machine() -> None:
    found = accelerator()
    assert (found is None) == (not torch.accelerator.is_available())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_row() -> None:
    cuda = device_layer("cuda")
    event = cuda.new_event()
    torch.ones(2, device="cuda").sum()
    event.record()
    event.synchronize()
    cuda.synchronize()
    assert cuda.can_pin_memory()
    state = cuda.rng_state()
    drawn = torch.rand(3, device="cuda")
    cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))


# ---- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (5, 1, 8)),
        ({"LOCAL_RANK": "3"}, (3, 3, 1)),
        ({"RANK": "none", "LOCAL_RANK": "2"}, (2, 2, 1)),
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "6"}, (4, 0, 6)),
    ],
)
def test_ranks(environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    found = (current_rank(environment), local_rank(environment), world_size(environment))
    assert found == expected


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            RuntimeError("torch_npu._C._clear_overflow_npu() NPU error, error code is 107002"),
            "no NPU is set for this thread. Before the first call that needs one, write "
            "torch.npu.set_device('npu:0') (in every process its own number: "
            "torch.npu.set_device(f'npu:{local_rank}'))",
        ),
        (
            AttributeError("module 'torch' has no attribute 'npu_linear'"),
            "npu_linear is an op of torch_npu: write torch_npu.npu_linear(...) and "
            "`import torch_npu`",
        ),
        (
            AttributeError("module 'torch' has no attribute 'npu'"),
            f"torch alone has no NPU: `import torch_npu` right after `import torch`, and install "
            f"the torch_npu built for torch {torch.__version__}",
        ),
        (
            AttributeError("module 'torch_npu' has no attribute 'relu'"),
            "torch_npu has only the NPU's own ops: if relu is PyTorch's, write torch.relu; if it "
            "is the NPU's, this torch_npu is too old for it",
        ),
        (
            NameError("name 'torch_npu' is not defined"),
            f"torch_npu is not here. On an NPU install the one built for torch "
            f"{torch.__version__} and import it; on a GPU or CPU there is nothing to install, "
            "leave out what needs it (kernel-level dumps)",
        ),
        (
            RuntimeError("Expected all tensors to be on the same device, but found at least two "
                         "devices, npu:0 and cpu! (when checking ...)"),
            "one operand is on npu:0, another on cpu: move the second with .to('npu:0')",
        ),
        (
            TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() ..."),
            "numpy reads host memory only: write tensor.cpu().numpy()",
        ),
        (ValueError("shapes do not match"), None),
        (RuntimeError("error 1070021"), None),
    ],
)  # fmt: skip
def test_explain(error: BaseException, advice: str | None) -> None:
    assert explain(error) == advice


def test_explain_looks_at_causes() -> None:
    error = ValueError("training failed")
    error.__cause__ = RuntimeError("error code is 107002")
    assert "set_device" in str(explain(error))


def test_real_errors_of_this_torch_are_explained() -> None:
    with pytest.raises(AttributeError) as no_op:
        torch.npu_linear  # noqa: B018
    assert "torch_npu.npu_linear" in str(explain(no_op.value))
    with pytest.raises(RuntimeError) as no_device:
        torch.device("npu")
    assert "import torch_npu" in str(explain(no_device.value))
    with pytest.raises(ModuleNotFoundError) as no_module:
        import torch_npu  # noqa: F401
    assert "torch_npu is not here" in str(explain(no_module.value))


def test_check_environment() -> None:
    assert check_environment("npu", {}) == []
    assert check_environment("npu", {"NPU_ASD_ENABLE": "0"}) == []
    assert check_environment("cuda", {"NPU_ASD_ENABLE": "1"}) == []
    (asd,) = check_environment("npu:0", {"NPU_ASD_ENABLE": "1"})
    assert asd.endswith("export NPU_ASD_ENABLE=0")
    (mode,) = check_environment("npu", {"INF_NAN_MODE_ENABLE": "0"})
    assert mode.endswith("export INF_NAN_MODE_ENABLE=1")
    (mode,) = check_environment("npu", {"INF_NAN_MODE_FORCE_DISABLE": "1"})
    assert mode.endswith("unset INF_NAN_MODE_FORCE_DISABLE")


def test_check_kernel_dump() -> None:
    assert check_kernel_dump("npu", {"TASK_QUEUE_ENABLE": "0"}) == []
    assert "export TASK_QUEUE_ENABLE=0" in check_kernel_dump("npu", {})[0]
    assert check_kernel_dump("cuda", {}) == [
        "cuda has no kernel-level dump: that is an Ascend facility. "
        "Record at level L2 instead, which sees every kernel on every device"
    ]


def test_names_of_calls_agree_with_the_table() -> None:
    """Naming imports no torch, and so cannot ask the table."""
    for fused in [row.fused_ops for row in rows() if row.fused_ops is not None]:
        for op in (f"{fused.module}.fused", f"torch.ops.{fused.namespace}.fused.default"):
            assert api_name(op).stem == f"{fused.prefix}.fused"


# ---- the house rule ----------------------------------------------------------------------------


def _asks_which_device(node: ast.AST) -> bool:
    """A comparison whose one side is a device's name, as in `device.type == "npu"`."""
    if not isinstance(node, ast.Compare):
        return False
    names = {"cpu", "cuda", "npu", "xpu", "mps"}
    sides = [node.left, *node.comparators]
    constants = {side.value for side in sides if isinstance(side, ast.Constant)}
    return bool(constants & names)


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(SRC.rglob("*.py"))
        # torch_versions.py is below the table: old versions of torch name devices in functions
        if "devices" not in path.parts and path.name != "torch_versions.py"
    ],
    ids=lambda path: str(path.relative_to(SRC)),
)
def test_no_other_room_asks_which_device_it_is_on(path: Path) -> None:
    found = [node for node in ast.walk(ast.parse(path.read_text())) if _asks_which_device(node)]
    lines = [node.lineno for node in found if isinstance(node, ast.expr)]
    assert lines == [], f"{path}: ask tensorprobe.devices.device_layer instead, at lines {lines}"


def test_importing_the_room_changes_nothing() -> None:
    code = (
        "import random, torch\n"
        "before = torch.get_rng_state(), random.getstate(), dir(torch), set(vars(torch.Tensor))\n"
        "import tensorprobe.devices, tensorprobe.devices.sim_npu, sys\n"
        "after = torch.get_rng_state(), random.getstate(), dir(torch), set(vars(torch.Tensor))\n"
        "assert torch.equal(before[0], after[0]) and before[1:] == after[1:]\n"
        "assert not torch.__future__.get_swap_module_params_on_conversion()\n"
        "assert 'torch_npu' not in sys.modules\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert random.getstate()
