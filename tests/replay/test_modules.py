"""Modules are made again from what was recorded of them: torch's own, composed ones, a user's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe as tp
from recorded import record
from tensorprobe.checking.one import check_one
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.allowed import _ALLOWED, function_named
from tensorprobe.replay.modules import build_module, check_names, how_made
from tensorprobe.replay.pairing import pair
from tensorprobe.replay.reference import replay

X = (2, 4)
LINE = (2, 4, 12)
PICTURE = (2, 4, 12, 12)
BLOCK = (1, 4, 6, 6, 6)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape).add(0.1).requires_grad_()


# Each class of torch.nn without children, with arguments that are not the defaults.
ELEMENTWISE: dict[str, tuple[Any, ...]] = {
    "CELU": (1.2,), "ELU": (1.1,), "GELU": ("tanh",), "GLU": (1,), "Hardshrink": (0.4,),
    "Hardsigmoid": (), "Hardswish": (), "Hardtanh": (-0.5, 0.7), "Identity": (),
    "LeakyReLU": (0.2,), "LogSigmoid": (), "LogSoftmax": (1,), "Mish": (), "PReLU": (4,),
    "ReLU": (True,), "ReLU6": (), "SELU": (), "SiLU": (), "Sigmoid": (), "Softmax": (1,),
    "Softmin": (1,), "Softplus": (1.5, 15.0), "Softshrink": (0.3,), "Softsign": (), "Tanh": (),
    "Tanhshrink": (), "Threshold": (0.1, 0.5), "Dropout": (0.3,), "AlphaDropout": (0.3,),
    "Flatten": (0,), "LayerNorm": (4, 1e-3), "RMSNorm": (4, 1e-3),
    "BatchNorm1d": (4, 1e-3, 0.3), "Linear": (4, 3, False), "RReLU": (0.1, 0.2),
}  # fmt: skip
LINES: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool1d": (5,), "AdaptiveMaxPool1d": (5,), "AvgPool1d": (3, 2, 1, True, False),
    "CircularPad1d": (2,), "ConstantPad1d": (2, 0.5), "Conv1d": (4, 6, 3, 2, 1, 2, 2, False),
    "ConvTranspose1d": (4, 6, 3, 2, 1, 1), "Dropout1d": (0.4,), "FeatureAlphaDropout": (0.4,),
    "GroupNorm": (2, 4, 1e-3), "InstanceNorm1d": (4, 1e-3, 0.2, True), "LPPool1d": (2, 3),
    "LocalResponseNorm": (2, 1e-3, 0.6, 2.0), "MaxPool1d": (3, 2, 1), "ReflectionPad1d": (2,),
    "ReplicationPad1d": (2,), "Unflatten": (1, (2, 2)), "ZeroPad1d": (2,),
}  # fmt: skip
PICTURES: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool2d": ((3, 5),), "AdaptiveMaxPool2d": ((3, 5),),
    "AvgPool2d": (3, 2, 1, True, False, 5), "BatchNorm2d": (4, 1e-3, 0.3, False),
    "ChannelShuffle": (2,), "CircularPad2d": (1,), "ConstantPad2d": (1, 0.5),
    "Conv2d": (4, 6, 3, 1, "same", 2, 1, True, "reflect"), "ConvTranspose2d": (4, 6, 3, 2, 1),
    "CrossMapLRN2d": (3,), "Dropout2d": (0.4,), "Fold": (), "FractionalMaxPool2d": (2, (5, 5)),
    "InstanceNorm2d": (4,), "LPPool2d": (2, 3), "MaxPool2d": (3, 2, 1), "PixelShuffle": (2,),
    "PixelUnshuffle": (2,), "ReflectionPad2d": (1,), "ReplicationPad2d": (1,), "Softmax2d": (),
    "Unfold": (3, 1, 1, 2), "Upsample": (None, 2.0, "bilinear", False),
    "UpsamplingBilinear2d": (None, 2), "UpsamplingNearest2d": (None, 2), "ZeroPad2d": (1,),
}  # fmt: skip
BLOCKS: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool3d": (3,), "AdaptiveMaxPool3d": (3,), "AvgPool3d": (2,), "BatchNorm3d": (4,),
    "CircularPad3d": (1,), "ConstantPad3d": (1, 0.5), "Conv3d": (4, 2, 3),
    "ConvTranspose3d": (4, 2, 3), "Dropout3d": (0.4,), "FractionalMaxPool3d": (2, (3, 3, 3)),
    "InstanceNorm3d": (4,), "LPPool3d": (2, 3), "MaxPool3d": (2,), "ReflectionPad3d": (1,),
    "ReplicationPad3d": (1,), "ZeroPad3d": (1,),
}  # fmt: skip
TARGET = torch.tensor([1, 3])
SIGNS = torch.tensor([1.0, -1.0])
OTHERS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "Bilinear": (nn.Bilinear(4, 3, 2), (floats(2, 4), floats(2, 3))),
    "CosineSimilarity": (nn.CosineSimilarity(0), (floats(*X), floats(*X))),
    "PairwiseDistance": (nn.PairwiseDistance(1.5, keepdim=True), (floats(*X), floats(*X))),
    "Embedding": (nn.Embedding(9, 3, padding_idx=1), (torch.tensor([[1, 2], [8, 2]]),)),
    "EmbeddingBag": (nn.EmbeddingBag(9, 3, mode="sum"), (torch.tensor([[1, 2], [8, 2]]),)),
    "GRU": (nn.GRU(4, 3, 2, bidirectional=True), (floats(5, 2, 4),)),
    "GRUCell": (nn.GRUCell(4, 3, bias=False), (floats(*X), floats(2, 3))),
    "LSTM": (nn.LSTM(4, 3, 2, batch_first=True, dropout=0.2, proj_size=2), (floats(5, 2, 4),)),
    "LSTMCell": (nn.LSTMCell(4, 3), (floats(*X), (floats(2, 3), floats(2, 3)))),
    "RNN": (nn.RNN(4, 3, nonlinearity="relu"), (floats(5, 2, 4),)),
    "RNNCell": (nn.RNNCell(4, 3, nonlinearity="relu"), (floats(*X), floats(2, 3))),
    "MaxUnpool1d": (nn.MaxUnpool1d(2), (floats(1, 1, 2), torch.tensor([[[0, 3]]]))),
    "MaxUnpool2d": (nn.MaxUnpool2d(2), (floats(1, 1, 1, 2), torch.tensor([[[[0, 3]]]]))),
    "MaxUnpool3d": (nn.MaxUnpool3d(2), (floats(1, 1, 1, 1, 2), torch.tensor([[[[[0, 9]]]]]))),
    "BCELoss": (nn.BCELoss(reduction="sum"), (torch.rand(X), torch.rand(X))),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), (floats(*X), torch.rand(X))),
    "CTCLoss": (
        nn.CTCLoss(2, "sum", True),
        (
            torch.randn(6, 2, 5).log_softmax(2).requires_grad_(),
            torch.tensor([[1, 3], [3, 4]]),
            torch.tensor([6, 6]),
            torch.tensor([2, 2]),
        ),
    ),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss(0.2), (floats(*X), floats(*X), SIGNS)),
    "CrossEntropyLoss": (
        nn.CrossEntropyLoss(torch.rand(4), ignore_index=3, reduction="sum", label_smoothing=0.1),
        (floats(*X), TARGET),
    ),
    "GaussianNLLLoss": (nn.GaussianNLLLoss(full=True), (floats(*X), floats(*X), positive(*X))),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(0.5), (floats(2), SIGNS)),
    "HuberLoss": (nn.HuberLoss("sum", 0.3), (floats(*X), torch.randn(X))),
    "KLDivLoss": (nn.KLDivLoss(reduction="batchmean", log_target=True), (floats(*X), floats(*X))),
    "L1Loss": (nn.L1Loss(reduction="none"), (floats(*X), torch.randn(X))),
    "MSELoss": (nn.MSELoss(reduction="sum"), (floats(*X), torch.randn(X))),
    "MarginRankingLoss": (nn.MarginRankingLoss(0.3), (floats(2), floats(2), SIGNS)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), (floats(4), torch.tensor([3, 0, -1, 1]))),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), (floats(*X), torch.rand(X))),
    "MultiMarginLoss": (nn.MultiMarginLoss(2, 0.5), (floats(*X), TARGET)),
    "NLLLoss": (nn.NLLLoss(reduction="sum"), (floats(*X), TARGET)),
    "NLLLoss2d": (nn.NLLLoss(), (floats(*X), TARGET)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(False, True), (positive(*X), positive(*X))),
    "SmoothL1Loss": (nn.SmoothL1Loss(reduction="sum", beta=0.3), (floats(*X), torch.randn(X))),
    "SoftMarginLoss": (nn.SoftMarginLoss(reduction="sum"), (floats(2), SIGNS)),
    "TripletMarginLoss": (
        nn.TripletMarginLoss(0.4, 1.0, swap=True), (floats(*X), floats(*X), floats(*X))
    ),
    "Fold": (nn.Fold((4, 5), (2, 3)), (floats(1, 12, 9),)),
}  # fmt: skip
# Made of modules, abstract, or without numbers of their own.
NOT_LEAVES = {
    "AdaptiveLogSoftmaxWithLoss", "Container", "DataParallel",
    "LinearCrossEntropyLoss", "Module", "ModuleDict", "ModuleList",
    "MultiheadAttention", "ParameterDict", "ParameterList", "RNNBase", "RNNCellBase", "Sequential",
    "SyncBatchNorm", "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
    "TransformerEncoder", "TransformerEncoderLayer", "TripletMarginWithDistanceLoss",
}  # fmt: skip


def leaves() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Every leaf class with the tensors to call it with."""
    found = dict(OTHERS)
    for group, shape in ((ELEMENTWISE, X), (LINES, LINE), (PICTURES, PICTURE), (BLOCKS, BLOCK)):
        for name, arguments in group.items():
            if name not in found:
                found[name] = (getattr(nn, name)(*arguments), (floats(*shape),))
    return found


