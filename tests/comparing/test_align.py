"""Alignment of unequal sequences of calls."""

from __future__ import annotations

import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.comparing.align import Pair, align, diff, stem
from tensorprobe.comparing.mapping import Layers, Mapping, plain_path, read_mapping
from tensorprobe.records import Call, TensorRecord, TensorSummary


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
    mapping = Mapping({"NPU.rms.0": "Functional.rms_norm.0"}, {"blocks": "layers"}, {})
    pairs = align(actual, expected, mapping)
    assert pairs[0].how == "mapped"
    assert names(pairs)[0] == ("NPU.rms.0.forward", "Functional.rms_norm.0.forward")


def at_line(name: str, line: str, norm: float | None = None) -> Call:
    made = msgspec.structs.replace(call(name), stack=(f"model.py:{line} in forward",))
    if norm is None:
        return made
    summary = TensorSummary(-norm, norm, norm / 3, norm, 0, 0, 0)
    tensors = tuple(msgspec.structs.replace(r, summary=summary) for r in made.tensors)
    return msgspec.structs.replace(made, tensors=tensors)


def test_lines_tell_which_of_equal_calls_is_the_extra_one() -> None:
    actual = [at_line(f"Torch.relu.{n}.forward", line) for n, line in enumerate(("7", "8", "9"))]
    for missing in range(3):
        expected = [
            at_line(f"Torch.relu.{n}.forward", line)
            for n, line in enumerate([x for i, x in enumerate("789") if i != missing])
        ]
        pairs = align(actual, expected)
        assert [e is None for _, e, _ in pairs] == [n == missing for n in range(3)]
        assert [a is None for a, _, _ in align(expected, actual)].index(True) == missing


def test_lines_that_have_all_moved_are_no_evidence() -> None:
    actual = [at_line(f"Torch.relu.{n}.forward", line) for n, line in enumerate(("8", "9", "30"))]
    expected = [at_line(f"Torch.relu.{n}.forward", line) for n, line in enumerate(("7", "8"))]
    assert [e.name if e else None for _, e, _ in align(actual, expected)] == [
        "Torch.relu.0.forward", "Torch.relu.1.forward", None,
    ]  # fmt: skip


def test_contents_tell_which_of_equal_calls_is_the_extra_one() -> None:
    norms = (1.0, 2.0, 3.0, 4.0)
    actual = [at_line(f"Torch.relu.{n}.forward", "5", norm) for n, norm in enumerate(norms)]
    expected = [at_line(f"Torch.relu.{n}.forward", "5", norms[k]) for n, k in enumerate((1, 3))]
    pairs = align(actual, expected)
    assert [e.name if e else None for _, e, _ in pairs] == [
        None, "Torch.relu.0.forward", None, "Torch.relu.1.forward",
    ]  # fmt: skip


def drawn(n: int, held: float, drew: float) -> Call:
    """Numbers drawn into memory that held others before."""
    name = f"Torch.nn.init.uniform_.{n}.forward"
    tensors = tuple(
        TensorRecord(
            f"{name}.{suffix}", role, "float32", (2, 3),
            summary=TensorSummary(0.0, norm, 0.5, norm, 0, 0, 0),
        )
        for suffix, role, norm in (("input.0", "input", held), ("output.0", "output", drew))
    )  # fmt: skip
    return Call(
        index=n, name=name, op="torch.nn.init.uniform_", module="", direction="forward",
        tensors=tensors,
    )  # fmt: skip


def test_what_was_drawn_tells_which_draw_is_the_extra_one() -> None:
    actual = [drawn(n, 7.0, drew) for n, drew in enumerate((1.0, 2.0, 3.0))]
    expected = [drawn(0, 8.0, 1.0), drawn(1, 7.0, 3.0)]
    pairs = align(actual, expected)
    assert [e.name if e else None for _, e, _ in pairs] == [
        "Torch.nn.init.uniform_.0.forward", None, "Torch.nn.init.uniform_.1.forward",
    ]  # fmt: skip


def test_a_module_of_another_class_is_paired_by_its_place() -> None:
    actual = [call("Module.fc.ColumnParallelLinear.forward.0", 0, "fc"),
              call("Module.out.Linear.forward.0", 1, "out")]  # fmt: skip
    expected = [call("Module.fc.Linear.forward.0", 0, "fc"),
                call("Module.out.Linear.forward.0", 1, "out")]  # fmt: skip
    assert [(a.module, e.module) for a, e, _ in align(actual, expected) if a and e] == [
        ("fc", "fc"), ("out", "out"),
    ]  # fmt: skip


def test_children_are_mapped_by_the_class_they_are_in() -> None:
    """`proj` is another thing in an Attention than in an Mlp; `down.proj` has two parts."""

    def program(rename: dict[str, str]) -> list[Call]:
        paths = ["", "h.0", "h.0.a", "h.0.a.proj", "h.0.m", "h.0.m.proj", "h.0.m.down.proj"]
        classes = ["Net", "Block", "Attention", "Linear", "Mlp", "Linear", "Linear"]
        return [
            call(f"Module.{rename.get(p, p)}.{c}.forward.0".replace("..", "."), i, rename.get(p, p))
            for i, (p, c) in enumerate(zip(paths, classes, strict=True))
        ]

    theirs = {
        "h.0": "layers.0", "h.0.a": "layers.0.attention", "h.0.a.proj": "layers.0.attention.out",
        "h.0.m": "layers.0.m", "h.0.m.proj": "layers.0.m.second", "h.0.m.down.proj": "layers.0.m.x",
    }  # fmt: skip
    mapping = read_mapping({
        "TopLayer": {"h": "layers"},
        "Block": {"a": "attention(SelfAttention)"},
        "Attention": {"proj": "out"},
        "Mlp": {"proj": "second", "down.proj": "x"},
    })  # fmt: skip
    actual, expected = program({}), program(theirs)
    layers = Layers(actual, mapping.layers)
    assert [layers.renamed(c.module) for c in actual] == [c.module for c in expected]
    pairs = align(actual, expected, mapping)
    assert all(a and e and a.index == e.index for a, e, _ in pairs)
    assert [how for _, _, how in pairs] == ["exact"] + ["mapped"] * 6
    # without the calls of modules nobody knows the classes: a rule then holds anywhere
    assert Layers([], mapping.layers).renamed("h.0.a") == "layers.0.attention"


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
