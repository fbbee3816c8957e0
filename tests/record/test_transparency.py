"""Programs give the same bits, the same exceptions and the same memory with a recorder on."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import random
import re
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tensorprobe as tp
from default_device import host_only
from tensorprobe.devices import device_layer
from tensorprobe.record import module_calls
from tensorprobe.records import Capture
from tensorprobe.torch_versions import default_device
from tiny_models import MODELS

LEVELS = ("L0", "L1", "L2", "mix")
KEEPS = ("structure", "stats", "digest", "tensors")


def recorder(path: Path, **options: Any) -> tp.Recorder:
    return tp.Recorder(path, log=lambda text: None, **options)


# A program is given a function to call at the end of each step and returns what it computed.
Program = Callable[[Callable[[], None]], Any]


def observe(program: Program, step: Callable[[], None] = lambda: None) -> Any:
    """What a program computes from a fixed start, and where it leaves the random generators."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    result = program(step)
    states = [device_layer(device).rng_state() for device in ("cpu", default_device())]
    return result, random.getstate(), np.random.get_state()[1].tolist(), states


def same(actual: Any, expected: Any, where: str = "result") -> None:
    """Require equal bits everywhere in a nest."""
    assert type(actual) is type(expected), where
    if isinstance(expected, Tensor):
        if expected.layout is not torch.strided or expected.is_quantized:
            assert repr(actual) == repr(expected), where
            return
        assert (actual.dtype, actual.shape, actual.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        ), where
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
        assert torch.equal(a, b), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            same(a, b, f"{where}.{i}")
    else:
        assert actual == expected, where


def unchanged(program: Program, folder: Path, **options: Any) -> Capture:
    """Require the same of a program with and without a recorder; what was recorded."""
    expected = observe(program)
    with recorder(folder, **options) as rec:
        actual = observe(program, rec.step)
    same(actual, expected)
    return tp.load(folder)


def trained(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], step: Callable[[], None]
) -> Any:
    """Three steps of training: losses, gradients of the last, parameters and buffers after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return losses, gradients, dict(model.state_dict())


# Models


def transformer(name: str) -> Program:
    def program(step: Callable[[], None]) -> Any:
        model, loss_of = MODELS[name]()
        return trained(model.train(), loss_of, step)

    return program


class Cnn(nn.Module):
    """BatchNorm, ReLU in place, views, writes to views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 9, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        left = x[:, :, :, :1]
        left *= 2
        x[:, 0].add_(1)
        return self.head(self.act(x).flatten(1))


def cnn(step: Callable[[], None]) -> Any:
    x = torch.randn(4, 3, 5, 5)
    return trained(Cnn(), lambda model: model(x).square().mean(), step)


def lstm(step: Callable[[], None]) -> Any:
    x = torch.randn(5, 2, 4)
    model = nn.LSTM(4, 3, num_layers=2, dropout=0.3, bidirectional=True)
    return trained(model, lambda m: m(x)[0].square().sum() + m(x)[1][1].sum(), step)


def gan(step: Callable[[], None]) -> Any:
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))
    for_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
    for_d = torch.optim.SGD(discriminator.parameters(), lr=1e-2, momentum=0.9)
    judge = nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(3):
        real, noise = torch.randn(6, 4), torch.randn(6, 3)
        fake = generator(noise)
        for_d.zero_grad()
        loss_d = judge(discriminator(real), torch.ones(6, 1)) + judge(
            discriminator(fake.detach()), torch.zeros(6, 1)
        )
        loss_d.backward()
        for_d.step()
        for_g.zero_grad()
        loss_g = judge(discriminator(fake), torch.ones(6, 1))
        loss_g.backward()
        for_g.step()
        losses += [loss_d.detach(), loss_g.detach()]
        step()
    return losses, dict(generator.state_dict()), dict(discriminator.state_dict())


def checkpointed(use_reentrant: bool) -> Program:
    def program(step: Callable[[], None]) -> Any:
        first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU())
        second = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
        x = torch.randn(3, 4)

        def loss_of(model: nn.Module) -> Tensor:
            given = x.clone().requires_grad_()
            hidden = checkpoint(first, given, use_reentrant=use_reentrant)
            return checkpoint(second, hidden, use_reentrant=use_reentrant).square().sum()

        return trained(nn.ModuleList([first, second]), loss_of, step)

    return program


