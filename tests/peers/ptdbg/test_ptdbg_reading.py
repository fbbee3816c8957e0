"""Dumps of ptdbg_ascend, of every release, as captures; hostile ones too."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorprobe as tp
from tensorprobe.errors import UnreadableCapture
from tensorprobe.peers.ptdbg import ptdbg_layout as ptdbg
from tensorprobe.peers.ptdbg.ptdbg_names import native_name, parse_name
from tensorprobe.records import Special, TensorRecord

SHARED = Path(os.environ.get("TENSORPROBE_SHARED") or Path(__file__).parents[3] / ".." / "shared")
SAMPLES = SHARED / "data" / "ptdbg"

NAMES = {
    "Functional_conv2d_0_forward_input.0": ("Functional.conv2d.0.forward", "input.0"),
    "Tensor_add__1_forward_output": ("Tensor.add_.1.forward", "output"),
    "Tensor___getitem___0_backward_input.0": ("Tensor.__getitem__.0.backward", "input.0"),
    "Tensor.__add__.0.forward.input.1": ("Tensor.__add__.0.forward", "input.1"),
    "VF_lstm_99_forward_input.1.0": ("VF.lstm.99.forward", "input.1.0"),
    "Torch_linalg.norm_3_forward_output": ("Torch.linalg.norm.3.forward", "output"),
    "Module_Conv2d_0_forward_output": ("Module.Conv2d.forward.0", "output"),
    "layers.0.fc.Linear.12.backward.output.0": (
        "Module.layers.0.fc.Linear.backward.12",
        "output.0",
    ),
    "conv.Conv2d.abnormal.backward.input.0": ("Module.conv.Conv2d.backward.abnormal", "input.0"),
    "MyModule_0_forward_input.0": ("Module.MyModule.forward.0", "input.0"),
    "NPU_npu_scaled_masked_softmax_2_forward_stack_info": (
        "NPU.npu_scaled_masked_softmax.2.forward",
        "stack_info",
    ),
    "Aten__native_batch_norm_legit_functional_0_forward_output.3": (
        "Aten._native_batch_norm_legit_functional.0.forward",
        "output.3",
    ),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_of_all_releases(text: str) -> None:
    name = parse_name(text)
    assert name is not None
    assert (native_name(name), name.rest) == NAMES[text]
    separator = "." if text.count(".forward.") or text.count(".backward.") else "_"
    assert f"{name.stem}{separator}{name.rest}" == text


def test_what_is_no_name() -> None:
    for text in ("", "forward", "Functional_conv2d", "a_b_forward_input.0", "x.forward.input"):
        assert parse_name(text) is None


def line(name: str, *rest: Any) -> str:
    return json.dumps([name, *rest]) + "\n"


TENSOR = (1, [], "torch.float32", [2, 2], [3.0, 0.0, 1.5])


def write(folder: Path, text: str | bytes, **arrays: Any) -> Path:
    """An index with tensors beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "my.pkl"
    index.write_bytes(text.encode() if isinstance(text, str) else text)
    data = folder / "my"
    data.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(data / f"{name}.npy", array)
    return index


X = np.arange(4, dtype=np.float32).reshape(2, 2)


def test_one_call(tmp_path: Path) -> None:
    text = (
        line("Functional_relu_0_forward_input.0", *TENSOR)
        + line("Functional_relu_0_forward_input.1", 1, [], "<class 'bool'>", "[]", [True] * 3)
        + line("Functional_relu_0_forward_input.3", 1, [], "<class 'float'>", "[]", [0.5] * 3)
        + line("Functional_relu_0_forward_output", *TENSOR)
        + line("Functional_relu_0_forward_stack_info", [["/a/wrap_tensor.py", "1", "f", None],
                                                        ["/a/m.py", "7", "forward", "x"]])
    )  # fmt: skip
    index = write(tmp_path / "tag_v2.3" / "rank3", text, Functional_relu_0_forward_input_0=X)
    os.rename(
        index.parent / "my" / "Functional_relu_0_forward_input_0.npy",
        index.parent / "my" / "Functional_relu_0_forward_input.0.npy",
    )
    for path in (index, index.parent, index.parents[1], index.parents[2], index.with_suffix("")):
        capture = tp.load(path)
        assert capture.layout == "ptdbg"
        (call,) = capture.calls
        assert (call.name, call.op) == (
            "Functional.relu.0.forward",
            "torch.nn.functional.relu",
        )
        assert (call.rank, call.step, call.index) == (3, 0, 0)
        assert call.stack == ("/a/m.py:7 in forward",)
        x, flag, hole, half = call.args
        assert (flag, half) == (True, 0.5)
        assert isinstance(hole, Special)  # None, or text: the dump does not tell
        assert isinstance(x, TensorRecord)
        assert x.summary is not None
        assert (x.summary.max, x.summary.counted) == (3.0, False)
        assert np.array_equal(x.array(), X)
        assert call.outputs is call.tensor("output.0")
        assert call.tensor("output.0").gap == "Functional_relu_0_forward_output.npy is missing"


