"""Tiny Hugging Face models, rounding noise on every matmul, norm and softmax, and one fault.

The noise and the fault are a dispatch mode below the recorder: one kernel's result is altered once,
and everything after it goes on from there, as with a wrong kernel of a device.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe as tp

NOISY = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_batch_norm",
    "native_batch_norm_backward", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_fused_rms_norm",
}  # fmt: skip

_INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def shift_ulps(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Each number moved by so many of its neighbours; zeros and infinities stay."""
    kind = _INTEGERS[x.dtype]
    x = x.contiguous()
    moved = (x.view(kind) + steps.to(kind)).view(x.dtype)
    tiny = torch.finfo(x.dtype).tiny * 4
    usable = (x.abs() > tiny) & (x.abs() < torch.finfo(x.dtype).max / 4)
    return torch.where(usable, moved, x)


def layout_like(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype)
    return out.copy_(new)


Alter = Callable[[torch.Tensor], torch.Tensor]


class Fault:
    """Alter output `output` of the `nth` call of kernel `op`; `phase` forward or backward."""

    def __init__(
        self, op: str, nth: int, alter: Alter, output: int = 0, phase: str = "forward"
    ) -> None:
        self.op, self.nth, self.alter, self.output, self.phase = op, nth, alter, output, phase


class Device(TorchDispatchMode):
    """Kernels with rounding noise of one or two ULP, and at most one fault."""

    def __init__(self, noise: bool, fault: Fault | None = None, seed: int = 7) -> None:
        super().__init__()
        self.noise, self.fault = noise, fault
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0
        self.struck = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if self.noise and name in NOISY:
            result = self._each(result, self._with_noise)
        fault = self.fault
        if fault is not None and name == fault.op and _phase() == fault.phase:
            if self.count == fault.nth:
                result = self._strike(result, fault, in_place=name.endswith("_"))
            self.count += 1
        return result

    def _each(self, result: Any, change: Alter) -> Any:
        if isinstance(result, torch.Tensor):
            return change(result)
        # of several results the first floating ones are the answer; statistics and states follow
        parts = list(result)
        for i in range(min(3, len(parts))):
            if isinstance(parts[i], torch.Tensor) and parts[i].is_floating_point():
                parts[i] = change(parts[i])
        return tuple(parts)

    def _with_noise(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in _INTEGERS or not x.numel():
            return x
        steps = torch.randint(1, 3, x.shape, generator=self.generator)
        signs = torch.randint(0, 2, x.shape, generator=self.generator) * 2 - 1
        return layout_like(shift_ulps(x, steps * signs), x)

    def _strike(self, result: Any, fault: Fault, in_place: bool) -> Any:
        self.struck = True
        if in_place:
            return result.copy_(fault.alter(result.clone()))
        if isinstance(result, torch.Tensor):
            return layout_like(fault.alter(result.clone()), result)
        parts = list(result)
        old = parts[fault.output]
        parts[fault.output] = layout_like(fault.alter(old.clone()), old)
        return tuple(parts)


def _phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


# Faults


def gain(factor: float) -> Alter:
    return lambda x: x * factor


def ulps(n: int) -> Alter:
    return lambda x: shift_ulps(x, torch.full(x.shape, n))


def one_row(change: Alter) -> Alter:
    def alter(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).clone()
        at = len(rows) // 3
        rows[at] = change(rows[at])
        return rows.reshape(x.shape)

    return alter


def through_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def permuted_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).clone()
    rows[[0, 1]] = rows[[1, 0]]
    return rows.reshape(x.shape)


def one_value(value: float) -> Alter:
    def alter(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).clone()
        flat[flat.numel() // 2] = value
        return flat.reshape(x.shape)

    return alter


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


# Models


def _ids(batch: int = 2, length: int = 16, vocabulary: int = 96) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def gpt2(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    c = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32,
                   bos_token_id=0, eos_token_id=0, **config)  # fmt: skip
    ids = _ids()
    return GPT2LMHeadModel(c), {"input_ids": ids, "labels": ids}


def llama(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    c = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=96,
                    num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=0,
                    max_position_embeddings=32, **config)  # fmt: skip
    ids = _ids()
    return LlamaForCausalLM(c), {"input_ids": ids, "labels": ids}


def bert(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    c = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=96,
                   intermediate_size=64, max_position_embeddings=32, **config)  # fmt: skip
    ids = _ids()
    return BertForMaskedLM(c), {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids,
    }  # fmt: skip


def t5(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    c = T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=96,
                 decoder_start_token_id=0, **config)  # fmt: skip
    ids = _ids()
    return T5ForConditionalGeneration(c), {"input_ids": ids, "labels": ids}


def vit(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    c = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                  image_size=16, patch_size=4, num_labels=4, **config)  # fmt: skip
    images = torch.randn(2, 3, 16, 16)
    return ViTForImageClassification(c), {"pixel_values": images, "labels": torch.tensor([1, 2])}


def resnet(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config.pop("attn_implementation", None)
    c = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                     num_labels=4, **config)  # fmt: skip
    images = torch.randn(2, 3, 32, 32)
    return ResNetForImageClassification(c), {"pixel_values": images, "labels": torch.tensor([1, 2])}


def qwen2(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    c = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=96,
                    num_attention_heads=2, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
                    max_position_embeddings=32, **config)  # fmt: skip
    ids = _ids()
    return Qwen2ForCausalLM(c), {"input_ids": ids, "labels": ids}


MODELS = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, resnet, qwen2)}
Prepare = Callable[[torch.nn.Module, dict[str, Any]], None]


def record_run(
    folder: Path,
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    noise: bool = False,
    fault: Fault | None = None,
    keep: str = "tensors",
    level: str = "mix",
    attention: str = "eager",
    prepare: Prepare | None = None,
    seed: int = 1,
    lr: float = 1e-3,
    steps: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Record `steps` training steps of a model, on a device with noise or a fault."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), quiet_hub(), one_thread():
        warnings.simplefilter("ignore")
        net, batch = MODELS[model](attn_implementation=attention, **(config or {}))
        net = net.to(dtype).train()
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].to(dtype)
        if prepare is not None:
            prepare(net, batch)
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        torch.manual_seed(seed)
        device = Device(noise, fault)
        with device, tp.Recorder(folder, keep=keep, level=level) as recorder:
            for _ in range(steps):
                net(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
    assert fault is None or device.struck, f"no {fault.phase} {fault.op} number {fault.nth}"
    return folder


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Two runs of one program then give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
