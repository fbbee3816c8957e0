"""Looking at optimizers: gradients before a step, and parameters that it left bad."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable
from types import FrameType

import torch
from torch.optim.optimizer import Optimizer

from tensorprobe.follow.naming import optimizer_name
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.overflow.call_kinds import plan_for
from tensorprobe.overflow.cases import Case, NamedCall
from tensorprobe.overflow.guard_state import GuardState
from tensorprobe.overflow.judge import SeenTensor, look_at, seen_as
from tensorprobe.overflow.pending_calls import NotedOutput
from tensorprobe.overflow.watched_call import Tensors, content_of, version_of
from tensorprobe.tensors.finiteness import FINE, INFINITE, NAN, Extent, extent_now, readable


class OptimizerSteps:
    """Looks at what optimizers are given and what they leave."""

    def __init__(self, state: GuardState) -> None:
        self._state = state
        # optimizers that stepped in this step and the one before, and the case their gradients had
        self._stepped: list[tuple[weakref.ref[Optimizer], NamedCall, Case | None]] = []

    def begin(self, optimizer: Optimizer, frame: FrameType, has_closure: bool) -> NamedCall:
        """Look at the gradients; what happens inside of the step is one call.

        A closure makes the gradients inside of the step, by calls that are looked at like others.
        """
        ident = threading.get_ident()
        self._state.stepping.pop(ident, None)
        self._state.closures.pop(ident, None)
        if has_closure:
            self._state.watcher.optimizer_begins(optimizer)
            step = inspect.unwrap(type(optimizer).step)
            self._state.closures[ident] = id(optimizer), getattr(step, "__code__", None)
            return self._name(optimizer, frame)
        call, bad = self._look_at_gradients(optimizer, frame)
        self._state.stepping[ident] = id(optimizer), call, bad
        return call

    def end(self, optimizer: Optimizer, call: NamedCall) -> None:
        """Parameters were written; on a device they are looked at, on the host when next used."""
        ident = threading.get_ident()
        step = self._state.stepping.pop(ident, None)
        if self._state.closures.pop(ident, (0, None))[0] == id(optimizer):
            was_bad = self._look_at_group(optimizer, call, "gradients")
        elif step is None or step[0] != id(optimizer):
            return
        else:
            was_bad = step[2]
        case = self._state.cases.of_backward if was_bad else None
        self._stepped = [*self._recent(), (weakref.ref(optimizer), call, case)]
        self._look_at_group(optimizer, call, "parameters")

    def left(self) -> None:
        """No optimizer steps in this thread any more."""
        self._state.stepping.pop(threading.get_ident(), None)
        self._state.closures.pop(threading.get_ident(), None)

    def _look_at_gradients(self, optimizer: Optimizer, frame: FrameType) -> tuple[NamedCall, bool]:
        """The call of an optimizer, and whether one of its gradients is bad."""
        self._state.watcher.optimizer_begins(optimizer)
        call = self._name(optimizer, frame)
        if getattr(optimizer, "found_inf", None) is not None:
            return call, True  # a fused optimizer under a GradScaler: it looks itself
        bad = self._look_at_group(optimizer, call, "gradients")
        if bad and self._state.watcher.is_due:
            self._state.watcher.optimizer_begins(optimizer)
        return call, bad

    def _name(self, optimizer: Optimizer, frame: FrameType) -> NamedCall:
        kind = type(optimizer)
        api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
        number = self._state.program.counter.next(api)
        trail = self._state.program.trail(frame)
        return NamedCall(plan_for(api), number, "", self._state.step, trail)

    def look_at_parameters(self) -> None:
        """The watch ends: nothing will use the parameters any more."""
        with Quiet():
            for reference, call, case in self._recent():
                optimizer = reference()
                if optimizer is None or case is not None:
                    continue
                tensors = [(p, (str(n),)) for n, p in enumerate(_parameters(optimizer))]
                contents = [(t, p) for t, p in tensors if self._state.looks_now(t)]
                bad = [each for each in contents if extent_now(content_of(each[0])).bits]
                seen = look_at(bad[:8], "parameter")
                if seen and self._state.cases.of(seen[0].storage) is None:
                    self._blame_optimizer(call, seen)
        self._stepped = []

    def _look_at_group(self, optimizer: Optimizer, call: NamedCall, what: str) -> bool:
        bad: Tensors = []
        seen: list[SeenTensor] = []
        held: list[NotedOutput] = []
        with Quiet():
            for number, parameter in enumerate(_parameters(optimizer)):
                tensor = parameter.grad if what == "gradients" else parameter
                if tensor is None:
                    continue
                path = (str(number),)
                if type(tensor) in PLAIN_TENSORS and not self._state.is_immediate(tensor):
                    plain = self._state.pending.hold_plain(tensor, path)
                    if plain is not None:
                        held.append(plain)
                        continue
                content = readable(tensor)
                if content is None:
                    continue
                if not self._state.is_immediate(content):
                    held.append(self._state.pending.hold(content, path))
                elif what == "gradients" and (extent := self._extent_of_gradient(content)).bits:
                    bad.append((tensor, path))
                    seen.append(seen_as(content, path, what, extent))
            if held:
                self._state.pending.add(call, "forward", tuple(held), note=what)
            if bad:
                self._suspect_gradients(call, bad, seen)
        return bool(bad)

    def _extent_of_gradient(self, content: torch.Tensor) -> Extent:
        """The extent of a gradient; one that backward sent and nobody wrote to since is fine."""
        known = self._state.seen_gradients.get(content.untyped_storage()._cdata)
        if known is not None and known[1] == version_of(content):
            return FINE
        return extent_now(content)

    def _suspect_gradients(self, call: NamedCall, bad: Tensors, seen: list[SeenTensor]) -> None:
        cases = self._state.cases
        case = cases.of_backward or cases.among(seen)
        if case is None:
            why = "no call of backward made them: another rank, a hook, or their sum"
            reason = f"{len(bad)} gradients it is given are not finite, and {why}"
            metrics = {each.label: each.facts for each in look_at(bad[:8], "gradients")}
            case = cases.add(Case(call, "forward", reason, metrics))
        if case is not None:
            cases.of_backward = case
            cases.reach(case, f"{len(bad)} gradients of parameters", seen)

    # A parameter that is bad when it is used

    def optimizer_behind(self, inputs: list[SeenTensor]) -> Case | None:
        """An optimizer that left a parameter bad, which shows when it is next used: parameters are
        not looked at after every step, that would read all of them once more."""
        for each in inputs:
            if each.bits and (found := self._writer_of(each)) is not None:
                call, case = found
                if case is None:
                    return self._blame_optimizer(call, [each])
        return None

    def reading_spoiled(self, inputs: list[SeenTensor]) -> str | None:
        """Why a call is reported that uses a parameter which an earlier step has spoiled."""
        for each in inputs:
            found = self._writer_of(each) if each.bits else None
            if found is not None and found[1] is not None:
                case = found[1]
                return (
                    f"it reads {each.label}, a parameter that {case.name} has spoiled in step "
                    f"{case.call.step}"
                )
        return None

    def _writer_of(self, seen: SeenTensor) -> tuple[NamedCall, Case | None] | None:
        for reference, call, case in reversed(self._recent()):
            optimizer = reference()
            for parameter in _parameters(optimizer) if optimizer is not None else ():
                held = readable(parameter)
                if held is not None and held.untyped_storage()._cdata == seen.storage:
                    return call, case
        return None

    def _recent(self) -> list[tuple[weakref.ref[Optimizer], NamedCall, Case | None]]:
        return [each for each in self._stepped if each[1].step >= self._state.step - 1]

    def _blame_optimizer(self, call: NamedCall, bad: list[SeenTensor]) -> Case | None:
        first = bad[0]
        shape = "x".join(str(length) for length in first.shape)
        count = first.count(NAN) + first.count(INFINITE)
        reason = (
            f"the gradients are finite, and {count} numbers of a parameter ({shape}, "
            f"{first.kind}) are not after it"
        )
        metrics = {f"parameter.{n}": each.facts for n, each in enumerate(bad)}
        case = self._state.cases.add(Case(call, "forward", reason, metrics))
        if case is not None:
            self._state.cases.spoil(bad, case)
        return case


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
