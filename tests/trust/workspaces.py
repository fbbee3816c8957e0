"""Operators with results that nobody reads: workspaces, masks, indices, at the level of kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.arguments import numbers
from trust.harness import Case
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import Batch, Mlp, calling, inferring, sgd, training

FAMILY = "workspaces"
RUNS = ("tensors mix", "stats mix", "tensors L2", "stats L2", "digest L2")
WITH_L0 = (*RUNS, "tensors L0")


class Rnn(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(12, 10, batch_first=True, **options)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def sequences(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randn(2, 5, 12, generator=generator), torch.randn(2, 5, 4, generator=generator))


def _ctc(**changes: Any) -> Any:
    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = net(x).log_softmax(-1).transpose(0, 1)
        targets, lengths = torch.tensor([[1, 2], [3, 1]]), torch.tensor([2, 2])
        return F.ctc_loss(scores, targets, torch.tensor([5, 5]), lengths, **changes)

    return loss


def _nll(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    return F.nll_loss(net(x).log_softmax(-1).flatten(0, 1), y.argmax(-1).flatten(), weight)


def _pooled(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.max_pool1d(net(x).transpose(1, 2), 2).mean(-1), y.mean(1))


class Bag(nn.Module):
    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 12, mode=mode)
        self.rest = Mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.rest(self.bag(ids))


def _ids(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 20, (3, 6), generator=generator), torch.randn(3, 4, generator=generator)


def _sorted(is_actual: bool) -> Tensor:
    """A sort by two kinds of sort: the order of equal numbers differs, and nobody reads it."""
    x = (numbers(8, 8) * 3).round()
    return x.sort(stable=is_actual).values.cumsum(-1).mean()


LSTM: dict[str, Any] = {"net": Rnn, "data": sequences, "steps": 2, "optimizer": sgd}
GRU: dict[str, Any] = {**LSTM, "net": functools.partial(Rnn, "GRU")}

CASES = [
    Case("lstm-twice", FAMILY, training(LSTM), runs=WITH_L0, quick=True),
    Case("lstm-other-kernels", FAMILY, training(LSTM, inside=other_kernels), runs=WITH_L0),
    Case(
        "lstm-in-eval-twice",
        FAMILY,
        inferring({"net": Rnn, "data": sequences}),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "lstm-in-eval-other-kernels",
        FAMILY,
        inferring({"net": Rnn, "data": sequences}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case("gru-other-kernels", FAMILY, training(GRU, inside=other_kernels), runs=WITH_L0),
    Case("ctc-loss-twice", FAMILY, training({**LSTM, "loss": _ctc()}), runs=WITH_L0, quick=True),
    Case(
        "ctc-loss-other-kernels",
        FAMILY,
        training({**LSTM, "loss": _ctc()}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "nll-loss-other-kernels",
        FAMILY,
        training({**LSTM, "loss": _nll}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "pooling-other-kernels",
        FAMILY,
        training({**LSTM, "loss": _pooled}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "embedding-bag-other-kernels",
        FAMILY,
        training({"net": Bag, "data": _ids}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case("sorted-stably-or-not", FAMILY, calling(_sorted), runs=RUNS),
    # faults
    Case(
        "lstm-weight",
        FAMILY,
        training(LSTM, prepare=lambda net, _: net.rnn.weight_hh_l0.data.mul_(1.05)),
        at={"*": "VF.lstm.0.*|Torch.lstm.0.*|Module.rnn.*", "L0": "Module.rnn.*", "L2": "Aten.*"},
        cause="weights",
        step=0,
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "lstm-weight-in-eval",
        FAMILY,
        inferring(
            {"net": Rnn, "data": sequences},
            prepare=lambda net: net.rnn.weight_hh_l0.data.mul_(1.05),
        ),
        at={
            "*": "VF.lstm.0.*|Torch.lstm.0.*|Module.rnn.*",
            "L0": "Module.rnn.*",
            "L2": "Aten.mkldnn_rnn_layer.0.*|Aten.t.*",
        },
        cause="weights",
        runs=WITH_L0,
    ),
    Case(
        "lstm-backwards",
        FAMILY,
        inferring(
            {"net": Rnn, "data": sequences},
            data=lambda step: tuple(part.flip(1) for part in sequences(step)),
        ),
        at="Module.Rnn.forward.0|VF.lstm.0.*|Torch.lstm.0.*|Module.rnn.*|Aten.*",
        cause="data",
        runs=WITH_L0,
    ),
    Case(
        "ctc-loss-other-blank",
        FAMILY,
        training({**LSTM, "loss": _ctc()}, loss=_ctc(blank=3)),
        at={"*": "Functional.ctc_loss.0.forward", "L2": "Aten._ctc_loss.0.*"},
        cause="argument",
        step=0,
        runs=RUNS,
    ),
    Case(
        "ctc-loss-summed",
        FAMILY,
        training({**LSTM, "loss": _ctc()}, loss=_ctc(reduction="sum")),
        at={"*": "Functional.ctc_loss.0.forward", "L2": "Aten.*"},
        cause="argument|structure",
        step=0,
        runs=RUNS,
    ),
    Case(
        "ctc-loss-wrong",
        FAMILY,
        training(
            {**LSTM, "loss": _ctc()},
            inside=functools.partial(wrong_kernel, "_ctc_loss", gain(1.01)),
        ),
        at={"*": "Functional.ctc_loss.0.forward", "L2": "Aten._ctc_loss.0.*"},
        cause="result",
        step=0,
        runs=RUNS,
        quick=True,
    ),
    Case(
        "embedding-bag-summed",
        FAMILY,
        training({"net": Bag, "data": _ids}, net=functools.partial(Bag, "sum")),
        at={
            "*": "Functional.embedding_bag.0.forward",
            "L0": "Module.bag.*",
            "L2": "Aten._embedding_bag.0.*",
        },
        cause="argument",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "nll-loss-wrong",
        FAMILY,
        training(
            {**LSTM, "loss": _nll},
            inside=functools.partial(wrong_kernel, "nll_loss_forward", gain(1.01)),
        ),
        at={"*": "Functional.nll_loss.0.forward", "L2": "Aten.nll_loss_forward.0.*"},
        cause="result",
        step=0,
        runs=RUNS,
    ),
]
