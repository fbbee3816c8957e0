"""What is wanted of a run: by step, rank, name, range, API, module, direction and dtype."""

import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest

from tensorprobe.config import RecordConfig
from tensorprobe.follow.naming import (
    ApiName,
    CallNames,
    Counter,
    api_name,
    call_name,
    module_name,
    optimizer_name,
)
from tensorprobe.record.selection import Selection
from tensorprobe.records import Direction, Role


def selection(**arguments: Any) -> Selection:
    return Selection(RecordConfig.make(**arguments))


def program() -> Iterable[CallNames]:
    """A step: two attention blocks, a functional and its in-place twin, backward, an optimizer."""
    counter = Counter()
    forward: list[CallNames] = []

    def call(api: ApiName, module: str = "") -> CallNames:
        names = CallNames(api, call_name(api, counter.next(api)), module)
        forward.append(names)
        return names

    yield call(module_name("", "Net"))
    yield call(api_name("torch.nn.functional.embedding"), "embed")
    for block in ("h.0", "h.1"):
        yield call(module_name(f"{block}.attn", "Attention"), f"{block}.attn")
        yield call(api_name("torch.nn.functional.linear"), f"{block}.attn.q")
        yield call(api_name("torch.Tensor.__add__"), f"{block}.attn")
        yield call(api_name("torch.relu"), block)
        yield call(api_name("torch.Tensor.relu_"), block)
    yield call(api_name("torch.nn.functional.leaky_relu"), "")
    yield call(api_name("ns::fused"), "")
    yield call(api_name("torch.ops.npu.npu_rms_norm"), "")
    for names in reversed(forward):
        n = names.name.split(".")[-1 if names.api.prefix == "Module" else -2]
        yield names.but(name=call_name(names.api, int(n), "backward"), direction="backward")
    adam = optimizer_name("AdamW")
    yield CallNames(adam, call_name(adam, 0))


def selected(chosen: Selection) -> list[str]:
    chosen.begin_step()
    return [names.name for names in program() if chosen.decide(names)]


ALL = [names.name for names in program()]


def test_nothing_asked_is_everything() -> None:
    chosen = selection(steps="0-1", keep="tensors", directions="forward", dtypes="float")
    assert chosen.everything
    assert selected(selection()) == ALL


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ("Torch.relu.1.forward", ["Torch.relu.1.forward"]),
        ("Torch.relu.1", ["Torch.relu.1.forward", "Torch.relu.1.backward"]),
        ("Torch_relu_1_backward", ["Torch.relu.1.backward"]),
        ("Tensor.__add__.0.forward", ["Tensor.add.0.forward"]),
        ("Tensor___add___0_forward", ["Tensor.add.0.forward"]),
        ("Tensor_relu__0_forward", ["Tensor.relu_.0.forward"]),
        ("Optimizer.AdamW.step.0", ["Optimizer.AdamW.step.0"]),
        ("Module.h.1.attn.Attention.backward.0", ["Module.h.1.attn.Attention.backward.0"]),
        (
            "Module.Net.0",
            ["Module.Net.forward.0", "Module.Net.backward.0"],
        ),
        ("Torch.relu", []),
    ],
)
def test_calls_are_exact_names(calls: str, names: list[str]) -> None:
    assert selected(selection(calls=calls)) == names


RELUS = [f"Torch.relu.{n}.forward" for n in (0, 1)]


@pytest.mark.parametrize(
    ("apis", "names"),
    [
        ("relu", RELUS),
        ("torch.relu", RELUS),
        ("F.relu", RELUS),
        ("Tensor.relu", RELUS),
        ("aten.relu", RELUS),
        ("relu_", ["Tensor.relu_.0.forward", "Tensor.relu_.1.forward"]),
        ("*leaky*", ["Functional.leaky_relu.0.forward"]),
        ("NPU.*", ["NPU.npu_rms_norm.0.forward"]),
        ("*norm*", ["NPU.npu_rms_norm.0.forward"]),
        ("ns::fused", ["Ops.ns.fused.0.forward"]),
        ("Ops.*", ["Ops.ns.fused.0.forward"]),
        ("__add__", ["Tensor.add.0.forward", "Tensor.add.1.forward"]),
        ("Tensor.__iadd__", []),
        ("Attention", [f"Module.h.{n}.attn.Attention.forward.0" for n in (0, 1)]),
        ("h.1.attn", ["Module.h.1.attn.Attention.forward.0"]),
        ("AdamW", ["Optimizer.AdamW.step.0"]),
        (
            "Tensor.*",
            [f"Tensor.{api}.{n}.forward" for n in (0, 1) for api in ("add", "relu_")],
        ),
    ],
)
def test_apis_match_any_name_a_call_goes_by(apis: str, names: list[str]) -> None:
    assert selected(selection(apis=apis, directions="forward")) == names


