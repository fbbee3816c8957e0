"""Dump files: every style, every name, and no file however damaged that does harm."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from ascend_files import (
    BF16,
    DUMP_NAME,
    FLOAT,
    FRACTAL_NZ,
    INT32,
    ND,
    Tensor,
    chunk,
    dump_bytes,
    header,
    number,
    shape_message,
    varint,
    write_dump,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.ascend.dump import original_name, parse_dump_name, read_dump
from tensorprobe.ascend.opdebug import parse_opdebug
from tensorprobe.errors import BadArtefact


def messages():
    """DumpData as python-protobuf sees it: the oracle both ways."""
    kinds = {"i32": 5, "u32": 13, "u64": 4, "str": 9, "bytes": 12}
    layout = {
        "Shape": [("dim", 1, "u64", True)],
        "OriginalOp": [("name", 1, "str", False), ("output_index", 2, "u32", False)],
        "OpOutput": [
            ("data_type", 1, "i32", False), ("format", 2, "i32", False),
            ("shape", 3, "Shape", False), ("original_op", 4, "OriginalOp", False),
            ("data", 5, "bytes", False), ("size", 6, "u64", False),
            ("original_shape", 7, "Shape", False), ("sub_format", 8, "i32", False),
            ("address", 9, "u64", False), ("arg_index", 12, "u32", False),
        ],
        "OpInput": [
            ("data_type", 1, "i32", False), ("format", 2, "i32", False),
            ("shape", 3, "Shape", False), ("data", 4, "bytes", False), ("size", 5, "u64", False),
            ("original_shape", 6, "Shape", False), ("sub_format", 7, "i32", False),
            ("address", 8, "u64", False), ("arg_index", 10, "u32", False),
            ("input_type", 11, "u32", False),
        ],
        "Block": [
            ("type", 1, "i32", False), ("data", 2, "bytes", False), ("size", 3, "u64", False),
        ],
        "OpAttr": [("name", 1, "str", False), ("value", 2, "str", False)],
        "DumpData": [
            ("version", 1, "str", False), ("dump_time", 2, "u64", False),
            ("output", 3, "OpOutput", True), ("input", 4, "OpInput", True),
            ("buffer", 5, "Block", True), ("op_name", 6, "str", False), ("attr", 7, "OpAttr", True),
            ("space", 8, "Block", True), ("dfx_message", 9, "str", False),
        ],
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="dump.proto", package="t", syntax="proto3")
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for field, tag, kind, repeated in fields:
            message.field.add(
                name=field,
                number=tag,
                label=3 if repeated else 1,
                type=kinds.get(kind, 11),
                type_name=None if kind in kinds else f".t.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.DumpData"))


DumpData = messages()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = np.array([7, -8], np.int32)
    path = write_dump(
        tmp_path / DUMP_NAME,
        inputs=[Tensor(x, address=0x1240), Tensor(y, INT32)],
        outputs=[Tensor(np.full((), 3.5, np.float32))],
        buffers=[b"abc"],
        spaces=[b"\1\2\3\4"],
        op_name="L2Loss",
    )
    dump = read_dump(path)
    assert (dump.style, dump.version, dump.op_name) == ("adump", "2.0", "L2Loss")
    assert dump.time_us == 1638329841577837
    assert [t.name for t in dump.tensors] == [
        "input.0", "input.1", "output.0", "l1buffer.0", "space.0"
    ]  # fmt: skip
    np.testing.assert_array_equal(dump.tensors[0].array(), x)
    np.testing.assert_array_equal(dump.tensors[1].array(), y)
    assert dump.tensors[0].address == 0x1240
    assert dump.tensors[2].shape == ()
    assert dump.tensors[4].raw().tobytes() == b"\1\2\3\4"
    assert dump.warnings == ()


def test_the_first_version_has_the_data_inside(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    path = write(tmp_path / "Add.Add.1.2", header([Tensor(x)], [Tensor(x * 2)], inline=True))
    dump = read_dump(path)
    assert dump.style == "serialised"
    np.testing.assert_array_equal(dump.tensors[1].array(), x * 2)


dims = st.lists(st.integers(0, 4), max_size=4)
entries = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 7, 8, 11, 12, 27]), st.integers(0, 60), dims, st.integers(0, 9)
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(inputs=entries, outputs=entries, name=st.text(max_size=20), inline=st.booleans())
def test_any_message_protobuf_writes_is_read_the_same(
    tmp_path_factory, inputs, outputs, name, inline
) -> None:
    message = DumpData(version="2.0", dump_time=5, op_name=name, dfx_message="lost " * 3)
    message.attr.add(name="k", value="v")
    blocks = []
    sizes = {1: 4, 2: 2, 3: 1, 4: 1, 7: 4, 8: 8, 11: 1, 12: 8, 27: 2}
    for side, many in (("input", inputs), ("output", outputs)):
        for dtype, fmt, shape, padding in many:
            nbytes = int(np.prod(shape, dtype=int)) * sizes[dtype]
            raw = (bytes(range(256)) * 8)[:nbytes] + bytes(padding)
            entry = getattr(message, side).add(data_type=dtype, format=fmt, size=len(raw))
            entry.shape.dim.extend(shape)
            entry.original_shape.dim.extend(shape[::-1])
            entry.address = 77
            blocks.append((side, dtype, fmt, shape, raw))
            if inline:
                entry.data = raw
    body = message.SerializeToString()
    raw = b"" if inline else b"".join(block[-1] for block in blocks)
    path = tmp_path_factory.mktemp("p") / "A.b.1.2"
    path.write_bytes(body if inline else struct.pack("<Q", len(body)) + body + raw)
    dump = read_dump(path)
    assert (dump.op_name, dump.attributes, dump.message) == (name, {"k": "v"}, "lost " * 3)
    assert len(dump.tensors) == len(blocks)
    for tensor, (side, _, fmt, shape, data) in zip(dump.tensors, blocks, strict=True):
        assert (tensor.role, tensor.shape) == (side, tuple(shape))
        assert tensor.original_shape == tuple(shape[::-1])
        assert tensor.address == 77
        assert tensor.raw().tobytes() == data
        assert tensor.array().shape == tuple(shape), tensor.format
        assert tensor.format == ("NCHW" if fmt == 0 else tensor.format)


def test_protobuf_reads_what_the_tests_write() -> None:
    """The other direction: the hand encoder of these tests is right, so its files are real ones."""
    raw = np.arange(4, dtype=np.float32)
    message = DumpData.FromString(header([Tensor(raw, address=9, original=(2, 2))], [Tensor(raw)]))
    assert list(message.input[0].shape.dim) == [4]
    assert list(message.input[0].original_shape.dim) == [2, 2]
    assert (message.input[0].size, message.input[0].address) == (16, 9)


def test_unknown_fields_unpacked_dims_and_repeats_are_taken_as_protobuf_takes_them(
    tmp_path: Path,
) -> None:
    body = (
        chunk(1, b"2.0")
        + chunk(99, b"later")
        + varint(98 << 3 | 1) + bytes(8)
        + varint(97 << 3 | 5) + bytes(4)
        + varint(96 << 3 | 3) + number(1, 5) + varint(96 << 3 | 4)
        + chunk(
            4,
            number(1, FLOAT)
            + chunk(3, shape_message([2], packed=False)) + chunk(3, shape_message([3]))
            + number(5, 1) + number(5, 24)
            + chunk(50, b"?"),
        )
    )  # fmt: skip
    dump = read_dump(write(tmp_path / "A.b.1.2", struct.pack("<Q", len(body)) + body + bytes(24)))
    message = DumpData.FromString(body)
    assert dump.tensors[0].shape == tuple(message.input[0].shape.dim) == (2, 3)
    assert dump.tensors[0].nbytes == message.input[0].size == 24


def test_truncation_at_every_byte_is_a_clear_error(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    data = dump_bytes([Tensor(x)], [Tensor(x)], spaces=[b"12"], op_name="n")
    path = tmp_path / "A.b.1.2"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(BadArtefact, match=r"at byte \d+: .*; expected") as caught:
            read_dump(path)
        assert str(path) in str(caught.value)


def test_truncation_of_the_first_version_never_escapes(tmp_path: Path) -> None:
    data = header([Tensor(np.arange(6, dtype=np.float32))], op_name="n", inline=True)
    path = tmp_path / "A.b.1.2"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with contextlib.suppress(BadArtefact):  # cut between two fields it is still a message
            read_dump(path)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 63) + b"\xff" * 100,
        struct.pack("<Q", 20) + chunk(4, number(1, 1))[:-1] + b"\xff\xff\xff\xff\x7f" + bytes(40),
        struct.pack("<Q", 12) + chunk(4, number(1, 1) + number(5, (1 << 64) - 1))[:20] + bytes(9),
        struct.pack("<Q", 30) + b"\x80" * 30,
        struct.pack("<Q", 30) + varint(5 << 3 | 3) * 30,
        struct.pack("<Q", 30) + b"\x07" * 30,
        struct.pack("<Q", 30) + b"\0" * 30,
        struct.pack("<Q", 0) + b"xxxx",
        b"\x7fELF" + bytes(100),
        b"",
        b"1234567",
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadArtefact, match="expected"):
        read_dump(write(tmp_path / "A.b.1.2", data))


def test_oversized_claims_cost_neither_memory_nor_time(tmp_path: Path) -> None:
    huge = [1 << 62, 1 << 62]
    body = chunk(4, number(1, FLOAT) + chunk(3, shape_message(huge)) + number(5, 8))
    path = write(tmp_path / "A.b.1.2", struct.pack("<Q", len(body)) + body + bytes(8))
    endless = chunk(4, chunk(3, chunk(1, b"\1" * 10_000_000)))
    other = write(tmp_path / "A.c.1.2", struct.pack("<Q", len(endless)) + endless)
    many = chunk(4, b"") * 1_000_000
    third = write(tmp_path / "A.d.1.2", struct.pack("<Q", len(many)) + many)
    tracemalloc.start()
    began = time.thread_time()
    tensor = read_dump(path).tensors[0]
    assert tensor.array().shape == (2,)
    assert "needs" in tensor.warnings[0]
    with pytest.raises(BadArtefact, match="shape without end"):
        read_dump(other)
    with pytest.raises(BadArtefact, match="at most 8192"):
        read_dump(third)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert time.thread_time() - began < 10


@pytest.mark.slow
def test_random_damage_never_gives_anything_but_a_dump_or_a_clear_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.arange(6, dtype=np.float32)
    data = np.frombuffer(dump_bytes([Tensor(x)], [Tensor(x, BF16)], op_name="node"), np.uint8)
    path = tmp_path / "A.b.1.2"
    for _ in range(10_000):
        bad = data.copy()
        bad[rng.integers(0, len(bad), 3)] = rng.integers(0, 256, 3)
        path.write_bytes(bad.tobytes())
        with contextlib.suppress(BadArtefact):
            for tensor in read_dump(path).tensors:
                tensor.array()


def test_padding_zero_dims_and_dynamic_shapes(tmp_path: Path) -> None:
    x = np.arange(3, dtype=np.float32)
    path = write_dump(
        tmp_path / "A.b.1.2",
        inputs=[
            Tensor(x.tobytes() + bytes(20), shape=(3,)),
            Tensor(b"", shape=(2, 0)),
            Tensor(x.tobytes(), shape=(-1, 3)),
            Tensor(x.tobytes(), shape=(4,)),
            Tensor(x.tobytes(), dtype=0, shape=(3,)),
        ],
    )
    padded, empty, dynamic, short, untyped = read_dump(path).tensors
    np.testing.assert_array_equal(padded.array(), x)
    assert empty.array().shape == (2, 0)
    assert dynamic.shape == (-1, 3)
    assert "dynamic" in dynamic.warnings[0]
    np.testing.assert_array_equal(short.array(), x)
    assert "needs 16 bytes, the block has 12" in short.warnings[0]
    assert untyped.array().dtype == np.int8
    assert untyped.array().size == 12


def test_trailing_bytes_and_shifted_blocks_are_said(tmp_path: Path) -> None:
    x = np.zeros(2, np.float32)
    data = dump_bytes([Tensor(x, input_type=1)], [Tensor(x)]) + b"more"
    warnings = read_dump(write(tmp_path / "A.b.1.2", data)).warnings
    assert any("wrong tensors" in warning for warning in warnings)
    assert any("4 bytes after" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (DUMP_NAME, ("L2Loss", "L2Loss", 3, None, "1638329841577837")),
        ("Add.Add.45.0.1675157077183551", ("Add", "Add", 45, 0, "1675157077183551")),
        ("Conv2D.a_b.7.3.1675157077183551.4.11.2.0", ("Conv2D", "a_b", 7, 3, "1675157077183551")),
        ("exception_info.42.1.20240912164007469", ("", "", 1, 42, "20240912164007469")),
        ("Opdebug.Node_OpDebug.2.8.16751570", ("Opdebug", "Node_OpDebug", 2, 8, "16751570")),
    ],
)  # fmt: skip
def test_names_old_and_new(name: str, expected: tuple) -> None:
    parsed = parse_dump_name(name)
    assert parsed is not None
    assert (
        parsed.op_type, parsed.op_name, parsed.task_id, parsed.stream_id, parsed.timestamp
    ) == expected  # fmt: skip
    assert parsed.is_overflow == (expected[0] == "Opdebug")


def test_what_is_no_dump_name() -> None:
    for name in ("graph.txt", "a.b", "123", "mapping.csv", "", "x.1"):
        assert parse_dump_name(name) is None


def test_mapping_csv_gives_the_long_name_back(tmp_path: Path) -> None:
    long = f"Fused.{'a' * 300}.3.1638329841577837"
    path = write_dump(tmp_path / "123456", inputs=[Tensor(np.zeros(1, np.float32))])
    (tmp_path / "mapping.csv").write_text(f"123456,{long}\n")
    assert original_name(path) == long


def test_old_overflow_record(tmp_path: Path) -> None:
    raw = bytearray(2048)
    struct.pack_into("<6Q", raw, 256, 514, 563, 57, 0, 0x1008005B0000, 0x100800297000)
    struct.pack_into("<3Q", raw, 1024, 0x1008005AE000, 1, 0x20 | 0x100)
    path = write_dump(
        tmp_path / "Opdebug.Node_OpDebug.2.8.16751570", outputs=[Tensor(bytes(raw), dtype=4)]
    )
    record = parse_opdebug(read_dump(path).tensors[0])
    assert record["AI Core"] == {
        "model_id": 514, "stream_id": 563, "task_id": 57, "task_type": 0,
        "pc_start": "0x1008005b0000", "para_base": "0x100800297000",
        "kernel_code": "0x1008005ae000", "block_idx": 1, "status": 0x120,
        "meaning": ["floating-point overflow", "float32 or int32 to float16 overflowed"],
    }  # fmt: skip


def test_new_overflow_record(tmp_path: Path) -> None:
    raw = struct.pack("<6I", 0x5A5A5A5A, 0, 1, 0, 0, 88)
    raw += struct.pack("<11Q", 1, 2, 3, 0, 5, 6, 0x10, 0x20, 9, 10, 0x400)
    path = write_dump(tmp_path / "Opdebug.N.2.8.16", outputs=[Tensor(raw, dtype=4)])
    record = parse_opdebug(read_dump(path).tensors[0])["AI Core"]
    assert (record["task_id"], record["core_id"], record["status"]) == (3, 9, 0x400)
    assert record["meaning"] == ["accumulation in the cube unit overflowed"]
    short = write_dump(tmp_path / "Opdebug.N.2.8.17", outputs=[Tensor(raw[:60], dtype=4)])
    with pytest.raises(BadArtefact, match="expected 88"):
        parse_opdebug(read_dump(short).tensors[0])


def tlv(tag: int, data: bytes) -> bytes:
    return struct.pack("<II", tag, len(data)) + data


def nano_bytes() -> tuple[bytes, np.ndarray, np.ndarray]:
    x = np.arange(6, dtype=np.float16)
    y = np.arange(3, dtype=np.int32)
    shape = tlv(0, struct.pack("<2Q", 2, 3)) + tlv(1, struct.pack("<1Q", 6)) + tlv(2, b"node")
    one = struct.pack("<3i3QI", 1, ND, 0, 0x500, 0, x.nbytes, len(shape)) + shape
    flat = tlv(0, struct.pack("<1Q", 3))
    two = struct.pack("<6i3QI", 3, ND, 0, 0, 3, ND, 0x600, 0, y.nbytes, len(flat)) + flat
    body = struct.pack("<II", 0x5A5A5A5A, 1) + tlv(5, two) + tlv(9, b"?") + tlv(4, one)
    return struct.pack("<Q", len(body)) + body + x.tobytes() + y.tobytes(), x, y


def test_nano(tmp_path: Path) -> None:
    data, x, y = nano_bytes()
    dump = read_dump(write(tmp_path / "nano.bin", data))
    assert dump.style == "nano"
    first, second = dump.tensors
    assert (first.name, first.dtype, first.shape, first.original_shape, first.origin) == (
        "input.0", "float16", (2, 3), (6,), "node"
    )  # fmt: skip
    np.testing.assert_array_equal(first.array(), x.reshape(2, 3))
    np.testing.assert_array_equal(second.array(), y)
    path = tmp_path / "cut.bin"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(BadArtefact, match="expected"):
            read_dump(path)


def test_atb(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float16)
    text = b"$Version=1.0\n$Object.Length=12\ndtype=1\nformat=2\ndims=2,3\n$End=1\n"
    tensor = read_dump(write(tmp_path / "outtensor0.bin", text + x.tobytes())).tensors[0]
    assert (tensor.dtype, tensor.format) == ("float16", "ND")
    np.testing.assert_array_equal(tensor.array(), x.reshape(2, 3))
    elsewhere = text.replace(b"$End", b"data=/etc/passwd\n$End")
    assert "/etc/passwd" in read_dump(write(tmp_path / "o.bin", elsewhere)).warnings[0]
    with pytest.raises(BadArtefact, match="dtype=NUMBER"):
        read_dump(write(tmp_path / "p.bin", text.replace(b"dtype=1", b"dtype=x") + x.tobytes()))


def test_sub_formats_sit_above_the_low_byte(tmp_path: Path) -> None:
    raw = np.zeros((1, 1, 16, 16), np.float32)
    path = write_dump(tmp_path / "A.b.1.2", inputs=[Tensor(raw, fmt=FRACTAL_NZ | 7 << 8)])
    tensor = read_dump(path).tensors[0]
    assert (tensor.format, tensor.sub_format) == ("FRACTAL_NZ", 7)
