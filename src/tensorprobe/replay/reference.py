"""What a recorded call should have given: run again in float64 on the CPU, on its own inputs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorprobe.devices import device_layer, rng_kept
from tensorprobe.errors import NotReplayable
from tensorprobe.records import HOST, Call, Special, TensorRecord
from tensorprobe.replay import references as user_references
from tensorprobe.replay.allowed import dtype_named
from tensorprobe.replay.decompositions import formula, vendor_formula
from tensorprobe.replay.kinds import Kind, api_of, backward_kind, kind_of
from tensorprobe.replay.rebuild import (
    LiveCall,
    ReplayPlace,
    Source,
    cannot_run,
    load,
    rebuild,
    with_stride,
)
from tensorprobe.torch_versions import dispatch_modes_off

References = Mapping[str, Callable[..., Any]]
Results = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]  # outputs, gradients

CPU = torch.device("cpu")
# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53, "complex128": 2.0**-53, "float32": 2.0**-24, "complex64": 2.0**-24,
    "float16": 2.0**-11, "complex32": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3, "float8_e8m0fnu": 2.0**-1,
}  # fmt: skip
# Masks hold the largest number there is; in a norm they would hide everything else.
HUGE = 1e30
_STEP = ROUNDOFF["float32"]  # how far inputs are moved to see what a rounding of them does


@dataclass
class Replayed:
    """The result of a replay; names are those of a capture, without the call ("output.0")."""

    kind: Kind
    how: str  # what the reference is: "float64", "as recorded", a user's function...
    roundoff: float  # unit roundoff of the coarsest dtype that took part
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)  # by one rounding of the inputs
    noise: dict[str, float] = field(default_factory=dict)  # rms of `moved`, at `roundoff`

    def unit(self, name: str) -> float:
        """The root mean square error that rounding explains in this output."""
        return math.hypot(self.roundoff * rms(self.outputs[name]), self.noise.get(name, 0.0))

    def error(self, name: str, actual: torch.Tensor) -> float:
        """How far `actual` is from the reference, in units of what rounding explains.

        Healthy calls stay below about 2 (see docs/check.md); 0 is equality, inf a NaN or infinity
        where the reference has none.
        """
        expected = self.outputs[name]
        if not (expected.is_floating_point() or expected.is_complex()):
            return 0.0 if torch.equal(actual.detach().cpu(), expected) else math.inf
        found = actual.detach().to("cpu", expected.dtype)
        if bool(misplaced(found, expected, actual.dtype).any()):
            return math.inf
        distance = rms(found - expected)
        if distance == 0.0:
            return 0.0
        return distance / max(self.unit(name), smallest(actual.dtype))

    def _shake(self, moved: Mapping[str, torch.Tensor]) -> None:
        scale = self.roundoff / _STEP
        for name, reference in self.outputs.items():
            if name in moved and reference.is_floating_point():
                self.moved[name] = moved[name] - reference
                self.noise[name] = scale * rms(self.moved[name])


def misplaced(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where NaN and infinity are that should not be, or are not that should; overflow may."""
    overflow = found.isinf() & (expected.abs() > _finite_limit(dtype))
    overflow &= torch.sgn(found) == torch.sgn(expected)
    same = (found == expected) | (found.isfinite() & expected.isfinite())
    return ~(same | (found.isnan() & expected.isnan()) | overflow)


def replay(
    forward: Call,
    *,
    backward: Call | None = None,
    dtype: str = "float64",
    references: References | None = None,
    noise: bool = True,
    source: Source = load,
) -> Replayed:
    """Run a recorded call on the CPU in `dtype`; with `backward`, give its gradients instead.

    Calls that move, compare or convert numbers are run in the dtypes they were recorded in, where
    they have one right answer. Raises NotReplayable with the reason.

        replayed = replay(capture.call("Functional.linear.0.forward"))
        replayed.error("output.0", call.tensor("output.0").load())
    """
    there, back = replay_both(
        forward, backward, dtype=dtype, references=references, noise=noise, source=source
    )
    return there if back is None else back