def test_modules_bring_their_inside() -> None:
    assert selected(selection(modules="*.1.attn*", directions="forward")) == [
        "Module.h.1.attn.Attention.forward.0",
        "Functional.linear.1.forward",
        "Tensor.add.1.forward",
    ]
    assert selected(selection(modules="h.0", apis="linear")) == [
        "Functional.linear.0.forward",
        "Functional.linear.0.backward",
    ]


def test_names_are_parts_and_a_module_brings_its_inside() -> None:
    assert selected(selection(names="relu.0.forward")) == [
        "Torch.relu.0.forward",
        "Functional.leaky_relu.0.forward",
    ]
    inside = selected(selection(names="Module.h.0.attn.Attention.forward.0", directions="forward"))
    assert inside == [
        "Module.h.0.attn.Attention.forward.0",
        "Functional.linear.0.forward",
        "Tensor.add.0.forward",
    ]


def test_a_range_of_forward_calls_brings_their_backwards() -> None:
    chosen = selection(between=("Tensor.add.0.forward", "Functional.linear.1"))
    wanted = [
        "Tensor.add.0.forward",
        "Torch.relu.0.forward",
        "Tensor.relu_.0.forward",
        "Module.h.1.attn.Attention.forward.0",
        "Functional.linear.1.forward",
        "Functional.linear.1.backward",
        "Module.h.1.attn.Attention.backward.0",
        "Tensor.relu_.0.backward",
        "Torch.relu.0.backward",
        "Tensor.add.0.backward",
    ]
    assert selected(chosen) == wanted
    assert selected(chosen) == wanted, "a range is armed again each step"


def test_a_new_step_arms_a_range_that_never_ended() -> None:
    chosen = selection(between=("Torch.relu.0", "Torch.relu.7"), directions="forward")
    first = CallNames(api_name("torch.nn.functional.linear"), "Functional.linear.0.forward")
    chosen.wants_step(0)
    assert any(chosen.decide(names) for names in program())
    assert chosen.wants_step(0)
    assert chosen.decide(first), "asking again about the same step changes nothing"
    chosen.wants_step(1)
    assert not chosen.decide(first)


def test_a_range_of_one_call() -> None:
    name = "Torch.relu.1.forward"
    assert selected(selection(between=(name, name), directions="forward")) == [name]


def test_a_range_that_ends_in_a_module_includes_its_inside() -> None:
    chosen = selection(
        between=("Tensor.relu_.0.forward", "Module.h.1.attn.Attention.forward.0"),
        directions="forward",
    )
    assert selected(chosen) == [
        "Tensor.relu_.0.forward",
        "Module.h.1.attn.Attention.forward.0",
        "Functional.linear.1.forward",
        "Tensor.add.1.forward",
    ]


def test_a_range_of_backward_calls_runs_in_backward_order() -> None:
    chosen = selection(between=("Tensor.relu_.1.backward", "Tensor.add.1.backward"))
    assert selected(chosen) == [
        "Tensor.relu_.1.backward",
        "Torch.relu.1.backward",
        "Tensor.add.1.backward",
    ]
    across = selected(selection(between=("Ops.ns.fused.0.forward", "Ops.ns.fused.0.backward")))
    assert across == [
        "Ops.ns.fused.0.forward",
        "NPU.npu_rms_norm.0.forward",
        "NPU.npu_rms_norm.0.backward",
        "Ops.ns.fused.0.backward",
    ]


def test_a_range_sees_calls_that_directions_leave_out() -> None:
    chosen = selection(between=("Torch.relu.0", "Torch.relu.0"), directions="backward")
    assert selected(chosen) == ["Torch.relu.0.backward"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"directions": "forward"},
        {"calls": "Torch.relu.1.backward"},
        {"calls": "Module.h.0.attn.Attention.backward.0"},
        {"apis": "relu"},
        {"modules": "h.1"},
        {"names": "relu.0.backward"},
        {"between": ("Torch.relu.0", "Tensor.add.1")},
        {"between": ("Tensor.relu_.1.backward", "Tensor.add.1.backward")},
    ],
)
def test_every_wanted_backward_is_watched_from_its_forward_on(arguments: dict[str, Any]) -> None:
    chosen = selection(**arguments)
    watched: set[str] = set()
    for names in program():
        wanted = chosen.decide(names)
        if names.direction == "forward":
            if chosen.may_want_backward(names):
                watched.add(names.name.replace("forward", "backward"))
        elif wanted:
            assert names.name in watched
    backward = [name for name in ALL if "backward" in name]
    if "between" not in arguments and arguments:
        assert len(watched) < len(backward), "what cannot be wanted is not watched"


