"""A script that shows a fault of torch.compile alone: a graph, its inputs, and nothing but torch.

The graph's operators are written by their names in the table of what may be called; nothing else
that a recording says gets into the source but plain numbers and known words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tensorprobe.compiling.compile_records import GraphNode, RecordedGraph
from tensorprobe.compiling.graph_replay import SIZES, is_random, nodes_read
from tensorprobe.compiling.stage_findings import StageFinding
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Special
from tensorprobe.replay.allowed import dtype_named, format_named, function_named, is_word
from tensorprobe.store.outputs import make_folder
from tensorprobe.store.tree import decode

SCRIPT, INPUTS = "repro.py", "inputs.pt"
_DOTTED = re.compile(r"torch(\.[A-Za-z_][A-Za-z0-9_]*)+")
_OPERATORS = {
    "operator.add": "+", "operator.sub": "-", "operator.mul": "*", "operator.truediv": "/",
    "operator.floordiv": "//", "operator.mod": "%", "operator.eq": "==", "operator.matmul": "@",
    "operator.ge": ">=", "operator.le": "<=", "operator.gt": ">", "operator.lt": "<",
    "operator.iadd": "+", "operator.isub": "-", "operator.imul": "*",
}  # fmt: skip
_TAKEN = (
    "torch", "os", "sys", "graph", "wide", "run", "same", "inputs", "DEVICE", "float", "slice",
    "complex",
)  # fmt: skip
_BACKENDS = {
    "aot_autograd": "aot_eager_decomp_partition",
    "inductor's joint-graph passes": "inductor",
    "inductor's graph passes": "inductor",
    "kernel": "inductor",
}
_SCRIPT = '''\
"""{title}

