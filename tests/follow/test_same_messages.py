"""A recorded program warns, fails and is traced with the words of an unrecorded one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe as tp
from default_device import host_only
from tensorprobe import native

pytestmark = host_only("traces and kernels of another device are its own")
WAYS = ("L0", "L1", "mix", "L2", "tensors", "overflow", "errors", "reroute")
_OFTEN = {
    ("C++", "L1"),
    ("C++", "L2"),
    ("C++", "overflow"),
    ("Python", "L1"),
    ("Python", "reroute"),
}
every_way = pytest.mark.parametrize(
    ("language", "way"),
    [
        pytest.param(language, way, marks=() if (language, way) in _OFTEN else pytest.mark.slow)
        for language in ("C++", "Python")
        for way in WAYS
    ],
    indirect=["language"],
)
both_languages = pytest.mark.parametrize("language", ["C++", "Python"], indirect=True)


@pytest.fixture
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("the parts in C++ are not built")
    return str(request.param)


@contextlib.contextmanager
def watched(way: str, folder: Path) -> Iterator[Any]:
    """One of the ways to watch a program."""

    def quiet(text: str) -> None: ...

    if way == "reroute":
        with tp.reroute({"torch.cosh": "float64"}) as on:
            torch.cosh(torch.ones(1))  # a name without a call is an error
            on._log = quiet
            yield on
    elif way in ("overflow", "errors"):
        options = {"overflow_nums": -1, "timeout": 0, "log": quiet}
        with tp.Guard(folder, watch=way, **options) as on:
            yield on
    else:
        level, keep = ("L1", "tensors") if way == "tensors" else (way, "stats")
        with tp.Recorder(folder, level=level, keep=keep, log=quiet) as on:
            torch.ones(1) + 1  # a recorder without a call is an error
            nn.Identity()(torch.ones(1))
            yield on


# Warnings


class _Warns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        F.softmax(grad)
        warnings.warn("in backward", stacklevel=1)
        return grad


def warns() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        F.softmax(x)
    F.log_softmax(x)
    torch.meshgrid(torch.arange(2), torch.arange(3))
    F.mse_loss(x, torch.randn(3, 1))
    nn.MSELoss()(x, torch.randn(3, 1))
    _ = torch.randn(2, 3, 4).T
    torch.randn(3, dtype=torch.complex64).to(torch.float32)
    _ = (x * 2).grad
    torch.add(torch.ones(3), torch.ones(3), out=torch.empty(1))
    torch.tensor(torch.ones(2))
    torch.ones(3)[torch.tensor([1, 0, 1], dtype=torch.uint8)]
    F.l1_loss(x, x.detach(), size_average=True)
    _Warns.apply(x).sum().backward()
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: warnings.warn("in a hook", stacklevel=1))
    model(x)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    scheduler.step()


def said_by(program: Callable[[], None], action: Any) -> list[tuple[Any, ...]]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else torch says some of them once in a process
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter(action)
            program()
    finally:
        torch.set_warn_always(before)
    return [(each.category, each.filename, each.lineno, str(each.message)) for each in seen]


@every_way
def test_warnings_name_the_line_that_caused_them(way: str, language: str, tmp_path: Path) -> None:
    expected = said_by(warns, "always")
    with watched(way, tmp_path / "run"):
        actual = said_by(warns, "always")
    assert actual == expected
    assert [line for _, file, line, _ in actual if file == __file__]


@every_way
def test_a_module_of_torch_warns_of_its_own_file(way: str, language: str, tmp_path: Path) -> None:
    def warns_further_out() -> None:
        for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin):
            nn.Sequential(kind())(torch.ones(2, 2))

    # The line differs where hooks are on: torch itself goes another way then.
    expected = [file for _, file, _, _ in said_by(warns_further_out, "always")]
    with watched(way, tmp_path / "run"):
        actual = [file for _, file, _, _ in said_by(warns_further_out, "always")]
    assert actual == expected == [nn.modules.module.__file__] * 3


@every_way
def test_a_line_warns_once(way: str, language: str, tmp_path: Path) -> None:
    expected = said_by(warns, "default")
    with watched(way, tmp_path / "run"):
        assert said_by(warns, "default") == expected


def test_what_was_said_before_the_recording_is_not_said_again(tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(2):
            F.softmax(torch.ones(2, 2))
            with tp.Recorder(tmp_path / "run", log=lambda text: None):
                torch.ones(1) + 1
            with tp.Guard(tmp_path / "guard", watch="errors", log=lambda text: None):
                torch.ones(1) + 1

    assert len(said_by(program, "default")) == 1


@every_way
def test_a_warning_as_an_error_is_raised_at_its_line(
    way: str, language: str, tmp_path: Path
) -> None:
    expected = shown(lambda: said_by(warns, "error"))
    with watched(way, tmp_path / "run"):
        assert (
            shown(lambda: said_by(warns, "error")).splitlines()[-2:] == (expected.splitlines()[-2:])
        )


# Tracebacks


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("in backward")


X = torch.randn(2, 4, requires_grad=True)


def in_a_call() -> None:
    torch.mm(X, X)


def in_an_operator() -> None:
    X + torch.ones(3, 3)


def in_a_functional() -> None:
    F.cross_entropy(X, torch.tensor([9, 1]))


def in_a_module() -> None:
    nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 4))(X)


def in_backward() -> None:
    _Fails.apply(X).sum().backward()


def in_a_hook() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: 1 / 0)
    model(X)


def in_an_optimizer() -> None:
    torch.optim.SGD([X], lr=0.1).step(lambda: 1 / 0)


def in_an_op() -> None:
    torch.ops.aten.mm(X, X)


def while_handling() -> None:
    try:
        in_a_module()
    except RuntimeError as error:
        raise KeyError("later") from error


FAILURES = (
    in_a_call,
    in_an_operator,
    in_a_functional,
    in_a_module,
    in_backward,
    in_a_hook,
    in_an_optimizer,
    in_an_op,
    while_handling,
)


def shown(program: Callable[[], Any]) -> str:
    """What Python prints of what a program raises, from the program's own line on."""
    try:
        program()
    except Exception as error:  # noqa: BLE001 it is the program's own
        lines = traceback.format_exception(error)
        return "".join(line for line in lines if " in shown" not in line and "raised" not in line)
    raise AssertionError("it was to fail")


