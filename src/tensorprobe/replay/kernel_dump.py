"""A recorded call once more on its device, while that dumps what its kernels read and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensorprobe.devices import device_layer
from tensorprobe.errors import BadUsage, NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.rebuild import LiveCall, ReplayPlace, rebuild


def run_under_dump(
    call: Call,
    config: Path,
    *,
    backward: Call | None = None,
    gradients: Sequence[Path] = (),
    with_backward: bool = False,
) -> list[Path]:
    """Run a forward call, or its backward, under the dump.json at `config`; gives the new files.

    Backward runs with `gradients` (.npy files, one an output), else with those of the recorded
    `backward`. The dump is switched on once, whatever the call calls inside.
    """
    device = _device_of(call)
    layer = device_layer(device)
    if layer.kernel_dump is None:
        raise NotReplayable(f"{call.name} ran on {device}, which has no kernel-level dump")
    live = rebuild(call, ReplayPlace(device), grad=with_backward)
    folder = _dump_path(config)
    before = _files(folder)
    if not with_backward:
        with layer.kernel_dump(config):
            live.run()
    else:
        outputs = _outputs(live)
        given = _gradients(call, backward, gradients, outputs)
        with layer.kernel_dump(config):
            torch.autograd.backward(outputs, given)
    return sorted(_files(folder) - before)


def _outputs(live: LiveCall) -> list[torch.Tensor]:
    """What backward starts from: outputs that are tensors with a gradient, and nothing else."""
    result = live.function(*live.args, **live.kwargs)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise NotReplayable(
            f"the output of {live.call.name} is not of tensor type and cannot be automatically "
            "derived, so its backward cannot be dumped"
        )
    outputs = [part for part in parts if part.requires_grad]
    if not outputs:
        raise NotReplayable(f"no output of {live.call.name} has a gradient")
    return outputs


def _gradients(
    call: Call, backward: Call | None, paths: Sequence[Path], outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    if paths:
        found = [_from_npy(path) for path in paths]
    elif backward is not None:
        found = [record.load() for record in backward.tensors if record.role == "input"]
    else:
        raise NotReplayable(
            f"backward of {call.name} was not seen. Let the program run it, or give its input: "
            "set_backward_input([FILE])"
        )
    shapes = [list(tensor.shape) for tensor in found]
    wanted = [list(tensor.shape) for tensor in outputs]
    if shapes != wanted:
        raise BadUsage(
            f"the gradients for {call.name} have the shapes {shapes}, its outputs {wanted}"
        )
    return [
        tensor.to(output.device, output.dtype)
        for tensor, output in zip(found, outputs, strict=True)
    ]


def _from_npy(path: Path) -> torch.Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadUsage(f"'{path}' is no .npy file of numbers: {error}") from error
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)


def _device_of(call: Call) -> torch.device:
    """The accelerator the call ran on, else the host."""
    names = [record.device for record in call.tensors if not record.is_on_host]
    return torch.device(names[0] if names else "cpu")


def _dump_path(config: Path) -> Path:
    content: Any = json.loads(config.read_text())
    return Path(content["dump"]["dump_path"])


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
