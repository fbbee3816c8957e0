"""Records that no recorder writes: each becomes a gap, and the rest is read."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_making import open_writer, write_capture, write_relu

import tensorprobe as tp
from recorded import record
from tensorprobe.cli.main import main
from tensorprobe.errors import UnreadableCapture
from tensorprobe.store.shard import HEADER_NBYTES
from tensorprobe.tensors.layouts import ITEMSIZES, check_layout

LOG = "rank0/step0/calls.jsonl"
TENSOR = '{"tensor":{"dtype":"float32","shape":[2]}}'
CALL = '{"type":"call","id":77,"name":"Torch.evil.0.forward","op":"torch.evil"%s}'


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


def tuples(depth: int) -> str:
    return '{"tuple":[' * depth + "]}" * depth


def tensor(**fields: Any) -> str:
    return json.dumps({"tensor": {"dtype": "float32", "shape": [2], **fields}})


HOSTILE = {
    "900 deep": CALL % f',"args":[{nest(900)}]',
    "100,000 deep": CALL % f',"args":[{nest(100_000)}]',
    "900 tuples": CALL % f',"args":[{tuples(900)}]',
    "deep where nothing is": CALL % f',"more":{nest(100_000)}',
    "a number of a million digits": CALL % f',"args":[{"9" * 1_000_000}]',
    "digits in text": CALL % f',"args":[{{"int":"{"9" * 5000}"}}]',
    "a float that is too large": CALL % ',"args":[1e999]',
    "NaN": CALL % ',"args":[NaN]',
    "a lone surrogate": CALL % r',"module":"\ud800"',
    "no UTF-8": CALL % ',"module":"\udcff"',
    "NUL": CALL % ',"module":"\0"',
    "a list for an object": CALL % ',"kwargs":[1]',
    "an object for a list": CALL % ',"args":{"a":1}',
    "a name that is a number": CALL.replace('"Torch.evil.0.forward"', "5") % "",
    "an unknown kind of value": CALL % ',"args":[{"evil":1}]',
    "a kind of fields": CALL % ',"args":[{"fields":["evil","a",{}]}]',
    "fields in a list": CALL % ',"args":[{"fields":["namedtuple","a",[1]]}]',
    "a special of numbers": CALL % ',"args":[{"special":[1,2]}]',
    "a dtype of no library": CALL % f',"args":[{tensor(dtype="float99")}]',
    "a dtype of numpy": CALL % f',"args":[{tensor(dtype="object")}]',
    "a dtype of text": CALL % f',"args":[{tensor(dtype="U1000000000")}]',
    "a dtype that is a list": CALL % f',"args":[{tensor(dtype=["float32"])}]',
    "a negative length": CALL % f',"args":[{tensor(shape=[-2])}]',
    "a length of a half": CALL % f',"args":[{tensor(shape=[0.5])}]',
    "too many elements": CALL % f',"args":[{tensor(shape=[1 << 40, 1 << 40])}]',
    "too many elements of none": CALL % f',"args":[{tensor(shape=[0, 1 << 40, 1 << 40])}]',
    "too many dimensions": CALL % f',"args":[{tensor(shape=[1] * 65)}]',
    "fewer strides": CALL % f',"args":[{tensor(shape=[2, 2], stride=[1])}]',
    "a negative stride": CALL % f',"args":[{tensor(stride=[-1])}]',
    "a huge stride": CALL % f',"args":[{tensor(stride=[1 << 63])}]',
    "a tensor that is text": CALL % ',"args":[{"tensor":"x"}]',
    "a parameter that cannot be": CALL % f',"parameters":{{"w":{tensor(shape=[-2])[11:-1]}}}',
    "an unknown line": '{"type":"evil"}',
    "no object": "[]",
    "half a line": '{"type":"call","id":1',
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_one_record_is_a_gap_and_the_rest_is_read(hostile: str, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "run")
    lines = (capture / LOG).read_bytes().splitlines(keepends=True)
    lines.insert(3, HOSTILE[hostile].encode("utf-8", "surrogateescape") + b"\n")
    (capture / LOG).write_bytes(b"".join(lines))
    found = tp.load(capture)
    assert [call.name for call in found.calls if "evil" not in call.name] == [
        f"Torch.relu.{n}.forward" for n in range(3)
    ]
    if hostile != "deep where nothing is":
        (gap,) = found.gaps
        assert gap.name == "rank0/step0/calls.jsonl:4"
        assert len(gap.reason) < 300
    for call in found.calls:
        for each in call.tensors:
            each.array()


def test_names_that_come_twice_are_empty_or_their_own_parents(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "run")
    more = [
        '{"type":"call","id":50,"name":"a","op":"torch.relu","parent":"b","args":[%s]}',
        '{"type":"call","id":51,"name":"b","op":"torch.relu","parent":"a","args":[%s]}',
        '{"type":"call","id":52,"name":"a","op":"","parent":"a","args":[%s]}',
        '{"type":"call","id":53,"name":"","op":"torch.relu","parent":"","args":[%s]}',
        '{"type":"call","id":53,"id":54,"name":"a.forward","name":"b.forward","op":"x"}',
    ]
    same = '{"tensor":{"dtype":"float32","shape":[2],"same":"input.0"}}'  # as itself
    with (capture / LOG).open("a") as file:
        file.writelines(f"{line.replace('%s', same)}\n" for line in more)
    assert [call.name for call in tp.load(capture).calls][3:] == ["a", "b", "a", "", "b.forward"]
    for layout in ("native", "msprobe", "ptdbg"):
        words = ["convert", str(capture), "--to", layout, "-o", str(tmp_path / layout)]
        assert main(words) == 0
    words = ["compare", str(capture), str(tmp_path / "native"), "--jobs", "1"]
    assert main([*words, "--timeout", "0"]) in (0, 1, 3)
    assert main(["show", str(capture), "*"]) == 0


@pytest.mark.parametrize("blob", [[0, -1, 16], [0, 1 << 70, 16], [1 << 70, 0, 16], [7, 0, 16]])
def test_places_that_are_not_in_the_shard(blob: list[int], tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "run", n_calls=1)
    lines = [json.loads(line) for line in (capture / LOG).read_text().splitlines()]
    for line in lines:
        if line["type"] == "value":
            line["blob"] = blob
    (capture / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UnreadableCapture, match="no stored content"):
        tp.load(capture).calls[0].tensor("input.0").array()


def test_a_petabyte_that_is_not_there_is_not_asked_for(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "run", compress=True)
    out.begin_step(0)
    write_relu(out, 0, np.zeros(1 << 16, np.float32))
    out.close()
    path = tmp_path / "run" / LOG
    length = 10**15
    for packed in (True, False):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["type"] == "value":
                line["blob"] = [*line["blob"][:3], *([4 * length] if packed else [])]
            for tree in [*line.get("args", []), line.get("outputs")]:
                if tree:
                    tree["tensor"]["shape"] = [length]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        record = tp.load(tmp_path / "run").calls[0].tensor("input.0")
        with pytest.raises(UnreadableCapture, match=r"takes (more than )?\d+"):
            record.array()
        with pytest.raises(UnreadableCapture):
            record.load()


def test_a_header_that_claims_too_much(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "run")
    shard = capture / "rank0" / "step0" / "tensors-0.safetensors"
    content = shard.read_bytes()
    for header in (b"\xff" * 8, (HEADER_NBYTES).to_bytes(8, "little") + b"[" * 100_000):
        shard.write_bytes(header + content[len(header) :])
        (gap,) = tp.load(capture).gaps
        assert "header" in gap.reason
        tp.load(capture).calls[0].tensor("input.0").array()  # the log says where it is


@pytest.mark.parametrize("text", [nest(900), nest(100_000), "[]", '{"a":' * 200 + "1" + "}" * 200])
def test_facts_that_are_none(text: str, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "run")
    for name in ("capture.json", "rank0/rank.json"):
        (capture / name).write_text(text)
    found = tp.load(capture)
    assert len(found.calls) == 3
    assert [gap.name for gap in found.gaps] == ["capture.json", "rank.json"]


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(d).removeprefix("torch."): d.itemsize for d in dtypes} == ITEMSIZES
    for name in ITEMSIZES:
        check_layout(name, (2, 0, 3), (0, 3, 1))


# Any value in any place

VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 10**30, -(10**30), "", "x", "nan", "9" * 5000, [], {}, [[]],
    {"a": 1}, [None], "\x1b[31m\u202e\n", {"tensor": {}}, {"special": [1, 2]},
    {"tensor": {"dtype": "float32", "shape": [10**15]}}, {"fields": ["namedtuple", "a", [1]]},
    [[[[[[[[]]]]]]]], "Module." + ".a" * 1000, "²", "/dev/zero:1 in f", "a\ud800b",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        parts = dict(enumerate(value))
    for key, part in parts.items():
        yield from places(part, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = changed(value[path[0]], path[1:], new)
    return value


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def program() -> None:
        y = torch.split(model(torch.ones(2, 4)), [1, 1])[0]
        torch.add(y, 1 + 2j).abs().sum().backward()
        torch.nn.functional.pad(y[..., 0:1], (1, 1), value=float("inf")).to(torch.float16)

    record(folder / "native", program, level="mix")
    for layout in ("msprobe", "ptdbg"):
        words = ["convert", str(folder / "native"), "--to", layout, "-o", str(folder / layout)]
        assert main(words) == 0
    return folder


@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["native", "msprobe", "ptdbg"])
def test_any_value_in_any_place(
    layout: str, count: int, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(runs / layout, tmp_path / layout))
    files = sorted(p for p in root.rglob("*") if p.suffix in (".json", ".jsonl", ".pkl"))
    other = runs / ("native" if layout != "native" else "msprobe")
    chance = random.Random(count)
    for _ in range(count):
        path = chance.choice(files)
        text = path.read_text()
        lines = [text] if path.suffix == ".json" else text.splitlines()
        number = chance.randrange(len(lines))
        value = json.loads(lines[number])
        place, new = chance.choice(list(places(value))), chance.choice(VALUES)
        lines[number] = json.dumps(changed(value, place, new))
        path.write_text("\n".join(lines) + "\n")
        out = tmp_path / "out"
        for words in (
            ["show", str(root)],
            ["show", str(root), "*"],
            ["convert", str(root), "--to", chance.choice(["native", "msprobe", "ptdbg"])],
            ["compare", str(root), str(other), "--jobs", "1", "--timeout", "0"],
        ):
            output = [] if words[0] == "show" else ["-o", str(out)]
            status = main([*words, *output])
            said = capsys.readouterr()
            assert status in (0, 1, 2, 3), (path, number, place, new)
            assert "\x1b" not in said.out + said.err
            shutil.rmtree(out, ignore_errors=True)
        path.write_text(text)
