"""Every kind of call is replayed from its record, forward and backward, and agrees with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

import tensorprobe as tp
from recorded import record
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call, Capture
from tensorprobe.replay.allowed import _ALLOWED, _ALLOWED_NAMESPACES, allow
from tensorprobe.replay.rebuild import with_stride
from tensorprobe.replay.reference import replay


def grad_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def the_call(capture: Capture, api: str, direction: str = "forward") -> Call:
    calls = [c for c in capture.calls if f".{api}." in c.name and c.direction == direction]
    assert len(calls) == 1, [call.name for call in capture.calls]
    return calls[0]


def replays(capture: Capture, api: str) -> None:
    """The replay of a call and of its backward gives every tensor that was recorded."""
    forward = the_call(capture, api)
    done = replay(forward)
    for tensor in forward.tensors:
        if tensor.role == "output":
            name = tensor.name.removeprefix(forward.name + ".")
            assert done.error(name, tensor.load()) < 16, name
    backward = next((c for c in capture.calls if c.direction == "backward" and api in c.name), None)
    if backward is not None:
        back = replay(forward, backward=backward)
        for tensor in backward.tensors:
            if tensor.role == "output":
                name = tensor.name.removeprefix(backward.name + ".")
                assert back.error(name, tensor.load()) < 16, name


def linear() -> None:
    F.linear(grad_tensor(2, 3, 4), grad_tensor(5, 4)).square().sum().backward()


def in_place() -> None:
    x = grad_tensor(3, 4)
    y = x * 2
    y.mul_(grad_tensor(4))
    y.sum().backward()


def in_place_on_a_view() -> None:
    y = grad_tensor(4, 6) * 2
    y[1:3, ::2].exp_()
    y.sum().backward()


def out_variant() -> None:
    out = torch.empty(3, 4)
    torch.addcmul(torch.ones(3, 4), torch.randn(3, 4), torch.randn(3, 4), out=out)


def nested() -> None:
    torch.cat([grad_tensor(2, 3), grad_tensor(1, 3)], dim=0).square().sum().backward()


def set_item() -> None:
    x = grad_tensor(4, 4).clone()
    x[1] = grad_tensor(4)
    x.sum().backward()


def strided() -> None:
    x = grad_tensor(6, 8)
    torch.cumsum(x.t()[::2], 0).sum().backward()


def expanded() -> None:
    torch.tanh(grad_tensor(1, 4).expand(3, 4)).sum().backward()


def expanded_gradient() -> None:
    torch.sigmoid(grad_tensor(5)).sum().backward()


def one_tensor_three_times() -> None:
    x = grad_tensor(2, 2, 4, 8)
    F.scaled_dot_product_attention(x, x, x).square().sum().backward()


def bfloat16() -> None:
    F.softmax(grad_tensor(4, 8, dtype=torch.bfloat16), -1).square().sum().backward()


def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(grad_tensor(3, 4), grad_tensor(5, 4)).sum().backward()


def dtype_argument() -> None:
    F.log_softmax(torch.randn(3, 4).bfloat16(), -1, dtype=torch.float32)


def recurrent() -> None:
    torch.manual_seed(0)
    torch.nn.LSTM(3, 4)(grad_tensor(5, 2, 3))[0].sum().backward()


def batch_norm() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    F.batch_norm(grad_tensor(8, 3), mean, var, training=True).pow(3).sum().backward()


def foreach() -> None:
    torch._foreach_mul_([torch.randn(3), torch.randn(4)], 2.0)


def scalar_comparison() -> None:
    torch.gt(torch.tensor([0.1, 0.2]), 0.1)


def masked() -> None:
    x = torch.randn(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, torch.finfo(torch.float32).min)
    torch.softmax(x.requires_grad_(), -1).square().sum().backward()


CASES = {
    "linear": linear, "mul_": in_place, "exp_": in_place_on_a_view, "addcmul": out_variant,
    "cat": nested, "__setitem__": set_item, "cumsum": strided, "tanh": expanded,
    "sigmoid": expanded_gradient, "scaled_dot_product_attention": one_tensor_three_times,
    "softmax": bfloat16, "log_softmax": dtype_argument, "lstm": recurrent,
    "batch_norm": batch_norm, "_foreach_mul_": foreach, "gt": scalar_comparison,
}  # fmt: skip


@pytest.mark.parametrize("api", CASES)
def test_a_call_is_replayed(api: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    replays(record(tmp_path / "run", CASES[api], level="L1"), api)


@pytest.mark.parametrize(("api", "program"), [("linear", autocast), ("softmax", masked)])
def test_a_call_in_special_surroundings_is_replayed(
    api: str, program: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    replays(record(tmp_path / "run", program, level="L1"), api)


def test_a_wrong_kernel_is_far_from_its_replay(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", linear, level="L1")
    call = the_call(capture, "linear")
    right = call.tensor("output.0").load()
    done = replay(call)
    assert done.error("output.0", right) < 3
    assert done.error("output.0", right * 1.0005) > 100
    assert done.error("output.0", right * math.nan) == math.inf


def test_a_gradient_that_is_zero_in_truth_is_no_error(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        x = grad_tensor(8, 16)
        (torch.softmax(x, -1) * torch.ones(16)).sum().backward()

    capture = record(tmp_path / "run", program, level="L1")
    replays(capture, "softmax")


@pytest.mark.parametrize("kind", ["Linear", "LayerNorm", "Conv2d", "Embedding"])
def test_a_module_of_torch_is_replayed(kind: str, tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        if kind == "Embedding":
            torch.nn.Embedding(10, 4)(torch.tensor([1, 2])).sum().backward()
        elif kind == "Conv2d":
            torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)(grad_tensor(2, 3, 8, 8)).sum().backward()
        else:
            made = {"Linear": (6, 4), "LayerNorm": (6,)}[kind]
            getattr(torch.nn, kind)(*made)(grad_tensor(5, 6)).square().sum().backward()

    capture = record(tmp_path / "run", program, level="L0")
    forward = capture.calls(direction="forward")[0]
    done = replay(forward)
    assert done.error("output.0", forward.tensor("output.0").load()) < 4


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda: torch.empty(3), "its content is not defined"),
        (lambda: torch.from_numpy(torch.ones(2).numpy()), None),
        (lambda: torch.nn.Sequential(torch.nn.ReLU())(torch.ones(1, 2)), "other modules"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    program: Callable[[], Any], reason: str | None, tmp_path: Path
) -> None:
    capture = record(tmp_path / "run", program, level="mix")
    if reason is not None:
        with pytest.raises(NotReplayable, match=reason):
            replay(next(c for c in capture.calls if c.op != "torch.ones"))


def test_no_formula_is_tried_for_arguments_that_an_op_does_not_take(tmp_path: Path) -> None:
    """torch's formula for `add` would say it in other words, after importing torch._dynamo."""
    x = torch.ones(2)
    capture = record(tmp_path / "run", lambda: torch.add(x, x), level="L2")
    call = msgspec.structs.replace(the_call(capture, "add"), kwargs={"beta": 1})
    with pytest.raises(NotReplayable, match="RuntimeError: Unknown keyword argument 'beta'"):
        replay(call)