def test_steps_and_ranks_by_their_numbers(tmp_path: Path) -> None:
    for step in (0, 2, 10):
        for rank in (0, 1):
            folder = tmp_path / "d_v5.0" / f"step{step}" / f"rank{rank}"
            write(folder, line("Torch_abs_0_forward_output", *TENSOR))
    capture = tp.load(tmp_path)
    assert (capture.steps, capture.ranks) == ((0, 2, 10), (0, 1))
    assert [(c.rank, c.step, c.index) for c in capture.calls] == [
        (rank, step, i) for rank in (0, 1) for i, step in enumerate((0, 2, 10))
    ]
    assert tp.load(tmp_path / "d_v5.0" / "step2").steps == (2,)


def test_a_name_that_comes_again_is_another_call(tmp_path: Path) -> None:
    """A second api_stack run of release 2.3 appends to the index, and writes over the tensors."""
    text = line("Torch_abs_0_forward_output", *TENSOR) * 2
    index = write(tmp_path, text, Torch_abs_0_forward_output=X)
    first, second = tp.load(index).calls
    assert first.tensor("output.0").gap == "the dump wrote a later call of this name over it"
    assert np.array_equal(second.tensor("output.0").array(), X)


def test_several_dumps_in_one_folder_have_to_be_named(tmp_path: Path) -> None:
    for name in ("a", "api_stack_a"):
        (tmp_path / f"{name}.pkl").write_text(line("Torch_abs_0_forward_output", *TENSOR))
    with pytest.raises(UnreadableCapture, match=r"holds 2 dumps: a\.pkl, api_stack_a\.pkl"):
        tp.load(tmp_path)
    assert len(tp.load(tmp_path / "a.pkl").calls) == 1


def test_a_real_pickle_is_no_dump(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "x.pkl").write_bytes(pickle.dumps(["Functional_relu_0_forward_input.0"]))
    with pytest.raises(UnreadableCapture, match="is not a capture"):
        tp.load(tmp_path)


