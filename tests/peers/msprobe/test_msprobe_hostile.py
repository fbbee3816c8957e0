"""Dumps from others are hostile: an error or a gap that says where, never harm, never a hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msprobe_making import leaf, relu_dump, write_dump

import tensorprobe as tp
from tensorprobe.errors import TensorprobeError
from tensorprobe.peers.foreign_records import (
    Problem,
    confined,
    decode_text,
    file_name,
    parse_items,
    parse_lines,
    read_shape,
)
from tensorprobe.peers.msprobe import msprobe_layout as msprobe
from tensorprobe.records import Capture
from tensorprobe.store import native

NAME = "Functional.relu.0.forward"


def reasons(capture: Capture) -> list[str]:
    return [gap.reason for gap in capture.gaps]


def test_a_damaged_record_is_skipped_and_the_rest_is_read(tmp_path: Path) -> None:
    x = leaf(torch.ones(2))
    write_dump(tmp_path, {f"Torch.f.{i}.forward": {"output": [x]} for i in range(5)})
    path = tmp_path / "dump.json"
    text = path.read_text()
    at = text.index('"Torch.f.2.forward"')
    path.write_text(text[: at + 40] + "]]" + text[at + 40 :])
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls] == [f"Torch.f.{i}.forward" for i in (0, 1, 3, 4)]
    (gap,) = capture.gaps
    assert gap.name.endswith("/dump.json")
    line = text.count("\n", 0, at) + 1
    assert gap.reason.startswith((f"line {line} ", f"line {line + 1} ", f"line {line + 2} "))
    assert "Torch.f.2.forward" in gap.reason


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    x = leaf(torch.ones(2))
    write_dump(tmp_path, {f"Torch.f.{i}.forward": {"output": [x]} for i in range(5)})
    path = tmp_path / "dump.json"
    path.write_text(path.read_text()[: path.stat().st_size * 7 // 10])
    capture = tp.load(tmp_path)
    assert 2 <= len(capture.calls) < 5
    assert len(capture.gaps) == 1


@pytest.mark.parametrize(
    "text",
    ['{"task":', "", "[]", '{"task": "x", "level": "L1"}', '{"task": 1, "level": 2, "data": 3}'],
)
def test_a_file_without_records_gives_no_calls(tmp_path: Path, text: str) -> None:
    (tmp_path / "dump.json").write_text('{"task": "x", "level": "y",' + text)
    capture = tp.load(tmp_path)
    assert not capture.calls
    assert len(capture.gaps) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_byte_order_marks_and_encodings(tmp_path: Path, encoding: str) -> None:
    relu_dump(tmp_path)
    path = tmp_path / "dump.json"
    path.write_bytes(path.read_text().replace("relu", "rélu").encode(encoding))
    capture = tp.load(tmp_path)
    assert capture.calls[0].name == "Functional.rélu.0.forward"
    assert len(capture.gaps) == 0


def test_bytes_of_another_encoding_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path, {"Torch.f.0.forward": {"input_args": [{"type": "str", "value": "?"}]}})
    path = tmp_path / "dump.json"
    path.write_bytes(path.read_bytes().replace(b"?", "精".encode("gbk")))
    capture = tp.load(tmp_path)
    assert len(capture.calls) == 1
    assert "is not UTF-8" in capture.gaps[0].reason


@pytest.mark.parametrize(
    "record",
    [
        '{"output": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"output": ' + "[" * 70 + "]" * 70 + "}",
        '{"output": [{"type": "int", "value": ' + "9" * 100_000 + "}]}",
        '{"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [-1]}]}',
        '{"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": ["2"]}]}',
        '{"output": [{"type": "torch.Tensor", "dtype": "os.system", "shape": [2]}]}',
        '{"output": [{"type": "torch.Tensor", "dtype": 3, "shape": [2]}]}',
        '{"output": [{"type": "int", "value": "three"}]}',
        '{"output": [7]}',
        '"text"',
        "[]",
        '{"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": {}}]}',
        '{"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "md5": []}]}',
    ],
    ids=lambda record: record[:50],
)
def test_absurd_records_are_gaps(tmp_path: Path, record: str) -> None:
    began = time.thread_time()
    (tmp_path / "dump.json").write_text(
        '{"task": "statistics", "level": "L1", "data": {\n'
        f'  "Torch.bad.0.forward": {record},\n'
        '  "Torch.good.0.forward": {"output": []}\n}}'
    )
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls] == ["Torch.good.0.forward"]
    assert len(capture.gaps) == 1
    assert time.thread_time() - began < 5


def test_huge_and_strange_numbers_are_taken_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(
        '{"task": "statistics", "level": "L1", "data": {"Torch.f.0.forward": {"output": ['
        '{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], '
        '"Max": 1e999, "Min": -Infinity, "Mean": NaN, "Norm": 123456789012345678901234567890}]}}}'
    )
    (call,) = tp.load(tmp_path).calls
    summary = call.tensor("output.0").summary
    assert summary is not None
    assert (summary.max, summary.inf_count, summary.mean) == (float("inf"), 1, None)


@pytest.mark.parametrize(
    "name",
    ["../secret.pt", "/etc/passwd", "..\\x.pt", "a/../../b.pt", "..", ".", "", "a\0b.pt", 7, None],
)
def test_names_that_lead_out_are_not_followed(tmp_path: Path, name: object) -> None:
    torch.save(torch.ones(2), tmp_path / "secret.pt")
    folder = write_dump(
        tmp_path / "d", {NAME: {"output": [leaf(torch.ones(2), data_name=name)]}}, task="tensor"
    )
    (folder / "dump_tensor_data").mkdir()
    (call,) = tp.load(folder).calls
    record = call.tensor("output.0")
    assert record.blob is None
    assert record.gap or name in (None, "")


def test_the_path_in_the_file_is_not_followed(tmp_path: Path) -> None:
    folder = relu_dump(tmp_path / "d")
    text = (folder / "dump.json").read_text()
    other = relu_dump(tmp_path / "other")
    moved = json.dumps(str(other / "dump_tensor_data"))
    (folder / "dump.json").write_text(
        text.replace('"dump_data_dir": null', f'"dump_data_dir": {moved}')
    )
    for path in (folder / "dump_tensor_data").iterdir():
        path.unlink()
    (call,) = tp.load(folder).calls
    assert all(t.gap and "is missing" in t.gap for t in call.tensors)


def test_shapes_that_the_file_has_no_room_for(tmp_path: Path) -> None:
    folder = relu_dump(tmp_path)
    path = folder / "dump.json"
    content = json.loads(path.read_text())
    content["data"][NAME]["output"][0]["shape"] = [1 << 20, 1 << 20]
    content["data"][NAME]["input_args"][0]["shape"] = [4]
    path.write_text(json.dumps(content))
    (call,) = tp.load(folder).calls
    assert "too small" in (call.tensor("output.0").gap or "")
    with pytest.raises(TensorprobeError, match=r"holds shape \[2, 2\]; the index says \[4\]"):
        call.tensor("input.0").load()


def test_a_dtype_of_the_index_that_the_numbers_do_not_fit(tmp_path: Path) -> None:
    folder = relu_dump(tmp_path)
    path = folder / "dump.json"
    path.write_text(path.read_text().replace("torch.float32", "torch.int8"))
    (call,) = tp.load(folder).calls
    assert call.tensor("input.0").load().tolist() == [[-1, 2], [3, -4]]
    torch.save(torch.full((2, 2), 0.5), folder / "dump_tensor_data" / f"{NAME}.input.0.pt")
    with pytest.raises(TensorprobeError, match="numbers that it has no room for"):
        call.tensor("input.0").load()


def test_pipes_and_folders_in_the_place_of_files(tmp_path: Path) -> None:
    folder = relu_dump(tmp_path)
    for path in list((folder / "dump_tensor_data").iterdir()):
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(folder / "stack.json")
    (folder / "construct.json").mkdir()
    (call,) = tp.load(folder).calls
    for record in call.tensors:
        with pytest.raises(TensorprobeError):
            record.load()


@pytest.mark.parametrize("name", ["stack.json", "construct.json"])
@pytest.mark.parametrize("text", ["[1", '{"0": 1}', '{"0": [[1], 2]}', '{"a": {"b": []}}', "\xff"])
def test_damaged_companions_leave_the_dump_readable(tmp_path: Path, name: str, text: str) -> None:
    folder = relu_dump(tmp_path)
    (folder / name).write_text(text, encoding="latin-1")
    assert len(tp.load(folder).calls) == 1


def test_a_tree_that_bites_its_tail(tmp_path: Path) -> None:
    tree = {"Module.a.A.forward.0": "Module.b.B.forward.0", "Module.b.B.forward.0": "Module.a.A.forward.0"}  # fmt: skip  # noqa: E501
    write_dump(tmp_path, {name: {"output": []} for name in tree}, level="L0", construct=tree)
    capture = tp.load(tmp_path)
    assert len(capture.calls) == 2
    msprobe.write(capture, tmp_path / "out")
    native.write(capture, tmp_path / "out2")


def test_lines_with_several_values_or_none() -> None:
    data = b'["a", 1]["b", 2]\n\n["c", NaN]\n["d", \n{"e": 1} tail\n'
    found = list(parse_lines(data))
    assert [item for _, item in found if not isinstance(item, Problem)][:2] == [["a", 1], ["b", 2]]
    assert [str(p).split(":")[0] for _, p in found if isinstance(p, Problem)] == [
        "line 4 column 7",
        "line 5 column 10",
    ]


def test_file_names_never_lead_out_and_never_meet() -> None:
    names = ["a/b", "a_b", "..", "../a", "x" * 500, "x" * 501, "", "\n", "é" * 200]
    made = [file_name(name, ".pt") for name in names]
    assert len(set(made)) == len(made)
    for name in made:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) < 255


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=20,
)
KEYS = st.sampled_from(
    ["input_args", "input_kwargs", "input", "output", "parameters", "type", "dtype", "shape",
     "value", "Max", "Min", "Mean", "Norm", "md5", "data_name", "nonfinite", "class_type", "tensor"]
)  # fmt: skip
RECORD = st.dictionaries(KEYS, st.recursive(JSON, lambda i: st.dictionaries(KEYS, i) | st.lists(i)))
NAMES = st.sampled_from(
    [NAME, "Module.a.B.forward.0", "Module.a.B.parameters_grad.0", "Torch.f.0.backward",
     "x.0.debug", "x_grad.0.debug", "nonsense", "Module.forward.0"]
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.dictionaries(NAMES, RECORD | JSON, max_size=4), stack=JSON, construct=JSON)
def test_any_json_is_read_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, data: object, stack: object, construct: object
) -> None:
    folder = tmp_path_factory.mktemp("d")
    write_dump(folder, data, construct=construct, stack=stack)  # type: ignore[arg-type]
    capture = tp.load(folder)
    lost = msprobe.write(capture, folder / "out")
    assert isinstance(lost, list)
    again = tp.load(folder / "out") if capture.calls else capture
    assert len(again.calls) <= len(capture.calls)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    text, _ = decode_text(data)
    try:
        for item in parse_items(text):
            assert isinstance(item, Problem | tuple)
    except TensorprobeError:
        pass
    for number, _ in parse_lines(data):
        assert number >= 1


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_shapes_and_names_are_checked(value: object) -> None:
    with contextlib.suppress(ValueError):
        assert all(n >= 0 for n in read_shape(value))
    with contextlib.suppress(ValueError):
        assert confined(Path("/a/b"), value).parent == Path("/a/b")


def _flip(original: bytes, generator: random.Random) -> bytes:
    content = bytearray(original)
    for _ in range(generator.choice((1, 1, 1, 2, 8))):
        at = generator.randrange(len(content))
        how = generator.random()
        if how < 0.7:
            content[at] ^= 1 << generator.randrange(8)
        elif how < 0.85:
            del content[at : at + generator.randrange(1, 20)]
        else:
            content[at:at] = content[: generator.randrange(1, 20)]
        if not content:
            return b" "
    return bytes(content)


def flip_bytes(folder: Path, count: int) -> None:
    """Read a dump `count` times, each time with other bytes of one of its files wrong."""
    relu_dump(
        folder,
        level="mix",
        construct={NAME: "Module.a.ReLU.forward.0"},
        stack={"0": [[NAME], ["File /m.py, line 8, in forward, \n relu(x)"]]},
    )
    tensor = folder / "dump_tensor_data" / f"{NAME}.input.0.pt"
    files = [folder / "dump.json", folder / "stack.json", folder / "construct.json", tensor]
    originals = {path: path.read_bytes() for path in files}
    generator = random.Random(1234)
    for _ in range(count):
        path = generator.choices(files, (4, 1, 1, 4))[0]
        path.write_bytes(_flip(originals[path], generator))
        try:
            for call in msprobe.read(folder).calls:
                for record in call.tensors:
                    if record.blob is not None:
                        assert record.array().nbytes <= 1 << 20
        except TensorprobeError:
            pass
        path.write_bytes(originals[path])


def test_bytes_that_are_wrong(tmp_path: Path) -> None:
    flip_bytes(tmp_path, 500)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_bytes_that_are_wrong() -> None:
    memory = Path("/dev/shm")  # opening a file to write takes a disk longer than all the rest
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        flip_bytes(Path(folder) / "dump", 100_000)
