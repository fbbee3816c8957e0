"""Alignment of unequal sequences of calls."""

from __future__ import annotations

import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.compare.align import Mapping, Pair, align, diff, plain_path, stem
from tensorprobe.records import Call, TensorRecord


def call(name: str, index: int = 0, module: str = "", shape: tuple[int, ...] = (2, 3)) -> Call:
    direction = "backward" if ".backward" in name else "forward"
    tensors = tuple(
        TensorRecord(f"{name}.{suffix}", role, "float32", shape)
        for suffix, role in (("input.0", "input"), ("output.0", "output"))
    )
    return Call(
        index=index, name=name, op="torch.x", module=module, direction=direction, tensors=tensors
    )


def program(*ops: str, module: str = "net") -> list[Call]:
    """Calls of these ops, numbered as a recorder numbers them."""
    counts: dict[str, int] = {}
    calls = []
    for i, op in enumerate(ops):
        n = counts[op] = counts.get(op, -1) + 1
        calls.append(call(f"{op}.{n}.forward", i, module))
    return calls


def names(pairs: list[Pair]) -> list[tuple[str | None, str | None]]:
    return [(a.name if a else None, e.name if e else None) for a, e, _ in pairs]


def test_a_program_aligns_with_itself() -> None:
    calls = program("Functional.linear", "Tensor.add", "Torch.relu", "Tensor.add")
    assert all(a is e and how == "exact" for a, e, how in align(calls, calls))


def test_an_inserted_call_shifts_the_numbers_and_nothing_else() -> None:
    actual = program("Functional.linear", "Tensor.to", "Functional.linear", "Torch.relu")
    expected = program("Functional.linear", "Functional.linear", "Torch.relu")
    assert names(align(actual, expected)) == [
        ("Functional.linear.0.forward", "Functional.linear.0.forward"),
        ("Tensor.to.0.forward", None),
        ("Functional.linear.1.forward", "Functional.linear.1.forward"),
        ("Torch.relu.0.forward", "Torch.relu.0.forward"),
    ]


def test_numbers_tell_an_inserted_call_from_its_neighbour() -> None:
    def scaled(name: str, factor: float) -> Call:
        return msgspec.structs.replace(call(name, 0, "act"), args=(None, factor))

    actual = [scaled("Tensor.mul.0.forward", 1.0), scaled("Tensor.mul.1.forward", 0.5)]
    expected = [scaled("Tensor.mul.0.forward", 0.5)]
    assert names(align(actual, expected)) == [
        ("Tensor.mul.0.forward", None),
        ("Tensor.mul.1.forward", "Tensor.mul.0.forward"),
    ]


def test_what_only_expected_has_stands_where_it_would_have_run() -> None:
    actual = program("Functional.linear", "Torch.relu")
    expected = program("Functional.linear", "Tensor.contiguous", "Torch.relu")
    assert names(align(actual, expected))[1] == (None, "Tensor.contiguous.0.forward")


def test_a_renamed_api_is_paired_by_its_place() -> None:
    actual = program("Functional.linear", "Torch.add", "Torch.relu")
    expected = program("Functional.linear", "Tensor.add_", "Torch.relu")
    assert names(align(actual, expected))[1] == ("Torch.add.0.forward", "Tensor.add_.0.forward")


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", ""])
def test_wrappers_of_modules_do_not_matter(wrapper: str) -> None:
    actual = [
        call("Tensor.add.3.forward", 0, f"{wrapper}h.0"),
        call("Tensor.add.4.forward", 1, "h.1"),
    ]
    expected = [call("Tensor.add.0.forward", 0, "h.0"), call("Tensor.add.1.forward", 1, "h.1")]
    pairs = align(actual, expected)
    assert names(pairs)[0] == ("Tensor.add.3.forward", "Tensor.add.0.forward")
    assert pairs[0].how == "aligned"


def test_backward_calls_follow_their_forward_calls() -> None:
    actual = [*program("Tensor.mul", "Tensor.add"), call("Tensor.add.0.backward", 2, "net"),
              call("Tensor.mul.0.backward", 3, "net")]  # fmt: skip
    expected = [*program("Tensor.mul", "Tensor.add"), call("Tensor.mul.0.backward", 2, "net"),
                call("Tensor.add.0.backward", 3, "net")]  # fmt: skip
    assert all(
        a is not None and e is not None and a.name == e.name for a, e, _ in align(actual, expected)
    )


def test_a_mapping_of_calls_and_modules_is_followed() -> None:
    actual = [call("NPU.rms.0.forward", 0, "blocks.0.norm"), call("Torch.relu.0.forward", 1, "a")]
    expected = [call("Functional.rms_norm.0.forward", 0, "layers.0.norm"),
                call("Torch.relu.0.forward", 1, "b")]  # fmt: skip
    mapping = Mapping({"NPU.rms.0": "Functional.rms_norm.0"}, {"blocks": "layers"})
    pairs = align(actual, expected, mapping)
    assert pairs[0].how == "mapped"
    assert names(pairs)[0] == ("NPU.rms.0.forward", "Functional.rms_norm.0.forward")


def test_stems_and_paths() -> None:
    assert stem("Functional.linear.12.forward") == "Functional.linear"
    assert stem("Tensor.__add__.0.backward") == "Tensor.add"
    assert stem("Module.h.0.ln.LayerNorm.forward.3") == "Module.LayerNorm.forward"
    assert plain_path("module._orig_mod.h.0") == "h.0"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from("abcd"), max_size=30), st.lists(st.sampled_from("abcd"), max_size=30)
)
def test_diff_is_a_common_subsequence(a: list[str], b: list[str]) -> None:
    pairs = diff(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p < q and i < j for (p, i), (q, j) in itertools.pairwise(pairs))


@given(st.lists(st.sampled_from("abcde"), max_size=40))
def test_diff_with_itself_is_the_identity(a: list[str]) -> None:
    assert diff(a, a) == [(i, i) for i in range(len(a))]


def test_a_hundred_thousand_calls_align_in_seconds() -> None:
    ops = ["Functional.linear", "Tensor.add", "Torch.matmul", "Functional.softmax", "Tensor.view"]
    rng = random.Random(0)
    calls = [
        call(f"{rng.choice(ops)}.{i}.forward", i, f"layers.{i // 100}.part{i % 7}")
        for i in range(100_000)
    ]
    gone = set(rng.sample(range(len(calls)), 2000))
    expected = [c for i, c in enumerate(calls) if i not in gone]
    begun = time.process_time()
    pairs = align(calls, expected)
    assert time.process_time() - begun < 20
    assert sum(e is None for _, e, _ in pairs) == len(gone)