def autocast(step: Callable[[], None]) -> Any:
    model, loss_of = MODELS["gpt2"]()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(default_device().type, dtype=torch.bfloat16):
            return loss_of(model)

    return trained(model, loss, step)


def scaled(step: Callable[[], None]) -> Any:
    """The second step overflows: its update is skipped and the scale halved."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(default_device().type, init_scale=8.0)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        loss = (model(torch.randn(3, 4)) * factor).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        step()
    return scales, dict(model.state_dict())


def accumulated(step: Callable[[], None]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(3):
            (model(torch.randn(5, 4)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step()
    return dict(model.state_dict()), [p.grad for p in model.parameters()]


def without_gradients(step: Callable[[], None]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    with torch.no_grad():
        a = model(torch.randn(2, 4))
        model[0].weight.add_(1)
    with torch.inference_mode():
        b = model(torch.randn(2, 4))
        b.add_(1)[0].mul_(2)
    step()
    return a, b.tolist(), a.requires_grad, b.is_inference(), dict(model.state_dict())


def functional(step: Callable[[], None]) -> Any:
    model = nn.Linear(3, 2)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 3)

    def loss(params: Any, sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (sample,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    jacobian = torch.func.jacrev(torch.sin)(x[0])
    hessian = torch.func.hessian(lambda v: (v**3).sum())(x[0])
    randomized = torch.func.vmap(F.dropout, randomness="different")(x)
    step()
    return per_sample, jacobian, hessian, randomized


def double_backward(step: Callable[[], None]) -> Any:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    step()
    return gradient.detach(), x.grad, [p.grad for p in model.parameters()]


class Cube(torch.autograd.Function):
    """A custom function, with a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, x.detach() > 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2 * ctx.scale, None


def custom_function(step: Callable[[], None]) -> Any:
    x = torch.randn(4, requires_grad=True)
    y, mask = Cube.apply(nn.Identity()(x * 1), 0.5)
    (y * mask).sum().backward()
    alone, _ = Cube.apply(x, 2.0)
    alone.sum().backward()
    step()
    return y.detach(), mask, x.grad


class Tagged(Tensor):
    """A subclass that keeps its type through torch functions."""


class Wrapper(Tensor):
    """A subclass without storage, whose operations run on what it wraps."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(unwrap, args), **(kwargs or {}))
        return Wrapper(result) if isinstance(result, Tensor) else result


def kinds_of_tensors(step: Callable[[], None]) -> Any:
    z = nn.Flatten(0)(torch.randn(3, dtype=torch.complex64))
    whole = torch.arange(6).reshape(2, 3)
    yes = whole > 2
    empty = torch.empty(0, 3)
    scalar = torch.tensor(2.5)
    sparse = torch.eye(3).to_sparse() * 2
    csr = torch.eye(3).to_sparse_csr()
    dense = torch.sparse.mm(sparse, torch.ones(3, 2)) + csr @ torch.ones(3, 2)
    quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    tagged = torch.randn(3).as_subclass(Tagged)
    wrapped = Wrapper(torch.ones(3)) + 1
    fake = torch.empty(3, device="meta") + 1
    low = torch.randn(4).to(torch.float8_e4m3fn)
    results = [
        (z * z.conj()).imag,
        torch.view_as_real(z.conj().resolve_conj()),
        z.conj().imag + 1,
        whole // 2,
        whole[yes],
        ~yes,
        empty.sum(0),
        torch.cat([empty, torch.ones(1, 3)]),
        scalar.exp(),
        scalar.item(),
        dense,
        sparse.coalesce().values(),
        quantised.dequantize(),
        (nested * 2).to_padded_tensor(0.0),
        (jagged.sin() + 1).values(),
        type(tagged + 1).__name__,
        (tagged + 1).as_subclass(Tensor),
        wrapped.inner,
        tuple(fake.shape),
        low.to(torch.float32),
        torch.ones(3, dtype=torch.uint16).to(torch.int32),
    ]
    step()
    return results


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor | None = None


class OldHook(nn.Module):
    """A module with the deprecated register_backward_hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch.x)


