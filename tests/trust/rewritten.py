"""A Llama and a GPT-2 written by hand with fused weights, and transformers' of the same weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def hf_llama(dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    """transformers' Llama with random weights, those of norms too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    return _with_norms(LlamaForCausalLM(config)).eval().to(dtype)


def hf_gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.15,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, pad_token_id=0,
    )  # fmt: skip
    return _with_norms(GPT2LMHeadModel(config)).eval().to(dtype)


def hf_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=48, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _with_norms(T5ForConditionalGeneration(config)).eval()


def _with_norms(model: nn.Module) -> nn.Module:
    """With other weights of norms than ones, as trained models have them."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "weight" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class Norm(nn.Module):
    """An RMS norm; `weighted=False` forgets its weight."""

    def __init__(self, width: int, eps: float, weighted: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if weighted:
            self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * self.weight if hasattr(self, "weight") else y


class Attention(nn.Module):
    """Grouped-query attention with one matrix for keys and values."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        self.fault = fault
        self.wq = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.wkv = nn.Linear(config.hidden_size, 2 * self.groups * self.size, bias=False)
        self.wo = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Tensor, hidden: Tensor) -> Tensor:
        n, length, _ = x.shape
        q = self.wq(x).view(n, length, self.heads, self.size).transpose(1, 2)
        k, v = self.wkv(x).view(n, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = self.turned(q, angles), self.turned(k, angles)
        times = self.heads // self.groups
        if self.fault == "gqa":  # as numpy's tile: 0 1 0 1 in place of 0 0 1 1
            k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
        else:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self.size**-0.5
        if self.fault == "scale":
            scores = scores * self.size**-0.5
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        mixed = scores.softmax(-1).to(x.dtype) @ v
        return self.wo(mixed.transpose(1, 2).reshape(n, length, -1))

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """RoPE of halves; or, as a fault, of neighbours."""
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.fault == "rope":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class FeedForward(nn.Module):
    """One matrix for gate and up."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        if self.fault == "swapped":
            gate, up = up, gate
        act = F.gelu if self.fault == "activation" else F.silu
        return self.down(act(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        eps = 1e-3 if fault == "eps" else config.rms_norm_eps
        self.norm1 = Norm(config.hidden_size, eps, weighted=fault != "norm")
        self.attn = Attention(config, fault)
        self.norm2 = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, fault)
        self.fault = fault

    def forward(self, x: Tensor, angles: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles, hidden)
        y = self.mlp(self.norm2(x))
        return y if self.fault == "residual" else x + y


class HandLlama(nn.Module):
    """Llama, written by hand. `fault` is what is wrong, in layer `where` or in all."""

    def __init__(self, config: Any, fault: str = "", where: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config, fault if where in (None, i) else "")
            for i in range(config.num_hidden_layers)
        )
        self.final = Norm(config.hidden_size, config.rms_norm_eps)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.size = config.hidden_size // config.num_attention_heads

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        steps = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        angles = torch.outer(torch.arange(length).float(), 10000.0**-steps)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angles, hidden)
        return self.out(self.final(x))


@torch.no_grad()
def converted(model: nn.Module, fault: str = "", where: int | None = None) -> HandLlama:
    """transformers' Llama as one written by hand, with its weights."""
    mine = HandLlama(model.config, fault, where).eval().to(model.dtype)
    mine.embed.weight.copy_(model.model.embed_tokens.weight)
    mine.final.weight.copy_(model.model.norm.weight)
    mine.out.weight.copy_(model.lm_head.weight)
    for i, (block, layer) in enumerate(zip(mine.blocks, model.model.layers, strict=True)):
        here = where in (None, i)
        if hasattr(block.norm1, "weight"):
            block.norm1.weight.copy_(layer.input_layernorm.weight)
        block.norm2.weight.copy_(layer.post_attention_layernorm.weight)
        attn, mlp = layer.self_attn, layer.mlp
        block.attn.wq.weight.copy_(attn.q_proj.weight)
        parts = [attn.k_proj.weight, attn.v_proj.weight]
        if fault == "kv order" and here:
            parts.reverse()
        block.attn.wkv.weight.copy_(torch.cat(parts))
        block.attn.wo.weight.copy_(attn.o_proj.weight)
        parts = [mlp.gate_proj.weight, mlp.up_proj.weight]
        if fault == "gate order" and here:
            parts.reverse()
        block.mlp.gate_up.weight.copy_(torch.cat(parts))
        block.mlp.down.weight.copy_(mlp.down_proj.weight)
        if fault == "weights" and here:
            block.mlp.down.weight[3] *= 1.01
    return mine


MAPPING = """\
embed: model.embed_tokens
final: model.norm
out: lm_head
blocks: model.layers
Block: {norm1: input_layernorm, norm2: post_attention_layernorm, attn: self_attn}
Attention: {wq: q_proj, wo: o_proj, wkv: [k_proj, v_proj]}
FeedForward: {gate_up: [gate_proj, up_proj], down: down_proj}
"""


@torch.no_grad()
def turned_llama(model: nn.Module, fault: str = "", where: int | None = None) -> HandLlama:
    """With RoPE of neighbours, and rows of the weights in the order that this takes."""
    mine = converted(model, fault, where)
    for block in mine.blocks:
        attn = block.attn
        attn.fault = "rope"
        order = torch.arange(attn.size).view(2, -1).T.reshape(-1)  # 0 4 1 5 ...: pairs together
        heads = attn.wq.weight.view(attn.heads, attn.size, -1)
        attn.wq.weight.copy_(heads[:, order].flatten(0, 1))
        keys, values = attn.wkv.weight.chunk(2)
        keys = keys.view(attn.groups, attn.size, -1)[:, order].flatten(0, 1)
        attn.wkv.weight.copy_(torch.cat((keys, values)))
    return mine


class Apart(nn.Module):
    """Queries, keys and values of GPT-2 as three linears in place of one Conv1D."""

    def __init__(self, joined: nn.Module) -> None:
        super().__init__()
        width = joined.weight.shape[0]
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        weights, biases = joined.weight.chunk(3, 1), joined.bias.chunk(3)
        for linear, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.q(x), self.k(x), self.v(x)), -1)


