"""What a recorded call says: arguments, results, state, place, numbers."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from tensorprobe.records import Call, Capture, Fields, Special, TensorRecord


def recorder(path: Path, **options: Any) -> tp.Recorder:
    settings = {"level": "L1", "keep": "tensors", **options}
    return tp.Recorder(path, log=lambda text: None, **settings)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Capture]:
    """Runs a program under a recorder and loads what was recorded."""
    numbers = itertools.count()

    def run(program: Callable[[], Any], **options: Any) -> Capture:
        folder = tmp_path / str(next(numbers))
        with recorder(folder, **options):
            program()
        return tp.load(folder)

    return run


Record = Callable[..., Capture]


def names(capture: Capture) -> list[str]:
    return [call.name for call in capture.calls]


def tensors(call: Call) -> dict[str, Any]:
    """Contents by name, without the call's own."""
    return {t.name.removeprefix(call.name + "."): t.load().tolist() for t in call.tensors}


class Echo(nn.Module):
    """Gives back what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclasses.dataclass
class Batch:
    ids: Tensor
    more: list[Tensor]
    name: str | None = None


# Arguments and results


def test_nested_arguments_are_named_by_their_path(record: Record) -> None:
    a, b, c = (torch.tensor(float(i)) for i in range(3))

    def program() -> None:
        torch.stack([a, b])
        Echo()((a, [b, {"key": (c,)}]), flag=True, deep={"in": [a]})

    capture = record(program, level="mix")
    stack = capture.call("Torch.stack.0.forward")
    assert tensors(stack) == {"input.0.0": 0, "input.0.1": 1, "output.0": [0, 1]}
    echo = capture.call("Module.Echo.forward.0")
    inputs = [t.name.removeprefix(echo.name + ".") for t in echo.tensors if t.role == "input"]
    assert inputs == ["input.0.0", "input.0.1.0", "input.0.1.1.key.0", "input.deep.in.0"]
    assert echo.kwargs["flag"] is True


def test_containers_keep_their_type(record: Record) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    t = torch.ones(2)
    values = [
        Point(t, "p"),
        Batch(t, [t, t]),
        BaseModelOutput(last_hidden_state=t, hidden_states=(t, t)),
        OrderedDict(a=t),
    ]

    def program() -> None:
        echo = Echo()
        for value in values:
            echo(value)
        torch.ones(2, 3).max(1)

    capture = record(program, level="mix")
    point, batch, output, ordered = (c.args[0] for c in capture.calls(name="Module.Echo"))
    assert isinstance(point, Fields)
    assert (point.kind, point.type.rpartition(".")[2], point.fields["label"]) == (
        "namedtuple",
        "Point",
        "p",
    )
    assert (batch.kind, batch.fields["name"]) == ("dataclass", None)
    assert [t.name.rpartition("input.")[2] for t in batch.fields["more"]] == [
        "0.more.0",
        "0.more.1",
    ]
    assert output.type == "transformers.modeling_outputs.BaseModelOutput"
    assert isinstance(output.fields["hidden_states"], tuple)
    assert (ordered.kind, ordered.type) == ("mapping", "collections.OrderedDict")
    assert [t.name for t in capture.call("Tensor.max.0.forward").tensors][1:] == [
        "Tensor.max.0.forward.output.0",
        "Tensor.max.0.forward.output.1",
    ]


def test_none_unsupported_and_bool_tensors_are_three_things(record: Record) -> None:
    class Thing:
        pass

    def program() -> None:
        Echo()([None, Thing(), torch.tensor([True, False])])

    (call,) = record(program, level="L0").calls
    nothing, thing, flags = call.args[0]
    assert nothing is None
    assert isinstance(thing, Special)
    assert thing.kind == "unsupported"
    assert isinstance(flags, TensorRecord)
    assert flags.dtype == "bool"
    assert (flags.summary.mean, flags.summary.norm, flags.summary.zero_count) == (None, None, 1)


def test_scalars_of_every_kind(record: Record) -> None:
    values = [
        *(1, 2**70, -(2**63), True, 1.5, float("inf"), 2j, "text", ..., slice(1, None, 2)),
        *(torch.float16, torch.device("cpu"), torch.Size([2, 3]), range(3), {1: 2, None: 3}),
        *(np.float32(2), np.arange(3), torch.nn.Linear, print, {(1, 2): [3]}),
    ]
    (call,) = record(lambda: Echo()(values), level="L0").calls
    found = call.args[0]
    assert found[:10] == values[:10]
    assert [type(v) for v in found[:10]] == [type(v) for v in values[:10]]
    assert (found[10], found[11]) == (Special("dtype", "torch.float16"), Special("device", "cpu"))
    assert found[12] == (2, 3)
    assert found[13] == Special("unsupported", "builtins.range")
    assert found[14] == {1: 2, None: 3}
    assert [v.kind for v in found[15:19]] == ["numpy", "numpy", "function", "function"]
    assert found[19] == {(1, 2): [3]}


def test_odd_keys_and_cycles_do_no_harm(record: Record) -> None:
    loop: list[Any] = [torch.ones(1)]
    loop += [loop, loop, loop]
    odd = {Point(torch.ones(1), "k").label: 1, torch.float32: 2, frozenset([1]): 3, Batch: 4}
    capture = record(lambda: (Echo()(odd), Echo()(loop)), level="L0")
    assert capture.gaps == ()
    first, second = capture.calls
    assert list(first.args[0].values()) == [1, 2, 3, 4]
    assert second.args[0][1:] == [Special("unsupported", "builtins.list inside itself")] * 3


def test_gradients_of_outputs_by_number(record: Record) -> None:
    def program() -> None:
        x = torch.ones(1, requires_grad=True) * 1
        Echo()({10**9: x * 2})[10**9].sum().backward()

    assert record(program, level="mix").gaps == ()


# Written arguments


def test_inputs_are_recorded_before_they_are_written_to(record: Record) -> None:
    def program() -> None:
        x = torch.zeros(2)
        x.add_(1)
        x += 1
        F.relu(x.neg_(), inplace=True)
        x[0] = 5
        torch.add(x, 1, out=x)

    for level in ("L1", "L2"):
        capture = record(program, level=level)
        prefix = "Tensor" if level == "L1" else "Aten"
        add = tensors(capture.call(f"{prefix}.add_.0.forward"))
        assert (add["input.0"], add["output.0"]) == ([0, 0], [1, 1])
        add = tensors(capture.call(f"{prefix}.add_.1.forward"))
        assert (add["input.0"], add["output.0"]) == ([1, 1], [2, 2])
        neg = tensors(capture.call(f"{prefix}.neg_.0.forward"))
        assert (neg["input.0"], neg["output.0"]) == ([2, 2], [-2, -2])
    capture = record(program)
    assert tensors(capture.call("Functional.relu.0.forward"))["output.0"] == [0, 0]
    item = capture.call("Tensor.__setitem__.0.forward")
    assert tensors(item) == {"input.0": [0, 0], "output.0": [5, 0]}
    assert "outputs are the arguments after the call" in item.notes
    out = tensors(capture.call("Torch.add.0.forward"))
    assert (out["input.0"], out["input.out"], out["output.0"]) == ([5, 0], [5, 0], [6, 1])


def test_lists_written_to(record: Record) -> None:
    def program() -> None:
        torch._foreach_add_([torch.zeros(2), torch.ones(1)], 2.0)

    for level, name in (
        ("L1", "Torch._foreach_add_.0.forward"),
        ("L2", "Aten._foreach_add_.0.forward"),
    ):
        found = tensors(record(program, level=level).call(name))
        assert (found["input.0.0"], found["input.0.1"]) == ([0, 0], [1])
        after = [value for key, value in found.items() if key.startswith("output")]
        assert after == [[2, 2], [3]]


def test_an_argument_written_to_beside_the_result(record: Record) -> None:
    def program() -> None:
        values, where = torch.empty(1), torch.zeros(1, dtype=torch.int64)
        torch.max(torch.tensor([[1.0, 3.0]]), 1, out=(values, where))
        F.batch_norm(torch.tensor([[1.0], [3.0]]), torch.zeros(1), torch.ones(1), training=True)

    capture = record(program)
    assert tensors(capture.call("Torch.max.0.forward"))["output.0"] == [3]
    norm = tensors(capture.call("Functional.batch_norm.0.forward"))
    assert (norm["input.1"], norm["buffers.input.1"]) == ([0], [pytest.approx(0.2)])
    assert (norm["input.2"], norm["buffers.input.2"]) == ([1], [pytest.approx(1.1)])


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_running_statistics_before_and_after(level: str, record: Record) -> None:
    norm = nn.BatchNorm1d(1)
    capture = record(lambda: norm(torch.tensor([[1.0], [3.0]])), level=level)
    found = tensors(capture.call("Module.BatchNorm1d.forward.0"))
    assert (found["buffers.running_mean"], found["buffers.running_mean.after"]) == (
        [0],
        [pytest.approx(0.2)],
    )
    assert found["buffers.num_batches_tracked"] == 0
    assert found["buffers.num_batches_tracked.after"] == 1
    norm.eval()
    found = tensors(record(lambda: norm(torch.ones(2, 1)), level=level).calls[0])
    assert not [key for key in found if key.endswith(".after")]


# Optimizers and scalers


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
def test_an_optimizer_step_shows_settings_and_parameters(level: str, record: Record) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)

    def program() -> None:
        model(torch.full((1, 1), 2.0)).backward()
        optimizer.step()

    step = record(program, level=level).call("Optimizer.SGD.step.0")
    assert step.args[0]["lr"] == 0.25
    assert step.args[0]["momentum"] == 0.5
    assert tensors(step) == {
        "parameters.weight": [[1.0]],
        "parameters_grad.weight": [[2.0]],
        "output.weight": [[0.5]],
        "state.weight.momentum_buffer.after": [[2.0]],
    }
    assert step.stack[0].partition(":")[0].endswith("test_calls.py")


def test_an_optimizer_that_writes_to_data(record: Record) -> None:
    """No version moves: what is known of the parameters must not be believed."""

    class Raw(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad.data)

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = Raw(model.parameters(), {})

    def program() -> None:
        model(torch.ones(1, 1)).backward()
        optimizer.step()
        model(torch.ones(1, 1))

    for level in ("L0", "mix"):
        nn.init.ones_(model.weight)
        optimizer.zero_grad()
        capture = record(program, level=level)
        step = tensors(capture.call("Optimizer.Raw.step.0"))
        assert (step["parameters.weight"], step["output.weight"]) == ([[1]], [[0]])
        later = tensors(capture.call("Module.Linear.forward.1"))
        assert later["parameters.weight"] == [[0]]


@pytest.mark.parametrize("foreach", [False, True])
def test_what_torchs_own_optimizers_wrote_is_stored_once(foreach: bool, record: Record) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, foreach=foreach)

    def program() -> None:
        model(torch.full((1, 1), 2.0)).backward()
        optimizer.step()

    capture = record(program, level="L1")
    step = capture.call("Optimizer.SGD.step.0")
    written = "Torch._foreach_add_.0.forward" if foreach else "Tensor.add_.0.forward"
    inner = next(t for t in capture.call(written).tensors if t.role == "output")
    assert step.tensor("output.weight").load() == 0.5
    assert step.tensor("output.weight").blob == inner.blob != step.tensor("parameters.weight").blob


def test_loss_scaling_is_visible(record: Record) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def program() -> None:
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    found = [name.rpartition(".0.")[0] for name in names(record(program))]
    assert "Torch._amp_foreach_non_finite_check_and_unscale_" in found
    assert "Torch._amp_update_scale_" in found


# Circumstances


def test_recomputation_is_noted(record: Record) -> None:
    model = nn.Linear(2, 2)

    def program() -> None:
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(lambda y: model(y).tanh(), x, use_reentrant=False).sum().backward()

    capture = record(program, level="mix")
    first, again = capture.calls(name="Functional.linear", direction="forward")
    assert first.notes == ()
    assert again.notes == ("inside backward: recomputation",)
    assert capture.gaps == ()


def test_the_backward_of_a_custom_function_is_no_recomputation(record: Record) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.mul(gradient, 2)

    def program() -> None:
        Double.apply(torch.ones(2, requires_grad=True)).exp().sum().backward()

    capture = record(program)
    assert capture.call("Torch.mul.0.forward").notes == ("inside backward",)
    assert names(capture)[2:4] == ["Function.Double.0.forward", "Tensor.exp.0.forward"]
    function = capture.call("Function.Double.0.backward")
    assert tensors(function)["output.0"] == [pytest.approx(2 * np.exp(2))] * 2


def test_a_custom_function_is_seen_wherever_its_result_goes(record: Record) -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / 2

    def program() -> None:
        x = torch.full((), 8.0, requires_grad=True)
        Half.apply(Half.apply(x)).backward()

    capture = record(program)
    found = {c.name: tensors(c) for c in capture.calls(name="Function")}
    assert found["Function.Half.0.forward"] == {"output.0": 2}
    assert found["Function.Half.0.backward"] == {"input.0": 1, "output.0": 0.5}


def test_an_optimizer_whose_step_calls_that_of_its_base_class(record: Record) -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    def program() -> None:
        weight = torch.ones(2, requires_grad=True)
        optimizers = [kind([weight], lr=0.5) for kind in (torch.optim.SGD, Clipped)]
        weight.sum().backward()
        optimizers[1].step()

    (step,) = record(program).calls(name="Optimizer")
    assert (step.name, step.status) == ("Optimizer.Clipped.step.0", "complete")
    assert tensors(step)["output.group0.0"] == [0.5, 0.5]


def test_a_custom_function_whose_graph_is_kept_over_steps(tmp_path: Path) -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / 2

    half = Half.apply(torch.ones(2, requires_grad=True))
    with tp.Recorder(tmp_path, level="L1", log=lambda text: None) as rec:
        for _ in range(3):
            (half * 2).sum().backward(retain_graph=True)
            rec.step()
    capture = tp.load(tmp_path)
    for step in range(3):
        assert [call.name for call in capture.calls(step=step, name="Function")] == [
            "Function.Half.0.forward",
            "Function.Half.0.backward",
        ]


def test_a_custom_function_shows_every_result_that_is_used(record: Record) -> None:
    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            ctx.save_for_backward(x, y)
            return x * y, x + y, x - y

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            return a * y + b, a * x + b

    def program() -> None:
        x, y = (torch.full((), value, requires_grad=True) for value in (3.0, 5.0))
        product, total, _ = Parts.apply(x, y)  # the last one is used by nobody
        (total.mul(10) + product.mul(100)).backward()

    capture = record(program)
    found = {c.name: tensors(c) for c in capture.calls(name="Function")}
    assert found["Function.Parts.0.forward"] == {"output.0": 15, "output.1": 8}
    assert found["Function.Parts.0.backward"] == {
        "input.0": 100, "input.1": 10, "output.0": 510, "output.1": 310
    }  # fmt: skip
    assert capture.gaps == ()


def test_casts_and_autocast(record: Record) -> None:
    def program() -> None:
        x = torch.ones(2, 2)
        x.to(torch.float16).float().type_as(torch.ones(1).double())
        x.half()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x

    capture = record(program)
    assert [c.op.rpartition(".")[2] for c in capture.calls(name="Tensor")] == [
        *("to", "float", "double", "type_as", "half", "matmul")
    ]
    matmul = capture.call("Tensor.matmul.0.forward")
    assert matmul.notes == ("autocast cpu torch.bfloat16",)
    assert [t.dtype for t in matmul.tensors] == ["float32", "float32", "bfloat16"]


def test_layout_and_gradient_flags(record: Record) -> None:
    def program() -> None:
        torch.exp(torch.ones(2, 3, requires_grad=True).t())

    exp = record(program).call("Torch.exp.0.forward")
    given = exp.tensor("input.0")
    assert (given.stride, given.requires_grad, given.device) == ((1, 3), True, "cpu")
    assert given.load().shape == (3, 2)


def test_place_thread_and_stack(record: Record) -> None:
    model = nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(2, 2), nn.ReLU())))

    def program() -> None:
        model(torch.ones(1, 2))
        F.normalize(torch.ones(1, 2))
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),), name="other")
        thread.start()
        thread.join()

    capture = record(program, level="mix")
    linear = capture.call("Functional.linear.0.forward")
    assert (linear.module, linear.thread) == ("block.0", "MainThread")
    assert linear.parent == "Module.block.0.Linear.forward.0"
    assert "linear.py" in linear.stack[0]
    assert any("test_calls.py" in frame and "program" in frame for frame in linear.stack)
    normalize = capture.call("Functional.normalize.0.forward")
    assert "test_calls.py" in normalize.stack[0]
    assert "program" in normalize.stack[0]
    other = capture.call("Functional.linear.1.forward")
    assert (other.module, other.thread) == ("block.0", "other")
    bare = record(program, level="mix", stacks=False)
    assert all(call.stack == () for call in bare.calls)


@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_a_stack_begins_at_the_line_that_calls(record: Record, level: str) -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def program() -> None:
        add(torch.ones(2)) * 2

    name = "Aten" if level == "L2" else "Tensor"
    capture = record(program, level=level)
    added, times = (capture.call(f"{name}.{op}.0.forward").stack for op in ("add", "mul"))
    assert [line.rpartition(" in ")[2].rpartition(".")[2] for line in added[:2]] == [
        "add",
        "program",
    ]
    assert times[0].endswith("program")


# Random calls


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_random_calls_keep_the_state_they_began_from(level: str, record: Record) -> None:
    own = torch.Generator().manual_seed(5)

    def program() -> None:
        torch.manual_seed(3)
        F.dropout(torch.ones(64))
        torch.randn(8, generator=own)
        F.dropout(torch.ones(4), training=False)
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3)
        torch.ones(3).exp()

    capture = record(program, level=level)
    states = {
        call.name: call.tensor("buffers.rng_state").load()
        for call in capture.calls
        if any(t.name.endswith("rng_state") for t in call.tensors)
    }
    assert len(states) == 2
    dropped, drawn = states
    if level == "L1":
        assert (dropped, drawn) == ("Functional.dropout.0.forward", "Torch.randn.0.forward")
        torch.set_rng_state(states[dropped])
        expected = F.dropout(torch.ones(64))
        assert torch.equal(capture.call(dropped).tensor("output.0").load(), expected)
    generator = torch.Generator()
    generator.set_state(states[drawn])
    again = torch.randn(8, generator=generator)
    assert torch.equal(capture.call(drawn).tensor("output.0").load(), again)


# Selecting


def small_program() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model(torch.ones(1, 2)).exp().sum().backward()


@pytest.mark.parametrize(
    "selection",
    [
        {"calls": ["Functional.linear.1.forward"]},
        {"calls": ["Functional.linear.1.backward"]},
        {"calls": ["Functional.linear.1"]},
        {"between": ("Functional.relu.0", "Functional.linear.1")},
        {"apis": ["linear"]},
        {"modules": ["2"]},
        {"directions": ["forward"]},
        {"directions": ["backward"]},
        {"sides": ["output"]},
        {"dtypes": "float"},
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
def test_selecting_never_renumbers(selection: dict[str, Any], level: str, record: Record) -> None:
    if level in ("L0", "L2") and {"calls", "between", "apis"} & selection.keys():
        pytest.skip("names of another level")
    everything = names(record(small_program, level=level))
    narrow = record(small_program, level=level, **selection)
    found = names(narrow)
    remaining = iter(everything)
    assert all(name in remaining for name in found), "not a subsequence"
    if "calls" in selection:
        wanted = selection["calls"][0]
        assert all(name.startswith(wanted) for name in found)
        assert len(found) == (1 if wanted.endswith("ward") else 2)
    if "directions" in selection:
        (direction,) = selection["directions"]
        assert found
        assert {call.direction for call in narrow.calls} == {direction}
    if "sides" in selection:
        assert all(
            (t.summary is None) == (t.role in ("input", "parameter", "buffer"))
            for call in narrow.calls
            for t in call.tensors
            if not t.name.endswith("rng_state")
        )


# The same content is known again, and only then


_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 "
    "uint16 uint32 uint64 bool complex64 complex128"
)
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_content_is_kept_bit_for_bit(dtype: torch.dtype, record: Record) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (12 * size,), dtype=torch.uint8)
    whole = raw.view(dtype).reshape(3, 4)
    shapes = {
        "plain": whole,
        "transposed": whole.t(),
        "sliced": whole[1:, ::2],
        "expanded": whole[:1].expand(3, 4),
        "empty": whole[:0],
        "scalar": whole[1, 2],
    }
    capture = record(lambda: Echo()(shapes), level="L0")
    for name, tensor in shapes.items():
        kept = capture.calls[0].tensor(f"input.0.{name}").load()
        assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(kept.contiguous().reshape(-1).view(torch.uint8), expected)


def test_memory_used_again_is_other_content(record: Record) -> None:
    def program() -> None:
        for i in range(50):
            torch.full((1000,), float(i)).exp()  # dies at once; the next one gets its memory

    capture = record(program)
    calls = capture.calls(name="Torch.full")
    assert [call.tensor("output.0").load()[0].item() for call in calls] == list(range(50))


def test_writes_through_aliases_are_seen(record: Record) -> None:
    base = torch.zeros(4)
    view, flat, data = base[1:3], base.view(2, 2), base.data

    def program() -> None:
        echo = Echo()
        echo(base)
        view.add_(1)
        echo(base)
        flat.mul_(3)
        echo(base)
        data.add_(1)  # has a version of its own
        echo(base)
        torch.as_strided(base, (3, 2), (1, 1)).clone()
        echo(base[::2])

    calls = record(program, level="mix").calls(name="Module.Echo", direction="forward")
    assert [tensors(call)["input.0"] for call in calls] == [
        [0, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 3, 3, 0],
        [1, 4, 4, 1],
        [1, 4],
    ]


def test_writes_through_numpy_are_seen(tmp_path: Path) -> None:
    """Though they move no version."""
    array = np.zeros(2, np.float32)
    x, echo = torch.from_numpy(array), Echo()
    with recorder(tmp_path / "run", level="L0") as rec:
        echo(x)
        array += 1
        echo(x)
        rec.step()
        echo(x)
    calls = tp.load(tmp_path / "run").calls
    assert [tensors(call)["input.0"] for call in calls] == [[0, 0], [1, 1], [1, 1]]


def test_overlapping_and_negated_views(record: Record) -> None:
    base = torch.arange(4.0)
    z = torch.tensor([1 + 2j, 3 - 4j])

    def program() -> None:
        echo = Echo()
        echo(base)
        echo(torch.as_strided(base, (3, 2), (1, 1)))
        echo(z.imag)
        echo(z.conj())
        echo(z.conj().imag)

    calls = record(program, level="L0").calls
    assert [tensors(call)["input.0"] for call in calls] == [
        [0, 1, 2, 3],
        [[0, 1], [1, 2], [2, 3]],
        [2, -4],
        [1 - 2j, 3 + 4j],
        [-2, 4],
    ]


def test_inference_tensors_written_to(record: Record) -> None:
    def program() -> None:
        with torch.inference_mode():
            x = torch.zeros(2)
            x.add_(1)
            x.add_(1)

    capture = record(program)
    second = tensors(capture.call("Tensor.add_.1.forward"))
    assert (second["input.0"], second["output.0"]) == ([1, 1], [2, 2])


# By hand; starting and stopping


def test_values_saved_by_hand(tmp_path: Path) -> None:
    with recorder(tmp_path / "run", level="L0") as rec:
        x = torch.ones(2, requires_grad=True)
        hidden = x * 3
        rec.save("hidden", {"h": hidden, "note": "text", "pair": (hidden * 2, 1)})
        rec.save("hidden", hidden)
        (hidden * 5).sum().backward()
    capture = tp.load(tmp_path / "run")
    assert names(capture) == [
        "Saved.hidden.0.forward",
        "Saved.hidden.1.forward",
        "Saved.hidden.0.backward",
        "Saved.hidden.1.backward",
    ]
    saved = capture.call("Saved.hidden.0.forward")
    assert saved.outputs["note"] == "text"
    assert tensors(saved) == {"output.h": [3, 3], "output.pair.0": [6, 6]}
    assert tensors(capture.call("Saved.hidden.0.backward")) == {"input.h": [5, 5]}
    assert tensors(capture.call("Saved.hidden.1.backward")) == {"input.0": [5, 5]}


def test_starting_again_in_the_same_step_goes_on_counting(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "run")
    x = torch.ones(2)
    rec.start()
    x.exp()
    rec.stop()
    x.sin()
    rec.start()
    x.exp()
    rec.step()
    x.exp()
    rec.stop()
    rec.step()
    rec.start()
    x.cos()
    rec.close()
    capture = tp.load(tmp_path / "run")
    assert [(call.step, call.name) for call in capture.calls] == [
        (0, "Tensor.exp.0.forward"),
        (0, "Tensor.exp.1.forward"),
        (1, "Tensor.exp.0.forward"),
        (2, "Tensor.cos.0.forward"),
    ]
    assert all(tensors(call)["input.0"] == [1, 1] for call in capture.calls)
    assert capture.facts["unfinished"] == []


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_recording_inside_one_module_only(level: str, tmp_path: Path) -> None:
    rec = recorder(tmp_path / "run", level=level)

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            rec.start()
            try:
                return self.linear(x).exp()
            finally:
                rec.stop()

    model = nn.Sequential(nn.Linear(2, 2), Middle(), nn.Linear(2, 2))
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    rec.close()
    capture = tp.load(tmp_path / "run")
    assert [name for name in names(capture) if name.startswith("Module")] == [
        "Module.1.linear.Linear.forward.0",
        "Module.1.linear.Linear.forward.1",
    ]
    if level == "mix":
        assert {c.module for c in capture.calls(name="Tensor.exp")} == {"1"}


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_modules_of_other_threads_are_recorded(level: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)

    def work() -> None:
        model(torch.ones(2, 3)).sum().backward()

    with tp.Recorder(tmp_path / "run", level=level, log=lambda text: None):
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
    calls = [call for call in tp.load(tmp_path / "run").calls if call.thread == "worker"]
    assert {call.direction for call in calls} == {"forward", "backward"}
    assert any("linear" in call.name or "addmm" in call.name for call in calls)
