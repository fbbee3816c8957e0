"""Memory that numpy and others write to: each call is recorded with what it was given."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.records import Capture

Shared = tuple[torch.Tensor, Any]  # a tensor, and an array of the same memory
KEEPS = ["stats", "digest", "tensors"]


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    return str(request.param)


def record(folder: Path, program: Callable[[], object], **options: Any) -> Capture:
    with tp.Recorder(folder, log=lambda text: None, **options):
        program()
    return tp.load(folder)


def borrowed() -> Shared:
    array = np.zeros((3, 2), np.float32)
    return torch.from_numpy(array), array


def as_tensor() -> Shared:
    array = np.zeros((3, 2), np.float32)
    return torch.as_tensor(array), array


def of_a_buffer() -> Shared:
    memory = bytearray(24)
    array = np.frombuffer(memory, np.float32).reshape(3, 2)
    return torch.frombuffer(memory, dtype=torch.float32).reshape(3, 2), array


def lent() -> Shared:
    tensor = torch.zeros(3, 2)
    return tensor, tensor.numpy()


def lent_by_a_view() -> Shared:
    tensor = torch.zeros(3, 2)
    return tensor, tensor[1:].numpy()


def lent_by_numpy() -> Shared:
    tensor = torch.zeros(3, 2)
    return tensor, np.asarray(tensor)


def a_parameter() -> Shared:
    tensor = nn.Parameter(torch.zeros(3, 2))
    return tensor, tensor.detach().numpy()


def transposed() -> Shared:
    array = np.zeros((2, 3), np.float32)
    return torch.from_numpy(array).t(), array


def half() -> Shared:
    array = np.zeros((3, 2), np.float16)
    return torch.from_numpy(array), array


WAYS = [
    borrowed, as_tensor, of_a_buffer, lent, lent_by_a_view, lent_by_numpy, a_parameter, transposed,
    half,
]  # fmt: skip


def loaded() -> Shared:
    """What was read from a file cannot be resized, either."""
    file = io.BytesIO()
    torch.save(torch.zeros(3, 2), file)
    file.seek(0)
    tensor = torch.load(file)
    return tensor, tensor.numpy()


def by_dlpack() -> Shared:
    tensor = torch.zeros(3, 2)
    return tensor, torch.from_dlpack(tensor)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("made", ["before", "while recording"])
@pytest.mark.parametrize("shared", [*WAYS, loaded, by_dlpack])
def test_a_write_to_shared_memory(
    shared: Callable[[], Shared], made: str, keep: str, tmp_path: Path
) -> None:
    if shared in (loaded, by_dlpack) and made == "before":
        pytest.skip("torch does not say that it was lent")
    before = shared()

    def program() -> None:
        tensor, array = before if made == "before" else shared()
        for value in (1, 2, 2, 3):
            array[...] = value
            tensor.neg()
            tensor.abs()

    capture = record(tmp_path, program, level="L1", keep=keep)
    for api in ("neg", "abs"):
        inputs = [
            capture.call(f"Tensor.{api}.{number}.forward").tensor("input.0") for number in range(4)
        ]
        assert [each.summary.max for each in inputs] == [1, 2, 2, 3]
        if keep != "stats":
            assert len({each.digest for each in inputs}) == 3
        if keep == "tensors":
            assert [float(each.load()[-1, -1]) for each in inputs] == [1, 2, 2, 3]


@pytest.mark.parametrize("shared", [borrowed, lent])
def test_what_nobody_wrote_to_is_one_value(shared: Callable[[], Shared], tmp_path: Path) -> None:
    tensor, array = shared()

    def program() -> None:
        array[...] = 1
        for _ in range(3):
            tensor.neg()

    record(tmp_path, program, level="L1")
    log = (tmp_path / "rank0" / "step0" / "calls.jsonl").read_text()
    assert log.count('"type":"value"') == 1 + 3


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "L2"])
def test_a_weight_written_by_numpy_between_calls(level: str, keep: str, tmp_path: Path) -> None:
    layer = nn.Linear(2, 2, bias=False)

    def program() -> None:
        for value in (1.0, 2.0):
            layer.weight.detach().numpy()[...] = value
            layer(torch.ones(1, 2))

    capture = record(tmp_path, program, level=level, keep=keep)
    name, label = {
        "L0": ("Module.Linear.forward.{}", "parameters.weight"),
        "L1": ("Functional.linear.{}.forward", "input.1"),
        "mix": ("Functional.linear.{}.forward", "input.1"),
        "L2": ("Aten.t.{}.forward", "input.0"),
    }[level]
    weights = [capture.call(name.format(number)).tensor(label) for number in range(2)]
    assert [weight.summary.max for weight in weights] == [1.0, 2.0]


def test_a_lent_tensor_in_a_call_that_is_not_recorded(tmp_path: Path) -> None:
    tensor = loaded()[0]  # of which numpy has the memory, and torch does not say so

    def program() -> None:
        array = tensor.numpy()
        for value in (1, 2):
            array[...] = value
            tensor.neg()

    capture = record(tmp_path, program, level="L1", apis="neg")
    inputs = [capture.call(f"Tensor.neg.{number}.forward").tensor("input.0") for number in (0, 1)]
    assert [each.summary.max for each in inputs] == [1, 2]


@pytest.mark.parametrize("keep", KEEPS)
def test_to_read_a_tensor_is_not_to_lend_it(keep: str, tmp_path: Path) -> None:
    tensor = torch.ones(3)
    record(tmp_path, tensor.neg, level="L1", keep=keep)
    tensor.resize_(5)  # an error of torch's once numpy has the memory


@pytest.mark.parametrize("keep", KEEPS)
def test_empty_memory_of_numpy(keep: str, tmp_path: Path) -> None:
    tensor = torch.from_numpy(np.zeros((0, 2), np.float32))
    capture = record(tmp_path, lambda: (tensor.neg(), tensor.neg()), level="L1", keep=keep)
    assert not capture.gaps
    assert capture.call("Tensor.neg.1.forward").tensor("input.0").shape == (0, 2)
