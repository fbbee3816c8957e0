"""What the door does with an NPU, on the simulated one in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolated_pytest import run_isolated
from tensorprobe.errors import DeviceUnusable
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump

FOLDER = Path(__file__).parent / "on_sim_npu"


def test_on_sim_npu() -> None:
    run_isolated(sorted(FOLDER.glob("check_*.py")))


def test_acl_without_torch_npu_is_refused_and_level_l2_named(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text('{"dump": {"dump_path": "x"}}')
    with pytest.raises(DeviceUnusable, match="tensorprobe run --level L2"):
        PtdbgSession().register_hook(
            None, acc_cmp_dump, dump_mode="acl", dump_config=tmp_path / "dump.json"
        )
