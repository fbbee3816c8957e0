"""Dumps as msprobe writes them, made from the notes on its format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
SHARED = Path(os.environ.get("TENSORPROBE_SHARED", ROOT / ".." / "shared"))
SAMPLES = SHARED / "data" / "msprobe"


def leaf(tensor: torch.Tensor, **more: Any) -> dict[str, Any]:
    """A tensor's leaf, statistics as msprobe computes them."""
    floating = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return {
        "type": "torch.Tensor",
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "Max": tensor.max().item() if tensor.numel() else None,
        "Min": tensor.min().item() if tensor.numel() else None,
        "Mean": tensor.mean().item() if tensor.numel() and floating else None,
        "Norm": tensor.norm().item() if tensor.numel() and floating else None,
        "requires_grad": tensor.requires_grad,
        **more,
    }


def write_dump(
    folder: Path,
    data: dict[str, Any],
    *,
    task: str = "statistics",
    level: str = "L1",
    construct: dict[str, Any] | None = None,
    stack: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    file: str = "dump.json",
) -> Path:
    """The files of one step of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": None}
    (folder / file).write_text(json.dumps({**head, "data": data}, indent=1))
    if construct is not None:
        (folder / "construct.json").write_text(json.dumps(construct, indent=1))
    if stack is not None:
        (folder / "stack.json").write_text(json.dumps(stack, indent=1))
    for name, tensor in (tensors or {}).items():
        (folder / "dump_tensor_data").mkdir(exist_ok=True)
        torch.save(tensor, folder / "dump_tensor_data" / name)
    return folder


def relu_dump(folder: Path, **more: Any) -> Path:
    """One relu with its two tensors on disk."""
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    name = "Functional.relu.0.forward"
    files = {f"{name}.input.0.pt": x, f"{name}.output.0.pt": x.relu()}
    record = {
        "input_args": [leaf(x, data_name=f"{name}.input.0.pt")],
        "input_kwargs": {"inplace": {"type": "bool", "value": False}},
        "output": [leaf(x.relu(), data_name=f"{name}.output.0.pt")],
    }
    return write_dump(folder, {name: record}, task="tensor", tensors=files, **more)