@every_way
def test_what_leaves_the_block_looks_as_without(way: str, language: str, tmp_path: Path) -> None:
    for number, program in enumerate(FAILURES):

        def raised(program: Callable[[], None] = program, number: int | None = number) -> None:
            with contextlib.ExitStack() as stack:
                if number is not None:
                    stack.enter_context(watched(way, tmp_path / str(number)))
                program()

        expected = shown(lambda raised=raised: raised(number=None))
        actual = shown(raised)
        assert _without_contexts(actual) == _without_contexts(expected), program


def _without_contexts(text: str) -> str:
    """A `with` block's own frames, of this file and of contextlib, are not the program's."""
    return re.sub(
        r'  File ".*contextlib.py".*\n(    .*\n)*|  File .* in watched\n(    .*\n)*', "", text
    )


@every_way
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python keeps a traceback of its own there")
def test_what_the_program_catches_has_no_frame_of_ours(
    way: str, language: str, tmp_path: Path
) -> None:
    ours = str(Path(tp.__file__).parent)
    with watched(way, tmp_path / "run"):
        for program in FAILURES:
            assert ours not in shown(program), program
        plain = [in_a_call, in_an_operator, in_a_module, in_an_optimizer]
        actual = [shown(program) for program in plain]
    assert actual == [shown(program) for program in plain]