def replay_both(
    forward: Call,
    backward: Call | None = None,
    *,
    dtype: str = "float64",
    references: References | None = None,
    noise: bool = True,
    source: Source = load,
) -> tuple[Replayed, Replayed | None]:
    """The forward and the backward of a call, for the cost of one where that is possible."""
    kind = kind_of(forward)
    if kind == "uninitialised":
        raise NotReplayable(f"{forward.name} cannot be judged: its content is not defined")
    function, how = _stand_in(forward, references, dtype)
    exact = None
    if kind in ("exact", "selection", "conversion", "random") and function is None:
        exact = _as_recorded(forward, kind, source)
        if backward is None:
            return exact, None
    if kind == "random":
        raise NotReplayable(f"{forward.name} cannot be run in float64: it would draw other numbers")
    job = _Job(forward, backward, ReplayPlace(CPU, dtype_named(dtype)), function)
    if kind == "dropout" and rng_state(forward, "cpu") is None:
        job = _DropoutJob(forward, backward, job.place, function)
    try:
        outputs, sent = job.run(source)
    except NotReplayable as error:
        other = _next_best(job, coarsest(forward, None), error.__cause__)
        if other is None:
            raise
        job = other
        outputs, sent = job.run(source)
    there = Replayed(kind, job.how or how, coarsest(forward, None), outputs)
    back = None
    if backward is not None:
        back = Replayed(backward_kind(forward), there.how, coarsest(forward, backward), sent)
    if noise:
        shaker = _Shaker(apart=kind in ("elementwise", "compound"))
        # what forward saved for backward was rounded too: sigmoid's y, softmax's, a norm's rstd
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, shaker.shake):
            moved, moved_back = job.run(shaker.source(source, backward))
        there._shake(moved)
        if back is not None:
            back._shake(moved_back)
    return exact or there, back


def _stand_in(
    call: Call, references: References | None, dtype: str
) -> tuple[Callable[..., Any] | None, str]:
    """A user's reference or a vendor op's formula, and how the reference is called."""
    registered = user_references.registered() if references is None else references
    function = user_references.find(call.op, registered)
    if function is not None:
        return function, f"reference {getattr(function, '__name__', 'given')}"
    function = vendor_formula(call)
    if function is not None:
        return function, f"formula of {api_of(call.op)} in {dtype}"
    return None, dtype


def _next_best(job: _Job, roundoff: float, problem: BaseException | None) -> _Job | None:
    """Another way to a reference where the CPU has no kernel: a formula, or float32."""
    if job.function is None and (other := formula(job.forward.op, problem)) is not None:
        found = _Job(job.forward, job.backward, job.place, other)
        found.how = f"decomposition of {api_of(job.forward.op)} in float64"
        return found
    if job.place.dtype is torch.float64 and roundoff > ROUNDOFF["float32"]:
        found = _Job(job.forward, job.backward, ReplayPlace(CPU, torch.float32), job.function)
        found.how = "float32: the CPU has no float64 kernel for it"
        return found
    return None


class _Job:
    """One way to compute a reference, to be run on exact and on shaken inputs."""

    how = ""

    def __init__(
        self,
        forward: Call,
        backward: Call | None,
        place: ReplayPlace,
        function: Callable[..., Any] | None,
    ) -> None:
        self.forward, self.backward, self.place, self.function = forward, backward, place, function

    def run(self, source: Source) -> Results:
        with quiet(), rng_at(self.forward, CPU):
            live = rebuild(
                self.forward,
                self.place,
                grad=self.backward is not None,
                source=source,
                function=self.function,
            )
            return _attempt(live, self.backward, source)


class _DropoutJob(_Job):
    """Dropout whose random state is not known: its mask is read off what it gave."""

    how = "float64, mask from the recorded output"

    def run(self, source: Source) -> Results:
        output = next((t for t in self.forward.tensors if t.role == "output"), None)
        given = next((t for t in self.forward.tensors if t.role == "input"), None)
        p = drop_probability(self.forward)
        if output is None or given is None or p is None or p >= 1:
            raise NotReplayable(f"{self.forward.name}: its random state was not recorded")
        factor = (load(output) != 0).to(torch.float64) / (1 - p)
        outputs = {"output.0": source(given).to(torch.float64) * factor}
        if self.backward is None:
            return outputs, {}
        grad = next(t for t in self.backward.tensors if t.role == "input")
        return outputs, {"output.0": source(grad).to(torch.float64) * factor}


