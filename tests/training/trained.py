"""Small trainings by the frameworks themselves, each with a callback or without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tiny_models


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (8,), generator=drawn)
        return {"input_ids": ids, "labels": ids}


def hugging_face(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    """A Trainer that has not begun; two batches a step, and an evaluation after every second."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model, _ = tiny_models.llama()
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "seed": 3, **arguments,
    }  # fmt: skip
    return Trainer(
        model,
        TrainingArguments(str(folder / "out"), **options),
        train_dataset=Tokens(32),
        eval_dataset=Tokens(4),
        callbacks=callbacks,
    )


def losses(trainer: Any) -> list[Any]:
    """All losses that a Trainer has logged."""
    known = ("loss", "eval_loss", "grad_norm")
    return [(name, row[name]) for row in trainer.state.log_history for name in known if name in row]


def lightning(
    folder: Path, callbacks: list[Any], *, by_hand: bool = False, bad_batch: int | None = None
) -> Any:
    """A module that Lightning has fitted, tested and predicted with. `by_hand` it has two
    optimizers and steps them itself."""
    import lightning as L

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1))
            self.automatic_optimization = not by_hand
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> Tensor | None:
            x = batch[0] * (1e38 if number == bad_batch else 1)
            loss = self.net(x).square().mean()
            self.losses.append(loss.item())
            if not by_hand:
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(x).square().mean())
                optimizer.step()
            return None

        def validation_step(self, batch: Any, number: int) -> None:
            self.losses.append(self.net(batch[0]).mean().item())

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.parameters(), lr=0.01)
            return [first, torch.optim.SGD(self.parameters(), lr=0.01)] if by_hand else first

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Small()
    drawn = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4, generator=drawn)), batch_size=2)
    trainer = L.Trainer(
        max_epochs=1, accumulate_grad_batches=1 if by_hand else 2, val_check_interval=4,
        num_sanity_val_steps=1, callbacks=callbacks, logger=False, enable_checkpointing=False,
        default_root_dir=str(folder), enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=1,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    trainer.predict(module, loader)
    return module
