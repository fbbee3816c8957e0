"""Run one operator elsewhere: the named calls on another device or in higher precision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.capture import compiled
from tensorprobe.capture.engine import EngineEntry
from tensorprobe.capture.function_mode import SCALER_UPDATE, UserCalls
from tensorprobe.capture.hidden_state import written_arguments
from tensorprobe.capture.made_nodes import MadeNodes
from tensorprobe.capture.mode_stack import (
    add_below,
    add_dispatch_mode_below,
    add_mode,
    remove_mode,
)
from tensorprobe.capture.module_hooks import ModuleHooks
from tensorprobe.capture.naming import (
    ApiName,
    CallNames,
    Counter,
    call_name,
    is_noise,
    operator_name,
    split_direction,
)
from tensorprobe.capture.optimizer_hooks import OptimizerHooks
from tensorprobe.capture.recorder import say
from tensorprobe.capture.selection import Selection
from tensorprobe.capture.steps import StepOn, StepWatch, optimizers_in_round
from tensorprobe.capture.tape import Tape
from tensorprobe.capture.tracebacks import clean, clean_below
from tensorprobe.config import RecordConfig
from tensorprobe.errors import BadUsage
from tensorprobe.rerouting.checkpoint_calls import Recomputation
from tensorprobe.rerouting.elsewhere import VIEW, Call, run_elsewhere
from tensorprobe.rerouting.reroute_rules import Rule, Rules
from tensorprobe.rerouting.targets import HOME, check_present, parse_rules


class Reroute:
    """The named calls of a program run elsewhere while this is on; what it holds is its report.

    Made by `tp.reroute`. In a program of several steps, whose calls are named with their numbers,
    say `step()` at the end of each, as with a Recorder.
    """

    def __init__(
        self,
        rules: Mapping[str, str],
        *,
        step_on: StepOn = "explicit",
        log: Callable[[str], None] = say,
    ) -> None:
        targets = parse_rules(rules)
        check_present(targets.values())
        self._rules = Rules(targets)
        self._log = log
        self._watch = StepWatch(step_on, self._advance)
        self._track = _Track(log, recording=True)
        self._on = False
        self._advance_later = False
        self._ferry = _Ferry()
        self._mode = _CallMode(self._rules, self._track, self._ferry, self._watch)
        self._op_mode = _OpMode(self._rules, self._ferry)
        modes: list[Any] = [self._mode]
        if self._rules.has_operators:
            modes.append(self._op_mode)
        self._modes = modes
        self._modules = ModuleHooks(
            self._track, record=False, modes=modes, on_root=self._watch.root_called
        )
        self._optimizers = OptimizerHooks(
            _Track(log, recording=False), dict, self._optimizer_stepped
        )
        self._engine = EngineEntry(modes, lambda roots: None, self._backward_ended)

    @property
    def counts(self) -> dict[str, int]:
        """How many calls ran elsewhere, by the name that was given."""
        return {rule.name: rule.rerouted for rule in self._rules.rules}

    @property
    def calls(self) -> list[str]:
        """The calls that ran elsewhere, each name once: "Functional.linear.3"."""
        return list(self._ferry.calls)

    @property
    def failed(self) -> dict[str, str]:
        """What raised where it was sent, and why, by the name of its API."""
        return dict(self._ferry.failed)

    def start(self) -> Reroute:
        """Reroute from here on."""
        if not self._on:
            self._on = True
            self._optimizers.install_once()
            self._modules.install()
            self._engine.install()
            for mode in self._modes:
                add_mode(mode)
        return self

    def stop(self) -> None:
        """Let all calls run where they are, until `start`."""
        if not self._on:
            return
        self._on = False
        for mode in reversed(self._modes):
            remove_mode(mode)
        self._engine.remove()
        self._modules.remove()
        self._optimizers.remove()

    def step(self) -> None:
        """One step of the program has ended: the numbers of calls begin anew."""
        self._watch.be_explicit()
        self._advance()

    def close(self) -> None:
        """Stop, and say what ran elsewhere; BadUsage names what never did."""
        self.stop()
        for line in self._rules.summary():
            self._log(line)
        if self._mode.compiled_parts:
            self._log(
                "reroute: a compiled part ran, whose calls are not looked into. "
                "TORCH_COMPILE_DISABLE=1 runs it uncompiled"
            )
        problem = self._rules.problem()
        if problem is not None:
            raise BadUsage(problem)

    def __enter__(self) -> Reroute:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean_below(error)
        try:
            self.close()
        except BadUsage as problem:
            if error is None:
                raise
            self._log(str(problem))  # the user's own exception goes first

    def _advance(self) -> None:
        if self._on and torch._C._current_graph_task_id() != -1:
            self._advance_later = True  # an optimizer that steps inside of backward
            return
        self._track.counter.reset()
        self._mode.begin_step()
        self._op_mode.begin_step()
        self._modules.begin_step()

    def _optimizer_stepped(self, optimizer: object) -> None:
        if self._watch.automatic:
            self._watch.optimizer_stepped(optimizer)

    def _backward_ended(self, last: bool) -> None:
        self._watch.backward_ended()
        if self._advance_later:
            self._advance_later = False
            self._advance()


def reroute(rules: Mapping[str, str]) -> Reroute:
    """Run the named ops on another device or in higher precision, forward and backward.

        with tp.reroute({"torch.group_norm": "cpu", "Functional.softmax": "float32"}):
            loss = model(batch); loss.backward()

    A name is any that a call goes by: torch.x, F.x, Tensor.x, aten.x, a call's own name
    ("Functional.linear.3"), or the path of a module, all of whose calls are then meant. A target is
    a device, float32 or float64, or both ("cpu:float64"). Results come back to their device and
    dtype. A name that matched no call is an error at the end.
    """
    return Reroute(rules)


class _Track(Tape):
    """Where the program is: a recorder's tape on which nothing is ever written."""

    def __init__(self, log: Callable[[str], None], *, recording: bool) -> None:
        config = RecordConfig(stacks=False)
        super().__init__(config, Selection(config), cast(Any, None), cast(Any, None))
        self.recording = recording
        self._log = log
        self._told = False

    def gap(self, name: str, reason: BaseException | str) -> None:
        """A module whose path could not be told; its calls are matched by their other names."""
        if not self._told:
            self._told = True
            self._log(f"reroute: paths of modules are not known, {name}: {reason}")


