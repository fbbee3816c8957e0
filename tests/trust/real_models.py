"""Published models, trained in loops as people write them, and what goes wrong there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_models import MODELS
from trust.harness import Case, Program, Start
from trust.kernels import gain, one_row, other_kernels, wrong_kernel
from trust.programs import adamw

FAMILY = "real models"
BOTH = ("tensors mix", "stats mix")
HEALTHY = ("tensors mix", "stats mix", "digest mix", "stats L0")
BF16, F16 = torch.bfloat16, torch.float16
DTYPE = {"allowed": "dtype|flag", "says": "bfloat16|bf16|float16|autocast"}

Optimizer = torch.optim.Optimizer
Batch = tuple[Tensor, Tensor]


def _batch(step: int, seed: int = 100) -> Batch:
    """Tokens of two sentences, of which the second is padded at its end, and their mask."""
    generator = torch.Generator().manual_seed(seed + step)
    ids = torch.randint(1, 60, (2, 10), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids * mask, mask


def _next_tokens(net: nn.Module, batch: Batch) -> Tensor:
    """The loss of a causal model over the tokens that are no padding."""
    ids, mask = batch
    labels = ids.masked_fill(mask == 0, -100)
    return net(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def _fit(
    start: Start,
    name: str,
    *,
    steps: int = 2,
    prepare: Callable[[nn.Module], object] = lambda _: None,
    config: Callable[[Any], object] = lambda _: None,
    optimizer: Callable[[Any], Optimizer] = adamw,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    data: Callable[[int], Batch] = _batch,
    inside: Callable[[], Any] = contextlib.nullcontext,
    around: Callable[[], Any] = contextlib.nullcontext,
    backward: Callable[[Tensor], object] = lambda loss: loss.backward(),
    before_step: Callable[[nn.Module, int], object] = lambda net, step: None,
    after_step: Callable[[nn.Module, Optimizer, int], object] = lambda *_: None,
    schedule: Callable[[Optimizer], Any] | None = None,
    zero_grad: bool = True,
    train: bool = True,
) -> None:
    """Train a small model under a recorder. Each argument is a place to differ at."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    net, own_loss = MODELS[name]()
    config(net.config)
    net.train(train)
    prepare(net)
    optim = optimizer(net.parameters())
    scheduler = schedule(optim) if schedule else None
    batches = [data(step) for step in range(steps)]
    torch.manual_seed(1)
    with inside(), start() as recorder:
        for step, batch in enumerate(batches):
            with around():
                found = loss(net, batch) if loss else own_loss(net)
            backward(found)
            before_step(net, step)
            optim.step()
            if scheduler:
                scheduler.step()
            after_step(net, optim, step)
            if zero_grad:
                optim.zero_grad()
            recorder.step()


def fitting(name: str, both: dict[str, Any] | None = None, **changes: Any) -> Program:
    """`_fit` with the arguments of both sides, and on the actual side with `changes` too."""
    return lambda start, is_actual: _fit(
        start, name, **{**(both or {}), **(changes if is_actual else {})}
    )


# What is done to a model, or in a loop


def _attention(kind: str) -> Callable[[nn.Module], object]:
    return lambda net: net.set_attn_implementation(kind)


def _checkpointed(net: nn.Module) -> None:
    net.gradient_checkpointing_enable({"use_reentrant": False})


def _to(dtype: torch.dtype) -> Callable[[nn.Module], object]:
    return lambda net: net.to(dtype)


def _autocast(dtype: torch.dtype = BF16) -> Any:
    return lambda: torch.autocast("cpu", dtype=dtype)


