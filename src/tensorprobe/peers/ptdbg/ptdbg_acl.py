"""Mode acl: one recorded call once more, alone, while the device dumps its kernels."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorprobe.errors import BadUsage, DeviceUnusable, NothingRecorded, NotReplayable
from tensorprobe.peers.ptdbg.ptdbg_dump import PtdbgDump, drop
from tensorprobe.peers.ptdbg.ptdbg_telling import say
from tensorprobe.records import Call, Capture
from tensorprobe.store.loading import load
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named

_EXAMPLE = '{"dump": {"dump_list": [], "dump_path": "./dump/output", "dump_op_switch": "on"}}'


def check_device() -> None:
    """Refuse, before anything runs, what cannot work here."""
    from tensorprobe.devices import check_kernel_dump

    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        raise DeviceUnusable(
            "dump_mode='acl' needs torch_npu, which is not here: ACL dumps are an Ascend facility. "
            "Level L2 sees every kernel on every device: tensorprobe run --level L2 SCRIPT"
        )
    for finding in check_kernel_dump("npu"):
        raise DeviceUnusable(finding)


def check_config(path: Path) -> dict[str, Any]:
    """The object `dump` of a dump.json."""
    try:
        content = read_json(open_named(path), path)
    except OSError as error:
        raise BadUsage(f"dump_config='{path}': {error.strerror}. It holds {_EXAMPLE}") from error
    except ValueError as error:
        raise BadUsage(f"dump_config='{path}' is not JSON: {error}") from error
    dump = content.get("dump") if isinstance(content, dict) else None
    if not isinstance(dump, dict) or not isinstance(dump.get("dump_path"), str):
        raise BadUsage(f"dump_config='{path}' has no dump_path. It holds {_EXAMPLE}")
    if dump.get("dump_mode", "output") not in ("input", "output", "all"):
        raise BadUsage(
            f"'{path}': dump_mode '{dump['dump_mode']}' is not one of output, input, all"
        )
    if dump.get("dump_op_switch", "off") != "on":
        say(f"dump_op_switch is off in '{path}': the device dumps nothing until it is 'on'")
    return dump


def dump_folder(config: Path) -> Path:
    """Where the device writes, made if need be: the ACL library does not make it."""
    folder = Path(check_config(config)["dump_path"]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def dump_kernels_of(dump: PtdbgDump, config: Path, gradients: Sequence[Path]) -> None:
    """Re-execute the call that was recorded; where that cannot be, keep it for a repro."""
    (scope,) = dump.switch.scope
    dump.recorder.close()
    if isinstance(dump.recorder.failed, NothingRecorded) or not dump.private.is_dir():
        drop(dump.private)
        return
    # By another name: one that says it is being recorded is taken for a killed program's.
    kept = dump.private.with_name(f"{scope}-{os.getpid()}")
    shutil.rmtree(kept, ignore_errors=True)
    dump.private.rename(kept)
    if run_with_dump(load(kept), scope, config, gradients):
        drop(kept)


def run_with_dump(
    capture: Capture, scope: str, config: Path, gradients: Sequence[Path] = ()
) -> bool:
    """Run the call of that name under an ACL dump; False, with a warning, when it cannot be."""
    import torch

    from tensorprobe.follow.quiet import Quiet
    from tensorprobe.replay.kernel_dump import run_under_dump

    wants_backward = scope.endswith("backward")
    forward = next(call for call in capture.calls if call.direction == "forward")
    backward = next((call for call in capture.calls if call.direction == "backward"), None)
    try:
        # A guard or a recorder that is on would take this for a call of the program.
        with Quiet(), torch.enable_grad():
            files = run_under_dump(
                forward,
                config,
                backward=backward,
                gradients=gradients,
                with_backward=wants_backward,
            )
    except NotReplayable as error:
        say(f"{error}. {_how_to_repro(capture, forward)}")
        return False
    hint = "" if files else ". A view runs no kernel; and dump_op_switch has to be 'on'"
    folder = dump_folder(config)
    say(f"{scope} was run again under ACL dump: {len(files)} files in '{folder}'{hint}")
    return True


def _how_to_repro(capture: Capture, call: Call) -> str:
    return (
        "To run it by hand: tensorprobe repro "
        f"{shlex.quote(str(capture.path))} {call.name} -o repro_{call.name.replace('.', '_')}"
    )
