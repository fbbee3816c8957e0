"""Watches torch.compile at work: the graphs of each stage, and what goes through them.

Graphs are taken from torch's own structured log, to which a handler is added: nothing of the
compiler is replaced, and no option that shapes a graph or a kernel is set. Its two caches are off
meanwhile, as what comes out of them has no graph. Tensors are seen around
`CompiledFxGraph.__call__`, through which every graph of inductor runs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.fx import GraphModule

from tensorprobe.compiling.compile_records import (
    FOLDER,
    LINES_FILE,
    CompileEvent,
    CompileGap,
    CompileLine,
    EventKind,
    GeneratedCode,
    GraphRun,
    KernelRun,
    RecordedGraph,
    Stage,
    StoredTensor,
    Unstored,
    Value,
)
from tensorprobe.compiling.graph_encoding import GraphEncoder
from tensorprobe.compiling.kernel_watch import KernelWatch
from tensorprobe.follow.compiled import unseen
from tensorprobe.follow.quiet import Quiet
from tensorprobe.store.shard import Shards
from tensorprobe.torch_versions import CompiledGraphCalls, compile_caches_off
from tensorprobe.trouble import OnTrouble

Inside = Literal["call", "graphs", "kernels"]
_DEPTH = 40  # frames between our handler and the function of torch's that logs
# What torch calls an event, the local variable of its frame that has the graph, and the stage.
_GRAPHS: dict[str, tuple[str, Stage]] = {
    "dynamo_output_graph": ("gm", "dynamo"),
    "aot_joint_graph": ("fx_g", "joint"),
    "aot_inference_graph": ("fw_module", "inference"),
    "aot_forward_graph": ("fw_module", "forward"),
    "aot_backward_graph": ("bw_module", "backward"),
    "inductor_post_grad_graph": ("gm", "inductor"),
}
_EVENTS: dict[str, EventKind] = {
    "dynamo_graph_break_reason": "graph break",
    "recompile_reasons": "recompilation",
    "dynamo_cpp_guards_str": "guards",
}
_MAX_TEXT = 1 << 20
_RANDOM = re.compile(r"rand|seeds|bernoulli|dropout|normal")


class CompileWatch:
    """Writes down what torch.compile makes, and with `keep_tensors` what runs through it.

    `inside` is "graphs", or "kernels" for the tensors of each kernel as well. `folder` gives the
    rank's folder, or None while there is none; `step` the step, or None where it is not recorded.
    """

    def __init__(
        self,
        inside: Inside,
        *,
        keep_tensors: bool,
        folder: Callable[[], Path | None],
        step: Callable[[], int | None],
    ) -> None:
        self._inside = inside
        self._keep_tensors = keep_tensors
        self._folder = folder
        self._step = step
        self._encode = GraphEncoder()
        self._handler = _TraceHandler(self)
        self._calls = CompiledGraphCalls(self._around)
        self._lock = threading.RLock()
        self._waiting: list[CompileLine] = []
        self._file: Any = None
        self._shards: Shards | None = None
        self._n_graphs = self._n_runs = 0
        self._latest: dict[tuple[int, bool], RecordedGraph] = {}  # by inductor's number
        self._metadata: dict[str, tuple[tuple[int, ...], int]] = {}  # of AOT, by compilation
        self._kernels = KernelWatch()
        self._opened = ExitStack()

    def install(self) -> None:
        """Watch from here on."""
        logging.getLogger("torch.__trace").addHandler(self._handler)
        self._opened.enter_context(compile_caches_off())
        self._calls.install()

    def remove(self) -> None:
        """Watch no more."""
        self._calls.remove()
        self._opened.close()
        logging.getLogger("torch.__trace").removeHandler(self._handler)

    def close(self) -> None:
        """Bring everything to disk."""
        with self._lock:
            self._flush()
            if self._shards is not None:
                self._shards.close()
            if self._file is not None:
                self._file.close()
            self._file = self._shards = None

    # What torch tells

    def told(self, metadata: dict[str, Any], payload: Any, frame: FrameType | None) -> None:
        """One event of torch's structured log."""
        name = next((key for key in metadata if key in _GRAPHS or key in _EVENTS), None)
        if name is None:
            artifact = metadata.get("artifact")
            name = artifact.get("name", "") if isinstance(artifact, dict) else ""
        compilation = _name_of(metadata)
        with self._lock:
            if name in _GRAPHS:
                self._graph(name, compilation, frame)
            elif name in _EVENTS:
                text = payload if isinstance(payload, str) else str(payload)
                self._write(CompileEvent(_EVENTS[name], compilation, text[:_MAX_TEXT]))
            elif name == "aot_forward_graph_fw_metadata":
                meta = _local(frame, "fw_metadata", object)
                if meta is not None:
                    mutated = tuple(getattr(meta, "mutated_inp_runtime_indices", ()))
                    infos = getattr(meta, "output_info", ())
                    self._metadata[compilation] = mutated, len(infos)
            elif "inductor_output_code" in metadata:
                self._code(str(payload), frame)

    def _graph(self, name: str, compilation: str, frame: FrameType | None) -> None:
        local, stage = _GRAPHS[name]
        module = _local(frame, local, GraphModule)
        if module is None:
            self._write(CompileGap(f"{stage} of {compilation}", "this torch does not show it"))
            return
        encoded = self._encode(module)
        number = _local(frame, "graph_id", int) if stage == "inductor" else None
        mutated: tuple[int, ...] = ()
        n_results = -1
        if stage in ("forward", "inference"):
            mutated, n_results = self._metadata.get(compilation, ((), -1))
        backward = stage == "backward"
        if stage == "inductor":
            backward = bool(_local(frame, "is_backward", bool))
        constants = {key: self._stored(key, value) for key, value in encoded.constants.items()}
        graph = RecordedGraph(
            id=self._n_graphs,
            stage=stage,
            compilation=compilation,
            nodes=encoded.nodes,
            is_backward=backward,
            inductor=-1 if number is None else number,
            constants=constants,
            inner=encoded.inner,
            mutated=mutated,
            n_results=n_results,
        )
        self._n_graphs += 1
        if stage == "inductor":
            self._latest[graph.inductor, backward] = graph
        self._write(graph)

    def _code(self, text: str, frame: FrameType | None) -> None:
        lowering = _local(frame, "self", object, having="buffers")
        number = getattr(lowering, "graph_id", None)
        backward = bool(getattr(lowering, "is_backward", False))
        graph = self._latest.get((number if isinstance(number, int) else -1, backward))
        if graph is None:
            self._write(CompileGap("generated code", "it belongs to no graph that was seen"))
            return
        buffers = {}
        for buffer in getattr(lowering, "buffers", ()):
            node = getattr(buffer, "origin_node", None)
            if node is not None:
                buffers[str(buffer.get_name())] = str(node.name)
        self._write(GeneratedCode(graph.id, text, buffers))

    # What runs

    def _around(self, compiled: Any, inputs: Any, call: Callable[[], Any]) -> Any:
        """One run of a compiled graph: `call` runs it."""
        step = self._step() if self._keep_tensors else None
        if step is None:
            return call()
        given: list[Value] = []
        rng: Value = None
        graph = None
        held: list[Any] = []
        kernels: list[KernelRun] = []
        module = None
        with OnTrouble(self._trouble, "inputs of a compiled graph"), Quiet(), self._lock:
            options = getattr(compiled, "fx_kwargs", None) or {}
            key = options.get("graph_id", -1), bool(options.get("is_backward"))
            graph = self._latest.get(key)
            held = list(inputs)
            given = [self._stored("input", value) for value in held]
            if graph is not None and any(_RANDOM.search(node.target) for node in graph.nodes):
                rng = self._stored("rng", torch.get_rng_state())
            if self._inside == "kernels":
                module = self._watch_kernels(compiled, kernels)
        try:
            result = call()
        except BaseException as error:
            what = "a run" if graph is None else f"a run of graph {graph.id}"
            self._trouble(what, error)
            raise
        finally:
            if module is not None:
                self._kernels.end(module)
        with OnTrouble(self._trouble, "outputs of a compiled graph"), Quiet(), self._lock:
            outputs = result if isinstance(result, list | tuple) else [result]
            written = {
                str(number): self._stored("written", value)
                for number, value in enumerate(held)
                if not self._is_still(given[number], value)
            }
            self._write(
                GraphRun(
                    id=self._n_runs,
                    step=step,
                    graph=-1 if graph is None else graph.id,
                    inputs=tuple(given),
                    outputs=tuple(self._stored("output", value) for value in outputs),
                    written=written,
                    rng=rng,
                    kernels=tuple(kernels),
                )
            )
            self._n_runs += 1
        return result

    def _watch_kernels(self, compiled: Any, kernels: list[KernelRun]) -> dict[str, Any] | None:
        def seen(name: str, args: tuple[Any, ...], out: Any) -> None:
            with OnTrouble(self._trouble, name), Quiet(), self._lock:
                values = [] if out is not None else [self._stored(name, arg) for arg in args]
                stored = None if out is None else self._stored(name, out)
                kernels.append(KernelRun(name, tuple(values), stored))

        module = self._kernels.begin(getattr(compiled, "current_callable", None), seen)
        if module is None:
            self._write(CompileGap("kernels", "the functions that call them were not found"))
        return module

    # Writing

    def _is_still(self, given: Value, value: Any) -> bool:
        """Whether a tensor has the content that was stored of it."""
        if not isinstance(given, StoredTensor):
            return True
        if self._shards is None or tuple(value.shape) != given.shape:
            return False
        place = given.shard, given.offset, given.nbytes
        return _has_content(value) and self._shards.holds(place, _bytes_of(value))

    def _stored(self, name: str, value: Any) -> Value:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, bool | int | float) or value is None:
                return value
            return Unstored(type(value).__name__)
        if not self._keep_tensors:
            return Unstored("tensors are not kept")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return Unstored(f"of the class {type(value).__name__}")
        shards = self._open()
        if shards is None:
            return Unstored("nothing is recorded yet")
        if not _has_content(value):
            return Unstored("its memory was given back")
        data = _bytes_of(value)
        dtype = str(value.dtype).removeprefix("torch.")
        place = shards.find(data) or shards.append(name, dtype, tuple(value.shape), data)
        return StoredTensor(
            dtype=dtype,
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            device=str(value.device),
            shard=place[0],
            offset=place[1],
            nbytes=place[2],
            requires_grad=value.requires_grad,
        )

    def _open(self) -> Shards | None:
        if self._shards is None:
            folder = self._folder()
            if folder is None:
                return None
            home = folder / FOLDER
            home.mkdir(exist_ok=True)
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
            n_shards = sum(name.endswith(".safetensors") for name in os.listdir(fd))
            self._shards = Shards(fd, n_shards)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.fdopen(os.open(LINES_FILE, flags, 0o644, dir_fd=fd), "ab")
        return self._shards

    def _write(self, line: CompileLine) -> None:
        self._waiting.append(line)
        self._flush()

    def _flush(self) -> None:
        if not self._waiting or self._open() is None:
            return
        lines, self._waiting = self._waiting, []
        assert self._shards is not None
        self._shards.flush()
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def _trouble(self, what: str, error: BaseException) -> None:
        with OnTrouble(lambda error: None), self._lock:
            self._write(CompileGap(what, f"{type(error).__name__}: {error}"))


