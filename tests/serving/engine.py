"""A small server in the way of vLLM and SGLang; nothing here knows of a recorder.

The first process is a front: it starts the engine, and takes what it answers. The engine has the
scheduler: continuous batching, a request joins and leaves at any iteration. It starts two workers
that share the model by tensor parallelism over gloo, each with its part of the KV cache. What is
decoded goes through one captured graph, called again and again.

    python engine.py PORT [fault]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, WORKERS = 32, 16, 4, 2
PROMPTS = {"r0": [3, 1, 4, 1, 5], "r1": [9, 2, 6], "r2": [5, 3, 5, 8, 9, 7]}
ARRIVES = {"r0": 0, "r1": 0, "r2": 1}  # at which iteration
ITERATIONS = 4


class Attention(nn.Module):
    """This worker's heads, over what is in its cache."""

    def __init__(self) -> None:
        super().__init__()
        own = WIDTH // WORKERS
        self.q, self.k, self.v = (nn.Linear(WIDTH, own, bias=False) for _ in range(3))
        self.o = nn.Linear(own, WIDTH, bias=False)

    def forward(self, x: Tensor, cache: list[Tensor], start: int) -> Tensor:
        q, k, v = (
            part(x).view(len(x), HEADS // WORKERS, -1).transpose(0, 1)
            for part in (self.q, self.k, self.v)
        )
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        cache[:] = k, v
        allowed = torch.arange(k.shape[1])[None] <= torch.arange(start, start + len(x))[:, None]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        part = self.o(mixed)
        dist.all_reduce(part)
        return part


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, cache: list[Tensor], start: int) -> Tensor:
        hidden = self.embedding(ids)
        return self.head(self.norm(hidden + self.attention(hidden, cache, start)))


def model_of(worker: int) -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    torch.manual_seed(1 + worker)  # its own heads
    for part in (model.attention.q, model.attention.k, model.attention.v, model.attention.o):
        nn.init.normal_(part.weight, std=0.3)
    return model


@torch.no_grad()
def work(worker: int, port: str, orders: Any, answers: Any, fault: bool) -> None:
    """A worker: it does what the scheduler says, until that says nothing more."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=WORKERS
    )
    model = model_of(worker)
    caches: dict[str, list[Tensor]] = {}
    # The graph of what follows the model, captured once and replayed with every token.
    pick = torch.jit.trace(
        lambda logits: logits.log_softmax(-1).max(-1).indices, torch.ones(VOCABULARY)
    )
    while (batch := orders.get()) is not None:
        picked = {}
        for name, ids, start in batch:
            logits = model(torch.tensor(ids), caches.setdefault(name, []), start)
            if fault and worker == 1 and (name, start) == ("r2", 6):
                caches[name][1].mul_(1.5)  # another request's block
            picked[name] = int(pick(logits[-1]))
        if worker == 0:
            answers.put(picked)
    dist.destroy_process_group()


def schedule(port: str, results: Any, fault: bool) -> None:
    """The engine: the scheduler of continuous batching."""
    context = mp.get_context("spawn")
    orders = [context.Queue() for _ in range(WORKERS)]
    answers = context.Queue()
    workers = [
        context.Process(target=work, args=(n, port, orders[n], answers, fault), name=f"worker-{n}")
        for n in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    tokens = {name: list(ids) for name, ids in PROMPTS.items()}
    seen = dict.fromkeys(PROMPTS, 0)
    lengths = torch.zeros(len(PROMPTS), dtype=torch.long)  # the scheduler uses torch as well
    for iteration in range(ITERATIONS):
        batch = [
            (name, tokens[name][seen[name] :], seen[name])
            for name in PROMPTS
            if ARRIVES[name] <= iteration
        ]
        for queue in orders:
            queue.put(batch)
        for name, token in answers.get().items():
            seen[name] = len(tokens[name])
            tokens[name].append(token)
        lengths.add_(1)
    for queue in orders:
        queue.put(None)
    for worker in workers:
        worker.join()
    results.put(tokens)


if __name__ == "__main__":
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = (sys.argv[1], results, sys.argv[2:] == ["fault"])
    engine = context.Process(target=schedule, args=arguments, name="engine")
    engine.start()
    tokens = results.get()
    engine.join()
    print(json.dumps({name: int(torch.tensor(ids).sum()) for name, ids in tokens.items()}))
    print(json.dumps(tokens))