def test_a_damaged_random_state_is_the_reason(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", lambda: torch.zeros(5056).byte().random_(), level="L1")
    call = the_call(capture, "random_")
    state, given = call.tensor("buffers.rng_state"), call.tensor("input.0")
    damaged = msgspec.structs.replace(state, blob=given.blob, shape=given.shape)
    tensors = tuple(damaged if each is state else each for each in call.tensors)
    with pytest.raises(NotReplayable, match="its recorded random state is damaged: Invalid"):
        replay(msgspec.structs.replace(call, tensors=tensors))


def test_a_capture_without_tensors_says_how_to_get_them(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", linear, level="L1", keep="stats")
    with pytest.raises(NotReplayable, match="keep='tensors'"):
        replay(the_call(capture, "linear"))


def test_a_custom_op_takes_the_users_reference(tmp_path: Path) -> None:
    library = torch.library.Library("tensorprobe_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2.5, "CPU")

    def program() -> None:
        torch.ops.tensorprobe_test.twice(torch.ones(3))

    capture = record(tmp_path / "run", program, level="L1")
    call = the_call(capture, "twice")
    with pytest.raises(
        NotReplayable, match=r"\(allow its package with `imports='tensorprobe_test'`\)"
    ):
        replay(call)
    allow("tensorprobe_test")
    assert replay(call).error("output.0", call.tensor("output.0").load()) == 0
    own = {"tensorprobe_test::twice": lambda x: x * 2}
    done = replay(call, references=own)
    assert done.error("output.0", call.tensor("output.0").load()) > 100
    assert tp.reference("tensorprobe_test::twice")(own["tensorprobe_test::twice"])
    assert torch.equal(replay(call).outputs["output.0"], torch.full((3,), 2.0).double())
    _ALLOWED.remove("tensorprobe_test")
    _ALLOWED_NAMESPACES.remove("tensorprobe_test")


def test_the_random_numbers_of_the_program_are_not_used(tmp_path: Path) -> None:
    capture = record(tmp_path / "run", linear, level="L1")
    before = torch.get_rng_state()
    replay(the_call(capture, "linear"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((3, 4), (1, 3)),
        ((3, 4), (0, 1)),
        ((3, 2), (8, 3)),
        ((4, 3), (1, 1)),
        ((2, 3, 4), (0, 4, 1)),
    ],
)
def test_layout_is_rebuilt(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    memory = torch.randn(64)
    wanted = memory.as_strided(shape, stride)
    rebuilt = with_stride(wanted.contiguous(), stride)
    assert rebuilt.stride() == stride
    assert torch.equal(rebuilt, wanted)


@pytest.mark.parametrize("api", ["rand", "dropout", "scaled_dot_product_attention", "normal_"])
def test_random_numbers_are_drawn_again(api: str, tmp_path: Path) -> None:
    x = grad_tensor(2, 2, 8, 8)
    programs: dict[str, Callable[[], Any]] = {
        "rand": lambda: torch.rand(100),
        "dropout": lambda: F.dropout(x, 0.3).sum().backward(),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            x.detach(), x.detach(), x.detach(), dropout_p=0.2
        ),
        "normal_": lambda: torch.zeros(100).normal_(),
    }
    capture = record(tmp_path / "run", programs[api], level="L1")
    torch.manual_seed(99)  # the recorded state counts, not the present one
    replays(capture, api)
    forward = the_call(capture, api)
    assert replay(forward).error("output.0", forward.tensor("output.0").load()) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_without_eps_has_that_of_the_recorded_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    x = (torch.randn(8, 96) * 1e-3).to(dtype)

    def small_numbers() -> None:
        F.rms_norm(x, (96,))
        torch.rms_norm(x, (96,), None, None)
        torch.nn.Sequential(torch.nn.RMSNorm(96)).to(dtype)(x)

    calls = record(tmp_path, small_numbers).calls
    norms = [call for call in calls if "RMSNorm" in call.name or ".rms_norm." in call.name]
    assert len(norms) == 4
    for call in norms:
        assert replay(call).error("output.0", call.tensor("output.0").load()) < 2, call.name
