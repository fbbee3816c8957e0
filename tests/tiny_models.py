"""Small real models with random weights, each with a function that gives a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def _tokens(model: nn.Module) -> Tensor:
    ids = torch.arange(24).reshape(2, 12) % 50
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config), _tokens


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    ), _tokens


def bert() -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
    )

    def run(model: nn.Module) -> Tensor:
        ids = torch.arange(24).reshape(2, 12) % 50
        return model(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1])
        ).loss

    return BertForSequenceClassification(config), run


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
    )

    def run(model: nn.Module) -> Tensor:
        pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
        return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss

    return ViTForImageClassification(config), run


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )

    def run(model: nn.Module) -> Tensor:
        ids = torch.arange(24).reshape(2, 12) % 50
        return model(input_ids=ids, labels=ids[:, :6].clone(), use_cache=False).loss

    return T5ForConditionalGeneration(config), run


def mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config), _tokens


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def run(model: nn.Module) -> Tensor:
        features = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)
        labels = torch.arange(12).reshape(2, 6) + 3
        return model(input_features=features, labels=labels, use_cache=False).loss

    return WhisperForConditionalGeneration(config), run


MODELS: dict[str, Callable[[], Built]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "mixtral": mixtral,
    "whisper": whisper,
}
