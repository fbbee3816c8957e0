"""The planted faults: one altered kernel each, or one difference between the two programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import planting as p
import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault of the actual side; `kind` is what its culprit must be, `quick` in the fast set."""

    name: str
    model: str
    dtype: torch.dtype = F32
    fault: Callable[[], p.Fault] | None = None
    kind: str = "output"
    quick: bool = False
    actual: dict[str, Any] = dataclasses.field(default_factory=dict)
    both: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""  # what the culprit's name or module must contain, where no kernel is altered


def _case(
    name: str, model: str, op: str, nth: int, alter: p.Alter, kind: str = "output", **more: Any
) -> Case:
    phase = "backward" if kind == "gradient" or more.pop("backward", False) else "forward"
    output = more.pop("output", 0)
    return Case(
        name, model, fault=lambda: p.Fault(op, nth, alter, output, phase), kind=kind, **more
    )


SMALL = p.gain(1.0005)

KERNELS = [
    _case("gain-addmm", "gpt2", "addmm", 3, SMALL, quick=True),
    _case("gain-layer-norm", "gpt2", "native_layer_norm", 2, SMALL),
    _case("row-softmax", "gpt2", "_softmax", 1, p.one_row(p.gain(1.01)), quick=True),
    _case("bf16-mm", "gpt2", "mm", 0, p.through_bf16),
    _case("permuted-bmm", "gpt2", "bmm", 1, p.permuted_rows),
    _case("nan-bmm", "gpt2", "bmm", 2, p.one_value(float("nan")), "nonfinite", quick=True),
    _case("inf-addmm", "gpt2", "addmm", 5, p.one_value(float("inf")), "nonfinite"),
    _case("gain-tanh", "gpt2", "tanh", 0, SMALL),
    _case("grad-layer-norm", "gpt2", "native_layer_norm_backward", 1, SMALL, "gradient"),
    _case("grad-dropped-mm", "gpt2", "mm", 4, p.dropped, "gradient", quick=True),
    _case("grad-softmax", "gpt2", "_softmax_backward_data", 0, SMALL, "gradient"),
    _case("gain-linear", "llama", "mm", 6, SMALL),
    _case("gain-rsqrt", "llama", "rsqrt", 1, SMALL),
    _case("gain-silu", "llama", "silu", 1, SMALL),
    _case("row-mul", "llama", "mul", 9, p.one_row(p.gain(1.01))),
    _case("grad-mm", "llama", "mm", 7, SMALL, "gradient", quick=True),
    _case("grad-silu", "llama", "silu_backward", 0, p.through_bf16, "gradient"),
    _case("gain-gelu", "bert", "gelu", 1, SMALL),
    _case("gain-embedding", "bert", "embedding", 1, SMALL),
    _case("permuted-norm", "bert", "native_layer_norm", 3, p.permuted_rows, quick=True),
    _case("grad-gelu", "bert", "gelu_backward", 1, SMALL, "gradient"),
    _case("grad-bmm", "bert", "bmm", 3, p.one_row(p.gain(0.99)), "gradient"),
    _case("nan-grad", "bert", "mm", 5, p.one_value(float("nan")), "nonfinite", backward=True),
    _case("gain-relu", "t5", "relu", 1, SMALL),
    _case("gain-cross-attention", "t5", "bmm", 8, SMALL),
    _case("bf16-log-softmax", "t5", "_log_softmax", 0, p.through_bf16),
    _case("grad-embedding", "t5", "embedding_dense_backward", 0, SMALL, "gradient"),
    _case("gain-conv", "vit", "convolution", 0, SMALL, quick=True),
    _case("row-add", "vit", "add", 4, p.one_row(p.gain(1.01))),
    _case("grad-conv", "vit", "convolution_backward", 0, SMALL, "gradient", output=1),
    _case("gain-batch-norm", "resnet", "native_batch_norm", 2, SMALL),
    _case("gain-pool", "resnet", "mean", 0, SMALL),
    _case("grad-batch-norm", "resnet", "native_batch_norm_backward", 1, SMALL, "gradient"),
    _case("gain-cos", "qwen2", "cos", 0, SMALL),
    _case("grad-linear", "qwen2", "mm", 3, p.gain(0.5), "gradient"),
    # 16-bit: four neighbours further, or a factor of as much
    _case("bf16-4ulp-addmm", "gpt2", "addmm", 4, p.ulps(4), dtype=BF16, quick=True),
    _case("bf16-4ulp-mm", "llama", "mm", 5, p.ulps(4), dtype=BF16),
    _case("bf16-gain-norm", "bert", "native_layer_norm", 2, p.gain(1 + 4 * 2**-7), dtype=BF16),
    _case("bf16-4ulp-gelu", "vit", "gelu", 1, p.ulps(-4), dtype=BF16),
    _case("bf16-grad-mm", "gpt2", "mm", 6, p.ulps(4), "gradient", dtype=BF16),
    _case("bf16-row-bmm", "bert", "bmm", 2, p.one_row(p.gain(1.2)), dtype=BF16),
    _case("f16-4ulp-linear", "qwen2", "addmm", 2, p.ulps(4), dtype=F16),
    _case("f16-4ulp-softmax", "llama", "_softmax", 1, p.gain(1 + 4 * 2**-10), dtype=F16),
    _case("f16-grad-norm", "gpt2", "native_layer_norm_backward", 2, p.ulps(4), "gradient",
          dtype=F16),
]  # fmt: skip


