"""How often the monitor's rules raise an alarm in trainings that are healthy.

    python benchmarks/false_alarms.py [--steps 20000] [MODEL ...]

Each model is trained for so many steps, on data drawn anew in every step. An alarm is told with its
rule and place, so that a rule can be mended. The table goes into docs/monitor.md by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tensorprobe as tp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

Step = Callable[[int], None]


def warmed(step: int, steps: int, least: float = 0.1) -> float:
    """Linear warmup, then a cosine."""
    warm = min(1.0, (step + 1) / 200)
    return warm * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def mlp_adamw(steps: int) -> Step:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: warmed(n, steps))
    weights = torch.randn(8, 1)

    def step(number: int) -> None:
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.sin(x @ weights)).backward()
        optimizer.step()
        schedule.step()

    return step


def mlp_sgd(steps: int) -> Step:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, steps // 4, 0.3)
    weights = torch.randn(16, 4)

    def step(number: int) -> None:
        x = torch.randn(64, 16)
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), (x @ weights).argmax(1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


def cnn(steps: int) -> Step:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 16, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shapes = torch.randn(4, 1, 8, 8)

    def step(number: int) -> None:
        labels = torch.randint(4, (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(shapes[labels] + torch.randn(16, 1, 8, 8)), labels).backward()
        optimizer.step()
        if number % 500 == 499:  # an evaluation between two steps
            model.eval()
            with torch.no_grad():
                model(torch.randn(64, 1, 8, 8) * 3)
            model.train()

    return step


def llama(steps: int) -> Step:
    import tiny_models

    model, _ = tiny_models.llama()
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: warmed(n, steps))

    def step(number: int) -> None:
        start = torch.randint(50, (4, 1))
        ids = (start + torch.arange(12) * torch.randint(1, 4, (4, 1))) % 50
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


def gan(steps: int) -> Step:
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(number: int) -> None:
        real = torch.randn(32, 2) * 0.5 + 1
        fake = maker(torch.randn(32, 4))
        of_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()  # leaves gradients in the judge as well
        of_maker.step()

    return step


def lstm(steps: int) -> Step:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(40, 16),
            "lstm": nn.LSTM(16, 24, batch_first=True),
            "head": nn.Linear(24, 40),
        }
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        length = int(torch.randint(6, 16, ()))  # of another length each time
        ids = (torch.randint(40, (8, 1)) + torch.arange(length)) % 40
        optimizer.zero_grad()
        for part in ids.chunk(2):  # two micro batches
            hidden, _ = model["lstm"](model["embed"](part[:, :-1]))
            loss = F.cross_entropy(model["head"](hidden).flatten(0, 1), part[:, 1:].flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def half(steps: int) -> Step:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=500)
    weights = torch.randn(16, 4)

    def step(number: int) -> None:
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), (x @ weights).argmax(1))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def lora(steps: int) -> Step:
    """A frozen base, an adapter that begins at zero, and a parameter that nothing uses."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.base(x) + self.up(self.down(x)))

    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(16, 4))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    weights = torch.randn(16, 4)

    def step(number: int) -> None:
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x @ weights).argmax(1)).backward()
        optimizer.step()

    return step