def test_the_list_of_leaves_is_whole() -> None:
    classes = {
        name
        for name in dir(nn)
        if isinstance(kind := getattr(nn, name), type)
        and issubclass(kind, nn.Module)
        and not name.startswith("Lazy")  # they become the others when first called
    }
    assert classes - NOT_LEAVES == set(leaves())


def run_once(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    result = module(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
    first = result[0] if isinstance(result, tuple) else result
    if first.requires_grad:
        first.square().sum().backward()


# In float64 these draw other numbers.
UNREPEATABLE = {"FractionalMaxPool2d", "FractionalMaxPool3d", "RReLU"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_leaf_of_torch_nn_is_made_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wrong = []
    for name, (module, arguments) in leaves().items():
        capture = record(tmp_path / name, lambda m=module, a=arguments: run_once(m, a), level="L0")
        call = next(p for p in pair(capture.calls) if p.forward.name.startswith("Module."))
        row = check_one(call, torch.device("cpu"))
        if name in UNREPEATABLE:
            continue
        if row.verdict != "pass":
            wrong.append((name, call.forward.notes, row.verdict, row.reason))
            continue
        recorded = call.forward.tensor("output.0").load()
        error = replay(call.forward).error("output.0", recorded)
        if not error < 20 or recorded.numel() == 0:
            wrong.append((name, call.forward.notes, "is another module", str(error)))
    assert wrong == [], "\n".join(map(str, wrong))


# Compositions, and a user's own classes

USERS = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, n, factor):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.weight * self.factor

class Block(nn.Module):
    def __init__(self, n, settings):
        super().__init__()
        self.up = nn.Linear(n, 2 * n)
        self.scales = nn.ModuleList([Scale(2 * n, 2.0), Scale(2 * n, 0.5)])
        self.norm = nn.BatchNorm1d(2 * n)
        self.drop = nn.Dropout(0.2)
        self.unused = nn.Linear(1, 1)
        self.down = nn.Linear(2 * n, n)
        self.activation = torch.nn.functional.silu
        self.limit = float("inf")
        self.settings = settings

    def forward(self, x, mask=None):
        y = self.drop(self.activation(self.norm(self.up(x))))
        for scale in self.scales:
            y = scale(y)
        return self.down(y).clamp(max=self.limit)

class Needs(Block):
    def forward(self, x):
        return super().forward(x) * self.settings.k
"""


class Settings:
    k = 2


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "users_of_modules.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    import users_of_modules  # type: ignore[import-not-found]

    yield users_of_modules
    del sys.modules["users_of_modules"]
    _ALLOWED.discard("users_of_modules")


def run_repro(folder: Path, *path: str) -> tuple[int, str]:
    code = f"import sys, runpy; sys.modules['tensorprobe'] = None; sys.path[:0] = {list(path)!r}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{code}; sys.argv = ['repro.py']; "
         f"runpy.run_path({str(folder / 'repro.py')!r}, run_name='__main__')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


COMPOSED: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "attention": (
        nn.MultiheadAttention(8, 2, bias=False, dropout=0.1, batch_first=True),
        (floats(2, 3, 8), floats(2, 3, 8), floats(2, 3, 8)),
    ),
    "encoder layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (floats(2, 3, 8),)),
    "sequential": (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5).eval(), nn.Identity()),
        (floats(3, 4),),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n != "encoder layer" else n for n in COMPOSED],
)
def test_modules_of_modules_run_alone(name: str, tmp_path: Path) -> None:
    module, arguments = COMPOSED[name]
    capture = record(tmp_path / "run", lambda: run_once(module, arguments), level="L0")
    first = next(iter(capture.calls)).name
    status, text = run_repro(tp.repro(capture, first, tmp_path / "repro"))
    assert status == 0, text
    assert len(re.findall(r"^ok    recorded  ", text, re.M)) >= 2, text
    assert "FAIL" not in text


def test_a_users_module_runs_alone_where_it_can_be_imported(users: Any, tmp_path: Path) -> None:
    model = users.Block(4, Settings())
    capture = record(tmp_path / "run", lambda: run_once(model, (floats(3, 4),)), level="L0")
    name = "Module.Block.forward.0"
    with pytest.raises(
        NotReplayable, match=r"\(allow its package with `imports='users_of_modules'`\)"
    ):
        tp.repro(capture, name, tmp_path / "repro")
    folder = tp.repro(capture, name, tmp_path / "repro", imports="users_of_modules")
    status, text = run_repro(folder, str(tmp_path))
    assert status == 0, text
    assert "FAIL" not in text
    assert "ok    recorded  gradient of input.0" in text
    assert "gradient of parameters.scales.1.weight" in text
    assert "(needs torch and users_of_modules; " in (folder / "README.md").read_text()
    one = tp.repro(capture, "Module.scales.1.Scale.forward.0", tmp_path / "one")
    assert (
        "make(\n        users_of_modules.Scale,\n        {'factor': 0.5},\n    )"
        in (one / "repro.py").read_text()
    )


def test_what_a_module_lacks_is_said(users: Any, tmp_path: Path) -> None:
    model = users.Needs(4, Settings())
    capture = record(tmp_path / "run", lambda: run_once(model, (floats(3, 4),)), level="L0")
    reason = r"no attribute 'settings' \(of settings only the names were recorded\)\. Repro a call "
    with pytest.raises(NotReplayable, match=reason):
        tp.repro(
            capture, "Module.Needs.forward.0", tmp_path / "repro", imports=["users_of_modules"]
        )
    assert not (tmp_path / "repro").exists()


def test_a_class_of_the_script_itself_is_refused(tmp_path: Path) -> None:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    capture = record(tmp_path / "run", lambda: Local()(torch.ones(2)), level="L0")
    with pytest.raises(NotReplayable, match=r"Local cannot be imported\. Move the class into"):
        tp.repro(capture, "Module.Local.forward.0", tmp_path / "repro")


@pytest.mark.parametrize(
    "note",
    [
        "made as Linear(in_features=__import__('os').system('true'))",
        "made as Linear(4, 4)()",
        "made as Linear(4, 4, **{'a': 1})",
        "made as Linear(4, 4)(exit())",
        "made with lib.Block({'a': __import__('os')}, {}, [])",
        "made with lib.Block({**{}, 'a': 1}, {}, [])",
        "made with lib.Block({'a': 1}, {'': 'lib.Block'}, [])",
        "made with lib.Block({}, {'a': 'made as torch.nn.Linear(exit())'}, [])",
        "made with lib.Block({'a': " + "-" * 5000 + "1}, {}, [])",
        "made with lib.Block({'a': x" + ".y" * 3000 + "}, {}, [])",
    ],
)
def test_a_capture_is_data(note: str) -> None:
    op = "torch.nn.modules.container.Sequential"
    call = Call(index=0, name="Module.a.Block.forward.0", op=op, notes=(note,))
    with pytest.raises(NotReplayable, match="does not say how"):
        check_names(how_made(call, {}))


@pytest.mark.parametrize("name", ["os.system", "torch.load", "torch.hub.load", "builtins.exec"])
def test_an_attribute_names_nothing_outside_of_the_table(name: str) -> None:
    note = f"made with lib.Block({{'a': {name}}}, {{}}, [])"
    op = "torch.nn.modules.container.Sequential"
    call = Call(index=0, name="Module.a.Block.forward.0", op=op, notes=(note,))
    with pytest.raises(NotReplayable, match=f"not run: {name} is not an operator of torch"):
        check_names(how_made(call, {}))
    with pytest.raises(NotReplayable, match=f"not run: {name} is not an operator of torch"):
        build_module(call)


@pytest.mark.parametrize("op", ["os.system", "builtins.exec", "subprocess.run", "numpy.save"])
def test_no_function_of_the_system_is_looked_up(op: str) -> None:
    with pytest.raises(NotReplayable, match=r"not run: .* is not an operator of torch$"):
        function_named(op)
