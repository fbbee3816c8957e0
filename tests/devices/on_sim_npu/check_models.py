"""Hugging Face models train on the simulated NPU and give the host's numbers bit for bit.

Eager attention, no fault, no autocast: then every kernel is the same one. Whisper draws from the
host's random numbers to skip layers, so its dropout is off here: with both on, a run on one device
has one stream of random numbers and a run on two has two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tensorprobe.devices import sim_npu

transformers.logging.set_verbosity_error()

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "attn_implementation": "eager",
}  # fmt: skip


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


TEXT = {"input_ids": ids(60, 2, 12), "labels": ids(60, 2, 12)}


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=32, **SIZES)
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=60, max_position_embeddings=32, num_key_value_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=60, max_position_embeddings=32, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, output_router_logits=True, **SIZES,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=10, max_target_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "bert": (bert, TEXT),
    "gpt2": (gpt2, TEXT),
    "t5": (t5, TEXT),
    "llama": (llama, TEXT),
    "vit": (vit, {"pixel_values": floats(2, 3, 16, 16), "labels": ids(5, 2)}),
    "mixtral": (mixtral, TEXT),
    "whisper": (whisper, {"input_features": floats(2, 8, 20), "labels": ids(60, 2, 8)}),
}


def train(name: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[list[float], Any]:
    """Three steps; the losses and the parameters."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device=device, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = {key: value.to(device) for key, value in batch.items()}
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach().cpu() for key, value in model.named_parameters()}


def check_bit_equal(name: str, dtype: torch.dtype = torch.float32) -> None:
    expected_losses, expected = train(name, "cpu", dtype)
    losses, actual = train(name, "npu", dtype)
    assert losses == expected_losses
    assert actual.keys() == expected.keys()  # tied weights are still tied
    different = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert different == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_model_is_bit_equal(name: str) -> None:
    check_bit_equal(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_bit_equal(name: str) -> None:
    check_bit_equal(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_model_is_bit_equal_in_bfloat16(name: str) -> None:
    check_bit_equal(name, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_noisy_chip_is_close_and_a_broken_one_is_not(name: str) -> None:
    expected, parameters = train(name, "cpu")
    with sim_npu.noise(1):
        noisy, shaken = train(name, "npu")
    assert any(not torch.equal(shaken[key], parameters[key]) for key in parameters)
    assert noisy == pytest.approx(expected, rel=1e-4)
    with sim_npu.plant(op="*softmax", effect="scale:1.2"):
        broken, _ = train(name, "npu")
    assert broken != pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_trains_under_autocast(dtype: torch.dtype) -> None:
    make, batch = MODELS["llama"]
    model = make().npu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("npu", enabled=dtype == torch.float16)
    losses = []
    for _ in range(4):
        with torch.autocast("npu", dtype=dtype):
            loss = model(**{key: value.npu() for key, value in batch.items()}).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_generation() -> None:
    torch.manual_seed(0)
    model = llama().eval()
    prompt = ids(60, 1, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    actual = model.npu().generate(prompt.npu(), **options)
    assert actual.tolist() == expected.tolist()
