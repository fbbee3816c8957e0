"""Steps that run the forward inside the optimizer, and loops of Hugging Face and Lightning."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trust.harness import ALL_KEEPS, Case, Program, Start
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import Mlp, adamw, built, sgd, vectors

CLOSURES = "forward inside the step"
LOOPS = "Trainer and Lightning"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")


def _closed(
    start: Start,
    *,
    net: Any = Mlp,
    optimizer: Any = adamw,
    closure: bool = True,
    steps: int = 3,
    inside: Any = contextlib.nullcontext,
    factor: float = 1.0,
    data: Any = vectors,
) -> None:
    """A loop that gives the forward and backward to `optimizer.step`."""
    model = built(net)
    optim = optimizer(model.parameters())
    batches = [data(step) for step in range(steps)]
    with inside(), start() as recorder:
        for x, y in batches:

            def loss_and_gradients(x: Tensor = x, y: Tensor = y) -> Tensor:
                optim.zero_grad()
                loss = F.mse_loss(model(x), y)
                if factor != 1:
                    loss = loss * factor
                loss.backward()
                return loss

            if closure:
                optim.step(loss_and_gradients)
            else:
                loss_and_gradients()
                optim.step()
            recorder.step()


def _closing(both: dict[str, Any] | None = None, **changes: Any) -> Program:
    return lambda start, is_actual: _closed(
        start, **{**(both or {}), **(changes if is_actual else {})}
    )


def _lbfgs(parameters: Any, max_iter: int = 3) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=max_iter)


def _next(step: int) -> tuple[Tensor, Tensor]:
    return vectors(step + 1)


GELU = functools.partial(wrong_kernel, "gelu", gain(1.01))
SECOND = functools.partial(wrong_kernel, "addmm", gain(1.01), nth=1)
IN_MODEL = {
    "*": "Functional.gelu.0.forward",
    "L0": "Module.Mlp.forward.0|Module.second.*.forward.0|Module.norm.*.forward.0",
}

CLOSURE_CASES = [
    Case(
        "closure-gelu-wrong",
        CLOSURES,
        _closing(inside=GELU),
        at=IN_MODEL,
        cause="result|boundary",
        step=0,
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "closure-linear-wrong",
        CLOSURES,
        _closing(inside=SECOND),
        cause="result",
        step=0,
        at={"*": "Functional.linear.1.forward", "L0": "Module.second.*"},
        runs=WITH_L0,
    ),
    Case(
        "closure-gradient-wrong",
        CLOSURES,
        _closing(inside=functools.partial(wrong_kernel, "gelu_backward", gain(1.01))),
        at="Functional.gelu.0.backward",
        cause="result",
        step=0,
    ),
    Case(
        "closure-other-eps",
        CLOSURES,
        _closing(net=functools.partial(Mlp, eps=1e-2)),
        at={"*": "Functional.layer_norm.0.forward", "L0": "Module.norm.*"},
        cause="argument",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "closure-loss-halved",
        CLOSURES,
        _closing({"factor": 2.0}, factor=1.5),
        at="Tensor.mul.0.forward",
        cause="argument",
        step=0,
    ),
    Case(
        "closure-other-data",
        CLOSURES,
        _closing(data=_next),
        at="Module.Mlp.forward.0|Functional.linear.0.forward|Module.first.*",
        cause="data",
        culprits=2,
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "closure-other-learning-rate",
        CLOSURES,
        _closing({"optimizer": sgd}, optimizer=functools.partial(sgd, lr=0.11)),
        at="Optimizer.SGD.step.0|Tensor.add_.*|Torch._foreach*",
        cause="argument",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "closure-gelu-wrong-fused",
        CLOSURES,
        _closing({"optimizer": functools.partial(adamw, fused=True)}, inside=GELU),
        at=IN_MODEL,
        cause="result|boundary",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "closure-gelu-wrong-in-lbfgs",
        CLOSURES,
        _closing({"optimizer": _lbfgs, "steps": 2}, inside=GELU),
        at=IN_MODEL,
        cause="result|boundary",
        step=0,
    ),
    Case(
        "closure-called-more-often-by-lbfgs",
        CLOSURES,
        _closing(
            {"optimizer": _lbfgs, "steps": 2}, optimizer=functools.partial(_lbfgs, max_iter=4)
        ),
        at="Optimizer.LBFGS.step.0",
        cause="argument",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "closure-of-lbfgs-and-other-loss",
        CLOSURES,
        _closing(
            {"optimizer": _lbfgs, "steps": 2},
            optimizer=functools.partial(_lbfgs, max_iter=4),
            factor=1.5,
        ),
        at="Tensor.mul.0.forward",
        cause="structure",
        step=0,
        culprits=2,
    ),
    # healthy
    Case(
        "closure-other-kernels", CLOSURES, _closing(inside=other_kernels), runs=WITH_L0, quick=True
    ),
    Case("closure-or-none", CLOSURES, _closing({"closure": False}, closure=True), runs=WITH_L0),
    Case(
        "closure-fused-other-kernels",
        CLOSURES,
        _closing({"optimizer": functools.partial(adamw, fused=True)}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "closure-lbfgs-other-kernels",
        CLOSURES,
        _closing({"optimizer": _lbfgs, "steps": 2}, inside=other_kernels),
    ),
]


class TrainerNet(Mlp):
    """As the Trainer wants it: takes labels, gives the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.second(F.gelu(self.norm(self.first(x))))
        return {"loss": F.mse_loss(y, labels), "logits": y}


