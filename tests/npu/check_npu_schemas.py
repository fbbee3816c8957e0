"""The operators of the simulated NPU take what those of the installed torch_npu take."""

from __future__ import annotations

import re

import pytest
import torch
import torch_npu

from tensorprobe.replay.decompositions import VENDOR_OPS

pytestmark = pytest.mark.filterwarnings("default")

REAL = {schema.name.removeprefix("npu::"): [] for schema in torch._C._jit_get_all_schemas()}
for schema in torch._C._jit_get_all_schemas():
    if schema.name.startswith("npu::"):
        REAL[schema.name.removeprefix("npu::")].append(schema)
# Its results are given by name there, and here one by one; a call of either looks the same.
BY_NAME = {"npu_bert_apply_adam.out"}
# What a newer package has added at the end of the arguments.
VERSION = tuple(int(part) for part in torch_npu.__version__.split(".")[:2])


def arguments(schema: torch._C.FunctionSchema) -> list[tuple[str, str, str]]:
    """Names, types and defaults."""
    return [
        (each.name, re.sub("ScalarType|dtype", "int", str(each.type)), repr(each.default_value))
        for each in schema.arguments
    ]


@pytest.mark.parametrize("name", sorted(set(VENDOR_OPS) - BY_NAME))
def test_the_arguments_are_those_of_the_package(name: str) -> None:
    packet, _, overload = name.partition(".")
    found = [schema for schema in REAL.get(packet, []) if schema.overload_name == overload]
    assert found, f"torch_npu {torch_npu.__version__} has no {name}"
    real = arguments(found[0])
    ours = arguments(torch._C.parse_schema(f"npu::{VENDOR_OPS[name].schema}"))
    if VERSION < (2, 7):  # it calls the first `self`, and has fewer
        ours = [("self" if n == "input" else n, kind, default) for n, kind, default in ours]
        ours = ours[: len(real)]
        real = [("self" if n == "input" else n, kind, default) for n, kind, default in real]
    assert ours == real
