"""A call's own error: its outputs against its float64 replay, in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tensorprobe.errors import BadUsage, NotReplayable, TensorprobeError, UnreadableCapture
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.rounding_laws import Breach, Law, systematic_breach

if TYPE_CHECKING:
    import torch

HUGE = 1e30
_SHAKES = 2  # replays on inputs moved by a rounding, for what rounding explains
_ROW = 64  # numbers in a row where the last dimension is too short to average over
# Their backward computes with their result: near 1 little is left of 1 - tanh(x)^2.
_SAVE_RESULTS = {"tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax"}
_START_S = 120.0  # importing torch on a busy machine


class OwnError(msgspec.Struct, frozen=True):
    """How far one output is from its replay, in units of what rounding explains.

    `rms` is over the whole tensor, `row` over the worst row, `gain` the share of the result that
    is a systematic factor, in roundings, with its standard error `gain_sigma`. `worst` is the
    element with the largest error: where it is, what was recorded, what the replay gives.
    """

    name: str
    rms: float
    row: float
    gain: float
    gain_sigma: float
    relative: float
    exact: bool = False  # there is one right answer
    unit: float = 0.0  # the unit roundoff of the coarsest dtype that took part, autocast's included
    law: str | None = None  # how its kernel rounds; None: nobody has calibrated it
    breach: Breach | None = None  # what of that the result breaks
    systematic: Breach | None = None  # the same if its kernel may round as often as it likes
    worst: tuple[tuple[int, ...], float, float] | None = None

    @property
    def size(self) -> float:
        return max(self.rms, self.row / 2)

    def told(self) -> dict[str, Any]:
        """The worst element, for the metrics of a culprit."""
        if self.worst is None:
            return {}
        at, recorded, replayed = self.worst
        return {"worst": {"at": list(at), "recorded": recorded, "replayed": replayed}}


class Evidence(msgspec.Struct, frozen=True):
    """What replaying a call on one side has shown, or why it could not be replayed."""

    errors: dict[str, OwnError] = {}
    problem: str | None = None

    @property
    def worst(self) -> OwnError | None:
        return max(self.errors.values(), key=lambda error: error.size, default=None)


def own_error(forward: Call, backward: Call | None = None, *, noise: bool = True) -> Evidence:
    """Replay a call, or the backward of one, and hold its recorded outputs against the result.

    Without `noise` it takes half the time and the errors may come out larger than they are.
    """
    try:
        return _own_error(forward, backward, noise)
    except (NotReplayable, UnreadableCapture) as error:
        return Evidence(problem=str(error))


def _own_error(forward: Call, backward: Call | None, noise: bool) -> Evidence:
    from tensorprobe.replay.calibration import law_of
    from tensorprobe.replay.kinds import api_of
    from tensorprobe.replay.reference import replay
    from tensorprobe.replay.shaking import differences, shaken

    subject = backward or forward
    moved = []
    replayed = replay(forward, backward=backward, noise=False)
    if noise and replayed.kind not in ("exact", "conversion"):
        moved = [
            replay(
                forward,
                backward=backward,
                noise=False,
                source=shaken(replayed.roundoff, seed),
            ).outputs
            for seed in range(_SHAKES)
        ]
    errors = {}
    moves = differences(forward, backward, replayed.outputs)
    blind = _blind(forward) if replayed.kind == "dropout" and backward is not None else None
    for record in subject.tensors:
        name = record.name.removeprefix(subject.name + ".")
        reference = replayed.outputs.get(name)
        if record.role != "output" or record.blob is None or reference is None:
            continue
        found = record.load()
        if tuple(reference.shape) != tuple(found.shape):
            continue
        if blind is not None and blind.shape == found.shape:
            found, reference = found.clone(), reference.clone()
            found[blind], reference[blind] = 0, 0
        moved_by = [outputs[name] - reference for outputs in moved if name in outputs]
        exact = replayed.kind in ("exact", "conversion") and backward is None
        given = _incoming(backward, record) if backward is not None else None
        error = _compare(
            name,
            found,
            reference,
            replayed.roundoff,
            moved_by,
            given,
            exact,
            saves_result=backward is not None and api_of(forward.op).lower() in _SAVE_RESULTS,
        )
        law = law_of(forward, backward, record)
        if law is not None and blind is None:
            held = _hold(law, forward, backward, record, found, reference, moves(name))
            error = msgspec.structs.replace(error, **held)
        errors[name] = error
    if not errors:
        return Evidence(problem=f"{subject.name}: its replay gives none of what was recorded")
    return Evidence(errors)


def _hold(
    law: Law,
    forward: Call,
    backward: Call | None,
    record: TensorRecord,
    found: torch.Tensor,
    reference: torch.Tensor,
    moves: Callable[[float], list[torch.Tensor]],
) -> dict[str, Any]:
    """A result held against the law of its kernel: the fields of an OwnError."""
    from tensorprobe.replay import departures
    from tensorprobe.replay.calibration import sum_length

    if law.kind == "exact":
        source = _cast_from(forward, found)
        broken = (
            departures.exact_breach(found, reference)
            if source is None
            else departures.cast_breach(found, source)
        )
        return {"law": law.kind, "breach": broken, "systematic": broken}
    if not (departures.can_judge(found.dtype) and found.numel()):
        return {}
    length = sum_length(forward, backward, record)
    departure, broken = departures.settle(found, reference, law, length, moves)
    systematic = None if broken is None else systematic_breach(departure, law)
    return {"law": law.kind, "breach": broken, "systematic": systematic}


def _cast_from(call: Call, found: torch.Tensor) -> torch.Tensor | None:
    """What a call converts to another floating dtype, where that is what it does."""
    from tensorprobe.replay.kinds import kind_of

    given = [record for record in call.tensors if record.role == "input"]
    if kind_of(call) != "conversion" or not given or not found.is_floating_point():
        return None
    source = given[0].load()
    if source.shape != found.shape or not source.is_floating_point():
        return None
    return source if source.dtype != found.dtype else None


def _incoming(backward: Call, record: TensorRecord) -> torch.Tensor | None:
    """The gradient that came in, where it has the shape of the one that went out."""
    import torch

    for other in backward.tensors:
        if other.role == "input" and other.shape == record.shape and other.blob is not None:
            return torch.nan_to_num(other.load().to(torch.float64), 0.0, 0.0, 0.0)
    return None


def _blind(dropout: Call) -> torch.Tensor | None:
    """Where a mask that is read off the output cannot be told: what went in was zero."""
    given = next((r for r in dropout.tensors if r.role == "input" and r.blob is not None), None)
    made = next((r for r in dropout.tensors if r.role == "output" and r.blob is not None), None)
    if given is None or made is None:
        return None
    # a number so small that its scaled copy was rounded to zero tells nothing either
    return given.load().abs() < 1e-30 if made.dtype != "float16" else given.load().abs() < 1e-7


def matters(call: Call, other: Call, backward: Call | None = None) -> float | None:
    """How far the replay of a call, or of its backward, moves when it is given the arguments of
    another, in roundings; None when that cannot be tried."""
    from tensorprobe.replay.generate import load_or_generate
    from tensorprobe.replay.kinds import kind_of
    from tensorprobe.replay.rebuild import load
    from tensorprobe.replay.reference import replay, rms

    # whatever the numbers, those that are only moved show where they go
    source = load_or_generate if kind_of(call) == "exact" else load
    try:
        own = replay(call, backward=backward, noise=False, source=source)
        theirs = replay(other, backward=backward, noise=False, source=source)
    except (NotReplayable, UnreadableCapture):
        return None
    worst = 0.0
    for name, mine in own.outputs.items():
        got = theirs.outputs.get(name)
        if got is None or got.shape != mine.shape:
            return math.inf
        unit = own.roundoff * rms(mine)
        moved = rms(mine.double() - got.double())
        if moved:
            worst = max(worst, moved / unit if unit else math.inf)
    return worst


def moves(call: Call) -> bool:
    """Whether a call gives the numbers it is given in other places; tried on numbers made up."""
    from tensorprobe.replay.generate import load_or_generate
    from tensorprobe.replay.kinds import first_read
    from tensorprobe.replay.reference import replay

    given = first_read(call)
    if given is None:
        return False
    try:
        made = replay(call, noise=False, source=load_or_generate).outputs.get("output.0")
        return made is not None and not made.equal(load_or_generate(given).to(made.dtype))
    except (NotReplayable, UnreadableCapture):
        return False


def _compare(
    name: str,
    found: torch.Tensor,
    reference: torch.Tensor,
    u: float,
    shaken: list[torch.Tensor],
    given: torch.Tensor | None,
    exact: bool,
    saves_result: bool,
) -> OwnError:
    import torch

    if not (found.is_floating_point() or found.is_complex()):
        wrong = int((found != reference.to(found.dtype)).sum())
        size = math.inf if wrong else 0.0
        return OwnError(name, size, size, 0.0, 0.0, size, exact)
    if found.is_complex():
        found, reference = torch.view_as_real(found), torch.view_as_real(reference)
    x, y = found.to(torch.float64), reference.to(torch.float64)
    limit = torch.finfo(found.dtype).max * (1 + torch.finfo(found.dtype).eps / 4)
    y = torch.where(y.abs() > limit, y.sign() * math.inf, y)
    finite = x.isfinite() & y.isfinite()
    alike = finite | (x == y) | (x.isnan() & y.isnan())
    if not bool(alike.all()):
        return OwnError(name, math.inf, math.inf, 0.0, 0.0, math.inf, exact)
    usable = finite & (x.abs() < HUGE) & (y.abs() < HUGE)
    x, y = torch.where(usable, x, 0.0), torch.where(usable, y, 0.0)
    d = x - y
    if not bool(d.any()):
        return OwnError(name, 0.0, 0.0, 0.0, 0.0, 0.0, exact)
    n = max(int(usable.sum()), 1)
    rms_y = float(y.norm()) / math.sqrt(n)
    rms_d = float(d.norm()) / math.sqrt(n)
    tiny = float(torch.finfo(found.dtype).smallest_normal) * float(torch.finfo(found.dtype).eps)
    noise = [torch.where(usable, part.to(torch.float64), 0.0) for part in shaken]
    square_noise = sum((float(part.norm()) ** 2 for part in noise), 0.0) / max(len(noise), 1) / n
    # what backward saved of the result was rounded too, which no shaking of inputs shows
    saved = u * float(given.norm()) / math.sqrt(n) if saves_result and given is not None else 0.0
    scale = max(math.hypot(u * rms_y, math.sqrt(square_noise), saved), tiny)
    rows_d, rows_y = _row_rms(d), _row_rms(y)
    row_unit = (u * rows_y).square()
    for part in noise:
        row_unit = row_unit + _row_rms(part).square() / len(noise)
    if given is not None:
        row_unit = row_unit + (u * _row_rms(given)).square()
    # a row far smaller than the whole is what cancellation leaves of it
    row_unit = torch.clamp(row_unit.sqrt(), min=scale / 2)
    square = float(y.flatten() @ y.flatten())
    gain = float(d.flatten() @ y.flatten()) / square if square else 0.0
    rest = math.sqrt(max(rms_d**2 - (gain * rms_y) ** 2, 0.0))  # beside the factor
    sigma = rest / (rms_y * math.sqrt(n)) if rms_y else math.inf
    # a system of equations that is nearly singular moves its whole solution
    moved = [float(part.flatten() @ y.flatten()) / square for part in noise] if square else []
    # and so does, of a result that is far smaller, what backward has saved
    gain_unit = math.hypot(
        u, *(each / math.sqrt(len(moved)) for each in moved), saved / rms_y if rms_y else 0.0
    )
    return OwnError(
        name,
        rms_d / scale,
        float((rows_d / row_unit).max()),
        gain / gain_unit if u else 0.0,
        sigma / gain_unit if u else 0.0,
        rms_d / rms_y if rms_y else math.inf,
        exact,
        u,
        worst=_worst(d, x, y),
    )


def _worst(
    d: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[tuple[int, ...], float, float]:
    """The element with the largest error, of a tensor and its replay."""
    at = int(d.abs().argmax())
    place, rest = [], at
    for size in reversed(d.shape):
        rest, index = divmod(rest, size)
        place.append(index)
    return tuple(reversed(place)), float(x.flatten()[at]), float(y.flatten()[at])


def _row_rms(x: torch.Tensor) -> torch.Tensor:
    last = x.shape[-1] if x.dim() else 1
    if last >= _ROW // 4 and x.numel() > last:
        rows = x.reshape(-1, last)
    else:
        flat = x.reshape(-1)
        rows = (
            flat[: flat.numel() // _ROW * _ROW].reshape(-1, _ROW)
            if flat.numel() > _ROW
            else flat[None]
        )
    result: torch.Tensor = rows.pow(2).mean(1).sqrt()
    return result


class UserCode(msgspec.Struct, frozen=True):
    """What a user allows to be run besides torch: a file of references, packages and files."""

    references: Path | None = None
    imports: tuple[str | Path, ...] = ()


class Replayer:
    """Own errors and effects of arguments, worked out in another process."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Start the process; BadUsage where the user's code cannot be imported."""
        with self._lock:
            self._ready()

    def own_error(
        self, forward: Call, backward: Call | None = None, *, noise: bool = True, seconds: float
    ) -> Evidence:
        """As evidence.own_error has it; a process that dies or is late is a problem of the call."""
        if _has_reference(forward):
            return own_error(forward, backward, noise=noise)
        answer = self._ask("own_error", (forward, backward, noise), seconds)
        if isinstance(answer, str):
            return Evidence(problem=f"{(backward or forward).name} has no replay: {answer}")
        assert isinstance(answer, Evidence)
        return answer

    def matters(
        self, call: Call, other: Call | None, backward: Call | None = None, *, seconds: float
    ) -> float | None:
        """As evidence.matters has it; None also where the process dies or is late."""
        if other is None:
            return None
        if _has_reference(call):
            return matters(call, other, backward)
        answer = self._ask("matters", (call, other, backward), seconds)
        return None if isinstance(answer, str) else answer

    def moves(self, call: Call, *, seconds: float) -> bool:
        """As evidence.moves has it; False also where the process dies or is late."""
        return self._ask("moves", (call,), seconds) is True

    def _ask(self, what: str, call: tuple[Any, ...], seconds: float) -> Any:
        """The answer, or as text why there is none."""
        with self._lock:
            child = self._ready()
            try:
                return child.ask((what, *call), seconds)
            except TimeoutError:
                reason = f"no answer in {seconds:.0f} s"
            except (EOFError, OSError):
                reason = child.epitaph()
            child.end()
            self._child = None
            return reason

    def _ready(self) -> _Child:
        child = self._child
        if child is None or not child.can_be_asked:
            child = self._child = _Child(self._code)
        return child


