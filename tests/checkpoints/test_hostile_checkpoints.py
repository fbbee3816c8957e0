"""Checkpoints of strangers: nothing in them is run, and what cannot be ends in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorprobe.checkpoints.checkpoint_comparison import compare_checkpoints, lines
from tensorprobe.checkpoints.checkpoint_reading import read_checkpoint
from tensorprobe.cli.main import main
from tensorprobe.errors import BadArtefact, TensorprobeError


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


def archive(path: Path, pickled: bytes, *more: tuple[str, bytes], **options: int) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickled, **options)
        for name, content in (("x/data/0", bytes(64)), *more):
            file.writestr(name, content)
    return path


def test_no_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = {"model": {"w": torch.ones(2)}, "args": _Evil(), "more": [_Evil()]}
    for protocol in (2, 4):
        torch.save(evil, "a.pt", pickle_protocol=protocol)
        torch.save(evil, "old.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
        for name in ("a.pt", "old.pt"):
            found = read_checkpoint(Path(name))
            assert list(found.tensors) == ["model.w"]
            assert found.values["args"] == "posix.mkdir('owned')"
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(BadArtefact, match="damaged"):
        read_checkpoint(Path("dcp"))
    assert not Path("owned").exists()


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return b"\x80\x02" + opening * depth + closing * depth + b"."


def doubled() -> bytes:
    """A list of two of a list of two of a list: 2 to the 90th power of values."""
    made = b"\x80\x02]q\x00K\x01a"
    for n in range(90):
        made += b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1])
    return made + b"."


@pytest.mark.parametrize(
    "pickled",
    [
        nested(100_000, b"(", b"t"),
        nested(100_000, b"](", b"e"),
        b"\x80\x02}" + nested(50_000, b"(", b"t")[2:-1] + b"K\x01s.",  # a key
        doubled(),
        b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x02" + b"\x8b\xff\xff\xff\x7f" + b"x" * 100 + b".",
        b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
        b"\x80\x02" + b"]" * 300_000,
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x02h\x05.",
        b"\x80\x020.",
        b"\x80\x02t.",
        b"\x80\x02}}b.",
        b"",
    ],
    ids=range(14),
)
def test_pickles_that_cannot_be(tmp_path: Path, pickled: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(BadArtefact):
        read_checkpoint(archive(tmp_path / "x.pt", pickled))
    assert time.monotonic() - begun < 60


def test_archives_that_cannot_be(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(16)}, buffer)
    with zipfile.ZipFile(buffer) as file:
        name = next(n for n in file.namelist() if n.endswith("data.pkl"))
        pickled = file.read(name)
    path = tmp_path / "x.pt"
    assert read_checkpoint(archive(path, pickled)).tensors["w"].shape == (16,)
    with pytest.warns(UserWarning, match="Duplicate name"):
        archive(path, pickled, ("x/data/0", bytes(64)))
    with pytest.raises(BadArtefact, match="two entries of one name"):
        read_checkpoint(path)
    huge = archive(path, pickled + bytes(300 << 20), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(BadArtefact, match="its pickle is compressed"):
        read_checkpoint(huge)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/data/0", bytes(64))
    with pytest.raises(BadArtefact, match="compressed"):
        read_checkpoint(path)
    short = archive(path, pickled.replace(b"K\x10\x85", b"K\x11\x85"))
    with pytest.raises(BadArtefact, match=r"w: shape .17. of float32 takes 68 bytes; 64 are there"):
        read_checkpoint(short)


def safetensors(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 60]}}, "takes 64 bytes"),
        ({"w": {"dtype": "F32", "shape": [17], "data_offsets": [0, 68]}}, "0 to 68 of 64"),
        ({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, "no list of numbers"),
        ({"w": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 64]}}, "no list of numbers"),
        ({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, "no dtype"),
        ({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "no list of numbers"),
        ({"w": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, "65 dimensions"),
        ({"w": 3}, "no dtype"),
        (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":3}', "'w' twice"),
        (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "damaged"),
        (b'{"w"', "damaged"),
    ],
    ids=range(11),
)
def test_safetensors_that_cannot_be(tmp_path: Path, header: Any, reason: str) -> None:
    with pytest.raises(BadArtefact, match=reason):
        read_checkpoint(safetensors(tmp_path / "x.safetensors", header))


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../secret.safetensors")
    for path, reason in ((tmp_path / "pipe.pt", "a FIFO"), (folder, "leads out")):
        with pytest.raises(BadArtefact, match=reason):
            read_checkpoint(path)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", "/etc/passwd", "..", ""):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises((BadArtefact, OSError)):
            read_checkpoint(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("../..")
    with pytest.raises(BadArtefact, match="no folder here"):
        read_checkpoint(folder)


def test_numbers_that_are_repeated_for_ever(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 15, 1 << 15)}, tmp_path / "x.pt")
    with pytest.raises(BadArtefact, match="numbers where they are repeated"):
        read_checkpoint(tmp_path / "x.pt")


def test_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["\x1b[2J", "a\nmatch: all is well", "x" * 100_000, "\u202e", "a.\x00"]
    torch.save({key: torch.ones(2) for key in keys}, tmp_path / "a.pt")
    torch.save({key: torch.zeros(2) for key in keys}, tmp_path / "e.pt")
    status = main(["checkpoints", str(tmp_path / "a.pt"), str(tmp_path / "e.pt")])
    printed = capsys.readouterr().out
    assert status == 3
    assert "\x1b" not in printed
    assert "\nmatch" not in printed
    assert max(map(len, printed.splitlines())) < 500
    found = compare_checkpoints(tmp_path / "a.pt", tmp_path / "e.pt")
    assert len([*lines(found)]) < 20


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_flipped_bytes_do_no_harm(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    state = {"model": {"w": torch.ones(2, 3)}, "lr": 0.1, "names": ["a", "b"]}
    if kind == "safetensors":
        save_file(state["model"], path)  # type: ignore[arg-type]
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        end = draw.choice([len(content), draw.randrange(len(content))])
        path.write_bytes(bytes(content[:end]))
        with contextlib.suppress(TensorprobeError):
            compare_checkpoints(path, path)
