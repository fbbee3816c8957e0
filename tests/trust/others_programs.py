"""Programs as others write them: real models, optimizers and loops in two healthy ways; faults."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tiny_models import MODELS
from trust.harness import Case, Program, Start
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import Mlp, adamw, built, sgd, training, vectors

FAMILY = "programs of others"
TENSORS_AND_STATS = ("tensors mix", "stats mix")
NO_L2 = ("tensors mix", "stats mix", "digest mix", "tensors L0", "stats L0")
MOST = (*NO_L2, "tensors L2")
SOME = ("tensors mix", "digest mix", "stats L0", "stats L2", "tensors L1")

Loss = Callable[[nn.Module], Tensor]


def _model(
    start: Start,
    name: str,
    *,
    prepare: Callable[[nn.Module], object] = lambda _: None,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    optimizer: Any = adamw,
    inside: Any = contextlib.nullcontext,
    around: Any = contextlib.nullcontext,
    scaler: bool = False,
    steps: int = 2,
) -> None:
    """Trains a small real model; `around` is around its forward."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    net, loss = MODELS[name]() if name in MODELS else MORE[name]()
    net.train()
    prepare(net)
    optim = optimizer(net.parameters())
    net = wrap(net)
    scale = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
    torch.manual_seed(1)
    with inside(), start() as recorder:
        for _ in range(steps):
            with around():
                found = loss(net)
            scale.scale(found).backward()
            scale.step(optim)
            scale.update()
            optim.zero_grad()
            recorder.step()


def modelling(name: str, both: dict[str, Any] | None = None, **changes: Any) -> Program:
    return lambda start, is_actual: _model(
        start, name, **{**(both or {}), **(changes if is_actual else {})}
    )


def _resnet() -> tuple[nn.Module, Loss]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    pixels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().reshape(2, 3, 32, 32)
    return ResNetForImageClassification(
        config
    ), lambda net: net(pixel_values=pixels, labels=torch.tensor([0, 1])).loss


def _mamba() -> tuple[nn.Module, Loss]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)
    ids = torch.arange(24).reshape(2, 12) % 50
    return MambaForCausalLM(config), lambda net: net(input_ids=ids, labels=ids).loss


MORE = {"resnet": _resnet, "mamba": _mamba}


def _attention(kind: str) -> Callable[[nn.Module], object]:
    return lambda net: net.set_attn_implementation(kind)


def _checkpointed(reentrant: bool) -> Callable[[nn.Module], object]:
    return lambda net: net.gradient_checkpointing_enable({"use_reentrant": reentrant})


def _autocast(dtype: torch.dtype, **more: Any) -> Any:
    return lambda: torch.autocast("cpu", dtype=dtype, **more)


@contextlib.contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _threads() -> Any:
    return _set(torch.set_num_threads, 3, 1)


def _deterministic() -> Any:
    return _set(torch.use_deterministic_algorithms, True, False)


def _no_mkldnn() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


def _channels_last(net: nn.Module) -> None:
    net.to(memory_format=torch.channels_last)


def _compiled_layer(backend: str) -> Callable[[nn.Module], object]:
    def prepare(net: nn.Module) -> None:
        torch._dynamo.reset()
        net.model.layers[1].mlp.compile(backend=backend)

    return prepare


def _compiled(net: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(net, backend="aot_eager")


# From torch 2.5 on; without it the cases of it fail, and are of no test of older versions.
ADAFACTOR: Any = getattr(torch.optim, "Adafactor", torch.optim.SGD)

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "rmsprop": (
        functools.partial(torch.optim.RMSprop, foreach=True, centered=True, momentum=0.9),
        functools.partial(torch.optim.RMSprop, foreach=False, centered=True, momentum=0.9),
    ),
    "nadam": (
        functools.partial(torch.optim.NAdam, foreach=True),
        functools.partial(torch.optim.NAdam, foreach=False),
    ),
    "radam": (
        functools.partial(torch.optim.RAdam, foreach=True),
        functools.partial(torch.optim.RAdam, foreach=False),
    ),
    "adadelta": (
        functools.partial(torch.optim.Adadelta, foreach=True),
        functools.partial(torch.optim.Adadelta, foreach=False),
    ),
    "adagrad": (
        functools.partial(torch.optim.Adagrad, fused=True),
        functools.partial(torch.optim.Adagrad, foreach=False),
    ),
    "rprop": (
        functools.partial(torch.optim.Rprop, foreach=True),
        functools.partial(torch.optim.Rprop, foreach=False),
    ),
    "adafactor": (
        functools.partial(ADAFACTOR, foreach=True),
        functools.partial(ADAFACTOR, foreach=False),
    ),
    "sgd-fused": (
        functools.partial(sgd, fused=True, nesterov=True, weight_decay=0.1),
        functools.partial(sgd, foreach=False, nesterov=True, weight_decay=0.1),
    ),
    "adam-amsgrad": (
        functools.partial(adamw, fused=True, amsgrad=True),
        functools.partial(adamw, foreach=True, amsgrad=True),
    ),
    "adam-differentiable": (
        functools.partial(adamw, maximize=True, foreach=True),
        functools.partial(adamw, maximize=True, foreach=False),
    ),
}