GOOD = line("Torch_abs_0_forward_output", *TENSOR)
# Damage that a dump may have: what is skipped, and what the reason says.
HOSTILE: dict[str, tuple[str | bytes, int, str]] = {
    "two records on one line": (GOOD.strip() + GOOD.replace("_0_", "_1_"), 2, ""),
    "a line cut off": (GOOD + GOOD[:30], 1, "my.pkl:2: column"),
    "not a record": (GOOD + '{"a": 1}\n17\n[]\n', 1, "is no record"),
    "no name": (GOOD + '["what"]\n', 1, "is no name of a tensor"),
    "too few fields": (GOOD + line("Torch_abs_1_forward_output", 1), 1, "expected 5 or 6 fields"),
    "a shape of text": (
        GOOD + line("Torch_abs_1_forward_output", 1, [], "torch.float32", "no", []), 2, "no shape",
    ),
    "a negative shape": (
        GOOD + line("Torch_abs_1_forward_output", 1, [], "torch.float32", [-1], []), 2, "no shape",
    ),
    "an absurd shape": (
        GOOD + line("Torch_abs_1_forward_output", 1, [], "torch.float32", [10**30], []), 2,
        "no shape",
    ),
    "no dtype": (GOOD + line("Torch_abs_1_forward_output", 1, [], "os.system", [], []), 2, "dtype"),
    "an unknown dtype": (
        GOOD + line("Torch_abs_1_forward_output", 1, [], "torch.float3", [], []), 2, "float3",
    ),
    "nested deeply": (GOOD + "[" * 100_000 + "\n", 1, "nested too deeply"),
    "a huge number": (GOOD + "[" + "9" * 5000 + "]\n", 1, "5000 digits"),
    "not UTF-8": (GOOD.encode() + b'["\xff\xfe"]\n', 1, "not UTF-8"),
    "a byte-order mark": (b"\xef\xbb\xbf" + GOOD.encode(), 1, ""),
    "NaN and Infinity": (
        line("Torch_abs_0_forward_output", 1, [], "torch.float32", [2], [float("nan")] * 3), 1, "",
    ),
    "blank lines": ("\n\n" + GOOD + "\n", 1, ""),
    "an argument far away": (line("Torch_abs_0_forward_input.99999999999", *TENSOR), 1, ""),
    "arguments nested without end": (
        line("Torch_abs_0_forward_input" + ".0" * 5000, *TENSOR), 1, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_damage_is_skipped_with_its_position(case: str, tmp_path: Path) -> None:
    text, calls, reason = HOSTILE[case]
    capture = tp.load(write(tmp_path, text))
    assert len(capture.calls) == calls
    said = " ".join(f"{gap.name}: {gap.reason}" for gap in capture.gaps)
    assert reason in said
    assert bool(capture.gaps) == bool(reason)


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "secret.npy", X)
    evil = "Torch_abs_0_forward_input.0/../../../secret"
    capture = tp.load(write(tmp_path / "d", line(evil, *TENSOR)))
    assert all(record.blob is None for call in capture.calls for record in call.tensors)


def test_files_that_are_not_what_the_index_says(tmp_path: Path) -> None:
    index = write(tmp_path, GOOD, Torch_abs_0_forward_output=np.ones(3, np.float32))
    record = tp.load(index).calls[0].tensor("output.0")
    with pytest.raises(UnreadableCapture, match=r"holds shape \[3\]; the index says \[2, 2\]"):
        record.array()
    os.remove(tmp_path / "my" / "Torch_abs_0_forward_output.npy")
    os.mkfifo(tmp_path / "my" / "Torch_abs_0_forward_output.npy")
    with pytest.raises(UnreadableCapture, match="is a FIFO"):
        tp.load(index).calls[0].tensor("output.0").array()
    index = write(tmp_path, GOOD, Torch_abs_0_forward_outpu=X)
    bad = tmp_path / "my" / "Torch_abs_0_forward_output.npy"
    os.remove(bad)
    np.save(bad, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UnreadableCapture):
        tp.load(index).calls[0].tensor("output.0").array()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
suffixes = st.sampled_from(
    ["input.0", "input.1.0", "input.key", "output", "output.0.1", "stack_info"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(suffixes, st.lists(values, max_size=6)), max_size=6))
def test_any_fields_are_read_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, list[Any]]]
) -> None:
    text = GOOD + "".join(line(f"Torch_abs_1_forward_{s}", *fields) for s, fields in records)
    index = write(tmp_path_factory.getbasetemp() / "any_fields", text)
    capture = tp.load(index)
    assert capture.calls[0].name == "Torch.abs.0.forward"
    read_everything(capture.calls)


def read_everything(calls: Any) -> None:
    """What a user of the capture would touch; content that is damaged says so."""
    for call in calls:
        repr(call)
        for record in call.tensors:
            if record.blob is not None:
                with contextlib.suppress(UnreadableCapture):
                    record.array()


