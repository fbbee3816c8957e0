"""What a recording holds of compiled parts: graphs as data, code as text, runs with their tensors.

Nothing here imports torch. A graph's operators are names, which only `graph_replay` looks up, in
the one table of what may be called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from tensorprobe.errors import BadArtefact, UnreadableCapture
from tensorprobe.store.step_files import shard_name
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.opening import inside, open_file, split_lines

if TYPE_CHECKING:
    import torch

FOLDER = "compiled"  # in the folder of a rank
LINES_FILE = "compiled.jsonl"
MAX_LINE = 64 << 20  # generated code of a large graph is a few MB
_RANK = re.compile(r"rank(\d{1,9})")

Stage = Literal["dynamo", "joint", "inference", "forward", "backward", "inductor"]
NodeKind = Literal["input", "call", "method", "constant", "graph", "output"]
EventKind = Literal["graph break", "recompilation", "guards"]


class StoredTensor(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor that went into a compiled part or came out, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    shard: int
    offset: int
    nbytes: int
    requires_grad: bool = False

    def load(self, folder: Path, name: str) -> torch.Tensor:
        """The content, as a CPU tensor of its own; `folder` is where the shards are."""
        from tensorprobe.tensors.arrays import read_tensor

        blob = Blob(folder / shard_name(self.shard), self.offset, self.nbytes)
        return read_tensor(name, self.dtype, self.shape, blob)


class Unstored(msgspec.Struct, frozen=True, tag="unstored"):
    """A value whose content is not there, and why."""

    why: str


Value = StoredTensor | Unstored | bool | int | float | None


class GraphNode(msgspec.Struct, frozen=True):
    """One node: what it calls, by name, and its arguments as a tree (`store.tree`)."""

    name: str
    kind: NodeKind
    target: str = ""
    args: Any = None
    kwargs: Any = None
    stack: tuple[str, ...] = ()  # lines of the program, innermost first
    origin: str = ""  # the node of dynamo's graph that it was made for
    aten: str = ""  # the operator that it was decomposed from
    dtype: str = ""
    shape: str = ""


# Torch's own name of a compilation: 0/0, 0/1, 1/0, with compiled autograd !0/1/0. It gets into
# scripts.
Compilation = Annotated[str, msgspec.Meta(pattern=r"\A(!\d{1,9}/)?(\d{1,9}|None)/(\d{1,9}|None)\Z")]


class RecordedGraph(msgspec.Struct, frozen=True, tag="graph"):
    """One graph of one compilation."""

    id: int
    stage: Stage
    compilation: Compilation
    nodes: tuple[GraphNode, ...]
    is_backward: bool = False
    inductor: int = -1  # inductor's number of the graph
    constants: dict[str, Value] = {}
    inner: dict[str, tuple[GraphNode, ...]] = {}  # graphs that nodes call, by name
    mutated: tuple[int, ...] = ()  # inputs that become the first outputs of an AOT forward graph
    n_results: int = -1  # of the next outputs: what the program gets. -1: not known

    @property
    def inputs(self) -> list[GraphNode]:
        return [node for node in self.nodes if node.kind == "input"]

    def copied(self) -> dict[int, str]:
        """The inputs that the graph copies to, each with the node that it copies last."""
        numbers = {node.name: number for number, node in enumerate(self.inputs)}
        found = {}
        for node in self.nodes:
            if node.target.endswith("copy_.default") and isinstance(node.args, dict):
                args = node.args.get("tuple")
                pair = args[:2] if isinstance(args, list) else []
                names = [node_name(each) for each in pair]
                if len(names) == 2 and names[0] in numbers:
                    found[numbers[names[0]]] = names[1]
        return found


def node_name(tree: Any) -> str:
    """The node that an argument is; nothing where it is none."""
    special = tree.get("special") if isinstance(tree, dict) else None
    if isinstance(special, list) and len(special) == 2 and special[0] == "node":
        return str(special[1])
    return ""


class GeneratedCode(msgspec.Struct, frozen=True, tag="code"):
    """What inductor wrote for a graph, as text; and which node each of its buffers holds."""

    graph: int
    text: str
    buffers: dict[str, str]


class CompileEvent(msgspec.Struct, frozen=True, tag="event"):
    """A graph break, a recompilation or the guards of a graph, in torch's own words."""

    kind: EventKind
    compilation: Compilation
    text: str


