"""Private copies of tensors: right in every layout, and never memory that is still in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tensorprobe as tp
from tensorprobe.record.transfer import Transfer
from tensorprobe.tensors.digest import digest_tensor

N = 1 << 18  # elements: large enough for memory that is lent again


@pytest.fixture
def transfer() -> Transfer:
    return Transfer(spare_nbytes=16 << 20)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64],
)
def test_every_dtype(transfer: Transfer, dtype: torch.dtype) -> None:
    source = torch.randn(N).to(dtype)
    copy = transfer.snapshot(source)
    assert (copy.dtype, copy.shape) == (str(dtype).removeprefix("torch."), (N,))
    assert np.array_equal(copy.get(), source.view(torch.uint8).numpy())


def test_every_layout_becomes_row_major(transfer: Transfer) -> None:
    x = torch.randn(512, 512)
    pairs = torch.view_as_complex(torch.randn(N, 2))
    for source in (x.t(), x[:, ::2], x.expand(3, 512, 512), pairs.conj(), pairs.imag, x[0, 0]):
        copy = transfer.snapshot(source).tensor()
        assert copy.is_contiguous()
        assert torch.equal(copy, source)


def test_a_copy_is_as_the_tensor_was(transfer: Transfer) -> None:
    x = torch.zeros(N)
    copies = []
    for _ in range(4):
        copies.append(transfer.snapshot(x))
        x.add_(1)
    assert [copy.tensor().unique().tolist() for copy in copies] == [[0.0], [1.0], [2.0], [3.0]]


def test_memory_is_lent_again_when_nobody_uses_it(transfer: Transfer) -> None:
    x = torch.zeros(N)
    copy = transfer.snapshot(x)
    address = copy.tensor().data_ptr()
    array = copy.get()
    del copy
    second = transfer.snapshot(x + 1)
    assert second.tensor().data_ptr() != address  # the array still shows it
    assert not array.any()
    del array
    third = transfer.snapshot(x + 2)
    assert third.tensor().data_ptr() == address
    assert (second.tensor() == 1).all()


def test_no_more_memory_is_kept_than_was_said() -> None:
    transfer = Transfer(spare_nbytes=4 * N)
    copies = [transfer.snapshot(torch.zeros(N)) for _ in range(3)]
    copies.clear()
    assert transfer._spare is not None
    assert transfer._spare._nbytes <= 4 * N


@pytest.mark.parametrize("n", [16, N])  # digested at once, or by the thread that writes
def test_digests_are_those_of_the_tensors(tmp_path: Path, n: int) -> None:
    x = torch.randn(8, n // 8).t()
    with tp.Recorder(tmp_path, level="L1", keep="tensors", log=lambda text: None):
        torch.relu(x)
        x.neg_()
    call = tp.load(tmp_path).calls[0]
    found = [(tensor.digest, tensor.load()) for tensor in call.tensors]
    assert [digest for digest, _ in found] == [digest_tensor(tensor) for _, tensor in found]
    assert torch.equal(found[0][1], -x)
    assert all(tensor.summary is not None for tensor in call.tensors)