def gpt2(steps: int) -> Step:
    """Tied embeddings, dropout, gradients of four micro batches, clipping, warmup and cosine."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: warmed(n, steps))

    def step(number: int) -> None:
        for _ in range(4):
            start = torch.randint(64, (2, 1))
            ids = (start + torch.arange(16) * torch.randint(1, 4, (2, 1))) % 64
            (model(input_ids=ids, labels=ids).loss / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def resnet(steps: int) -> Step:
    """BatchNorm after every convolution, whose bias does nothing; SGD with Nesterov; a new image
    size now and then, and an evaluation."""

    class Block(nn.Module):
        def __init__(self, width: int, out: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1), nn.BatchNorm2d(out)
            self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out)
            self.side = nn.Conv2d(width, out, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + self.side(x))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), Block(8, 8, 1), Block(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, steps * 3 // 4])
    shapes = torch.randn(5, 3, 16, 16)

    def step(number: int) -> None:
        labels = torch.randint(5, (16,))
        size = 12 if number % 7 == 3 else 16
        x = (shapes[labels] + 1.5 * torch.randn(16, 3, 16, 16))[..., :size, :size]
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        schedule.step()
        if number % 300 == 299:
            model.eval()
            with torch.no_grad():
                model(torch.randn(8, 3, 16, 16))
            model.train()

    return step


def vit(steps: int) -> Step:
    """bfloat16 by autocast, LayerNorm, a class token, dropout, label smoothing, OneCycle."""

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 32, 4, 4)
            self.token = nn.Parameter(torch.zeros(1, 1, 32))
            self.places = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
            layer = nn.TransformerEncoderLayer(32, 2, 64, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            return self.head(self.encoder(x)[:, 0])

    model = Vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    shapes = torch.randn(5, 3, 16, 16)

    def step(number: int) -> None:
        labels = torch.randint(5, (16,))
        x = shapes[labels] + 2 * torch.randn(16, 3, 16, 16)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), labels, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


def embeddings(steps: int) -> Step:
    """Rows that few batches use, by Adagrad; tokens of a skewed distribution; no clipping."""
    model = nn.Sequential(nn.EmbeddingBag(500, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    kinds = torch.randint(3, (500,))

    def step(number: int) -> None:
        ids = (torch.rand(24, 6) ** 4 * 500).long()
        optimizer.zero_grad()
        F.cross_entropy(model(ids), kinds[ids].mode(1).values).backward()
        optimizer.step()

    return step


def ppo(steps: int) -> Step:
    """A policy that is trained four times on each rollout, by two optimizers."""
    actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    reward = torch.randn(6, 3)
    held: list[torch.Tensor] = []

    def step(number: int) -> None:
        if number % 4 == 0:
            with torch.no_grad():
                seen = torch.randn(32, 6)
                chances = torch.distributions.Categorical(logits=actor(seen))
                action = chances.sample()
                gain = (seen @ reward).gather(1, action[:, None])[:, 0]
                held[:] = [seen, action, gain, chances.log_prob(action)]
        seen, action, gain, before = held
        value = critic(seen)[:, 0]
        of_critic.zero_grad()
        F.mse_loss(value, gain).backward()
        of_critic.step()
        chances = torch.distributions.Categorical(logits=actor(seen))
        ratio = (chances.log_prob(action) - before).exp()
        better = gain - value.detach()
        better = (better - better.mean()) / (better.std() + 1e-6)
        of_actor.zero_grad()
        loss = -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        (loss - 0.01 * chances.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        of_actor.step()

    return step


MODELS: dict[str, Callable[[int], Step]] = {
    "mlp_adamw": mlp_adamw, "mlp_sgd": mlp_sgd, "cnn": cnn, "gan": gan, "lstm": lstm, "half": half,
    "lora": lora, "llama": llama, "gpt2": gpt2, "resnet": resnet, "vit": vit,
    "embeddings": embeddings, "ppo": ppo,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models or MODELS:
        torch.manual_seed(args.seed)
        step = MODELS[name](args.steps)
        folder = Path(tempfile.mkdtemp())
        start = time.perf_counter()
        quiet: Callable[[str], None] = lambda text: None  # noqa: E731
        with tp.Monitor(folder, max_disk="64M", log=quiet, step_on="explicit") as monitor:
            for number in range(args.steps):
                step(number)
                monitor.step()
        found = Counter(alarm.rule for alarm in monitor.alarms)
        ms = round((time.perf_counter() - start) / args.steps * 1e3, 2)
        print(json.dumps({"model": name, "steps": args.steps, "alarms": found, "ms": ms}))
        for alarm in monitor.alarms[:40]:
            print("  ", alarm.rule, alarm.step, alarm.kind, alarm.name, alarm.reason)
        sys.stdout.flush()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