def _transposed_storage(net: nn.Module) -> None:
    """Weights of linears lie in memory the other way round, as some checkpoints leave them."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def _backend(name: str) -> Any:
    def chosen() -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # from torch 2.3 on

        return sdpa_kernel(getattr(SDPBackend, name))

    return chosen


@contextlib.contextmanager
def _all_of(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each())
        yield


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _no_mkldnn() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


def _clipped(limit: float, foreach: bool | None = None) -> Any:
    def before(net: nn.Module, step: int) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), limit, foreach=foreach)

    return before


def _averaged_by_numpy(decay: float = 0.5) -> Any:
    """Weights are moved towards where they were, outside of torch."""
    kept: dict[str, Any] = {}

    def after(net: nn.Module, optimizer: Optimizer, step: int) -> None:
        del optimizer
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                held = parameter.numpy()
                kept[name] = decay * kept[name] + (1 - decay) * held if step else held.copy()
                held[:] = np.float32(0.5) * held + np.float32(0.5) * kept[name]

    return after


def _shrunk_through_data(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    del optimizer, step
    for parameter in net.parameters():
        parameter.data.mul_(0.99)


def _shrunk_by_numpy(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    del optimizer
    if step == 0:
        for parameter in net.parameters():
            parameter.detach().numpy()[:] *= np.float32(0.98)


def _scaling(scale: float, spoil: bool = False) -> dict[str, Any]:
    """A GradScaler around the loss; the first step may be skipped for an infinite gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    class Scaled:
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner

        def step(self) -> None:
            scaler.step(self.inner)
            scaler.update()

        def zero_grad(self) -> None:
            self.inner.zero_grad()

    def before(net: nn.Module, step: int) -> None:
        if spoil and step == 0:
            first = next(net.parameters())
            assert first.grad is not None
            first.grad.fill_(math.inf)

    return {
        "backward": lambda loss: scaler.scale(loss).backward(),
        "before_step": before,
        "optimizer": lambda parameters: Scaled(adamw(parameters)),
    }


def _scaled(scale: float, spoil: bool, both_spoil: bool = False) -> Program:
    """Each side has a scaler of its own."""

    def program(start: Start, is_actual: bool) -> None:
        inside = other_kernels if is_actual and both_spoil else contextlib.nullcontext
        spoils = spoil and (is_actual or both_spoil)
        _fit(start, "gpt2", steps=3, inside=inside, **_scaling(scale, spoils))

    return program


def _steps_down(late: int = 0) -> Any:
    return lambda optim: torch.optim.lr_scheduler.LambdaLR(
        optim, lambda step: 0.5 ** max(step - late, 0)
    )