class KernelRun(msgspec.Struct, frozen=True):
    """One kernel that the generated code called, and its tensors right after that."""

    name: str
    values: tuple[Value, ...]
    out: Value = None


class GraphRun(msgspec.Struct, frozen=True, tag="run"):
    """One run of a compiled graph: what it was given and gave, and what it wrote to its inputs."""

    id: int
    step: int
    graph: int  # of the stage "inductor"; -1 where it was compiled before recording began
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    written: dict[str, Value] = {}  # inputs that are others afterwards, by number, as text
    rng: Value = None
    kernels: tuple[KernelRun, ...] = ()


class CompileGap(msgspec.Struct, frozen=True, tag="gap"):
    """Something that is not recorded, and why."""

    what: str
    why: str


CompileLine = RecordedGraph | GeneratedCode | CompileEvent | GraphRun | CompileGap
_decode = msgspec.json.Decoder(CompileLine).decode


class CompiledParts:
    """All that one rank recorded of its compiled parts."""

    def __init__(self, folder: Path, lines: list[CompileLine], rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.graphs = {line.id: line for line in lines if isinstance(line, RecordedGraph)}
        self.code = {line.graph: line for line in lines if isinstance(line, GeneratedCode)}
        self.events = [line for line in lines if isinstance(line, CompileEvent)]
        self.runs = [line for line in lines if isinstance(line, GraphRun)]
        self.gaps = [line for line in lines if isinstance(line, CompileGap)]
        self._begun: dict[int, int] = {}  # by graph, dynamo's: after a reset names come again
        latest: dict[str, int] = {}
        for graph in self.graphs.values():
            if graph.stage == "dynamo":
                latest[graph.compilation] = graph.id
            self._begun[graph.id] = latest.get(graph.compilation, -1)

    def of(self, one: RecordedGraph, stage: Stage) -> list[RecordedGraph]:
        """The graphs of a stage in the compilation that `one` is of; DDP makes several of one."""
        begun = self._begun[one.id]
        return [
            graph
            for graph in self.graphs.values()
            if graph.compilation == one.compilation
            and graph.stage == stage
            and self._begun[graph.id] == begun
        ]

    def before_inductor(self, graph: RecordedGraph) -> RecordedGraph | None:
        """The AOT graph that inductor was given as this one."""
        stages: tuple[Stage, ...] = ("backward",) if graph.is_backward else ("inference", "forward")
        wanted = [node.name for node in graph.inputs]
        found = None
        for stage in stages:
            for each in self.of(graph, stage):
                if each.id < graph.id and [node.name for node in each.inputs] == wanted:
                    found = each
        return found


def read_compiled(path: Path) -> list[CompiledParts]:
    """The compiled parts of each rank of a recording; UnreadableCapture where there are none."""
    found = []
    for rank, folder in _rank_folders(path):
        parts = folder / FOLDER
        if (parts / LINES_FILE).exists():
            parts = inside(parts, folder)
            found.append(CompiledParts(parts, list(_read_lines(parts / LINES_FILE)), rank))
    if not found:
        raise UnreadableCapture(
            f"'{path}' has no graphs of compiled parts. Record with "
            "tp.Recorder(..., keep='tensors', compiled='graphs')"
        )
    return found


def _rank_folders(path: Path) -> Iterator[tuple[int, Path]]:
    if not path.is_dir():
        raise UnreadableCapture(f"no recording at '{path}'")
    match = _RANK.fullmatch(path.name)
    if match:
        yield int(match[1]), path
        return
    for folder in sorted(path.iterdir()):
        match = _RANK.fullmatch(folder.name)
        if match:
            yield int(match[1]), inside(folder, path)


def _read_lines(file: Path) -> Iterator[CompileLine]:
    try:
        with open_file(file) as opened:
            for number, line in enumerate(split_lines(opened, MAX_LINE), 1):
                if line is None:
                    yield CompileGap(f"line {number}", f"longer than {MAX_LINE} bytes")
                    continue
                if not line.endswith(b"\n"):  # the program was killed while it was written
                    yield CompileGap(f"line {number}", "it was cut off")
                    continue
                try:
                    yield _decode(line)
                except (ValueError, RecursionError) as error:
                    yield CompileGap(f"line {number}", f"damaged: {error}")
    except (OSError, BadArtefact) as error:
        raise UnreadableCapture(f"'{file}' cannot be read: {error}") from error
