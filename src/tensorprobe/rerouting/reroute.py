"""Run one operator elsewhere: the named calls on another device or in higher precision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.errors import BadUsage
from tensorprobe.follow.dispatch_mode import make_operator_call
from tensorprobe.follow.follower import Follower
from tensorprobe.follow.hidden_state import written_arguments
from tensorprobe.follow.made_nodes import MadeNodes
from tensorprobe.follow.mode_stack import add_dispatch_mode_below, remove_mode
from tensorprobe.follow.naming import (
    ApiName,
    CallNames,
    Counter,
    call_name,
    is_noise,
    operator_name,
    split_direction,
)
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.place import Place
from tensorprobe.follow.steps import StepOn
from tensorprobe.follow.tracebacks import clean, clean_below
from tensorprobe.record.recorder import say
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
        self._ferry = _Ferry()
        self._calls = _Calls(self._rules, self._ferry, log)
        operators = [self._calls.operators] if self._rules.has_operators else []
        self._follower = Follower(
            self._calls, self._calls.place, step_on=step_on, more_modes=operators, is_lowest=True
        )

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
        """The APIs that raised at their target, each with the reason."""
        return dict(self._ferry.failed)

    def start(self) -> Reroute:
        """Reroute from here on."""
        if not self._follower.is_on:
            self._follower.install()
        return self

    def stop(self) -> None:
        """Let all calls run where they are, until `start`."""
        if self._follower.is_on:
            self._follower.remove()

    def step(self) -> None:
        """One step of the program has ended: the numbers of calls begin anew."""
        self._follower.step()

    def close(self) -> None:
        """Stop, and say what ran elsewhere; BadUsage names what never did."""
        self.stop()
        for line in self._rules.summary():
            self._log(line)
        if self._calls.saw_compiled:
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


class _Calls(Observer):
    """Sees every torch call of the program, after all other modes: a recorder has the user's call.

    It names and counts calls as a recorder does.
    """

    on = True
    makes_calls = True

    def __init__(self, rules: Rules, ferry: _Ferry, log: Callable[[str], None]) -> None:
        self.place = Place()
        self.operators = _OpMode(rules, ferry)
        self.saw_compiled = False
        self._rules = rules
        self._ferry = ferry
        self._log = log
        self._told = False
        self._counter = Counter()
        self._recomputation = Recomputation()

    def begin(
        self, api: ApiName, func: Any, args: Any, kwargs: Any, frame: FrameType | None
    ) -> tuple[CallNames, Rule] | None:
        """The names of a call and the rule for it, where there is one."""
        number = self._counter.next(api)
        if self._rules.has_calls:
            number = self._recomputation.original(api, number, frame)
        names = CallNames(api, call_name(api, number), self.place.module)
        rule = self._rules.find(names)
        return None if rule is None else (names, rule)

    def make(
        self, call: tuple[CallNames, Rule], func: Any, args: Any, kwargs: Any, run: Any
    ) -> Any:
        names, rule = call
        return self._ferry.take(names.name, rule, Call(names.api, func, args, kwargs, run))

    def begin_hidden(self, plan: Any, args: Any, kwargs: Any) -> None:
        self.saw_compiled = True

    def compiled_began(self, run: Any, frame: FrameType | None) -> None:
        self.saw_compiled = True

    def gap(self, name: str, reason: BaseException | str) -> None:
        """A module whose path could not be told; its calls are matched by their other names."""
        if not self._told:
            self._told = True
            self._log(f"reroute: paths of modules are not known, {name}: {reason}")

    def step_ended(self) -> None:
        """The numbers of calls begin anew."""
        self._counter.reset()
        self._recomputation.begin_step()
        self.operators.begin_step()


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
                return make_operator_call(func, args, kwargs)
            api, writes = operator
            name = call_name(api, self._counter.next(api))
            rule = self._rule(api, name)
            if rule is None or self._ferry.inside.depth:
                return make_operator_call(func, args, kwargs)
            if func.is_view:
                rule.stayed[VIEW] = rule.stayed.get(VIEW, 0) + 1
                return make_operator_call(func, args, kwargs)
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