def _lbfgs(
    start: Start, is_actual: bool, line_search: str | None = None, wrong: Any = other_kernels
) -> None:
    net = built(Mlp)
    optim = torch.optim.LBFGS(
        net.parameters(), lr=0.1, max_iter=3, history_size=3, line_search_fn=line_search
    )
    with wrong() if is_actual else contextlib.nullcontext(), start() as recorder:
        for step in range(2):
            x, y = vectors(step)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optim.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return loss

            optim.step(closure)
            recorder.step()


def _averaged(start: Start, is_actual: bool, swa: bool, decay: float = 0.9) -> None:
    """An average of the weights, exponential or not, with running statistics made anew."""
    net = built(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    optim = sgd(net.parameters())
    average = None if swa else get_ema_multi_avg_fn(decay if is_actual else 0.9)
    mean = AveragedModel(net, multi_avg_fn=average, use_buffers=not swa)
    data = [vectors(step) for step in range(3)]
    with other_kernels() if is_actual else contextlib.nullcontext(), start() as recorder:
        for x, y in data:
            F.mse_loss(net(x), y).backward()
            optim.step()
            optim.zero_grad()
            mean.update_parameters(net)
            recorder.step()
        if swa:
            update_bn([x for x, _ in data], mean)
        mean.eval()
        mean(data[0][0])


def _loaded(start: Start, is_actual: bool, wrong: Any = contextlib.nullcontext) -> None:
    """Batches by worker processes, or in the program itself."""
    data = torch.utils.data.TensorDataset(
        *map(torch.cat, zip(*map(vectors, range(3)), strict=True))
    )
    net = built(Mlp)
    optim = adamw(net.parameters())
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        num_workers=2 if is_actual else 0,
    )
    with wrong() if is_actual else contextlib.nullcontext(), start() as recorder:
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            optim.step()
            optim.zero_grad()
            recorder.step()


class Weighted(Mlp):
    """Weight norm on one linear, an orthogonal parametrization on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)
        self.second = nn.utils.parametrizations.spectral_norm(self.second)


class Recurring(nn.Module):
    def __init__(self, kind: Any = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(12, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[None])[0][0])


class Many(nn.Module):
    """Torch's attention module, with its weights or without."""

    def __init__(self, need_weights: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, 4)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x[None], x[None], x[None], need_weights=self.need_weights)[0]
        return self.head(x[0])


def _reversed_parts(start: Start, is_actual: bool) -> None:
    net = built(Mlp)
    optim = adamw(net.parameters())
    batches = [vectors(step) for step in range(2)]
    with start() as recorder:
        for x, y in batches:
            parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
            for some, wanted in reversed(parts) if is_actual else parts:
                (F.mse_loss(net(some), wanted) / 4).backward()
            optim.step()
            optim.zero_grad()
            recorder.step()


def _generated(start: Start, is_actual: bool, wrong: Any = contextlib.nullcontext) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    net, _ = MODELS["llama"]()
    net.eval()
    ids = torch.arange(8).reshape(2, 4)
    with wrong() if is_actual else contextlib.nullcontext(), start(), torch.no_grad():
        net.generate(ids, max_new_tokens=4, do_sample=False, use_cache=is_actual)


def _evaluated(start: Start, is_actual: bool, way: str) -> None:
    net = built(Mlp).eval()
    x = vectors(0)[0]
    if is_actual and way == "traced":
        net = torch.jit.trace(net, x)
    if is_actual and way == "parallel":
        net = nn.DataParallel(net)
    mode = torch.inference_mode if is_actual and way == "inference" else torch.no_grad
    with start(), mode():
        F.softmax(net(x), -1)


def _case(name: str, program: Program, *, runs: tuple[str, ...] = SOME, **more: Any) -> Case:
    return Case(f"others-{name}", FAMILY, program, runs=runs, **more)


def _wrong(op: str, nth: int = 0) -> Any:
    return functools.partial(wrong_kernel, op, gain(1.05), nth=nth)


EAGER = _attention("eager")
BF16, F16 = torch.bfloat16, torch.float16
DTYPE = {"allowed": "dtype|flag", "says": "bfloat16|bf16|float16|autocast"}