def has_own_references() -> bool:
    """Whether this program has registered references, which other processes do not know."""
    references: Any = sys.modules.get("tensorprobe.replay.references")
    return references is not None and bool(references.registered())


def _has_reference(call: Call) -> bool:
    """Whether the user has registered a reference for the call in this process."""
    references: Any = sys.modules.get("tensorprobe.replay.references")  # it would import torch
    return references is not None and references.find(call.op, references.registered()) is not None


@functools.lru_cache(maxsize=4)
def replayer_for(code: UserCode) -> Replayer:
    """The replayer of this program for some code of the user's."""
    return Replayer(code)


class _Child:
    """The process and the way to it."""

    def __init__(self, code: UserCode) -> None:
        from tensorprobe.replay.child_limits import child_command

        ours, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs:
            start = f"from tensorprobe.comparing.evidence import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                child_command(start),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = _Line(ours)
        self.end = weakref.finalize(self, _end, self._process, self._connection, self._owner)
        try:
            problem = self.ask(code, _START_S)
        except (TimeoutError, EOFError, OSError) as error:
            problem = f"the process that replays calls did not start: {self.epitaph() or error}"
        if problem is not None:
            self.end()
            raise BadUsage(problem)

    @property
    def can_be_asked(self) -> bool:
        """Not after a fork, and not where the program has closed the files of others."""
        return self._owner == os.getpid() and self._connection.is_open

    def ask(self, question: Any, seconds: float) -> Any:
        self._connection.send(question)
        if not self._connection.poll(max(seconds, 0.0)):
            raise TimeoutError
        return self._connection.recv()

    def epitaph(self) -> str:
        """What a process that is gone died of."""
        deadline = time.monotonic() + 5.0
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        code = self._process.poll()
        return "the process that ran it died" + (f" (signal {-code})" if code and code < 0 else "")