def old_backward_hook(step: Callable[[], None]) -> Any:
    model, seen = OldHook(), []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append([None if t is None else t.clone() for t in (*inputs, *outputs)])

    model.linear.register_backward_hook(hook)
    model.register_full_backward_hook(hook)
    x = torch.randn(4, 3, requires_grad=True)
    model(Batch(x)).square().sum().backward()
    step()
    return seen, x.grad, [p.grad for p in model.parameters()]


def user_hooks(step: Callable[[], None]) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen: list[Any] = []
    x = torch.randn(2, 3, requires_grad=True)
    hidden = model[0](x)
    hidden.register_hook(lambda gradient: gradient * 2)
    hidden.retain_grad()
    model.register_forward_hook(lambda module, args, result: result + 1)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    (model(x) + hidden).sum().backward()
    step()
    return hidden.grad, x.grad, seen


def data_loader(step: Callable[[], None]) -> Any:
    data = TensorDataset(torch.randn(8, 3, device="cpu"), torch.randn(8, 1, device="cpu"))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    model = nn.Linear(3, 1)
    losses = []
    for x, y in loader:
        loss = F.mse_loss(model(x.to(model.weight.device)), y.to(model.weight.device))
        loss.backward()
        losses.append(loss.detach())
        step()
    return losses, [p.grad for p in model.parameters()]


def several_threads(step: Callable[[], None]) -> Any:
    models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(3)]
    inputs = [torch.randn(4, 3) for _ in models]
    results: list[Any] = [None] * len(models)

    def work(i: int) -> None:
        loss = models[i](inputs[i]).square().sum()
        loss.backward()
        results[i] = (loss.detach(), [p.grad for p in models[i].parameters()])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step()
    return results


def anomaly(step: Callable[[], None]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return cnn(step)


class TanhOfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def compiled(backend: str, how: str) -> Program:
    def program(step: Callable[[], None]) -> Any:
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        if how == "function":
            part = torch.compile(lambda x: (x.sin() * 2).cos(), backend=backend)
        elif how == "module":
            part = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend=backend)
        else:  # of a class of torch's, such as Sequential, nothing would be compiled
            part = TanhOfLinear()
            part.compile(backend=backend)
        x = torch.randn(2, 3)
        result = trained(model, lambda m: m(part(x)).square().sum(), step)
        torch.compiler.reset()
        return result

    return program


PROGRAMS: dict[str, Program] = {
    **{name: transformer(name) for name in MODELS},
    "cnn": cnn,
    "lstm": lstm,
    "gan": gan,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "autocast": autocast,
    "scaler": scaled,
    "accumulation": accumulated,
    "no_grad": without_gradients,
    "torch.func": functional,
    "double backward": double_backward,
    "custom function": custom_function,
    "kinds of tensors": kinds_of_tensors,
    "old backward hook": old_backward_hook,
    "user hooks": user_hooks,
    "data loader": data_loader,
    "threads": several_threads,
    "anomaly": anomaly,
    **{
        f"compiled {how} {backend}": compiled(backend, how)
        for how in ("function", "module", "in place")
        for backend in ("eager", "aot_eager")
    },
}
# Each promise once, with what disturbs most; the whole matrix is slow.
QUICK = {
    ("llama", "mix", "tensors"),
    ("t5", "L0", "stats"),
    ("gpt2", "L1", "digest"),
    ("bert", "L2", "stats"),
    ("mixtral", "mix", "stats"),
    ("whisper", "L1", "structure"),
    ("vit", "mix", "digest"),
}
NO_SPARSE = host_only("sparse, nested and quantised tensors are not on the simulated NPU")
NO_COMPILER = host_only("torch.compile would compile the simulation itself")
EVERY_LEVEL = [(level, "tensors") for level in LEVELS] + [("mix", "stats")]


def quick(name: str, level: str, keep: str) -> bool:
    if name in MODELS:
        return (name, level, keep) in QUICK
    if name.endswith("aot_eager"):
        return False  # test_a_compiled_part_is_one_opaque_call does the same
    if name.startswith("compiled") or name in ("data loader", "autocast"):
        return (level, keep) == ("mix", "tensors")
    return (level, keep) in EVERY_LEVEL