CASES = [
    _case("llama-autocast-eager", modelling("llama", {"around": _autocast(BF16)}, prepare=EAGER)),
    _case("llama-autocast-or-not", modelling("llama", around=_autocast(BF16)), **DTYPE),
    _case("llama-f16-scaler", modelling("llama", around=_autocast(F16), scaler=True), **DTYPE),
    _case(
        "llama-autocast-cache",
        modelling(
            "llama", {"around": _autocast(BF16)}, around=_autocast(BF16, cache_enabled=False)
        ),
    ),
    _case("llama-bf16-eager", modelling("llama", {"wrap": lambda n: n.to(BF16)}, prepare=EAGER)),
    _case("gpt2-checkpointed-reentrant", modelling("gpt2", prepare=_checkpointed(True))),
    _case(
        "gpt2-checkpointed-threads",
        modelling("gpt2", {"prepare": _checkpointed(False)}, inside=_threads),
    ),
    _case("bert-eager", modelling("bert", prepare=EAGER), runs=MOST),
    _case("t5-checkpointed", modelling("t5", prepare=_checkpointed(False))),
    _case("vit-eager", modelling("vit", prepare=EAGER)),
    _case("mixtral-eager", modelling("mixtral", prepare=EAGER)),
    _case("mixtral-deterministic", modelling("mixtral", inside=_deterministic)),
    _case("mamba-other-kernels", modelling("mamba", inside=other_kernels)),
    _case("mamba-autocast", modelling("mamba", around=_autocast(BF16)), **DTYPE),
    _case("resnet-channels-last", modelling("resnet", prepare=_channels_last)),
    _case("resnet-without-mkldnn", modelling("resnet", inside=_no_mkldnn), runs=MOST),
    _case("resnet-threads", modelling("resnet", inside=_threads)),
    _case(
        "llama-mlp-compiled", modelling("llama", prepare=_compiled_layer("eager")), runs=MOST[:5]
    ),
    _case(
        "llama-mlp-compiled-aot",
        modelling("llama", prepare=_compiled_layer("aot_eager")),
        runs=MOST[:5],
    ),
    _case("llama-compiled", modelling("llama", wrap=_compiled), runs=MOST[:5]),
    *(
        _case(f"optimizer-{name}", training({"optimizer": one, "steps": 3}, optimizer=other))
        for name, (other, one) in OPTIMIZERS.items()
    ),
    _case("lbfgs", _lbfgs),
    _case("lbfgs-line-search", functools.partial(_lbfgs, line_search="strong_wolfe")),
    _case("ema", functools.partial(_averaged, swa=False)),
    _case("swa", functools.partial(_averaged, swa=True)),
    _case("loader-with-workers", _loaded),
    _case("weight-norm", training({"net": Weighted, "steps": 3}, inside=other_kernels)),
    _case("gru-without-mkldnn", training({"net": Recurring, "steps": 2}, inside=_no_mkldnn)),
    _case(
        "lstm-threads",
        training({"net": functools.partial(Recurring, nn.LSTM), "steps": 2}, inside=_threads),
    ),
    _case(
        "attention-weights",
        training({"net": Many, "steps": 2}, net=functools.partial(Many, False)),
    ),
    _case("parts-reversed", _reversed_parts),
    _case("generated-with-cache", _generated, runs=TENSORS_AND_STATS),
    _case("traced", functools.partial(_evaluated, way="traced"), runs=MOST),
    _case("data-parallel", functools.partial(_evaluated, way="parallel"), runs=MOST),
    _case("inference-mode", functools.partial(_evaluated, way="inference"), runs=MOST),
    # faults
    _case(
        "llama-eager-and-silu-wrong",
        modelling("llama", prepare=EAGER, inside=_wrong("silu", 1)),
        at="Functional.silu.1.forward",
        cause="result",
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "llama-mlp-compiled-and-other-silu-wrong",
        modelling("llama", prepare=_compiled_layer("aot_eager"), inside=_wrong("silu")),
        at="Functional.silu.0.forward",
        cause="result",
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "gpt2-checkpointed-and-tanh-wrong",
        modelling("gpt2", prepare=_checkpointed(False), inside=_wrong("tanh", 1)),
        at="Torch.tanh.1.forward",
        cause="result",
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "resnet-channels-last-and-relu-wrong",
        modelling("resnet", prepare=_channels_last, inside=_wrong("relu")),
        at="Functional.relu.0.forward",
        cause="result",
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "adafactor-other-rate",
        training(
            {"optimizer": OPTIMIZERS["adafactor"][1]},
            optimizer=functools.partial(ADAFACTOR, foreach=True, lr=2e-2),
        ),
        at="Optimizer.Adafactor.step.0",
        cause="argument",
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "lbfgs-and-gelu-wrong",
        functools.partial(_lbfgs, wrong=_wrong("gelu", 2)),
        at="Functional.gelu.2.forward",
        cause="result",
        step=0,
        runs=TENSORS_AND_STATS,
    ),
    _case(
        "loader-with-workers-and-gelu-wrong",
        functools.partial(_loaded, wrong=_wrong("gelu", 1)),
        at="Functional.gelu.0.forward",
        cause="result",
        step=1,
        runs=TENSORS_AND_STATS,
    ),
]