class _Line(Connection):
    """A connection that leaves its descriptor alone once that is a file of the program's.

    A program may close all files that it does not know, and its own then get their numbers.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = _file_at(end.fileno())
        super().__init__(end.detach())

    @property
    def is_open(self) -> bool:
        return not self.closed and _file_at(self.fileno()) == self._socket

    def _close(self) -> None:  # by close() and when it is collected
        if self.is_open:
            os.close(self.fileno())


def _file_at(descriptor: int) -> tuple[int, int] | None:
    """Which file a descriptor is of; None where it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has nothing to end
        return
    connection.close()
    process.kill()
    process.wait()


def serve(descriptor: int) -> None:
    """Answer questions until the other end is closed."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        connection.send(_prepare(connection.recv()))
        while True:
            connection.send(_answer(*connection.recv()))


def _prepare(code: UserCode) -> str | None:
    """Import what the user brings, and take no more memory than allowed; what is wrong, if so."""
    from tensorprobe.replay.child_limits import limit_memory
    from tensorprobe.replay.references import bring_in, run_file

    try:
        if code.references is not None:
            run_file(code.references)
        bring_in(code.imports)
    except TensorprobeError as error:
        return str(error)
    limit_memory()
    return None


def _answer(what: Literal["own_error", "matters", "moves"], *call: Any) -> Any:
    try:
        if what == "own_error":
            forward, backward, noise = call
            return own_error(forward, backward, noise=noise)
        return moves(*call) if what == "moves" else matters(*call)
    except Exception as error:  # noqa: BLE001 judging one call: the reason is its result
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