def flip(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        place = chance.randrange(len(flipped))
        kind = chance.randrange(4)
        if kind == 0:
            flipped[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            flipped[place] = chance.randrange(256)
        elif kind == 2:
            del flipped[place : place + chance.choice((1, 10, 100))]
        else:
            flipped[place:place] = flipped[place // 2 : place // 2 + chance.choice((1, 10))]
        if not flipped:
            return b""
    return bytes(flipped)


def flip_bytes(folder: Path, rounds: int) -> None:
    chance = random.Random(7)
    stack = [["/a/m.py", "7", "forward", "x"]] * 3
    text = "".join(
        line(f"Functional_linear_{i}_{way}_{side}", *TENSOR)
        for i in range(2)
        for way in ("forward", "backward")
        for side in ("input.0", "input.1.0", "output.0")
    ) + line("Functional_linear_0_forward_stack_info", stack)
    index = write(folder, text)
    good, npy = index.read_bytes(), folder / "my" / "Functional_linear_0_forward_input.0.npy"
    np.save(npy, X)
    stored = npy.read_bytes()
    for number in range(rounds):
        index.write_bytes(flip(good, chance))
        if number % 4 == 0:
            npy.write_bytes(flip(stored, chance))
        calls, _ = ptdbg.read_index(index, folder / "my")
        read_everything(calls)


def test_flipped_bytes(tmp_path: Path) -> None:
    flip_bytes(tmp_path, 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_flipped_bytes(tmp_path: Path) -> None:
    flip_bytes(tmp_path, 100_000)


# The real ones

INDEXES = sorted(SAMPLES.rglob("*.pkl")) if SAMPLES.is_dir() else []


@pytest.mark.skipif(not INDEXES, reason="the samples are not here")
@pytest.mark.parametrize("index", INDEXES, ids=lambda path: str(path.relative_to(SAMPLES)))
def test_every_line_of_the_samples_is_read(index: Path) -> None:
    capture = tp.load(index)
    assert capture.gaps == ()
    lines = [json.loads(text) for text in index.read_text().splitlines() if text.strip()]
    tensors = [fields for fields in lines if len(fields) > 2 and "class" not in fields[3]]
    assert sum(len(call.tensors) for call in capture.calls) == len(tensors)
    stacks = sum(bool(call.stack) for call in capture.calls)
    assert stacks == sum(len(fields) == 2 for fields in lines)
    for call in capture.calls:
        spelt = ptdbg.spelt_name(call)
        assert any(fields[0].startswith(spelt) for fields in lines)
    if not stacks or tensors:
        assert all(call.tensors or call.args or call.stack for call in capture.calls)


@pytest.mark.skipif(not INDEXES, reason="the samples are not here")
def test_the_samples_of_two_releases_hold_the_same_run() -> None:
    old, new = (tp.load(SAMPLES / r / "dump_all") for r in ("v4.0.T2", "v6.0"))
    found = tp.compare(old, new)
    assert found.verdict.counts["only_actual"] == 0
    assert not found.verdict.culprits
    older = tp.load(SAMPLES / "v2.3" / "dump_filter_off")  # it records inner calls too
    found = tp.compare(older, new)
    one_sided = {call.name for call, _ in found.one_sided}
    assert "Torch.relu.0.forward" in one_sided
    assert found.verdict.counts["aligned"] >= 30


@pytest.mark.skipif(not INDEXES, reason="the samples are not here")
def test_the_stored_tensors_of_the_samples() -> None:
    name = "Functional_conv2d_0_forward_input.0"
    index = SAMPLES / "v2.3" / "dump_all" / "my.pkl"
    calls, gaps = ptdbg.read_index(index, SAMPLES / "v2.3" / "npy_examples")
    record = calls[0].tensor("input.0")
    assert np.array_equal(
        record.array(), np.load(SAMPLES / "v2.3" / "npy_examples" / f"{name}.npy")
    )
    assert not gaps


@pytest.mark.skipif(not INDEXES, reason="the samples are not here")
@pytest.mark.parametrize(("release", "count"), [("dec2023", 31), ("oct2024", 29)])
def test_the_samples_of_the_accuracy_checker(release: str, count: int) -> None:
    capture = tp.load(SAMPLES / "api_accuracy_checker" / release)
    assert (len(capture.calls), capture.gaps) == (count, ())
    conv = capture.call("Functional.conv2d.0.forward")
    assert conv.args[3:] == ([1, 1], [1, 1], [1, 1], 1)
    assert conv.tensor("input.1").requires_grad
    assert conv.tensor("input.0").shape == (2, 3, 6, 6)
    assert capture.call("Functional.conv2d.0.backward").tensor("input.0").shape == (2, 4, 6, 6)