def test_steps_and_ranks() -> None:
    chosen = selection(steps="1-2,5", ranks=[0, 3])
    assert [step for step in range(8) if chosen.wants_step(step)] == [1, 2, 5]
    assert [rank for rank in range(5) if chosen.wants_rank(rank)] == [0, 3]
    assert not chosen.past_last_step(5)
    assert chosen.past_last_step(6)
    assert selection().wants_step(10**9)
    assert not selection().past_last_step(10**9)


def test_inside_a_call() -> None:
    roles: tuple[Role, ...] = ("input", "output", "parameter", "parameter_grad", "buffer")
    outputs = selection(sides="output", directions="backward")
    assert [role for role in roles if outputs.wants_side(role)] == ["output", "parameter_grad"]
    assert [role for role in roles if selection(sides="input").wants_side(role)] == [
        "input",
        "parameter",
        "buffer",
    ]
    directions: tuple[Direction, ...] = ("forward", "backward")
    assert [d for d in directions if outputs.wants_direction(d)] == ["backward"]
    floats = ["float32", "bfloat16", "complex64", "float8_e4m3fn"]
    dtypes = [*floats, "int64", "uint8", "bool", "qint8", "quint4x2", "bits8"]
    assert [d for d in dtypes if selection(dtypes="float").wants_tensor(d)] == floats
    assert [d for d in dtypes if selection().wants_tensor(d)] == dtypes


def test_some_calls_keep_tensors() -> None:
    chosen = selection(keep="stats", keep_tensors="relu")
    kept = [n.name for n in program() if chosen.keep_for(n) == "tensors" and "fo" in n.direction]
    assert kept == [name for name in ALL if "relu" in name and "forward" in name]
    assert chosen.everything


def explain(**arguments: Any) -> str:
    chosen = selection(**arguments)
    chosen.wants_step(0)
    chosen.wants_rank(0)
    assert selected(chosen) == []
    return chosen.explain_nothing()


def test_nothing_found_says_what_was_near() -> None:
    assert explain(calls="Torch.relu.2.forward") == (
        f"nothing was recorded: calls='Torch.relu.2.forward' matched none of {len(ALL)} calls. "
        "Near names: Torch.relu.1.forward, Torch.relu.0.forward, Tensor.relu_.1.forward."
    )
    assert explain(apis="leaky_rellu").endswith("Near names: Functional.leaky_relu.0.forward.")
    assert "Near names: h.1.attn, h.0.attn" in explain(modules="*.atn")
    assert "Torch.relu.0.forward" in explain(between=("Torch_relu_7_forward", "b"))
    assert explain(names="zzzzzz").endswith(
        "The first calls were Module.Net.forward.0, Functional.embedding.0.forward, "
        "Module.h.0.attn.Attention.forward.0, Functional.linear.0.forward, Tensor.add.0.forward."
    )


def test_nothing_found_for_other_reasons() -> None:
    chosen = selection(steps="7", apis="relu")
    assert [chosen.wants_step(step) for step in range(3)] == [False] * 3
    assert chosen.explain_nothing() == (
        "nothing was recorded: steps 7 were asked for, the steps that ran were 0-2."
    )
    assert chosen.explain_nothing(begun=2).endswith("the steps that ran were 0-1.")
    chosen = selection(ranks="3-4")
    assert not chosen.wants_rank(0)
    assert chosen.explain_nothing() == (
        "nothing was recorded: ranks 3-4 were asked for, this is rank 0."
    )
    chosen = selection()
    assert chosen.explain_nothing() == (
        "nothing was recorded: no call was made while recording was on."
    )


def test_seen_names_are_bounded() -> None:
    chosen = selection(apis="nothing")
    api = api_name("torch.relu")
    for n in range(20_000):
        chosen.decide(CallNames(api, call_name(api, n)))
    assert len(chosen._seen) == 5000
    assert "matched none of 20000 calls" in chosen.explain_nothing()


@pytest.mark.parametrize(
    "arguments", [{"apis": "gelu"}, {"modules": "*.attn*"}, {"calls": "Torch.gelu.0"}]
)
def test_deciding_is_cheap(arguments: dict[str, Any]) -> None:
    chosen = selection(**arguments)
    names = CallNames(api_name("torch.relu"), "Torch.relu.0.forward", "h.0.mlp")
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()  # of this thread alone, whoever else computes
        for _ in range(2000):
            chosen.decide(names)
        best = min(best, (time.thread_time() - start) / 2000)
    assert best < 10e-6  # about 0.6 us on a quiet machine


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, tensorprobe.config, tensorprobe.record.selection\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
