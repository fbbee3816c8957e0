"""Every code block of the guide runs as it is, and with one changed import line."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from guide_blocks import DRIVER, blocks, guide

from recorded import SRC
from tensorprobe import ptdbg_ascend

pytestmark = pytest.mark.skipif(not guide(), reason="the guide is not here")
INSTALL = "from tensorprobe.devices import sim_npu\nsim_npu.install()\n"


def run_blocks(folder: Path, *, edited: bool) -> list[dict[str, Any]]:
    """Run all of them in one process: under `run --as`, or with the import line changed."""
    code = blocks()[1]
    driver = DRIVER
    command = [sys.executable, "-m", "tensorprobe", "run", "--as", "ptdbg_ascend", "--sim-npu"]
    if edited:
        driver = driver.replace("import ptdbg_ascend as", "import tensorprobe.ptdbg_ascend as")
        driver = INSTALL + driver.replace("from ptdbg_ascend", "from tensorprobe.ptdbg_ascend")
        code = [b.replace("from ptdbg_ascend", "from tensorprobe.ptdbg_ascend") for b in code]
        command = [sys.executable]
    (folder / "blocks.json").write_text(json.dumps(code))
    (folder / "driver.py").write_text(driver)
    environ = {
        **os.environ,
        "PYTHONPATH": str(SRC),
        "OMP_NUM_THREADS": "1",
        "TASK_QUEUE_ENABLE": "0",
    }
    done = subprocess.run(
        [*command, "driver.py"], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


EDITED = pytest.param(True, id="one line changed", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param(False, id="run --as"), EDITED])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run_blocks(tmp_path_factory.mktemp("guide"), edited=request.param)


def test_every_block_runs(results: list[dict[str, Any]]) -> None:
    assert len(results) >= 25
    failed = [r["code"] + r["problem"] for r in results if r["problem"]]
    assert not failed, "\n".join(failed)


# Something that a block says, and what it leaves behind.
LEFT = {
    'mode="list"': r"^ptdbg_dump_v2\.3/rank0/d/Tensor_permute_1_forward_input\.0\.npy$",
    'mode="range"': r"^ptdbg_dump_v2\.3/rank0/d/Torch_relu_2_forward_output\.npy$",
    'mode="stack"': r"^ptdbg_dump_v2\.3/rank0/d\.pkl$",
    'mode="api_list"': r"^ptdbg_dump_v2\.3/rank0/d/Torch_relu_3_backward_output\.0\.npy$",
    '"ON", mode="api_stack")': r"/rank0/api_stack_(d|npu_dump)\.pkl$",
    '"ON", filter_switch="OFF"': r"^ptdbg_dump_v2\.3/rank0/d/Functional_conv2d_0_forward_input\.6",
    "dump_tag='all'": r"^all_v2\.3/rank0/api_stack_npu_dump\.pkl$",
    "compare_distributed(": r"^output/compare_result_rank0-rank0_\d{14}\.csv$",
    "compare(dump_result_param": r"^output/compare_result_\d{14}\.csv$",
    "Functional_conv2d_1_backward": r"^dump/output/\d{14}/0/0/ConvolutionGrad\..+",
}


@pytest.mark.parametrize("words", LEFT)
def test_blocks_leave_their_files(words: str, results: list[dict[str, Any]]) -> None:
    found = [result for result in results if words in result["code"]]
    assert found
    for result in found:
        made = result["made"]
        assert any(re.search(LEFT[words], path) for path in made), (result["code"], made)


def test_prototypes_are_those_of_the_functions() -> None:
    """Names, order and defaults of the arguments; what comes after is ours."""
    prototypes = blocks()[0]
    assert len(prototypes) >= 9
    for text in prototypes:
        call = ast.parse(text.strip()).body[0].value  # type: ignore[attr-defined]
        assert isinstance(call, ast.Call)
        name = call.func.id  # type: ignore[attr-defined]
        ours = list(inspect.signature(getattr(ptdbg_ascend, name)).parameters.values())
        names = [arg.id for arg in call.args if isinstance(arg, ast.Name)]
        assert [p.name for p in ours[: len(names)]] == names, name
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours):
            continue  # register_hook: its prototype gives no defaults
        by_name = {parameter.name: parameter for parameter in ours}
        for keyword in call.keywords:
            if keyword.arg is None:  # **kwargs
                continue
            theirs = ast.literal_eval(keyword.value)
            default = by_name[keyword.arg].default
            assert default == theirs or (default is None and not theirs), (name, keyword.arg)


def test_a_star_import_brings_all_of_the_original() -> None:
    names = {
        *("register_hook", "set_dump_path", "set_dump_switch", "set_overflow_check_switch"),
        *("seed_all", "acc_cmp_dump", "overflow_check", "compare", "parse"),
        *("compare_distributed", "set_backward_input", "PrecisionDebugger"),
    }
    assert names <= set(ptdbg_ascend.__all__)