def drop_probability(call: Call) -> float | None:
    """The p of a dropout call; a module's is in the note that says how it was made."""
    for note in call.notes:
        if found := re.match(r"made as \w*Dropout\w*\(p=(\d+(?:\.\d+)?(?:e-?\d+)?)", note):
            return float(found[1])
    value = call.kwargs.get("p", call.args[1] if len(call.args) > 1 else 0.5)
    return float(value) if isinstance(value, int | float) else None


def _attempt(live: LiveCall, backward: Call | None, source: Source) -> Results:
    try:
        return run_call(live, backward, source)
    except NotReplayable:
        raise
    except Exception as error:  # replaying one call: the reason is its result
        raise cannot_run(live.call, error) from error


def run_call(live: LiveCall, backward: Call | None = None, source: Source = load) -> Results:
    """Run a live call: its outputs, and with `backward` the gradients that call recorded."""
    with torch.set_grad_enabled(backward is not None):
        outputs = live.run()
        sent = {} if backward is None else gradients(live, outputs, backward, source)
    return {name: tensor.detach() for name, tensor in outputs.items()}, sent


def gradients(
    live: LiveCall, outputs: Mapping[str, torch.Tensor], backward: Call, source: Source
) -> dict[str, torch.Tensor]:
    """What a call sends back when the recorded gradients come in, by the name of the input."""
    roots, incoming = [], []
    for record in backward.tensors:
        name = record.name.removeprefix(backward.name + ".")
        root = outputs.get("output." + name.partition(".")[2])
        if record.role != "input" or root is None or not root.requires_grad:
            continue
        grad = source(record).to(root.device, root.dtype)
        roots.append(root)
        incoming.append(with_stride(grad, record.stride).reshape(root.shape))
    wanted = [
        record.name.removeprefix(f"{backward.name}.output.")
        for record in backward.tensors
        if record.role == "output"
    ]
    found = ((path, live.leaves.get(f"input.{path}")) for path in wanted)
    leaves = {path: leaf for path, leaf in found if leaf is not None}
    if not roots or not leaves:
        raise NotReplayable(
            f"{backward.name} cannot be run alone: no gradient leads from its outputs to its inputs"
        )
    sent = torch.autograd.grad(roots, list(leaves.values()), incoming, allow_unused=True)
    return {
        f"output.{path}": grad for path, grad in zip(leaves, sent, strict=True) if grad is not None
    }


def perform(
    forward: Call, backward: Call | None, device: torch.device, source: Source = load
) -> Results:
    """Run a call as it was recorded, on any device: its outputs and the gradients it sends."""
    with quiet(), rng_at(forward, device), _autocast_as_recorded(forward, device):
        live = rebuild(forward, ReplayPlace(device), grad=backward is not None, source=source)
        return run_call(live, backward, source)


@contextmanager
def _autocast_as_recorded(call: Call, device: torch.device) -> Iterator[None]:
    note = next((note for note in call.notes if note.startswith("autocast ")), None)
    if note is None:
        yield
        return
    with torch.autocast(device.type, dtype_named(note.split()[-1])):
        yield


def _as_recorded(call: Call, kind: Kind, source: Source) -> Replayed:
    """Exact results: the same call on the CPU, in its own dtypes, or widened where it has none."""
    if kind == "random" and rng_state(call, "cpu") is None:
        raise NotReplayable(f"{call.name} is random and its state was not recorded")
    how = "as recorded"
    with quiet(), rng_at(call, CPU):
        live = rebuild(call, ReplayPlace(CPU), source=source)
        try:
            outputs = run_call(live)[0]
        except Exception as error:  # replaying one call: the reason is its result
            if "not implemented" not in str(error) and "not support" not in str(error):
                raise cannot_run(call, error) from error
            wide = rebuild(call, ReplayPlace(CPU, torch.float32), source=source)
            outputs = _narrowed(call, _attempt(wide, None, source)[0])
            how = "upcast to float32: the CPU has no kernel for its dtype"
    return Replayed(kind, how, coarsest(call, None), outputs)


