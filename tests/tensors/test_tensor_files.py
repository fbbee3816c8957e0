"""Tensors in .npy and .pt files are found without running what is in them."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.errors import BadArtefact, TensorprobeError
from tensorprobe.tensors.tensor_files import locate

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
    "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_torch_files(tmp_path: Path, name: str) -> None:
    tensor = (torch.arange(12).reshape(3, 4) % 3).to(getattr(torch, name))
    path = tmp_path / "x.pt"
    for saved in (tensor, tensor.t(), tensor[1:, 2:], tensor[0, 0], tensor[:0]):
        torch.save(saved, path)
        stored = locate(path)
        assert (stored.dtype, stored.shape) == (name, tuple(saved.shape))
        assert stored.array().tobytes() == bits(saved)


def test_parameters_and_protocols(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.nn.Parameter(torch.ones(2)), path)
    assert locate(path).array().tolist() == [1, 1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.array(3, np.int8),
        np.arange(3, dtype=np.complex64),
        np.empty((0, 3), np.float16),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_numpy_files(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "x.npy"
    np.save(path, array)
    stored = locate(path)
    assert stored.dtype == str(array.dtype)
    np.testing.assert_array_equal(stored.array(), array)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


def _archive(pickled: bytes, data: bytes = bytes(64), **more: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/data/0", data, **more)
    return buffer.getvalue()


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for pickled in (pickle.dumps(_Evil(), 2), pickle.dumps(_Evil(), 4)):
        (tmp_path / "x.pt").write_bytes(_archive(pickled))
        with pytest.raises(BadArtefact):
            locate(tmp_path / "x.pt")
    np.save(tmp_path / "y.npy", np.array([_Evil()], object), allow_pickle=True)
    with pytest.raises(BadArtefact, match="neither numbers nor bools"):
        locate(tmp_path / "y.npy")
    assert not (tmp_path / "owned").exists()


def _pickled(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """What torch.save writes of a float32 tensor with these claims."""
    buffer = io.BytesIO()
    tensor = torch.zeros(16).as_strided((2, 3), (3, 1))
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        text = archive.read(name)
    old = b"K\x00K\x02K\x03\x86q\x06K\x03K\x01\x86"
    assert old in text
    number = lambda n: b"J" + n.to_bytes(4, "little", signed=True)  # noqa: E731
    new = number(offset) + b"(" + b"".join(map(number, shape)) + b"tq\x06"
    return text.replace(old, new + b"(" + b"".join(map(number, strides)) + b"t")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((1000,), (1,), 0),
        ((2**31 - 1,) * 3, (0, 0, 0), 0),
        ((2, 3), (-3, 1), 0),
        ((2, -3), (3, 1), 0),
        ((2, 3), (3, 1), 15),
        ((2, 3), (3, 1), -1),
        ((2, 3), (3,), 0),
    ],
)
def test_absurd_claims(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(_archive(_pickled(shape, strides, offset)))
    with pytest.raises(BadArtefact):
        locate(path).array()


def test_other_content_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for content in ({"a": 1}, [torch.ones(1)], torch.ones(2).to_sparse()):
        torch.save(content, path)
        with pytest.raises(BadArtefact):
            locate(path)
    torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)
    with pytest.raises(BadArtefact, match="no zip archive"):
        locate(path)
    path.write_bytes(_archive(_pickled((2, 3), (3, 1)), compress_type=zipfile.ZIP_DEFLATED))
    with pytest.raises(BadArtefact, match="compressed"):
        locate(path)
    os.mkfifo(tmp_path / "pipe.npy")
    for name, reason in (("missing.pt", "is missing"), ("pipe.npy", "is a FIFO")):
        with pytest.raises(BadArtefact, match=reason):
            locate(tmp_path / name)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_do_no_harm(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("f") / data.draw(st.sampled_from(["x.pt", "x.npy"]))
    if path.suffix == ".pt":
        torch.save(torch.ones(2, 3), path)
    else:
        np.save(path, np.ones((2, 3)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        array = locate(path).array()
        assert array.nbytes <= len(content)
    except TensorprobeError:
        pass