class _Inside(threading.local):
    """Whether this thread is in a call that runs elsewhere."""

    depth = 0


class _Ferry:
    """Takes calls to where their rule says, and remembers which."""

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        self.failed: dict[str, str] = {}
        self.inside = _Inside()

    def take(self, name: str, rule: Rule, call: Call, writes: frozenset[str] | None = None) -> Any:
        """Make the call called `name` where `rule` wants it."""
        if rule.target == HOME:
            rule.rerouted += 1
            return call.make()
        self.inside.depth += 1
        try:
            result, reason = run_elsewhere(call, rule.target, writes)
        except Exception as error:
            text = str(error).partition("\n")[0]
            self.failed.setdefault(call.api.stem, f"{type(error).__name__}: {text}")
            raise
        finally:
            self.inside.depth -= 1
        if reason is None:
            rule.rerouted += 1
            if len(self.calls) < _CALLS_LIMIT:
                self.calls[split_direction(name)[0]] = None
        else:
            rule.stayed[reason] = rule.stayed.get(reason, 0) + 1
        return result


_CALLS_LIMIT = 100_000


class _CallMode(UserCalls):
    """Sees every torch call of the program, after all other modes: a recorder has the user's call.

    It names and counts calls as a recorder does.
    """

    def __init__(self, rules: Rules, track: _Track, ferry: _Ferry, watch: StepWatch) -> None:
        super().__init__()
        self._rules = rules
        self._track = track
        self._ferry = ferry
        self._watch = watch
        self._recomputation = Recomputation()
        self.compiled_parts = 0

    def __enter__(self) -> _CallMode:
        add_below(self)
        return self

    def __exit__(self, *exception: object) -> None:
        remove_mode(self)

    def begin_step(self) -> None:
        self._recomputation.begin_step()

    def called(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if compiled.may_run() and (compiled.in_backward() or compiled.running() is not None):
            self.compiled_parts += 1
            return self.make(func, args, kwargs)
        track = self._track
        number = track.counter.next(api)
        if self._rules.has_calls:
            number = self._recomputation.original(api, number)
        names = CallNames(api, call_name(api, number), track.place.module)
        rule = self._rules.find(names)
        if rule is None:
            result = self.make(func, args, kwargs)
        else:
            result = self._ferry.take(names.name, rule, Call(api, func, args, kwargs, self.make))
        if api.api == SCALER_UPDATE:
            self._watch.scaler_updated(optimizers_in_round())
        return result


class _OpMode(TorchDispatchMode):
    """Sees aten's ops below autograd, for names that only they have.

    Autograd does not know of the move, so the ops that the backward of such an op runs are sent
    the same way.
    """

    def __init__(self, rules: Rules, ferry: _Ferry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules
        self._ferry = ferry
        self._counter = Counter()
        self._operators: dict[Any, tuple[ApiName, frozenset[str]] | None] = {}
        self._last = threading.local()
        self._nodes = MadeNodes[Rule | None]()  # by whose rule their own op was rerouted

    def __enter__(self) -> _OpMode:
        add_dispatch_mode_below(self)
        return self

    def __exit__(self, *exception: object) -> None:
        remove_mode(self)

    def begin_step(self) -> None:
        self._counter.reset()
        self._nodes.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            kwargs = kwargs or {}
            if func not in self._operators:
                self._operators[func] = _look_up(func)
            operator = self._operators[func]
            if operator is None:
                return func(*args, **kwargs)
            api, writes = operator
            name = call_name(api, self._counter.next(api))
            rule = self._rule(api, name)
            if rule is None or self._ferry.inside.depth:
                return func(*args, **kwargs)
            if func.is_view:
                rule.stayed[VIEW] = rule.stayed.get(VIEW, 0) + 1
                return func(*args, **kwargs)
            return self._ferry.take(name, rule, Call(api, func, args, kwargs), writes)
        except BaseException as error:
            clean(error)
            raise

    def _rule(self, api: ApiName, name: str) -> Rule | None:
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._rules.find_operator(api, name) or self._nodes.find(node)
        rule = self._rules.find_operator(api, name)
        # the first op after a node was made is the node's own
        made = torch._C._autograd._get_sequence_nr() - 1
        if made != getattr(self._last, "made", -1):
            self._last.made = made
            self._nodes.note(made, rule)
        return rule


def _look_up(func: Any) -> tuple[ApiName, frozenset[str]] | None:
    namespace, _, name = func._schema.name.partition("::")
    api = operator_name(namespace, name, func._overloadname)
    return None if is_noise(api) else (api, written_arguments(func._schema))
