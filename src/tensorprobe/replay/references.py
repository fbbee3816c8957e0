"""References that a user supplies for operators that have none on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tensorprobe.errors import BadUsage
from tensorprobe.replay.allowed import NewOperators, allow, allow_operators, failed_import

F = TypeVar("F", bound=Callable[..., Any])

# The one list there is: a decorator has nowhere else to put what it decorates.
_REGISTERED: dict[str, Callable[..., Any]] = {}


def reference(op: str) -> Callable[[F], F]:
    """Say what a custom operator should compute, in plain torch that runs on the CPU.

        @tp.reference("mylib::fused_gelu")
        def fused_gelu(x, scale):
            return torch.nn.functional.gelu(x) * scale

    It is called with the operator's own arguments, in float64, wherever the operator is replayed.
    """
    if "::" not in op:
        raise BadUsage(f"reference('{op}'): an operator is named 'namespace::name'")

    def register(function: F) -> F:
        _REGISTERED[op] = function
        allow_operators({op.partition("::")[0]})
        return function

    return register


def registered() -> Mapping[str, Callable[..., Any]]:
    """Every reference registered in this process, by operator."""
    return _REGISTERED


def run_file(path: Path, argument: str = "references") -> None:
    """Run a user's Python file for what it registers and imports."""
    if not path.is_file():
        raise BadUsage(
            f"no file '{path}': `{argument}` takes a Python file that registers operators"
        )
    spec = importlib.util.spec_from_file_location(f"references_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadUsage(
            f"'{path}' is no Python file: `{argument}` takes one that registers operators"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # what it registers lives as long as it does
    try:
        with NewOperators():
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise BadUsage(f"{argument}='{path}': it ends the program that runs it") from error
    except Exception as error:
        raise failed_import(f"{argument}='{path}'", error) from error


def bring_in(imports: Sequence[str | Path]) -> tuple[list[str], list[Path]]:
    """Import what the user names as `imports`: which of it are packages, and which files."""
    names, files = [], []
    for each in imports:
        if str(each).endswith(".py"):
            run_file(Path(each), "imports")
            files.append(Path(each))
        else:
            allow(str(each))
            names.append(str(each))
    return names, files


def find(op: str, references: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    """The reference for an op as captures name it ("torch.ops.ns.name.overload")."""
    names = [op]
    parts = op.split(".")
    if op.startswith("torch.ops.") and len(parts) >= 4:
        names = [f"{parts[2]}::{parts[3]}.{'.'.join(parts[4:])}", f"{parts[2]}::{parts[3]}"]
    elif op.startswith("torch_npu."):
        names = [f"npu::{parts[-1]}"]
    return next((references[name] for name in names if name in references), None)