def marks(name: str, level: str, keep: str) -> list[pytest.MarkDecorator]:
    found = [] if quick(name, level, keep) else [pytest.mark.slow]
    if name == "kinds of tensors":
        found.append(NO_SPARSE)
    elif name.startswith("compiled"):
        found.append(NO_COMPILER)
    return found


def matrix() -> list[Any]:
    return [
        pytest.param(
            program, level, keep, id=f"{name}-{level}-{keep}", marks=marks(name, level, keep)
        )
        for name, program in PROGRAMS.items()
        for level in LEVELS
        for keep in KEEPS
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("program", "level", "keep"), matrix())
def test_same_bits(program: Program, level: str, keep: str, tmp_path: Path) -> None:
    capture = unchanged(program, tmp_path / "run", level=level, keep=keep)
    assert not capture.begun
    assert [gap for gap in capture.gaps if gap.name != "torch.compile"] == []


def reasons(capture: Capture) -> set[str]:
    return {t.gap for call in capture.calls for t in call.tensors if t.gap}


@NO_SPARSE
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    capture = unchanged(kinds_of_tensors, tmp_path / "run", level="L1", keep="tensors")
    text = " ".join(sorted(reasons(capture)))
    for kind in ("sparse_coo", "sparse_csr", "quantized", "nested", "meta", "Wrapper"):
        assert kind in text, text


@NO_COMPILER
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["function", "module", "in place"])
def test_a_compiled_part_is_one_opaque_call(how: str, backend: str, tmp_path: Path) -> None:
    capture = unchanged(compiled(backend, how), tmp_path / "run", level="L1", keep="stats")
    # one that backward goes through shows by its node, others by the run of their code
    opaque = ("Compiled.", "Function.CompiledFunction.")
    parts = [call for call in capture.calls(direction="forward") if call.name.startswith(opaque)]
    assert [call.step for call in parts] == [0, 1, 2]
    assert all("the calls inside are not visible" in call.notes[-1] for call in parts)
    assert (2, 3) in [tensor.shape for tensor in parts[0].tensors]
    inside = {"sin", "cos", "tanh", "addmm", "copy_", "empty_strided"}
    assert not [call.name for call in capture.calls if call.name.split(".")[1] in inside]
    (gap,) = capture.gaps
    assert "a compiled region is one opaque call" in gap.reason


@NO_COMPILER
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_and_its_inside_are_module_and_call(backend: str, tmp_path: Path) -> None:
    """As Linear and linear are at mix; the graph that a backend makes of it is no module."""
    program = compiled(backend, "module")
    capture = unchanged(program, tmp_path / "run", level="mix", keep="stats")
    first = [call for call in capture.calls(step=0) if any("compiled" in n for n in call.notes)]
    inside = {"eager": "Compiled.Sequential.0", "aot_eager": "Function.CompiledFunction.0"}
    assert [call.name for call in first] == [
        "Module.OptimizedModule.forward.0",
        f"{inside[backend]}.forward",
    ]
    assert not [call.name for call in capture.calls if "GraphModule" in call.op]


# Exceptions


class Failing(nn.Module):
    """Calls something fine, then raises what it was given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error


class OddError(Exception):
    """Takes arguments of its own, and cannot be shown."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code

    def __str__(self) -> str:
        raise RuntimeError("not showable")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "error", [OddError(3, "x"), KeyboardInterrupt(), SystemExit(4), StopIteration(1)], ids=repr
)
def test_an_exception_reaches_the_program_as_it_is(
    error: BaseException, level: str, tmp_path: Path
) -> None:
    args = error.args
    rec = recorder(tmp_path / "run", level=level)
    with pytest.raises(type(error)) as caught, rec:
        Failing(error)(torch.ones(1, 2))
    assert caught.value is error
    assert error.args == args
    assert error.__cause__ is None
    assert error.__context__ is None
    capture = tp.load(tmp_path / "run")
    assert capture.facts["unfinished"] == []
    assert capture.gaps == ()
    inner = capture.calls(name="Module.inner")
    assert [call.status for call in inner] == (["complete"] if level in ("L0", "mix") else [])


