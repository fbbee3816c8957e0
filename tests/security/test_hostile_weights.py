"""Checkpoints from somebody else: small files that would take all time or memory there is."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hostile_captures import Evil
from test_attacks import assert_harmless
from victims import Outcome, Sandbox, Victim, reading_weights

# Pickles by hand


def text(content: str) -> bytes:
    data = content.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def whole(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def many(item: bytes, count: int) -> bytes:
    """A tuple that has an item so many times; it is there once."""
    return item + b"r\x63\0\0\0" + b"0(" + b"j\x63\0\0\0" * count + b"t"


def dict_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


# A tuple of two of the same tuple of two of the same: no `str`, no `repr` and no hash of it ends.
DOUBLED = b")" + b"2\x86" * 60
STORAGE = named("torch", "FloatStorage")


def storage(kind: bytes = STORAGE, key: bytes = text("0")) -> bytes:
    return b"(" + text("storage") + kind + key + text("cpu") + whole(16) + b"tQ"


def tensor(of: bytes = b"", offset: bytes = b"", shape: bytes = b"", strides: bytes = b"") -> bytes:
    return (
        named("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + (of or storage())
        + (offset or whole(0))
        + (shape or whole(16) + b"\x85")
        + (strides or whole(1) + b"\x85")
        + b"\x89"
        + named("collections", "OrderedDict")
        + b")RtR"
    )


def cubed(count: int) -> bytes:
    """A key of count^3 parts."""
    made = b")"
    for n in range(3):
        place = struct.pack("<I", 200 + n)
        made += b"r" + place + b"0(" + (b"j" + place) * count + b"t"
    return made


def one_name(depth: int) -> bytes:
    """{"a": {"b": 1}, "a.b": 1}, with 2^depth paths of one name."""

    def place(n: int) -> bytes:
        return struct.pack("<I", 300 + n)

    made = b"K\x01" + b"r" + place(0) + b"0"
    for i in range(1, depth + 1):
        pairs = [(text(".".join("a" * j)), b"j" + place(i - j)) for j in range(1, i + 1)]
        made += dict_of(*pairs) + b"r" + place(i) + b"0"
    return made + b"j" + place(depth)


def array(shape: bytes, dtype: bytes) -> bytes:
    state = b"(K\x01" + shape + named("numpy", "dtype") + dtype + b"R\x89" + text("x") + b"t"
    return named("numpy.core.multiarray", "_reconstruct") + b")R" + state + b"b"


def named_by(key: bytes, value: bytes) -> bytes:
    return dict_of((key, value), (text("w"), tensor()))


BOMBS = {
    "shape": named_by(text("x"), tensor(shape=DOUBLED)),
    "strides": named_by(text("x"), tensor(strides=DOUBLED)),
    "offset": named_by(text("x"), tensor(offset=DOUBLED)),
    "storage": named_by(text("x"), tensor(DOUBLED)),
    "key of a storage": named_by(text("x"), tensor(storage(key=DOUBLED))),
    "kind of a storage": named_by(text("x"), tensor(storage(kind=DOUBLED))),
    "function": named_by(text("x"), DOUBLED + b")R"),
    "value": named_by(text("x"), DOUBLED),
    "key of a dict": named_by(cubed(1000), b"K\x01"),
    "doubled key of a dict": named_by(DOUBLED, b"K\x01"),
    "shape of an array": named_by(text("x"), array(DOUBLED, b"(" + text("f4") + b"t")),
    "dtype of an array": named_by(text("x"), array(whole(1) + b"\x85", b"(" + DOUBLED + b"t")),
    "a long name of many": named_by(text("k" * 1_000_000), many(many(b"N", 1000), 900)),
    "a long text many times": named_by(text("x"), many(text("t" * 4_000_000), 200_000)),
    "a long list many times": named_by(
        text("x"), many(many(text("t" * 4_000_000), 9)[:-1] + b"t", 100_000)
    ),
    "a call of many arguments": named_by(
        text("x"), many(named("a", "b") + many(text("t" * 150), 100_000) + b"R", 9000)
    ),
    "one name": named_by(text("x"), one_name(18)),
    "many tensors": named_by(text("x"), many(tensor(), 300_000)),
    "embed": dict_of(*((text("embed" * 200 + f"!{n}"), tensor()) for n in range(3000))),
    "digits": named_by(text("1." * 100_000 + "!"), tensor()),
    "a huge size": named_by(text("x"), tensor(shape=b"\x8b" + whole(5000)[1:] + b"\x7f" * 5000)),
}


def archive(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("x/data/0", bytes(64))


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_would_not_end(victim: Victim, sandbox: Sandbox, name: str) -> None:
    """The bench gives each step ten seconds."""
    archive(sandbox.folder / "a.pt", BOMBS[name])
    archive(sandbox.folder / "e.pt", dict_of((text("w"), tensor()), (text("v"), tensor())))
    outcome = victim.run(sandbox, reading_weights("a.pt", "e.pt"))
    assert_harmless(outcome)
    assert_short(outcome)


@pytest.mark.parametrize("name", ["key of a storage", "function", "shape", "value"])
def test_the_same_in_a_dump(victim: Victim, recorded: Path, sandbox: Sandbox, name: str) -> None:
    """Tensors of dumps are files of torch.save, too."""
    from test_hostile_dumps import msprobe
    from victims import reading

    folder = msprobe(recorded, sandbox)
    pickles = {**BOMBS, "value": DOUBLED, "function": DOUBLED + b")R"}
    pickles |= {"key of a storage": tensor(storage(key=DOUBLED)), "shape": tensor(shape=DOUBLED)}
    for path in folder.rglob("*.pt"):
        archive(path, pickles[name])
    steps = [step for step in reading("a") if step.get("verb", [""])[0] in ("compare", "convert")]
    assert_harmless(victim.run(sandbox, [*steps[:2], {"load": "a"}]))


def assert_short(outcome: Outcome) -> None:
    for told in outcome.texts[::2]:  # the others are JSON
        assert all(len(line) < 1000 for line in told.splitlines()), told[:2000]


# torch.distributed.checkpoint

_DCP = "torch.distributed.checkpoint.metadata"


def made(name: str, *fields: tuple[str, bytes]) -> bytes:
    """An object of a class with these fields."""
    pairs = [(text(key), value) for key, value in fields]
    return named(_DCP, name) + b")\x81" + dict_of(*pairs) + b"b"


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return made("ChunkStorageMetadata", ("offsets", offsets), ("sizes", sizes))


def metadata(described: bytes, stored: bytes) -> bytes:
    fields = ("state_dict_metadata", described), ("storage_data", stored)
    return b"\x80\x02" + made("Metadata", *fields) + b"."


def place(key: str, name: bytes, offset: int, length: int, at: bytes = b"N") -> tuple[bytes, bytes]:
    index = made("MetadataIndex", ("fqn", text(key)), ("offset", at))
    info = ("relative_path", name), ("offset", whole(offset)), ("length", whole(length))
    return index, made("_StorageInfo", *info)


HUGE = b"\x8a\x20" + b"\x7f" * 32  # a number of 255 bits


def distributed(name: str, folder: Path) -> bytes:
    """A .metadata that cannot be, or would not end."""
    torch.save(torch.zeros(0, 4), folder / "empty.distcp")
    (folder / "bomb.distcp").write_bytes(b"")
    archive(folder / "bomb.distcp", many(many(b"K\x01K\x02\x86", 500), 100))
    empty, bomb = ((folder / f"{n}.distcp").stat().st_size for n in ("empty", "bomb"))
    no_rows = whole(0) + whole(4) + b"\x86"
    tensor_of = [
        ("properties", b"N"), ("size", HUGE + whole(0) + b"\x86"),
        ("chunks", b"(" + chunk(HUGE + whole(0) + b"\x86", no_rows) * 2 + b"t"),
    ]  # fmt: skip
    many_chunks = many(chunk(whole(0) + whole(0) + b"\x86", no_rows), 100_000)
    one = place("w", text("empty.distcp"), 0, empty)
    regions = [place(f"k{n}", text("bomb.distcp"), 0, bomb) for n in range(2000)]
    values = [(text(f"k{n}"), made("BytesStorageMetadata")) for n in range(2000)]
    described = {
        "huge sizes": (dict_of((text("w"), made("TensorStorageMetadata", *tensor_of))), [one]),
        "many chunks": (
            dict_of(
                (
                    text("w"),
                    made("TensorStorageMetadata", ("size", no_rows), ("chunks", many_chunks)),
                )
            ),
            [one],
        ),
        "one region for all": (dict_of(*values), regions),
        "a name of tuples": (dict_of((text("w"), DOUBLED)), [one]),
        "a key of tuples": (dict_of((cubed(500), b"N")), [one]),
        "a file of tuples": (dict_of(), [place("w", DOUBLED, 0, 1)]),
        "a file elsewhere": (dict_of(*values), [place("k0", text("../secret.txt"), 0, 12)]),
        "an absolute file": (dict_of(*values), [place("k0", text("/etc/passwd"), 0, 12)]),
        "beyond its end": (dict_of(*values), [place("k0", text("bomb.distcp"), 7, 1 << 30)]),
        "before its beginning": (dict_of(*values), [place("k0", text("bomb.distcp"), -9, 20)]),
    }
    what, places = described[name]
    return metadata(what, dict_of(*places))


@pytest.mark.parametrize(
    "name",
    ["huge sizes", "many chunks", "one region for all", "a name of tuples", "a key of tuples",
     "a file of tuples", "a file elsewhere", "an absolute file", "beyond its end",
     "before its beginning"],
)  # fmt: skip
def test_distributed_checkpoints(victim: Victim, sandbox: Sandbox, name: str) -> None:
    folder = sandbox.folder / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(distributed(name, folder))
    archive(sandbox.folder / "e.pt", dict_of((text("w"), tensor())))
    outcome = victim.run(sandbox, reading_weights("dcp", "e.pt"))
    assert_harmless(outcome)
    assert_short(outcome)


# Folders


def test_folders_of_checkpoints(victim: Victim, sandbox: Sandbox) -> None:
    """Links that go round in circles, or out; FIFOs; pickles that run; a YAML of aliases."""
    steps = []
    here = sandbox.folder
    evil = pickle.dumps(Evil(sandbox.marker("a0.")))
    aliases = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )

    def fifo(path: Path) -> None:
        os.mkfifo(path)

    for name, make in {
        "circle": lambda f: (
            (f / "latest_checkpointed_iteration.txt").write_text("release"),
            (f / "release").symlink_to("."),
        ),
        "link-out": lambda f: (f / "model.pt").symlink_to("../secret.txt"),
        "link-out-folder": lambda f: (f / "mp_rank_00").symlink_to(".."),
        "in-circle": lambda f: (f / "mp_rank_00").symlink_to("."),
        "fifo": lambda f: fifo(f / "model.pt"),
        "fifo-metadata": lambda f: fifo(f / ".metadata"),
        "fifo-index": lambda f: fifo(f / "model.safetensors.index.json"),
        "fifo-layout": lambda f: fifo(f / "layout.yaml"),
        "fifo-tracker": lambda f: fifo(f / "latest_checkpointed_iteration.txt"),
        "pickle": lambda f: (f / "model.pt").write_bytes(evil),
        "metadata": lambda f: (f / ".metadata").write_bytes(evil),
        "aliases": lambda f: (f / "layout.yaml").write_text(aliases),
        "yaml": lambda f: (f / "layout.yaml").write_text(
            f"tp: !!python/object/apply:os.system ['touch {sandbox.marker('a1.')}']\n"
        ),
        "huge": lambda f: (f / "layout.yaml").write_text("tp: 999999\ndp: 999999\n"),
        "tracker": lambda f: (f / "latest_checkpointed_iteration.txt").write_text("9" * 99),
        "names": lambda f: torch.save({"w": torch.ones(1)}, f / "x\x1b[2J\u202e.pt"),
    }.items():
        (here / name).mkdir()
        make(here / name)
        steps += reading_weights(name, "e.pt", out=f"out/{name}")
    archive(here / "e.pt", dict_of((text("w"), tensor())))
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert set(outcome.statuses) <= {1, 2, 3}
    assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)


def test_archives_that_are_damaged(victim: Victim, sandbox: Sandbox) -> None:
    """Packed parts that do not unpack, or by methods that take any memory."""
    steps = []
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        name = f"a{method}.pt"
        path = sandbox.folder / name
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x/data.pkl", bytes(5000), compress_type=method)
            file.writestr("x/byteorder", b"little" * 100, compress_type=method)
        data = bytearray(path.read_bytes())
        at = data.index(b"data.pkl") + len(b"data.pkl") + 4
        data[at : at + 6] = zlib.compress(b"?")[:6]
        path.write_bytes(data)
        steps += reading_weights(name, name)
    assert_harmless(victim.run(sandbox, steps))