PROGRAM = """
    import torch, warnings
    from torch import nn
    import torch.nn.functional as F

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return F.cross_entropy(self.layers(x), torch.tensor([7, 1]))

    x = torch.ones(2, 4)
    for _ in range(2):
        F.softmax(x)
    try:
        Net()(x).backward()
    except IndexError as error:
        raise KeyError("later") from error
"""


@pytest.mark.parametrize("options", [["--level", "mix"], ["--no-record", "--guard", "overflow"]])
def test_run_prints_what_a_bare_program_prints(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))

    def stderr(*before: str) -> tuple[int, str]:
        command = [sys.executable, *before, str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
        lines = done.stderr.splitlines(keepends=True)
        return done.returncode, "".join(
            line for line in lines if not line.startswith("tensorprobe")
        )

    assert stderr("-m", "tensorprobe", "run", *options) == stderr()


# Traces


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).view(x.size(0), -1)
        y = self.conv(y.reshape(y.shape[0], 1, y.shape[1]))
        z = F.relu(y) * y.mean()
        z += y.shape[0]
        return helped(z[:, 0])


def helped(z: Tensor) -> Tensor:
    w = z + 1
    return F.softmax(w * 2, dim=-1)


def traced() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    net = _Net().eval()
    found = [
        torch.jit.trace(net, (x,)),
        torch.jit.trace(lambda a: helped(a @ a.t()) * a.shape[0], (x,)),
        torch.jit.trace_module(net, {"forward": (x,)}),
        torch.jit.script(net.linear),
    ]
    graphs = [str(getattr(each, "inlined_graph", each.graph)) for each in found]
    return [(_unmangled(g), each(x)) for g, each in zip(graphs, found, strict=True)]


def _unmangled(graph: str) -> str:
    return re.sub(r"___torch_mangle_\d+\.", "", graph)


@every_way
def test_a_traced_program_has_the_graph_of_a_bare_one(
    way: str, language: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = traced()
        with watched(way, tmp_path / "run") as on:
            actual = traced()
            on.step()
            actual_again = traced()
    for found in (actual, actual_again):
        for (graph, result), (wanted, output) in zip(found, expected, strict=True):
            assert graph == wanted
            assert torch.equal(result, output)
    if isinstance(on, tp.Recorder):
        gaps = {gap.name: gap.reason for gap in tp.load(tmp_path / "run").gaps}
        assert list(gaps) == ["torch.jit.trace"]
        assert re.fullmatch(r"\d+ calls made while it traced are not recorded", gaps.popitem()[1])


@every_way
def test_a_traced_convolution_is_no_constant(way: str, language: str, tmp_path: Path) -> None:
    def traced() -> Any:
        return torch.jit.trace(lambda a: F.conv1d(a, a).relu(), (torch.randn(1, 3, 4),))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = traced()
        with watched(way, tmp_path / "run"):
            actual = traced()
    x = torch.randn(1, 3, 4)
    assert actual.code == expected.code
    assert torch.equal(actual(x), F.conv1d(x, x).relu())


@both_languages
def test_calls_are_recorded_again_after_a_trace(language: str, tmp_path: Path) -> None:
    for level, name in (("L1", "Tensor.sin.0.forward"), ("L2", "Aten.sin.0.forward")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with tp.Recorder(tmp_path / level, level=level, log=lambda text: None):
                traced()
                torch.ones(2).sin()
        assert name in [call.name for call in tp.load(tmp_path / level).calls]


@both_languages
def test_other_transforms_are_as_without(language: str, tmp_path: Path) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 4)

    def transformed() -> list[Any]:
        made = make_fx(lambda a: F.softmax(a.relu() @ a.t(), -1) * a.shape[0])(x)
        symbolic = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        per_row = torch.func.vmap(lambda a: a.sin().sum() * 2)(x)
        slope = torch.func.grad(lambda a: (a * a).sum())(x)
        return [made.code, str(symbolic.graph), per_row.tolist(), slope.tolist()]

    expected = transformed()
    for way in WAYS:
        with watched(way, tmp_path / way):
            assert transformed() == expected, way
