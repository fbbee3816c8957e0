"""The monitor as an observer: what of a program is measured, and when."""

from __future__ import annotations

import fnmatch
import re
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from tensorprobe.errors import BadUsage
from tensorprobe.follow.module_hooks import ModuleCall, ModulePaths
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.place import Place
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.scaler_rounds import ScalerRounds
from tensorprobe.monitoring.kept_gradients import KeptGradients
from tensorprobe.monitoring.pending_steps import PendingStep, PendingSteps
from tensorprobe.nests import leaves_of
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.summarizer import Summarizer
from tensorprobe.trouble import OnTrouble

MAX_OUTPUTS = 4  # of one module
WHOLE = 1 << 14  # parameters up to so many elements are compared whole, of others a part
SAMPLE = 1 << 12
NAMES_EVERY = 100  # steps: modules that were hung in meanwhile
NO_DATA = re.compile(
    r"label|target|mask|type|position|past|cache|bias|weight|len|grid|index|indices|idx|^num_|^n_",
    re.IGNORECASE,
)
Named = list[tuple[str, Any]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0


class _OptimizerCall:
    """A step of an optimizer under way, with parts of the parameters as they were before it."""

    def __init__(self, parameters: Named, has_closure: bool) -> None:
        self.parameters = parameters
        self.has_closure = has_closure
        self.before: list[torch.Tensor] = []
        self.updated: Named = []


class MonitorObserver(Observer):
    """Measures a program step by step, and never waits for a device.

    What it measures goes to `pending`, which hands on steps that are complete. `every` says every
    how many steps each kind is measured.
    """

    def __init__(
        self,
        every: dict[str, int],
        pending: PendingSteps,
        *,
        modules: tuple[str, ...] = (),
        steps: Container[int] | None = None,
        gap: Callable[[str, BaseException | str], None] = lambda name, reason: None,
        on_root: Callable[[int], None] = lambda step: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = Place()
        self.scalers = ScalerRounds()
        self.paths: ModulePaths | None = None  # of the hooks, once there are some
        self.step = 0
        self.is_watching = False
        self._every = every
        self._pending = pending
        self._summarizer: Summarizer = pending.summarizer
        self._patterns = modules
        self._steps = steps
        self._gap = gap
        self._on_root = on_root
        self._on_step = on_step
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._kept = KeptGradients()
        self._optimizers: list[tuple[weakref.ref[Any], int]] = []
        self._names: dict[int, str] = {}
        self._names_at = -NAMES_EVERY
        self._local_hooks: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._backwards = 0  # in this step
        self._usual_backwards = 1  # in the last one
        self._by_backward: dict[str, tuple[int, int, Result]] = {}
        self._is_over = False
        self.is_explicit: Callable[[], bool] = lambda: False  # whether the program ends steps
        self._now = self._begin()

    # Steps

    def _begin(self) -> PendingStep:
        is_wanted = self._steps is None or self.step in self._steps
        self._takes = {
            kind: is_wanted and n > 0 and self.step % n == 0 for kind, n in self._every.items()
        }
        self._backwards = 0
        self._by_backward = {}
        return PendingStep(self.step, time.time())

    def begin_at(self, step: int) -> None:
        """The first step has this number."""
        self.step = step
        self._now = self._begin()

    def step_ended(self) -> None:
        """A step is over. One that ends by itself stays open until the next one shows: numbers that
        the program logs after the optimizer's step are still of it."""
        self.finish()
        if self.is_watching:
            with OnTrouble(self._gap, "step"), Quiet():
                if self._takes["parameters"]:
                    self._measure_parameters()
        self._is_over = True
        if self.is_explicit():
            self.finish()

    def finish(self) -> None:
        """End a step that stays open."""
        if not self._is_over:
            return
        self._is_over = False
        self._usual_backwards = max(1, self._backwards)
        now, self.step = self._now, self.step + 1
        self._now = self._begin()
        if not self.is_watching:
            return
        with OnTrouble(self._gap, "step"):
            if self._steps is not None and now.step not in self._steps:
                return
            now.scale_known = self.scalers.scaler is not None
            self._pending.add(now)
            self._hook_parameters()
        self._on_step()

    def log(self, name: str, value: Any) -> None:
        """A number that the program gives."""
        if isinstance(value, torch.Tensor):
            with Quiet():
                if value.numel() != 1:
                    raise BadUsage(f"{name} has {value.numel()} elements; expected a number")
                self._now.scalars[name] = self._summarizer.submit(value.detach())
            return
        try:
            self._now.scalars[name] = float(value)
        except (TypeError, ValueError):
            raise BadUsage(f"{name}={value!r}: expected a number, or a tensor of one") from None

    def structure(self) -> dict[str, Any]:
        """What rules know of the program: which parameters are to be trained."""
        return {"names": self._names}

    # Modules

    @property
    def on(self) -> bool:  # type: ignore[override]
        """Whether a module that is called now is to be told: one that no other module calls is
        told for its inputs."""
        if not self.is_watching:
            return False
        return self._takes["activations"] or self._thread.depth == 0

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> Any:
        thread = self._thread
        thread.depth += 1
        if thread.depth == 1:
            self.finish()
        if thread.depth == 1 and entry.module.training and torch.is_grad_enabled():
            with OnTrouble(self._gap, "input"):
                self._on_root(self.step)
                if self._takes["inputs"]:
                    path = entry.path or "model"
                    self._add("input", self._floats(args, path))
                    for key, value in _data_by_keyword(entry.frame):
                        self._add("input", self._floats(value, f"{path}.{key}"), least=2)
        return thread.depth

    def leave(self, entry: ModuleCall, call: Any, result: Any, error: BaseException | None) -> None:
        self._thread.depth = call - 1
        if error is not None or not self._takes["activations"]:
            return
        if not (entry.module.training and torch.is_grad_enabled()):
            return  # evaluation
        if self._wanted(entry.path):
            with OnTrouble(self._gap, f"Module.{entry.path}"):
                self._add("activation", self._floats(result, entry.path or "model"))

    def _floats(self, value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        found = 0
        for number, leaf in enumerate(leaves_of(value)):
            if isinstance(leaf, torch.Tensor) and found < MAX_OUTPUTS:
                found += 1
                yield (name if found == 1 else f"{name}.{number}"), leaf

    def _add(self, kind: str, named: Iterable[tuple[str, torch.Tensor]], least: int = 1) -> None:
        """Measure tensors of so many elements; of a name that comes twice in a step, the first."""
        entries = self._now.entries.setdefault(kind, {})
        with Quiet():
            for name, tensor in named:
                if name not in entries and tensor.numel() >= least:
                    if tensor.is_floating_point() or kind == "input":
                        entries[name] = self._summarizer.submit(tensor.detach()), tensor.numel()
                    if tensor.dtype is torch.float16:
                        self._now.is_half = True

    def _wanted(self, path: str) -> bool:
        return not self._patterns or any(fnmatch.fnmatchcase(path, p) for p in self._patterns)

    # Backward

    def backward_begins(self, roots: Any) -> None:
        if not self.is_watching:
            return
        self.finish()
        with OnTrouble(self._gap, "backward"), Quiet():
            self._kept.backward_begins()
            root = roots[0] if isinstance(roots, tuple | list) and roots else roots
            if isinstance(root, torch.Tensor) and root.numel() == 1 and len(self._now.losses) < 64:
                self._now.losses.append(self._summarizer.submit(root.detach()))
                scale = self.scalers.scale
                if isinstance(scale, torch.Tensor) and "loss_scale" not in self._now.scalars:
                    self._now.scalars["loss_scale"] = self._summarizer.submit(scale)

    def backward_ended(self, last: bool) -> None:
        if not (self.is_watching and last):
            return
        with OnTrouble(self._gap, "gradients"), Quiet():
            self._kept.backward_ended()
            self._backwards += 1
            if not self._takes["gradients"] or self._backwards != self._usual_backwards:
                return
            entries = self._now.entries.setdefault("gradient.backward", {})
            for name, parameter in self._named_parameters():
                grad = parameter.grad
                if grad is not None and name not in entries:
                    result = self._summarizer.submit(grad)
                    entries[name] = result, grad.numel()
                    self._by_backward[name] = id(grad), grad._version, result

    def _hook_parameters(self) -> None:
        """Where several ranks reduce gradients, see those of this rank before that."""
        distributed = torch.distributed
        several = (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
        if not (several and self._every["gradients"] and self.is_watching):
            return
        for name, parameter in self._named_parameters():
            known = self._local_hooks.get(id(parameter))
            is_known = known is not None and known[0]() is parameter
            if not is_known and parameter.requires_grad and _is_plain(parameter):
                handle = parameter.register_hook(self._local_hook(name))
                self._local_hooks[id(parameter)] = weakref.ref(parameter), handle

    def _local_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            if self.is_watching and self._takes["gradients"]:
                with OnTrouble(self._gap, "gradient.local"):
                    self._add("gradient.local", [(name, grad)])

        return hook

    def remove_hooks(self) -> None:
        """Leave the parameters alone."""
        for _, handle in self._local_hooks.values():
            handle.remove()
        self._local_hooks.clear()

    # Optimizers

    def optimizer_begins(
        self, optimizer: Any, frame: FrameType, has_closure: bool
    ) -> _OptimizerCall | None:
        if not self.is_watching:
            return None
        if not self._number_of(optimizer)[0]:  # the first, which ends a step
            self.finish()
        with OnTrouble(self._gap, "optimizer"), Quiet():
            self.scalers.find(frame)
            parameters = self._parameters_of(optimizer)
            call = _OptimizerCall(parameters, has_closure)
            self._measure_rates(optimizer)
            not_zeroed = self._kept.optimizer_begins(optimizer)
            if not_zeroed and not has_closure:
                self._now.kept_gradients.append(type(optimizer).__name__)
            scale = self.scalers.scale
            if isinstance(scale, torch.Tensor) and "loss_scale" not in self._now.scalars:
                self._now.scalars["loss_scale"] = self._summarizer.submit(scale)
            if not has_closure:
                self._measure_gradients(parameters)
            if self._takes["updates"]:
                call.updated = [each for each in parameters if each[1].requires_grad]
                call.before = [_part(parameter).clone() for _, parameter in call.updated]
            return call
        return None

    def optimizer_ended(self, optimizer: Any, call: _OptimizerCall) -> None:
        with OnTrouble(self._gap, "optimizer"), Quiet():
            self._now.has_stepped = True
            if call.has_closure:
                self._measure_gradients(call.parameters)
            self._kept.optimizer_ended(optimizer, [each for _, each in call.parameters])
            if call.before:
                self._measure_updates(call)
            if self._takes["moments"]:
                self._measure_moments(optimizer, call.parameters)

    def _measure_rates(self, optimizer: Any) -> None:
        scalars = self._now.scalars
        optimizer_number, first = self._number_of(optimizer)
        for number, group in enumerate(optimizer.param_groups, first):
            self._now.optimizers[number] = optimizer_number
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                scalars[f"lr.{number}"] = self._summarizer.submit(rate)
            elif isinstance(rate, int | float):
                scalars[f"lr.{number}"] = float(rate)
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    self._now.groups[name] = number
            betas = group.get("betas")
            if isinstance(betas, tuple | list) and len(betas) >= 2:
                decay = betas[1]
                if isinstance(decay, float):
                    self._now.decay = min(self._now.decay, decay)

    def _number_of(self, optimizer: Any) -> tuple[int, int]:
        """The number of an optimizer, and of its first group; one made anew has the old one's."""
        first = 0
        for number, (reference, n_groups) in enumerate(self._optimizers):
            known = reference()
            if known is optimizer:
                return number, first
            if known is None and n_groups == len(optimizer.param_groups):
                self._optimizers[number] = weakref.ref(optimizer), n_groups
                return number, first
            first += n_groups
        self._optimizers.append((weakref.ref(optimizer), len(optimizer.param_groups)))
        return len(self._optimizers) - 1, first

    def _measure_gradients(self, parameters: Named) -> None:
        if not self._takes["gradients"]:
            return
        entries = self._now.entries.setdefault("gradient", {})
        unscaled = self.scalers.scaler is not None  # which moves no version
        for name, parameter in parameters:
            grad = parameter.grad
            if grad is None or name in entries:
                continue
            known = self._by_backward.get(name)
            if known is not None and known[:2] == (id(grad), grad._version) and not unscaled:
                entries[name] = known[2], grad.numel()
            else:
                entries[name] = self._summarizer.submit(grad), grad.numel()
            if grad.dtype is torch.float16:
                self._now.is_half = True

    def _measure_updates(self, call: _OptimizerCall) -> None:
        after = [_part(parameter) for _, parameter in call.updated]
        differences = torch._foreach_sub(after, call.before)
        entries = self._now.updates
        for (name, parameter), before, change in zip(
            call.updated, call.before, differences, strict=True
        ):
            share = before.numel() / max(1, _local(parameter).numel())
            submit = self._summarizer.submit
            entries[name] = submit(change), submit(before), share
        call.before = []

    def _measure_moments(self, optimizer: Any, parameters: Named) -> None:
        for name, parameter in parameters:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    self._add(f"moment.{key}", [(name, value)])

    # Parameters

    def _measure_parameters(self) -> None:
        for name, parameter in self._named_parameters():
            if parameter.requires_grad:
                self._now.trained.add(name)
            if parameter.requires_grad or name in self._now.groups:
                self._add("parameter", [(name, parameter)])

    def _parameters_of(self, optimizer: Any) -> Named:
        if self._names_are_old(optimizer):
            self._find_names()
        names = self._names
        return [
            (names.get(id(parameter)) or f"group{group_number}.{number}", parameter)
            for group_number, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
            if not self._patterns or self._wanted(names.get(id(parameter), ""))
        ]

    def _names_are_old(self, optimizer: Any) -> bool:
        if self.step - self._names_at >= NAMES_EVERY:
            return True
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return first is not None and id(first) not in self._names and self.step != self._names_at

    def _find_names(self) -> None:
        self._names_at = self.step
        if self.paths is not None:
            self._names = self.paths.parameter_names()

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self.paths is None:
            return
        seen: set[int] = set()
        for name, parameter in self.paths.named_parameters():
            if id(parameter) not in seen and self._wanted(name):
                seen.add(id(parameter))
                yield name, parameter


def _data_by_keyword(frame: FrameType) -> list[tuple[str, Any]]:
    """What a model is called with by keyword, as those of Hugging Face are: the data, and not what
    says how to read it, which may be nearly all 0 at times."""
    given = frame.f_locals.get("kwargs")
    if not isinstance(given, dict):
        return []
    return [(key, value) for key, value in given.items() if NO_DATA.search(key) is None]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank has; else the tensor."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's elements, or some of a large one, evenly spread; no copy where it can be."""
    flat = _local(parameter).detach().reshape(-1)
    return flat if flat.numel() <= WHOLE else flat[:: -(-flat.numel() // SAMPLE)]