def _trainer(
    start: Start, *, eps: float = 1e-5, inside: Any = contextlib.nullcontext, **options: Any
) -> None:
    """Hugging Face's Trainer, three steps."""
    from transformers import Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    rows = [{"x": x, "labels": y} for step in range(3) for x, y in zip(*vectors(step), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            **{"seed": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 8, **options},
        )
        net = built(functools.partial(TrainerNet, eps=eps))
        trainer = Trainer(net, arguments, train_dataset=rows)
        with inside(), start():
            trainer.train()


def _training_by(loop: Any, both: dict[str, Any] | None = None, **changes: Any) -> Program:
    return lambda start, is_actual: loop(
        start, **{**(both or {}), **(changes if is_actual else {})}
    )


def _lightning(
    start: Start,
    *,
    eps: float = 1e-5,
    lr: float = 1e-2,
    factor: float = 1.0,
    inside: Any = contextlib.nullcontext,
    optimizer: Any = adamw,
    **options: Any,
) -> None:
    """Lightning's Trainer, three steps; it runs the forward inside `optimizer.step(closure)`."""
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = built(functools.partial(Mlp, eps=eps))

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            return loss * factor if factor != 1 else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.parameters(), lr=lr)

    task = Task()
    batches = [vectors(step) for step in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )
        with inside(), start():
            trainer.fit(task, torch.utils.data.DataLoader(batches, batch_size=None))


FUSED = functools.partial(adamw, fused=True)
LOOP_CASES = [
    Case(
        "trainer-gelu-wrong",
        LOOPS,
        _training_by(_trainer, inside=GELU),
        at="Functional.gelu.0.forward",
        cause="result",
        needs="accelerate",
    ),
    Case(
        "trainer-other-eps",
        LOOPS,
        _training_by(_trainer, eps=1e-2),
        at="Functional.layer_norm.0.forward",
        cause="argument",
        needs="accelerate",
    ),
    Case(
        "trainer-other-learning-rate",
        LOOPS,
        _training_by(_trainer, learning_rate=2e-2),
        at="Optimizer.*.step.*|Torch._foreach*|Torch._fused*|Tensor.*",
        cause="argument",
        needs="accelerate",
        runs=WITH_L0,
    ),
    Case(
        "trainer-other-seed",
        LOOPS,
        _training_by(_trainer, seed=4),
        cause="data|seed",
        at="Torch.randperm.*|Torch.stack.*|Module.TrainerNet.forward.*|Torch.random*|*generator*|Tensor.random_.*",
        culprits=2,
        needs="accelerate",
    ),
    Case(
        "trainer-other-clipping",
        LOOPS,
        _training_by(_trainer, {"max_grad_norm": 0.1}, max_grad_norm=0.05),
        at="Tensor.__rtruediv__.*|Tensor.mul*|Torch.clip*|Torch._foreach*",
        cause="argument",
        needs="accelerate",
    ),
    Case(
        "lightning-gelu-wrong",
        LOOPS,
        _training_by(_lightning, inside=GELU),
        at="Functional.gelu.0.forward",
        cause="result",
        needs="lightning",
        runs=ALL_KEEPS,
    ),
    Case(
        "lightning-other-eps",
        LOOPS,
        _training_by(_lightning, eps=1e-2),
        at={"*": "Functional.layer_norm.0.forward", "L0": "Module.*norm.*"},
        cause="argument",
        needs="lightning",
        runs=WITH_L0,
    ),
    Case(
        "lightning-loss-scaled",
        LOOPS,
        _training_by(_lightning, {"factor": 2.0}, factor=1.5),
        at="Tensor.mul.0.forward",
        cause="argument",
        needs="lightning",
    ),
    Case(
        "lightning-other-learning-rate",
        LOOPS,
        _training_by(_lightning, lr=2e-2),
        at="Optimizer.*.step.*|Torch._foreach*|Torch._fused*|Tensor.*",
        cause="argument",
        needs="lightning",
        runs=WITH_L0,
    ),
    # healthy
    Case(
        "trainer-other-kernels",
        LOOPS,
        _training_by(_trainer, inside=other_kernels),
        needs="accelerate",
        runs=WITH_L0,
    ),
    Case("trainer-same-twice", LOOPS, _training_by(_trainer), needs="accelerate", runs=WITH_L0),
    Case(
        "lightning-other-kernels",
        LOOPS,
        _training_by(_lightning, inside=other_kernels),
        needs="lightning",
        runs=WITH_L0,
    ),
    Case(
        "lightning-fused-other-kernels",
        LOOPS,
        _training_by(_lightning, {"optimizer": FUSED}, inside=other_kernels),
        needs="lightning",
        runs=WITH_L0,
    ),
]

CASES = [*CLOSURE_CASES, *LOOP_CASES]
