"""Whole scripts under `tensorprobe run`: what users type, with set-up, steps and exit included."""

from __future__ import annotations

import textwrap
from typing import Any

from trust.harness import Case, Program, Start

FAMILY = "scripts"
RUNS = ("tensors mix", "stats mix")

TRAIN = """
import sys

import torch
import torch.nn.functional as F

wrong = sys.argv[1]
torch.manual_seed(1 if wrong == "seed" else 0)
net = torch.nn.Sequential(
    torch.nn.Conv1d(3, 8, 3),
    torch.nn.BatchNorm1d(8, momentum=0.01 if wrong == "momentum" else 0.1),
    torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=wrong.startswith("fused"))
xs, ys = torch.randn(12, 3, 10), torch.randint(0, 4, (12,))
data = torch.utils.data.TensorDataset(xs, ys)
order = torch.Generator().manual_seed(6 if wrong == "order" else 5)
for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=order):
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1 if wrong == "smoothing" else 0.0)
    if wrong == "negated":
        loss = -loss
    if wrong == "looked at":
        print(loss.item(), net[0].weight.norm().item())
    loss.backward()
    if wrong == "numpy":
        net[5].bias.grad.numpy()[:] *= 3
    optimizer.step()
    optimizer.zero_grad()
"""

RESUME = """
import io
import sys

import torch

wrong = sys.argv[1]
torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
first = torch.optim.Adam(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(2, 6)).square().mean().backward()
    first.step()
    first.zero_grad()
file = io.BytesIO()
torch.save({"net": net.state_dict(), "optimizer": first.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
again = torch.nn.Linear(6, 3)
again.load_state_dict(saved["net"])
second = torch.optim.Adam(again.parameters(), lr=0.1)
if wrong != "lost":
    second.load_state_dict(saved["optimizer"])
for _ in range(2):
    again(torch.full((2, 6), 0.5)).square().mean().backward()
    second.step()
    second.zero_grad()
"""

GENERATE = """
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

wrong = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
prompts = [torch.arange(5, 11), torch.arange(20, 24)]
longest = max(map(len, prompts))
rows, masks = [], []
for prompt in prompts:
    pad = torch.zeros(longest - len(prompt), dtype=torch.long)
    parts = [prompt, pad] if wrong == "right" else [pad, prompt]
    rows.append(torch.cat(parts))
    masks.append(torch.cat([torch.ones_like(part) * (part is prompt) for part in parts]))
model.generate(
    input_ids=torch.stack(rows), attention_mask=torch.stack(masks), max_new_tokens=4,
    do_sample=False, pad_token_id=0, use_cache=True,
)
"""


def _script(text: str, wrong: str, expected: str = "nothing", **environ: str) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        if is_actual:
            start.run(textwrap.dedent(text), wrong, **environ)
        else:
            start.run(textwrap.dedent(text), expected)

    return program


def _fault(name: str, text: str, wrong: str, at: str, cause: str, **more: Any) -> Case:
    return Case(
        f"script-{name}", FAMILY, _script(text, wrong), at=at, cause=cause, runs=RUNS, **more
    )


CASES = [
    _fault("seed", TRAIN, "seed", "*kaiming*|*uniform_*", "seed"),
    _fault("momentum", TRAIN, "momentum", "Functional.batch_norm.0.forward|Module.1.*", "argument"),
    _fault(
        "order",
        TRAIN,
        "order",
        "Tensor.random_.0.*|Torch.randperm.*|Module.Sequential.forward.0",
        "seed|data",
        culprits=2,
    ),
    _fault("smoothing", TRAIN, "smoothing", "Functional.cross_entropy.0.forward", "argument"),
    _fault("negated", TRAIN, "negated", "Tensor.neg.0.*", "structure|boundary", step=0),
    _fault(
        "gradient-in-numpy",
        TRAIN,
        "numpy",
        "Optimizer.AdamW.step.0|Module.*parameters_grad*|Tensor.lerp_.*|Torch._foreach*|Torch._fused*",
        "boundary",
        step=0,
    ),
    _fault(
        "state-lost",
        RESUME,
        "lost",
        "Optimizer.Adam.step.0|Torch.zeros_like.*|Torch.zeros.*|Torch.tensor.*|Tensor.*|Torch._foreach*",
        "weights|boundary|structure",
    ),
    _fault(
        "padded-on-the-right",
        GENERATE,
        "right",
        "Torch.cat.0.forward|Torch.cat.2.forward",
        "data|structure|argument",
        quick=True,
    ),
    # healthy
    Case("script-twice", FAMILY, _script(TRAIN, "nothing"), runs=RUNS, quick=True),
    Case("script-two-threads", FAMILY, _script(TRAIN, "nothing", OMP_NUM_THREADS="2"), runs=RUNS),
    Case("script-fused-or-not", FAMILY, _script(TRAIN, "fused"), runs=RUNS),
    Case("script-looked-at", FAMILY, _script(TRAIN, "looked at"), runs=RUNS),
    Case("script-resumed", FAMILY, _script(RESUME, "nothing"), runs=RUNS),
    Case("script-generate-twice", FAMILY, _script(GENERATE, "nothing"), runs=RUNS),
]