Run it: python {script}. It exits with 1 where torch.compile gives something else than eager torch.
It needs torch alone. The inputs are in {inputs}, beside it.
"""

import os
import sys

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # compile it now, here

import torch

DEVICE = os.environ.get("DEVICE", "cpu")
LEAVES = {leaves}  # inputs that get gradients
{settings}

def graph({parameters}):
{body}
    return {results}


def wide(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def same(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())


def run(function, inputs):
    """The results, inputs that are written to, and the gradients of LEAVES."""
    given = inputs
    inputs = [x.clone().detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = {{i: inputs[i].requires_grad_() for i in LEAVES}}
    torch.manual_seed(0)
    results = function(*inputs)
    found = {{}}
    for i, r in enumerate(results):
        if isinstance(r, torch.Tensor):
            found[f"result {{i}}"] = r.detach()
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor) and not same(x, given[i]):
            found[f"input {{i}} afterwards"] = x.detach()
    wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if leaves and wanted:
        ones = [torch.ones_like(r) for r in wanted]
        gradients = torch.autograd.grad(wanted, list(leaves.values()), ones, allow_unused=True)
        for i, g in zip(leaves, gradients):
            if g is not None:
                found[f"gradient of input {{i}}"] = g
    return found


folder = os.path.dirname(os.path.abspath(__file__))
inputs = torch.load(os.path.join(folder, "{inputs}"), weights_only=True)
inputs = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs]
eager = run(graph, inputs)
compiled = run(torch.compile(graph, backend="{backend}"), inputs)
failed = False
for name in {{**eager, **compiled}}:
    actual, expected = compiled.get(name), eager.get(name)
    if actual is None or expected is None:
        print(f"{{name}}: only {{'eager' if actual is None else 'compiled'}} has it")
        failed = True
        continue
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        print(f"{{name}}: {{actual.dtype}} {{list(actual.shape)}}, "
              f"eager {{expected.dtype}} {{list(expected.shape)}}")
        failed = True
        continue
    if not expected.is_floating_point():
        apart = float((actual != expected).float().mean()) if expected.numel() else 0.0
        allowed = 0.01
    else:
        size = float(wide(expected).square().mean().sqrt()) if expected.numel() else 0.0
        gap = wide(actual) - wide(expected)
        gap[actual == expected] = 0  # infinities
        gap[actual.isnan() & expected.isnan()] = 0
        distance = float(gap.square().mean().sqrt()) if gap.numel() else 0.0
        apart = distance / max(size, 1e-30)
        allowed = 64 * torch.finfo(expected.dtype).eps
    state = "differs" if not apart <= allowed else "agrees"
    failed |= not apart <= allowed
    print(f"{{name}}: {{state}}, by {{apart:.3g}} of its size; allowed {{allowed:.3g}}")
sys.exit(1 if failed else 0)
'''


_SAME_NUMBERS = """\
import torch._inductor.config  # noqa: E402
torch._inductor.config.fallback_random = True  # the numbers that eager torch draws
"""


def write_repro(finding: StageFinding, folder: Path) -> Path:
    """Write the script and its inputs; NotReplayable where that cannot be done."""
    backend = _BACKENDS.get(finding.stage)
    if finding.graph is None or backend is None:
        raise NotReplayable(f"a fault of the stage {finding.stage} has no graph to show it with")
    if finding.graph.inner or finding.graph.constants:
        raise NotReplayable("its graph calls others, or holds tensors of its own")
    draws = any(is_random(node) for node in finding.graph.nodes)
    if draws and (finding.about_random or finding.graph.stage != "dynamo"):
        raise NotReplayable("its graph draws random numbers, and eager torch draws other ones")
    try:
        writer = _GraphWriter(finding.graph)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotReplayable(f"its graph is damaged: {error}"[:200]) from error
    grad = finding.graph.stage == "dynamo" and finding.direction == "backward"
    direction = f"{finding.direction} of {finding.compilation}"
    text = _SCRIPT.format(
        title=f"torch.compile: {finding.stage} ({direction}).",
        script=SCRIPT,
        inputs=INPUTS,
        parameters=", ".join(writer.parameters),
        body="\n".join(f"    {line}" for line in writer.lines) or "    pass",
        results=writer.results,
        leaves=repr([int(number) for number in finding.leaves] if grad else []),
        settings=_SAME_NUMBERS if draws else "",
        backend=backend,
    )
    ast.parse(text)  # a slip of ours shows here, not at the user's
    make_folder(folder)
    torch.save(list(finding.inputs), folder / INPUTS)
    (folder / SCRIPT).write_text(text)
    return folder / SCRIPT


class _GraphWriter:
    """The source of a graph as a function."""

    def __init__(self, graph: RecordedGraph) -> None:
        self._names: dict[str, str] = {}
        self.parameters: list[str] = []
        self.lines: list[str] = []
        self.results = "()"
        last_use = _last_uses(graph)
        for node in graph.nodes:
            name = self._name(node)
            if node.kind == "input":
                self.parameters.append(name)
            elif node.kind == "output":
                self.results = self._results(node)
            else:
                self.lines.append(self._line(name, node))
                done = [self._names[each] for each in last_use.get(node.name, ())]
                if done:
                    self.lines.append(f"del {', '.join(sorted(done))}")

    def _name(self, node: GraphNode) -> str:
        wanted = node.name if is_word(node.name) and len(node.name) < 60 else "value"
        if wanted in _TAKEN or wanted.startswith("__"):
            wanted = f"{wanted.strip('_')}_"
        name, taken, number = wanted, set(self._names.values()), 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        self._names[node.name] = name
        return name

    def _line(self, name: str, node: GraphNode) -> str:
        if node.target == "operator.setitem":
            texts = [self._value(arg) for arg in _arguments(node)[0]]
            if len(texts) == 3:
                return f"{texts[0]}[{texts[1]}] = {name} = {texts[2]}"
        return f"{name} = {self._call(node)}"

    def _call(self, node: GraphNode) -> str:
        args, kwargs = _arguments(node)
        texts = [self._value(arg) for arg in args]
        named = [f"{key}={self._value(value)}" for key, value in kwargs.items() if is_word(key)]
        sign = _OPERATORS.get(node.target)
        if sign is not None and len(texts) == 2:
            return f"{texts[0]} {sign} {texts[1]}"
        if node.target == "operator.getitem" and len(texts) == 2:
            return f"{texts[0]}[{texts[1]}]"
        if node.target == "operator.neg" and len(texts) == 1:
            return f"-{texts[0]}"
        if not _DOTTED.fullmatch(node.target):
            raise NotReplayable(f"{node.target[:80]} cannot be written in a script")
        if node.target not in SIZES:
            function_named(node.target)
        return f"{node.target}({', '.join([*texts, *named])})"

    def _results(self, node: GraphNode) -> str:
        args = decode(node.args, "", _refuse)
        value = args[0] if isinstance(args, tuple) and args else ()
        items = list(value) if isinstance(value, list | tuple) else [value]
        return f"({', '.join(self._value(item) for item in items)}{',' if items else ''})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Special):
            return self._special(value)
        if isinstance(value, tuple):
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, slice):
            parts = (self._value(part) for part in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if isinstance(value, float):
            return (
                f'float("{value}")' if value != value or abs(value) == float("inf") else repr(value)
            )
        if isinstance(value, complex):
            return f"complex({self._value(value.real)}, {self._value(value.imag)})"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        if isinstance(value, str) and (is_word(value) or not value):
            return repr(value)
        if value is ...:
            return "..."
        raise NotReplayable("an argument that cannot be written in a script")

    def _special(self, special: Special) -> str:
        if special.kind == "node" and special.text in self._names:
            return self._names[special.text]
        if special.kind == "dtype":
            return str(dtype_named(special.text))
        if special.kind == "device":
            return "DEVICE"
        if special.kind in ("layout", "memory_format"):
            return str(format_named(special.text))
        raise NotReplayable("an argument that cannot be written in a script")


def _arguments(node: GraphNode) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    args = decode(node.args, "", _refuse)
    kwargs = decode(node.kwargs, "", _refuse)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise NotReplayable(f"node {node.name}: its arguments are damaged")
    return args, kwargs


def _last_uses(graph: RecordedGraph) -> Mapping[str, list[str]]:
    """After which node each other one is of no more use."""
    last: dict[str, GraphNode] = {}
    for node in graph.nodes:
        for name in nodes_read(node):
            last[name] = node
    found: dict[str, list[str]] = {}
    inputs = {node.name for node in graph.inputs}
    for name, node in last.items():
        if node.kind != "output" and name not in inputs:
            found.setdefault(node.name, []).append(name)
    return found


def _refuse(name: str, body: Any) -> Any:
    raise NotReplayable("a tensor as an argument")
