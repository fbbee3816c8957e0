"""Healthy calls judged by the laws of rounding: how many, and how many false alarms.

    python benchmarks/below_rounding.py --dtypes fp32 bf16 fp16 --rounds 10
    python benchmarks/below_rounding.py --calibrate table.json --rounds 40
    python benchmarks/below_rounding.py --device cuda --calibrate table.json --rounds 40

Each round records training steps of five Hugging Face models and a program of single operators,
with sizes, numbers, threads, attention and libraries drawn by its seed. With --calibrate the table
of kernels is made of them instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import transformers as hf

import tensorprobe as tp
from tensorprobe.comparing.evidence import own_error
from tensorprobe.replay.calibrate import calibrate
from tensorprobe.replay.calibration import Section, read_table
from tensorprobe.replay.pairing import pair

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = ("mix", "mix", "mix", "L2", "L0")


def _tokens(draw: random.Random) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (draw.choice((1, 2, 4)), draw.choice((7, 16, 33, 64))))
    return {"input_ids": ids, "labels": ids}


def _sizes(draw: random.Random) -> tuple[int, int, int]:
    heads = draw.choice((2, 4))
    return heads, heads * draw.choice((8, 16, 32)), draw.choice((48, 96, 200))


def llama(draw: random.Random, attention: str) -> Any:
    heads, hidden, inner = _sizes(draw)
    config = hf.LlamaConfig(
        vocab_size=97, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, attn_implementation=attention,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), _tokens(draw)


def gpt2(draw: random.Random, attention: str) -> Any:
    heads, hidden, _ = _sizes(draw)
    config = hf.GPT2Config(
        vocab_size=97, n_embd=hidden, n_layer=2, n_head=heads, n_positions=64, bos_token_id=0,
        eos_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), _tokens(draw)


def bert(draw: random.Random, attention: str) -> Any:
    heads, hidden, inner = _sizes(draw)
    config = hf.BertConfig(
        vocab_size=97, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=inner, attn_implementation=attention,
    )  # fmt: skip
    batch = _tokens(draw)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][-1, 5:] = 0
    return hf.BertForMaskedLM(config), batch


def t5(draw: random.Random, attention: str) -> Any:
    heads, hidden, inner = _sizes(draw)
    config = hf.T5Config(
        vocab_size=97, d_model=hidden, d_kv=hidden // heads, d_ff=inner, num_layers=2,
        num_heads=heads, decoder_start_token_id=0,
        feed_forward_proj=draw.choice(("relu", "gated-gelu")),
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _tokens(draw)


def resnet(draw: random.Random, attention: str) -> Any:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, draw.choice((16, 32))], depths=[1, 2],
        layer_type=draw.choice(("basic", "bottleneck")), num_labels=5,
    )  # fmt: skip
    side = draw.choice((24, 32, 48))
    pixels = torch.randn(draw.choice((2, 4)), 3, side, side)
    return hf.ResNetForImageClassification(config), {
        "pixel_values": pixels, "labels": torch.arange(len(pixels)) % 5,
    }  # fmt: skip


MODELS = (llama, gpt2, bert, t5, resnet)


def train(model: Callable[..., Any], draw: random.Random, dtype: torch.dtype, device: str) -> None:
    """Two steps of training."""
    net, batch = model(draw, draw.choice(("sdpa", "eager")))
    if draw.random() < 0.5:  # as large as trained weights may be
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(draw.choice((1.0, 2.0, 4.0)))
    net = net.to(device=device, dtype=dtype).train()
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    batch = {name: value.to(device) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        net(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def operators(draw: random.Random, dtype: torch.dtype, device: str) -> None:
    """Single operators on numbers of other sizes and shapes than models give them."""
    rows, width = draw.choice((8, 40, 100)), draw.choice((16, 96, 256, 1024))
    size = draw.choice((0.01, 1.0, 1.0, 8.0))

    def given(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * size).to(device=device, dtype=dtype).requires_grad_()

    x = given(rows, width)
    results = [
        F.linear(x, given(64, width), given(64)),
        x @ given(width, 48),
        torch.matmul(given(4, rows, 32), given(4, 32, 40)),
        F.layer_norm(x + draw.choice((0.0, 3.0)), (width,), given(width), given(width)),
        F.rms_norm(x, (width,), given(width)),
        F.softmax(x, -1), F.log_softmax(x, -1), F.gelu(x), F.gelu(x, approximate="tanh"),
        F.silu(x), torch.tanh(x), torch.sigmoid(x), torch.exp(x.clamp(max=8)), x + given(width),
        x * given(rows, width), x - given(rows, 1), x / (given(rows, width).abs() + 0.1), x * 0.3,
        x + 0.7, x.pow(2), torch.rsqrt(x.abs() + 0.01), torch.sqrt(x.abs() + 0.01), x.sum(-1),
        x.mean(0), x.sum(), torch.sin(x), torch.cos(x), F.softplus(x), torch.sigmoid(x) * x,
        F.leaky_relu(x), torch.log(x.abs() + 0.5), F.mse_loss(x, given(rows, width)),
        F.cross_entropy(x, torch.arange(rows, device=device) % width), F.relu(x), torch.var(x, -1),
        F.group_norm(given(2, 16, 9, 9), 4, given(16), given(16)),
        F.batch_norm(given(4, 12, 9, 9), None, None, given(12), given(12), training=True),
        F.conv2d(given(2, 8, 15, 15), given(12, 8, 3, 3), given(12), padding=1),
        F.conv1d(given(2, 8, 40), given(12, 8, 3), given(12)),
        F.avg_pool2d(given(2, 8, 16, 16), 2), F.adaptive_avg_pool2d(given(2, 8, 16, 16), 1),
        F.embedding(torch.randint(0, 20, (4, 30)).to(device), given(20, 64)),
        F.scaled_dot_product_attention(
            given(2, 4, 24, 16), given(2, 4, 24, 16), given(2, 4, 24, 16),
            is_causal=draw.random() < 0.5,
        ),
        torch.addmm(given(40), given(rows, 64), given(64, 40)),
        torch.bmm(given(3, 9, 70), given(3, 70, 33)),
        torch.baddbmm(given(3, 9, 33), given(3, 9, 70), given(3, 70, 33)),
        torch.einsum("bij,bjk->bik", given(3, 20, 30), given(3, 30, 20)),
    ]  # fmt: skip
    finite = [each for each in results if each.requires_grad]
    incoming = [(torch.randn(each.shape) * size).to(device, dtype) for each in finite]
    torch.autograd.backward(finite, incoming)


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (*MODELS, operators)
}


@contextlib.contextmanager
def surroundings(draw: random.Random) -> Iterator[str]:
    """Other threads, and oneDNN on or off."""
    threads = torch.get_num_threads()
    torch.set_num_threads(draw.choice((1, 2, 3)))
    on = draw.random() < 0.6
    try:
        with torch.backends.mkldnn.flags(enabled=on), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield f"{torch.get_num_threads()} threads, oneDNN {'on' if on else 'off'}"
    finally:
        torch.set_num_threads(threads)


def record_round(
    seed: int, dtype: torch.dtype, folder: Path, programs: list[str], device: str
) -> Iterator[tuple[str, Path]]:
    """Captures of one round, each with how it came about."""
    draw = random.Random(seed)
    for at, program in enumerate(PROGRAMS[name] for name in programs):
        torch.manual_seed(seed)
        level = draw.choice(LEVELS[:-1] if program is operators else LEVELS)
        path = folder / str(at)
        with surroundings(draw) as how, tp.Recorder(path, keep="tensors", level=level):
            if program is operators:
                operators(draw, dtype, device)
            else:
                train(program, draw, dtype, device)
        yield f"{program.__name__} at {level}, {how}, seed {seed}", path


def judge(path: Path, how: str) -> Iterator[tuple[str, str]]:
    """Of every result, its law and what it breaks."""
    for forward, backward in pair(tp.load(path).calls):
        for back in (None, backward) if backward is not None else (None,):
            evidence = own_error(forward, back, noise=False)
            for name, error in evidence.errors.items():
                text = ""
                if error.breach is not None:
                    text = f"{how}: {(back or forward).name} {name} {error.breach.text}"
                yield error.law or "none", text


def _made_by(device: str) -> dict[str, str]:
    made_by = {"torch": str(torch.__version__)}
    if device == "cpu":
        return made_by | {
            "machine": platform.machine(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "library": "oneDNN and ATen, 1 to 3 threads",
        }
    return made_by | {
        "machine": torch.cuda.get_device_name(device),
        "library": f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--calibrate", type=Path, help="make a table of kernels, in this file")
    parser.add_argument("--device", default="cpu", help="where the calls run")
    arguments = parser.parse_args()
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)  # for replaying; each recording has a number of its own
    sections: list[Section] = []
    table = arguments.calibrate
    if table is not None and table.exists():
        sections = read_table(table)
    made_by = _made_by(arguments.device)
    counts = {name: Counter() for name in arguments.dtypes}
    alarms: list[str] = []
    begun = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.rounds):
        for name in arguments.dtypes:
            if time.monotonic() - begun > arguments.seconds:
                continue
            with tempfile.TemporaryDirectory() as folder:
                for how, path in record_round(
                    seed, DTYPES[name], Path(folder), arguments.programs, arguments.device
                ):
                    if table is not None:
                        counts[name]["measured"] += calibrate(sections, [path], made_by)
                        continue
                    for law, text in judge(path, f"{name} {how}"):
                        counts[name][law] += 1
                        if text:
                            counts[name]["ALARM"] += 1
                            alarms.append(text)
                            print(text, flush=True)
        if table is not None:
            encoded = msgspec.json.encode(sections)
            table.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        print(seed, json.dumps(counts), f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