@torch.no_grad()
def split_gpt2(model: nn.Module) -> nn.Module:
    """The same GPT-2 with the matrix of its attention in three."""
    for block in model.transformer.h:
        block.attn.c_attn = Apart(block.attn.c_attn)
    return model


class Served(Attention):
    """Attention over packed tokens, with the keys and values of each request in a list."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__(config, fault)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, requests: Tensor, at: Tensor) -> Tensor:
        n = len(x)
        steps = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        angles = torch.outer(at.float(), 10000.0**-steps)[:, None]
        q = self.turned(self.wq(x).view(n, self.heads, self.size), angles)
        k, v = self.wkv(x).view(n, 2, self.groups, self.size).unbind(1)
        k = self.turned(k, angles)
        mixed = torch.empty_like(q)
        for request in requests.unique().tolist():
            mine = requests == request
            keys, values = self.kept.get(request, (k[:0], v[:0]))
            keys, values = torch.cat((keys, k[mine])), torch.cat((values, v[mine]))
            self.kept[request] = keys, values
            if self.fault == "slot" and request == 1 and 0 in self.kept:
                keys, values = (x[: len(keys)] for x in self.kept[0])
            times = self.heads // self.groups
            scores = torch.einsum("qhd,khd->hqk", q[mine], keys.repeat_interleave(times, 1))
            late = torch.arange(len(keys))[None] > at[mine][:, None]
            scores = (scores * self.size**-0.5).masked_fill(late, -torch.inf).softmax(-1)
            mixed[mine] = torch.einsum("hqk,khd->qhd", scores, values.repeat_interleave(times, 1))
        return self.wo(mixed.reshape(n, -1))


class Engine(HandLlama):
    """A serving engine: a call takes tokens of any requests, packed into one row."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, fault: str = "") -> None:
        super().__init__(model.config)
        self.fault = fault
        for block in self.blocks:
            block.attn = Served(model.config, fault)
        self.load_state_dict(converted(model).state_dict())
        self.eval()

    def forward(self, tokens: Tensor, requests: Tensor, at: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            places = at - at.min() if self.fault == "positions" else at
            x = x + block.attn(block.norm1(x), requests, places)
            x = x + block.mlp(block.norm2(x))
        return self.out(self.final(x))