@pytest.mark.parametrize("level", LEVELS)
def test_errors_of_torch_are_the_same(level: str, tmp_path: Path) -> None:
    def fail() -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(RuntimeError) as expected:
        fail()
    with recorder(tmp_path / "run", level=level):
        nn.Linear(2, 2)(torch.ones(1, 2))
        for _ in range(2):  # one that is caught does not switch recording off
            with pytest.raises(RuntimeError) as caught:
                fail()
        torch.ones(1).exp()
        with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
            len(torch.tensor(1))
        with pytest.raises(StopIteration):
            next(iter([]))
    assert caught.value.args == expected.value.args
    capture = tp.load(tmp_path / "run")
    assert capture.gaps == ()
    if level in ("L1", "mix"):
        failed = [call for call in capture.calls if call.status == "raised"]
        assert [call.op for call in failed] == ["torch.Tensor.matmul"] * 2
        assert failed[0].error == f"RuntimeError: {expected.value}"
        assert capture.call("Tensor.exp.0.forward").status == "complete"


def test_after_an_interrupt_names_are_right_again(tmp_path: Path) -> None:
    """KeyboardInterrupt leaves modules without running any hook."""
    outer = nn.Sequential(nn.ReLU(), Failing(KeyboardInterrupt()))
    later = nn.Sequential(nn.Tanh())
    with recorder(tmp_path / "run", level="mix"):
        with pytest.raises(KeyboardInterrupt):
            outer(torch.ones(1, 2))
        later(torch.ones(1, 2))
        torch.ones(2).exp()
    capture = tp.load(tmp_path / "run")
    assert [c.status for c in capture.calls(name="Module.Sequential.forward.0")] == ["raised"]
    assert capture.call("Module.Sequential_1.0.Tanh.forward.0").module == "Sequential_1.0"
    assert capture.call("Tensor.exp.0.forward").module == ""


def test_a_module_that_returns_nothing_while_an_exception_is_handled(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            x.exp()

    with recorder(tmp_path / "run", level="L0"):
        try:
            raise ValueError
        except ValueError:
            Nothing()(torch.ones(2))
    (call,) = tp.load(tmp_path / "run").calls
    assert call.status == "complete"


# Two recorders


def described(capture: Capture) -> list[Any]:
    return [
        (
            call.name,
            call.module,
            call.direction,
            call.status,
            call.parent,
            call.notes,
            [
                (t.name, t.dtype, t.shape, t.summary, t.digest)
                for t in call.tensors
                if ".copy_." not in t.name  # its target may be new memory, which holds anything
            ],
        )
        for call in capture.calls
        if "empty" not in call.name
    ]


@pytest.mark.parametrize("levels", [("mix", "mix"), ("L1", "L2"), ("L2", "L0")], ids=str)
def test_two_recorders_do_not_see_each_other(levels: tuple[str, str], tmp_path: Path) -> None:
    outer, inner = levels
    x, model = torch.randn(4, 3, 5, 5), Cnn()  # made outside: new memory holds anything
    state = copy.deepcopy(model.state_dict())

    def program(step: Callable[[], None]) -> Any:
        return trained(model, lambda m: m(x).square().mean(), step)

    alone = {}
    for level in levels:
        model.load_state_dict(state)
        with recorder(tmp_path / f"{level} alone", level=level, keep="digest") as rec:
            expected = observe(program, rec.step)
        expected = copy.deepcopy(expected)
        alone[level] = described(tp.load(tmp_path / f"{level} alone"))
    model.load_state_dict(state)
    with recorder(tmp_path / "outer", level=outer, keep="digest") as first:
        with recorder(tmp_path / "inner", level=inner, keep="digest") as second:

            def step() -> None:
                first.step()
                second.step()

            actual = observe(program, step)
    same(actual, expected)
    assert described(tp.load(tmp_path / "outer")) == alone[outer]
    assert described(tp.load(tmp_path / "inner")) == alone[inner]


def test_two_recorders_may_end_in_any_order(tmp_path: Path) -> None:
    first = recorder(tmp_path / "first", level="mix")
    second = recorder(tmp_path / "second", level="mix")
    x = torch.ones(2, requires_grad=True)
    first.start()
    second.start()
    x.exp().sum().backward()
    first.close()
    x.sin().sum().backward()
    second.close()
    names = {path: [c.name for c in tp.load(tmp_path / path).calls] for path in ("first", "second")}
    assert "Tensor.exp.0.backward" in names["first"]
    assert "Tensor.sin.0.backward" in names["second"]
    assert "Tensor.sin.0.forward" not in names["first"]


# The model stays the user's own


@pytest.mark.parametrize("level", LEVELS)
def test_copies_of_the_model_hold_nothing_of_ours(level: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    pristine = copy.deepcopy(model)
    with recorder(tmp_path / "run", level=level):
        loss = model(torch.randn(5, 3)).sum()
        loss.backward()
        optimizer.step()
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False),
        ]
        state = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)
        again = copy.deepcopy(model)
        again.load_state_dict(model.state_dict())
    for twin in (*copies, again):
        same(dict(twin.state_dict()), dict(model.state_dict()))
        for module, original in zip(twin.modules(), pristine.modules(), strict=True):
            assert module.__dict__.keys() == original.__dict__.keys()
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    for blob in (saved, state):
        # the simulated device has a function of its own that builds its tensors again
        assert not re.search(rb"tensorprobe(?!\.devices\.sim_npu)", blob.getvalue())
    for parameter, original in zip(model.parameters(), pristine.parameters(), strict=True):
        assert not parameter._backward_hooks
        assert vars(parameter).keys() == vars(original).keys()