def _scale_weight(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        net.get_parameter("transformer.h.1.mlp.c_fc.weight").mul_(1.001)


def _one_weight(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        net.get_parameter("model.layers.1.self_attn.q_proj.weight")[3, 4] += 0.05


def _other_token(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 3] = (batch["input_ids"][0, 3] + 1) % 96


def _other_mask(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, -2:] = 0


def _extra_call(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    net.transformer.h[0].mlp.register_forward_hook(lambda module, args, out: out * 1.0)


def _scaling_call(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    net.transformer.h[0].mlp.register_forward_hook(lambda module, args, out: out * 1.001)


def _eps(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    net.transformer.h[1].ln_1.eps = 1e-4


PROGRAMS = [
    Case("weight-scaled", "gpt2", kind="parameter", actual={"prepare": _scale_weight},
         where="transformer.h.1.mlp.c_fc", quick=True),
    Case("weight-one", "llama", kind="parameter", actual={"prepare": _one_weight},
         where="model.layers.1.self_attn.q_proj"),
    Case("token", "gpt2", kind="input", actual={"prepare": _other_token}, where="GPT2LMHeadModel"),
    Case("mask", "bert", kind="input", actual={"prepare": _other_mask}, where="BertForMaskedLM"),
    Case("eps", "gpt2", kind="argument", actual={"prepare": _eps}, where="transformer.h.1.ln_1",
         quick=True),
    Case("dropout-seed", "bert", kind="output", actual={"seed": 2}, where="dropout", quick=True),
    Case("dropout-p", "bert", kind="argument", actual={"config": {"hidden_dropout_prob": 0.2}},
         where="dropout"),
    Case("learning-rate", "gpt2", kind="argument", actual={"lr": 2e-3}, where="Optimizer.AdamW",
         quick=True),
    Case("scaling-call", "gpt2", kind="structure", actual={"prepare": _scaling_call},
         where="Tensor.mul"),
    _case("inserted-then-fault", "gpt2", "addmm", 6, SMALL, actual={"prepare": _extra_call}),
]  # fmt: skip

HEALTHY = [
    *(Case(f"noise-{model}-{str(dtype)[6:]}", model, dtype) for model in p.MODELS
      for dtype in (F32, BF16)),
    Case("eager-sdpa-gpt2", "gpt2", actual={"attention": "sdpa"}),
    Case("eager-sdpa-llama", "llama", actual={"attention": "sdpa"}),
    Case("eager-sdpa-bert", "bert", actual={"attention": "sdpa"},
         both={"config": {"attention_probs_dropout_prob": 0.0}}),
    Case("inserted-no-op", "gpt2", actual={"prepare": _extra_call}),
]  # fmt: skip
