"""False alarms and speed of `tensorprobe check`: every call of a training step of HF models.

    python benchmarks/check_models.py [--models llama bert] [--dtypes fp32 bf16 fp16] [--jobs 2]

Each model is recorded on the CPU with tensors, then every call (none left out as alike) is checked
on the CPU against its float64 reference. A healthy CPU must not fail.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import tensorprobe as tp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TEXT = {"vocab_size": 211}


def tokens(batch: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 211, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def llama() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **sizes, **heads)), tokens()


def gpt2() -> Any:
    config = hf.GPT2Config(
        **TEXT, n_embd=96, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(config), tokens()


def bert() -> Any:
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    batch = tokens()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 15:] = 0
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, **sizes, intermediate_size=192)), batch


def t5() -> Any:
    sizes = {"d_model": 96, "d_kv": 24, "d_ff": 192, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(**TEXT, **sizes, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config), tokens()


def vit() -> Any:
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.ViTConfig(**sizes, intermediate_size=192, image_size=32, patch_size=8)
    return hf.ViTForImageClassification(config), images()


def convnext() -> Any:
    config = hf.ConvNextConfig(hidden_sizes=[24, 48], depths=[2, 2], num_stages=2, image_size=32)
    return hf.ConvNextForImageClassification(config), images()


MODELS = {make.__name__: make for make in (llama, gpt2, bert, t5, vit, convnext)}


def record(name: str, dtype: str, folder: Path) -> Path:
    """One training step of a model, with tensors."""
    torch.manual_seed(1)
    model, batch = MODELS[name]()
    model = model.train().to(DTYPES[dtype])
    batch = {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / f"{name}-{dtype}"
    with tp.Recorder(path, level="L1", keep="tensors"):
        model(**batch).loss.backward()
        optimizer.step()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="calls that are alike only once")
    args = parser.parse_args()
    print("| model | dtype | calls | pass | fail | crashed | skipped | worst share | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for dtype in args.dtypes:
                path = record(name, dtype, Path(folder))
                begin = time.perf_counter()
                done = tp.check(
                    path, Path(folder) / "out" / path.name, every=not args.once, jobs=args.jobs
                )
                elapsed = time.perf_counter() - begin
                n = done.counts
                worst = max(
                    (row.error for row in done.rows if row.verdict == "pass" and row.error),
                    default=0.0,
                )
                print(
                    f"| {name} | {dtype} | {n['checked']} | {n['pass']} | {n['fail']} | "
                    f"{n['crashed']} | {n['skipped']} | {worst:.2f} | {elapsed:.1f} |",
                    flush=True,
                )
                for row in done.rows:
                    if row.verdict in ("fail", "crashed"):
                        print(f"    {row.name}: {row.reason}")
                    if row.recorded:
                        print(f"    {row.name}, as recorded: {row.recorded}")


if __name__ == "__main__":
    main()
