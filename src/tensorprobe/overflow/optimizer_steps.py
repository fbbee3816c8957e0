"""Looking at optimizers: gradients before a step, and parameters that it left bad."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

import torch
from torch.optim.optimizer import Optimizer

from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import PLAIN_TENSORS
from tensorprobe.capture.naming import optimizer_name
from tensorprobe.capture.optimizer_hooks import OptimizerHooks
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.tape import Tape
from tensorprobe.overflow.bad_values import Looking
from tensorprobe.overflow.call_kinds import plan_for
from tensorprobe.overflow.cases import Case, Sighting
from tensorprobe.overflow.judge import Seen, look_at
from tensorprobe.overflow.pending_calls import NotedOutput
from tensorprobe.overflow.watched_call import Tensors, content_of, contents_of, labelled, version_of
from tensorprobe.tensors.finiteness import extent_now, readable


class OptimizerLooking(Looking):
    """Looks at what optimizers are given and what they leave."""

    def optimizer_begins(self, optimizer: Optimizer) -> tuple[Sighting, bool]:
        """Look at the gradients; whether one of them is bad."""
        self._watcher.optimizer_begins(optimizer)
        kind = type(optimizer)
        api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
        number = self._tape.counter.next(api)
        sighting = Sighting(plan_for(api), number, "", self.step, self._tape.trail(1))
        if getattr(optimizer, "found_inf", None) is not None:
            return sighting, True  # a fused optimizer under a GradScaler: it looks itself
        bad = self._look_at_group(optimizer, sighting, "gradients")
        if bad and self._watcher.is_due:
            self._watcher.optimizer_begins(optimizer)
        return sighting, bad

    def optimizer_ended(self, optimizer: Optimizer, sighting: Sighting, was_bad: bool) -> None:
        """Parameters were written; on a device they are looked at, on the host when next used."""
        case = self._pass_case if was_bad else None
        self._stepped.append((weakref.ref(optimizer), sighting, case))
        self._look_at_group(optimizer, sighting, "parameters")

    def look_at_parameters(self) -> None:
        """The watch ends: nothing will use the parameters any more."""
        with Quiet():
            for reference, sighting, case in self._stepped:
                optimizer = reference()
                if optimizer is None or case is not None or sighting.step < self.step - 1:
                    continue
                tensors = [(p, (str(n),)) for n, p in enumerate(_parameters(optimizer))]
                contents = [(t, p) for t, p in tensors if self._looks_now(t)]
                bad = [each for each in contents if extent_now(content_of(each[0])).bits]
                if bad and self.taint.case_of(content_of(bad[0][0])) is None:
                    self._blame_optimizer(sighting, look_at(labelled(bad[:8], "parameter")))
        self._stepped.clear()

    def _look_at_group(self, optimizer: Optimizer, sighting: Sighting, what: str) -> bool:
        bad: Tensors = []
        held: list[NotedOutput] = []
        with Quiet():
            for number, parameter in enumerate(_parameters(optimizer)):
                tensor = parameter.grad if what == "gradients" else parameter
                if tensor is None:
                    continue
                path = (str(number),)
                if type(tensor) in PLAIN_TENSORS and not self._is_immediate(tensor):
                    plain = self._ring.hold_plain(tensor, path)
                    if plain is not None:
                        held.append(plain)
                        continue
                content = readable(tensor)
                if content is None:
                    continue
                if not self._is_immediate(content):
                    held.append(self._ring.hold(content, path))
                elif what == "gradients" and self._is_bad_gradient(content):
                    bad.append((tensor, path))
            if held:
                self._ring.add(sighting.noted(), "forward", tuple(held), note=what)
            if bad:
                self._suspect_gradients(sighting, bad)
        return bool(bad)

    def _is_bad_gradient(self, content: torch.Tensor) -> bool:
        """Not looked at again where backward sent it just so."""
        known = self._seen_gradients.get(content.untyped_storage()._cdata)
        if known is not None and known[1] == version_of(content):
            return False
        return extent_now(content).bits != 0

    def _suspect_gradients(self, sighting: Sighting, bad: Tensors) -> None:
        case = self._pass_case
        if case is None:
            found = [self.taint.case_of(content) for content in contents_of(bad)]
            case = next((each for each in found if each is not None), None)
        if case is None and not self._watcher.is_full:
            seen = look_at(labelled(bad[:8], "gradients"))
            why = "no call of backward made them: another rank, a hook, or their sum"
            reason = f"{len(bad)} gradients it is given are not finite, and {why}"
            case = Case(sighting, "forward", reason, {s.label: s.facts for s in seen}, None)
            self._watcher.add(case, pending=False)
        if case is not None:
            self._pass_case = case
            case.reached = f"{len(bad)} gradients of parameters"
            for content in contents_of(bad):
                self.taint.add(content, case)

    # A parameter that is bad when it is used

    def _optimizer_behind(self, inputs: list[Seen]) -> Case | None:
        """An optimizer that left a parameter bad, which shows when it is next used: parameters are
        not looked at after every step, that would read all of them once more."""
        for each in inputs:
            if each.bits and (found := self._writer_of(each.tensor)) is not None:
                sighting, case = found
                if case is None:
                    return self._blame_optimizer(sighting, [each])
        return None

    def _reading_spoiled(self, inputs: list[Seen]) -> str | None:
        """Why a call is reported that uses a parameter which an earlier step has spoiled."""
        for each in inputs:
            found = self._writer_of(each.tensor) if each.bits else None
            if found is not None and found[1] is not None:
                case = found[1]
                return (
                    f"it reads {each.label}, a parameter that {case.name} has spoiled in step "
                    f"{case.sighting.step}"
                )
        return None

    def _writer_of(self, content: torch.Tensor) -> tuple[Sighting, Case | None] | None:
        key = content.untyped_storage()._cdata
        for reference, sighting, case in reversed(self._stepped):
            optimizer = reference()
            for parameter in _parameters(optimizer) if optimizer is not None else ():
                held = readable(parameter)
                if held is not None and held.untyped_storage()._cdata == key:
                    return sighting, case
        return None

    def _blame_optimizer(self, sighting: Sighting, bad: list[Seen]) -> Case | None:
        if self._watcher.is_full:
            return None
        shape = "x".join(str(length) for length in bad[0].facts["shape"])
        count = bad[0].facts["nan"] + bad[0].facts["inf"]
        reason = (
            f"the gradients are finite, and {count} numbers of a parameter ({shape}, "
            f"{bad[0].facts['dtype']}) are not after it"
        )
        metrics = {f"parameter.{n}": each.facts for n, each in enumerate(bad)}
        case = Case(sighting, "forward", reason, metrics, None)
        self._spoil(bad, case)
        self._watcher.add(case, pending=False)
        return case


class OptimizerSight(OptimizerHooks):
    """The hooks around optimizers' steps: what happens inside is one call."""

    def __init__(
        self,
        tape: Tape,
        parameter_names: Callable[[], dict[int, str]],
        on_step: Callable[[Optimizer], None],
        sight: OptimizerLooking,
    ) -> None:
        super().__init__(tape, parameter_names, on_step)
        self._sight = sight

    def _begin(self, optimizer: Optimizer) -> OpenCall | None:
        ident = threading.get_ident()
        self._sight.stepping.pop(ident, None)
        sighting, bad = self._sight.optimizer_begins(optimizer)
        self._sight.stepping[ident] = id(optimizer), sighting, bad
        return OpenCall(sighting.names(), "structure", sighting.step)

    def _end(self, optimizer: Optimizer, call: OpenCall) -> None:
        step = self._sight.stepping.pop(threading.get_ident(), None)
        if step is not None and step[0] == id(optimizer):
            self._sight.optimizer_ended(optimizer, *step[1:])

    def forget_raised(self, frame: FrameType) -> None:
        super().forget_raised(frame)
        if not self._thread.open:
            self._sight.stepping.pop(threading.get_ident(), None)


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