def _by_hand(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    """The same schedule without a scheduler."""
    del net
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.5 ** (step + 1)


def _shifted_loss(kind: str) -> Any:
    """The loss of the next tokens, written in several ways."""

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        ids, mask = batch
        logits = net(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        wanted, counts = ids[:, 1:], mask[:, 1:] == 1
        if kind == "ignored":
            labels = wanted.masked_fill(~counts, -100)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if kind == "selected":
            return F.cross_entropy(logits[counts], wanted[counts])
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        each = each.view_as(wanted) * counts
        if kind == "summed":
            return each.sum() / counts.sum()
        assert kind == "all counted"
        return each.mean()

    return loss


def _smoothed(amount: float) -> Any:
    def loss(net: nn.Module, batch: Batch) -> Tensor:
        ids, mask = batch
        logits = net(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=amount)

    return loss


def _without_mask(net: nn.Module, batch: Batch) -> Tensor:
    ids, mask = batch
    return net(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss


def _other_positions(net: nn.Module, batch: Batch) -> Tensor:
    ids, mask = batch
    labels = ids.masked_fill(mask == 0, -100)
    at = torch.arange(1, 11).expand(2, -1)
    return net(input_ids=ids, position_ids=at, attention_mask=mask, labels=labels,
               use_cache=False).loss  # fmt: skip


def _own_positions(net: nn.Module, batch: Batch) -> Tensor:
    ids, mask = batch
    labels = ids.masked_fill(mask == 0, -100)
    at = torch.arange(10).expand(2, -1)
    return net(input_ids=ids, position_ids=at, attention_mask=mask, labels=labels,
               use_cache=False).loss  # fmt: skip


def _untied(net: nn.Module) -> None:
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())


def _frozen(net: nn.Module) -> None:
    net.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)


def _layers_swapped(net: nn.Module) -> None:
    layers = net.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _without_layer(net: nn.Module) -> None:
    net.model.layers = net.model.layers[:1]


def _steeper_rope(net: nn.Module) -> None:
    net.model.rotary_emb.inv_freq.mul_(0.9)


def _query_scale(net: nn.Module) -> None:
    net.model.layers[1].self_attn.scaling *= 1.02


def _other_dropout(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2


def _no_dropout(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _one_expert(net: nn.Module) -> None:
    for layer in net.model.layers:
        layer.mlp.gate.top_k = 1


def _first_layer_twice(net: nn.Module) -> None:
    """The second layer has the weights of the first, as a wrong checkpoint gives them."""
    net.model.layers[1].load_state_dict(net.model.layers[0].state_dict())


def _through_bf16(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.to(BF16).float()


def _all_decayed(parameters: Any) -> Optimizer:
    return adamw(parameters, weight_decay=0.1)


def _not_norms(parameters: Any) -> Optimizer:
    """Weight decay of matrices only, as recipes have it."""
    kept = list(parameters)
    groups = [
        {"params": [p for p in kept if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in kept if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def _wrong(op: str, nth: int = 0, alter: Any = None) -> Any:
    return lambda: wrong_kernel(op, alter or gain(1.05), nth=nth)


def _case(name: str, program: Program, *, runs: tuple[str, ...] = BOTH, **more: Any) -> Case:
    return Case(f"real-{name}", FAMILY, program, runs=runs, **more)


EAGER = _attention("eager")
TEXT = {"loss": _next_tokens}

CASES = [
    _case("whisper-eager", fitting("whisper", prepare=EAGER), runs=HEALTHY),
    _case("gpt2-autocast", fitting("gpt2", around=_autocast()), runs=HEALTHY, **DTYPE),
    _case("t5-bf16", fitting("t5", prepare=_to(BF16)), runs=HEALTHY, **DTYPE),
    _case("bert-autocast-f16", fitting("bert", around=_autocast(F16)), runs=HEALTHY, **DTYPE),
    _case("mixtral-bf16", fitting("mixtral", {"steps": 1}, prepare=_to(BF16)), **DTYPE),
    _case(
        "whisper-bf16",
        fitting("whisper", {"train": False}, around=_autocast()),
        runs=HEALTHY,
        **DTYPE,
    ),
    _case(
        "llama-bf16-for-twelve-steps",
        fitting("llama", {**TEXT, "steps": 12}, around=_autocast()),
        runs=BOTH[1:],
        **DTYPE,
    ),
    _case("bert-transposed-weights", fitting("bert", prepare=_transposed_storage), runs=HEALTHY),
    _case(
        "gpt2-averaged-by-numpy",
        fitting("gpt2", {"steps": 3, "after_step": _averaged_by_numpy()}, inside=other_kernels),
    ),
    _case(
        "llama-clipped-in-a-loop",
        fitting(
            "llama",
            {**TEXT, "steps": 3, "before_step": _clipped(0.1, True)},
            before_step=_clipped(0.1, False),
        ),
        runs=HEALTHY,
    ),
    _case("mixtral-checkpointed", fitting("mixtral", prepare=_checkpointed)),
    _case("gpt2-step-skipped-on-both-sides", _scaled(2.0**10, True, both_spoil=True), runs=HEALTHY),
    _case(
        "llama-schedule-by-hand",
        fitting(
            "llama",
            {**TEXT, "steps": 3, "schedule": _steps_down()},
            schedule=None,
            after_step=_by_hand,
        ),
        runs=HEALTHY,
    ),
    _case(
        "llama-flash-or-math",
        fitting("llama", {"inside": _backend("FLASH_ATTENTION")}, inside=_backend("MATH")),
        runs=HEALTHY,
    ),
    _case(
        "llama-flash-or-math-bf16",
        fitting(
            "llama",
            {"inside": _backend("FLASH_ATTENTION"), "prepare": _to(BF16)},
            inside=_backend("MATH"),
        ),
        runs=HEALTHY,
    ),
    _case("gpt2-threads", fitting("gpt2", inside=_threads), runs=HEALTHY),
    _case(
        "bert-bf16-without-mkldnn",
        fitting("bert", {"prepare": _to(BF16)}, inside=_no_mkldnn),
        runs=HEALTHY,
    ),
    _case(
        "llama-labels-selected",
        fitting("llama", {"loss": _shifted_loss("ignored")}, loss=_shifted_loss("selected")),
    ),
    _case(
        "llama-loss-summed",
        fitting("llama", {"loss": _shifted_loss("ignored")}, loss=_shifted_loss("summed")),
    ),
    _case("llama-padded-eager", fitting("llama", TEXT, prepare=EAGER), runs=HEALTHY),
    _case(
        "gpt2-shrunk-through-data",
        fitting("gpt2", {"steps": 3, "after_step": _shrunk_through_data}, inside=other_kernels),
        runs=HEALTHY,
    ),
    _case("llama-positions-given", fitting("llama", TEXT, loss=_own_positions)),
    # faults
    _case(
        "llama-schedule-late",
        fitting("llama", {**TEXT, "steps": 3, "schedule": _steps_down()}, schedule=_steps_down(1)),
        at="Optimizer.AdamW.step.0",
        cause="argument",
        step=1,
    ),
    _case(
        "llama-other-shuffle",
        fitting("llama", TEXT, data=lambda step: _batch(step, 200)),
        at="Tensor.masked_fill.0.*|Module.LlamaForCausalLM.*",
        cause="data",
    ),
    _case(
        "llama-padding-counted",
        fitting("llama", {"loss": _shifted_loss("summed")}, loss=_shifted_loss("all counted")),
        at="Tensor.mean.5.*|Tensor.sum.*",
        cause="structure",
    ),
    _case(
        "gpt2-smoothed",
        fitting("gpt2", {"loss": _smoothed(0.0)}, loss=_smoothed(0.1)),
        at="Functional.cross_entropy.0.*",
        cause="argument",
    ),
    _case(
        "llama-mask-forgotten",
        fitting("llama", TEXT, loss=_without_mask),
        at="Module.model.LlamaModel.*|Module.LlamaForCausalLM.*",
        cause="argument|data|structure",
    ),
    _case(
        "gpt2-untied",
        fitting("gpt2", prepare=_untied),
        at="Module.transformer.wte.*|Module.lm_head.*",
        cause="boundary",
    ),
    _case(
        "gpt2-averaged-otherwise",
        fitting(
            "gpt2",
            {"steps": 3, "after_step": _averaged_by_numpy()},
            after_step=_averaged_by_numpy(0.9),
        ),
        at="Module.transformer.wte.*",
        cause="boundary",
        step=2,
    ),
    _case(
        "gpt2-shrunk-by-numpy",
        fitting("gpt2", {"steps": 3}, after_step=_shrunk_by_numpy),
        at="Module.transformer.wte.*",
        cause="boundary",
        step=1,
    ),
    _case(
        "llama-clipped-otherwise",
        fitting(
            "llama", {**TEXT, "steps": 2, "before_step": _clipped(0.1)}, before_step=_clipped(0.2)
        ),
        at="Tensor.__rtruediv__.0.*|Torch.nn.utils.clip*",
        cause="argument",
    ),
    _case(
        "gpt2-step-skipped",
        _scaled(2.0**10, True),
        at="Tensor.fill_.0.*",
        cause="structure",
    ),
    _case(
        "llama-rope",
        fitting("llama", prepare=_steeper_rope),
        at="Module.model.rotary_emb.*",
        cause="weights",
    ),
    _case(
        "llama-query-scale",
        fitting("llama", prepare=_query_scale),
        at="Functional.scaled_dot_product_attention.1.*",
        cause="argument",
    ),
    _case(
        "llama-query-scale-eager",
        fitting("llama", {"prepare": EAGER}, prepare=lambda net: (EAGER(net), _query_scale(net))),
        at="Tensor.mul.*",
        cause="argument",
    ),
    _case(
        "gpt2-other-dropout",
        fitting("gpt2", prepare=_other_dropout),
        at="Functional.dropout.0.*",
        cause="argument",
    ),
    _case(
        "gpt2-no-dropout",
        fitting("gpt2", prepare=_no_dropout),
        at="Functional.dropout.0.*",
        cause="argument|seed",
    ),
    _case(
        "gpt2-frozen",
        fitting("gpt2", prepare=_frozen),
        at="Optimizer.AdamW.step.0|Module.transformer.h.0.mlp.c_fc*",
        cause="structure",
    ),
    _case(
        "llama-layers-swapped",
        fitting("llama", prepare=_layers_swapped),
        at="Module.model.layers.0.*",
        cause="weights",
    ),
    _case(
        "llama-layer-missing",
        fitting("llama", prepare=_without_layer),
        at="Tensor.pow.2.*|Module.model.layers.1.*|Module.model.norm.*",
        cause="structure",
    ),
    _case(
        "llama-layer-loaded-twice",
        fitting("llama", prepare=_first_layer_twice),
        at="Module.model.layers.1.*",
        cause="weights",
    ),
    _case(
        "bert-through-bf16",
        fitting("bert", prepare=_through_bf16),
        at="Module.bert.embeddings.word_embeddings.*",
        cause="weights",
    ),
    _case(
        "mixtral-one-expert",
        fitting("mixtral", {"steps": 1}, prepare=_one_expert),
        at="Torch.topk.0.*",
        cause="argument",
    ),
    _case(
        "gpt2-norms-decayed",
        fitting("gpt2", {"steps": 2, "optimizer": _not_norms}, optimizer=_all_decayed),
        at="Tensor.mul_.*|Optimizer.AdamW.step.0",
        cause="boundary|argument",
    ),
    _case(
        "gpt2-gradients-kept",
        fitting("gpt2", {"steps": 3}, zero_grad=False),
        at="Module.transformer.wte.*parameters_grad*",
        cause="boundary",
        step=1,
    ),
    _case(
        "gpt2-other-betas",
        fitting("gpt2", {"steps": 3}, optimizer=lambda p: adamw(p, betas=(0.9, 0.99))),
        at="Optimizer.AdamW.step.0",
        cause="argument",
    ),
    _case(
        "whisper-one-softmax-row",
        fitting(
            "whisper",
            {"prepare": EAGER},
            inside=lambda: _all_of(other_kernels, _wrong("_softmax", 1, one_row(gain(1.2)))),
        ),
        at="Functional.softmax.1.forward",
        cause="result",
    ),
    _case(
        "llama-autocast-and-silu-wrong",
        fitting("llama", TEXT, around=_autocast(), inside=_wrong("silu", 1, gain(1.1))),
        at="Functional.silu.1.forward",
        cause="result",
    ),
    _case(
        "bert-bf16-and-gelu-wrong",
        fitting("bert", prepare=_to(BF16), inside=_wrong("gelu", 0, gain(1.1))),
        at="Functional.gelu.0.forward",
        cause="result",
    ),
    _case(
        "t5-bf16-and-softmax-wrong",
        fitting("t5", prepare=_to(BF16), inside=_wrong("_softmax", 2, gain(1.1))),
        at="Functional.scaled_dot_product_attention.2.forward",
        cause="result",
    ),
    _case(
        "gpt2-autocast-and-linear-backward-wrong",
        fitting("gpt2", around=_autocast(), inside=_wrong("tanh_backward", 1, gain(1.2))),
        at="Torch.tanh.0.backward",
        cause="result",
    ),
    _case(
        "bert-transposed-and-linear-wrong",
        fitting("bert", prepare=_transposed_storage, inside=_wrong("addmm", 3, gain(1.01))),
        at="Functional.linear.3.forward",
        cause="result",
    ),
    _case(
        "llama-math-and-softmax-wrong",
        fitting(
            "llama",
            {"inside": _backend("FLASH_ATTENTION")},
            inside=lambda: _all_of(_backend("MATH"), _wrong("_safe_softmax", 0, gain(1.05))),
        ),
        at="Functional.scaled_dot_product_attention.0.forward",
        cause="result",
    ),
]