def _narrowed(call: Call, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtypes = {
        record.name.removeprefix(call.name + "."): record.dtype
        for record in call.tensors
        if record.role == "output"
    }
    return {
        name: tensor.to(dtype_named(dtypes[name])) if name in dtypes else tensor
        for name, tensor in outputs.items()
    }


def coarsest(forward: Call, backward: Call | None) -> float:
    """The unit roundoff of the coarsest floating dtype in a call, autocast's included."""
    calls = [forward] if backward is None else [forward, backward]
    names = {record.dtype for call in calls for record in call.tensors}
    names |= {_bare(note.split()[-1]) for note in forward.notes if note.startswith("autocast ")}
    for value in (*forward.args, *forward.kwargs.values()):
        if isinstance(value, Special) and value.kind == "dtype":
            names.add(_bare(value.text))
    return max((ROUNDOFF[name] for name in names if name in ROUNDOFF), default=0.0)


def _bare(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def rms(tensor: torch.Tensor) -> float:
    """Root mean square over the numbers that are finite and no mask."""
    if tensor.numel() == 0:
        return 0.0
    size = tensor.detach().abs().to(torch.float64)
    usable = size < HUGE
    count = int(usable.sum())
    if count == 0:
        return 0.0
    kept = torch.where(usable, size, 0.0)
    return float(torch.linalg.vector_norm(kept)) / math.sqrt(count)


class _Shaker:
    """Moves each number by about one rounding, up or down by chance.

    Tensors moved `apart` go up and down in turn, as wholes: then no element of `a - b` is spared.
    Incoming gradients all go up on average: their sums may climb high and cancel late (one half of
    a batch against the other), and every addition on the way rounds what has been climbed. They go
    by different steps: of equal ones a normalisation's backward would take away the mean.
    """

    def __init__(self, *, apart: bool) -> None:
        self._generator = torch.Generator(HOST).manual_seed(0)
        self._turn = itertools.cycle((1, -1))
        self._apart = apart

    def source(self, source: Source, backward: Call | None) -> Source:
        incoming = {record.name for record in backward.tensors} if backward is not None else ()

        def shaken(record: TensorRecord) -> torch.Tensor:
            content = source(record)
            if record.name in incoming and content.is_floating_point():
                wide = content.to(torch.float64)
                return wide + _STEP * (1 + self._signs(wide)) * wide.abs()
            return self.shake(content)

        return shaken

    def shake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        if self._apart:
            return wide * (1 + _STEP * next(self._turn))
        return wide * (1 + _STEP * self._signs(wide))

    def _signs(self, like: torch.Tensor) -> torch.Tensor:
        """1 and -1 by chance."""
        drawn = torch.randint(
            0, 2, like.shape, generator=self._generator, dtype=torch.int8, device=HOST
        )
        return 2 * drawn.to(like.device, like.dtype) - 1


def _finite_limit(dtype: torch.dtype) -> float:
    """From where on a number may round to infinity."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return math.inf
    return float(torch.finfo(dtype).max) * (1 - torch.finfo(dtype).eps)


def smallest(dtype: torch.dtype) -> float:
    """Below this, numbers have an absolute and not a relative precision."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)


# Surroundings


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, no mode, hook or autocast of the program sees or changes what is run."""
    # asking first: disabling modes imports half of torch, and mostly there are none
    modes: AbstractContextManager[object]
    modes = dispatch_modes_off() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with torch._C.DisableTorchFunction(), modes, torch.autocast("cpu", enabled=False):
        yield


def rng_state(call: Call, device: str) -> torch.Tensor | None:
    """The state of the random numbers that a call drew from, where it was recorded."""
    for record in call.tensors:
        if record.name.endswith(".buffers.rng_state") and record.blob is not None:
            drawn_on = {r.device.partition(":")[0] for r in call.tensors if r is not record}
            if device in drawn_on or not drawn_on:
                return load(record)
    return None


@contextmanager
def rng_at(call: Call, device: torch.device) -> Iterator[None]:
    """Inside, random numbers start where the call found them; afterwards none were drawn."""
    state = rng_state(call, device.type)
    with rng_kept(device):
        if state is not None:
            try:
                device_layer(device).set_rng_state(state)
            except (RuntimeError, TypeError) as error:
                raise NotReplayable(
                    f"{call.name} cannot be run: its recorded random state is damaged: {error}"
                ) from error
        yield