class _TraceHandler(logging.Handler):
    """A handler of torch's structured log."""

    def __init__(self, watch: CompileWatch) -> None:
        super().__init__(logging.DEBUG)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        frame = sys._getframe().f_back
        metadata = getattr(record, "metadata", None)
        if isinstance(metadata, dict):
            with OnTrouble(self._watch._trouble, "an event of torch.compile"), Quiet():
                self._watch.told(metadata, getattr(record, "payload", None), frame)


def _name_of(metadata: dict[str, Any]) -> str:
    """Torch's name of a compilation; that of one which compiled autograd began says so."""
    name = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
    autograd = metadata.get("compiled_autograd_id")
    return name if autograd is None else f"!{autograd}/{name}"


def _local(frame: FrameType | None, name: str, kind: type, having: str = "") -> Any:
    """A local variable of the nearest frame that has one of that name and kind."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        value = frame.f_locals.get(name)
        if value is not None and isinstance(value, kind) and (not having or hasattr(value, having)):
            return value
        frame = frame.f_back
    return None


def _has_content(value: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor; FSDP frees what it has gathered."""
    return not value.numel() or value.untyped_storage().nbytes() > 0


def _bytes_of(value: torch.Tensor) -> np.ndarray[Any, Any]:
    content = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data: np.ndarray[Any, Any] = content.reshape(-1).view(torch.uint8).numpy()
    return data


unseen(CompileWatch._around)
