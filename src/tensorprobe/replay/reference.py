"""What a recorded call should have given: run again in float64 on the CPU, on its own inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call, Special, TensorRecord
from tensorprobe.replay import references as user_references
from tensorprobe.replay.kinds import Kind, kind_of
from tensorprobe.replay.rebuild import LiveCall, Place, Source, load, rebuild, with_stride

References = Mapping[str, Callable[..., Any]]

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
    noise: dict[str, float] = field(default_factory=dict)

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
        limit = _finite_limit(actual.dtype)
        if not torch.equal(found.isnan(), expected.isnan()):
            return math.inf
        overflow = (found.isinf() & (expected.abs() < limit)) | (
            ~found.isfinite() & expected.isfinite() & (expected.abs() < limit)
        )
        if bool(overflow.any()):
            return math.inf
        distance = rms(found - expected)
        if distance == 0.0:
            return 0.0
        unit = max(self.unit(name), _smallest(actual.dtype))
        return distance / unit


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
    kind = kind_of(forward)
    if kind == "uninitialised":
        raise NotReplayable(f"{forward.name} cannot be judged: its content is not defined")
    registered = user_references.registered() if references is None else references
    function = user_references.find(forward.op, registered)
    exact = kind in ("exact", "selection", "conversion", "random") and backward is None
    if exact and function is None:
        return _as_recorded(forward, kind, source)
    if kind == "random":
        raise NotReplayable(f"{forward.name} cannot be run in float64: it would draw other numbers")
    job = _Job(forward, backward, Place(CPU, getattr(torch, dtype)), function)
    if kind == "dropout" and rng_state(forward, "cpu") is None:
        job = _DropoutJob(forward, backward, job.place, function)
    how = dtype if function is None else f"reference {getattr(function, '__name__', function)}"
    result = Replayed(kind, job.how or how, coarsest(forward, backward), job.run(source))
    if noise:
        moved = job.run(_shaken(source))
        scale = result.roundoff / _STEP
        result.noise = {
            name: scale * rms(moved[name] - reference)
            for name, reference in result.outputs.items()
            if name in moved and reference.is_floating_point()
        }
    return result


class _Job:
    """One way to compute a reference, to be run on exact and on shaken inputs."""

    how = ""

    def __init__(
        self,
        forward: Call,
        backward: Call | None,
        place: Place,
        function: Callable[..., Any] | None,
    ) -> None:
        self.forward, self.backward, self.place, self.function = forward, backward, place, function

    def run(self, source: Source) -> dict[str, torch.Tensor]:
        grad = self.backward is not None
        with quiet(), rng_at(self.forward, CPU):
            live = rebuild(
                self.forward, self.place, grad=grad, source=source, function=self.function
            )
            return _attempt(live, self.backward, source)


class _DropoutJob(_Job):
    """Dropout whose random state is not known: its mask is read off what it gave."""

    how = "float64, mask from the recorded output"

    def run(self, source: Source) -> dict[str, torch.Tensor]:
        output = next((t for t in self.forward.tensors if t.role == "output"), None)
        given = next((t for t in self.forward.tensors if t.role == "input"), None)
        p = _probability(self.forward)
        if output is None or given is None or p is None or p >= 1:
            raise NotReplayable(f"{self.forward.name}: its random state was not recorded")
        factor = (load(output) != 0).to(torch.float64) / (1 - p)
        if self.backward is None:
            return {"output.0": source(given).to(torch.float64) * factor}
        grad = next(t for t in self.backward.tensors if t.role == "input")
        return {"output.0": source(grad).to(torch.float64) * factor}


def _probability(call: Call) -> float | None:
    value = call.kwargs.get("p", call.args[1] if len(call.args) > 1 else 0.5)
    return float(value) if isinstance(value, int | float) else None


def _attempt(live: LiveCall, backward: Call | None, source: Source) -> dict[str, torch.Tensor]:
    try:
        return run_call(live, backward, source)
    except NotReplayable:
        raise
    except Exception as error:  # replaying one call: the reason is its result
        text = str(error).strip().partition("\n")[0]
        raise NotReplayable(
            f"{live.call.name} does not run on the CPU: {type(error).__name__}: {text}"
        ) from error


def run_call(
    live: LiveCall, backward: Call | None = None, source: Source = load
) -> dict[str, torch.Tensor]:
    """Run a live call; with `backward` its outputs are the gradients that call recorded."""
    with torch.set_grad_enabled(backward is not None):
        outputs = live.run()
        if backward is None:
            return {name: tensor.detach() for name, tensor in outputs.items()}
        return gradients(live, outputs, backward, source)


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
    leaves = {
        path: live.leaves[f"input.{path}"] for path in wanted if f"input.{path}" in live.leaves
    }
    if not roots or not leaves:
        raise NotReplayable(
            f"{backward.name} cannot be run alone: no gradient leads from its outputs to its inputs"
        )
    sent = torch.autograd.grad(roots, list(leaves.values()), incoming, allow_unused=True)
    return {
        f"output.{path}": grad for path, grad in zip(leaves, sent, strict=True) if grad is not None
    }


def _as_recorded(call: Call, kind: Kind, source: Source) -> Replayed:
    """Exact results: the same call on the CPU, in its own dtypes, or widened where it has none."""
    if kind == "random" and rng_state(call, "cpu") is None:
        raise NotReplayable(f"{call.name} is random and its state was not recorded")
    how = "as recorded"
    with quiet(), rng_at(call, CPU):
        try:
            outputs = run_call(rebuild(call, Place(CPU), source=source))
        except NotReplayable:
            raise
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "not implemented" not in str(error) and "not support" not in str(error):
                outputs = _attempt(rebuild(call, Place(CPU), source=source), None, source)
            else:
                live = rebuild(call, Place(CPU, torch.float32), source=source)
                outputs = _narrowed(call, _attempt(live, None, source))
                how = "upcast to float32: the CPU has no kernel for its dtype"
    return Replayed(kind, how, coarsest(call, None), outputs)


def _narrowed(call: Call, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtypes = {
        record.name.removeprefix(call.name + "."): record.dtype
        for record in call.tensors
        if record.role == "output"
    }
    return {
        name: tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor
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


def _shaken(source: Source) -> Source:
    """The same inputs, each number moved up or down by about one rounding."""
    generator = torch.Generator().manual_seed(0)

    def shaken(record: TensorRecord) -> torch.Tensor:
        content = source(record)
        if not (content.is_floating_point() or content.is_complex()):
            return content
        wide = content.to(torch.complex128 if content.is_complex() else torch.float64)
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8) * 2 - 1
        return wide * (1 + _STEP * signs)

    return shaken


def _finite_limit(dtype: torch.dtype) -> float:
    """From where on a number may round to infinity."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return math.inf
    return float(torch.finfo(dtype).max) * (1 - torch.finfo(dtype).eps)


def _smallest(dtype: torch.dtype) -> float:
    """Below this, numbers have an absolute and not a relative precision."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)


# Surroundings


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, no mode, hook or autocast of the program sees or changes what is run."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        with torch.autocast("cpu", enabled=False):
            yield


def rng_state(call: Call, device: str) -> torch.Tensor | None:
    """The state of the random numbers that a call drew from, where it was recorded."""
    for record in call.tensors:
        if record.name.endswith(".buffers.rng_state") and record.blob is not None:
            drawn_on = {r.device.partition(":")[0] for r in call.tensors if r is not record}
            if device in drawn_on or not drawn_on:
                return record.load()
    return None


@contextmanager
def rng_at(call: Call, device: torch.device) -> Iterator[None]:
    """Inside, random numbers on the CPU start where the call found them; afterwards none were."""
    before = torch.get_rng_state()
    state = rng_state(call, device.type)
    try:
        if state is not None:
            torch.set_rng_state(state)
        yield
    finally:
        torch.set_rng_state(before)