# Memory


def live_tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("keep", ["stats", "tensors"])
@pytest.mark.parametrize("level", LEVELS)
def test_activations_die_when_they_would(level: str, keep: str, tmp_path: Path) -> None:
    deaths: list[str] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            gone = weakref.ref(hidden)
            x = self.second(hidden.exp())
            del hidden
            deaths.append("dead" if gone() is None else "alive")
            return x

    model = Watched()
    gc.disable()
    try:
        with recorder(tmp_path / "run", level=level, keep=keep):
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
                with torch.no_grad():
                    model(torch.ones(2, 3))
            gc.collect()
            before = live_tensors()
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            if keep != "tensors":  # those are copied, into a queue with a bound
                assert live_tensors() <= before
    finally:
        gc.enable()
    assert deaths == ["dead"] * 9


def test_forgotten_recorders_do_not_hold_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    alive = weakref.ref(model)
    rec = recorder(tmp_path / "run", level="mix")
    with rec:
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    del model
    gc.collect()
    assert alive() is None
    assert rec is not None


def test_a_symbolic_trace_is_what_it_is_without(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))
    expected = torch.fx.symbolic_trace(model).code
    with recorder(tmp_path / "run", level="L0"):
        traced = torch.fx.symbolic_trace(model)
        model(torch.ones(2, 3))
    assert traced.code == expected


@pytest.mark.timeout(60)
def test_a_signals_handler_may_call_a_module(tmp_path: Path) -> None:
    model, x = nn.Identity(), torch.ones(64)
    going = True

    def handle(*_: Any) -> None:
        model(x)
        if going:  # the next one from its end on: where it takes long they would pile up
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with recorder(tmp_path / "run", level="L0", keep="stats") as rec:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            for turn in range(2000):
                model(x)
                if turn % 50 == 0:
                    rec.step()
            going = False
    finally:
        going = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(tp.load(tmp_path / "run").calls) >= 2000


def test_a_signals_handler_may_go_backward_while_gradients_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state_of = nn.Linear(2, 2), module_calls._state_of
    handled: list[bool] = []
    given_up: list[bool] = []

    def go_backward(*_: Any) -> None:
        if not handled:
            handled.append(True)
            with torch.enable_grad():
                model(torch.ones(1, 2)).sum().backward()

    def interrupted(tensor: Tensor) -> tuple[int, int]:
        signal.raise_signal(signal.SIGUSR1)
        return state_of(tensor)

    def give_up(*_: Any) -> None:
        given_up.append(True)
        raise TimeoutError("it waits for itself")

    monkeypatch.setattr(module_calls, "_state_of", interrupted)
    before = signal.signal(signal.SIGUSR1, go_backward)
    before_alarm = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60)
        with recorder(tmp_path / "run", level="L0", keep="stats"):
            model(torch.ones(1, 2)).sum().backward()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGALRM, before_alarm)
    assert handled
    assert not given_up
