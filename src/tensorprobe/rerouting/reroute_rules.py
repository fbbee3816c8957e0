"""Which calls are rerouted, and by which of the names that were given."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from tensorprobe.errors import BadUsage
from tensorprobe.follow.naming import (
    ApiName,
    CallNames,
    native_call_name,
    split_direction,
)
from tensorprobe.record.selection import ApiFilter, ModuleFilter, path_of_module
from tensorprobe.rerouting.targets import HOME, Target

_OPERATOR = re.compile(r"(torch\.ops\.)?[Aa]ten(\.|::)")
_PATTERN = re.compile(r"[*?\[]")
_NUMBERED = re.compile(
    r"(Tensor|Torch|Functional|VF|NPU|Aten|Distributed|Ops)\..+\.\d+(\.forward|\.backward)?"
)
_SEEN_LIMIT = 5000


class Rule:
    """One name that was given, and what became of it."""

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.target = target
        self.rerouted = 0
        self.stayed: dict[str, int] = {}  # calls that matched and were made at home, by reason
        self.is_operator = _OPERATOR.match(name) is not None
        self.call = split_direction(native_call_name(name))[0] if _is_call(name) else None
        self._modules: ModuleFilter | None = None
        self._apis: ApiFilter | None = None
        if name.startswith("Module."):
            self._modules = ModuleFilter([_module_path(name)])
        elif self.call is None:
            self._apis = ApiFilter([name])
            self._modules = ModuleFilter([name])

    def takes_api(self, api: ApiName) -> bool:
        return self._apis is not None and self._apis.decide(api)

    def takes_module(self, path: str) -> bool:
        return self._modules is not None and self._modules.decide(path)


def _is_call(name: str) -> bool:
    return _NUMBERED.fullmatch(native_call_name(name)) is not None and not _PATTERN.search(name)


def _module_path(name: str) -> str:
    if re.search(r"\.(forward|backward)\.\d+$", name):
        raise BadUsage(
            f"cannot reroute '{name}': one call of a module is not told from the others. "
            f"Name the module: {path_of_module(name)}"
        )
    return path_of_module(name) if not _PATTERN.search(name) else name.removeprefix("Module.")


class Rules:
    """Finds the rule of a call: a call's own name goes before a module, a module before an API.

    Of those that are not calls' names, one that says `home` goes before all others.
    """

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self.rules = [Rule(name, target) for name, target in targets.items()]
        self._by_call = {rule.call: rule for rule in self.rules if rule.call is not None}
        self._others: dict[tuple[ApiName, str], Rule | None] = {}
        self._operators = [rule for rule in self.rules if rule.is_operator]
        self._operator_rules: dict[ApiName, Rule | None] = {}
        self._seen: dict[str, None] = {}

    @property
    def has_operators(self) -> bool:
        """Whether a name may mean an op below autograd."""
        return bool(self._operators)

    @property
    def has_calls(self) -> bool:
        """Whether a name is that of one call, with its number."""
        return bool(self._by_call)

    def find(self, names: CallNames) -> Rule | None:
        """The rule for a torch call of the program."""
        if self._by_call:
            own = self._by_call.get(split_direction(names.name)[0])
            if own is not None and not own.is_operator:  # those count as a recording at L2 does
                return own
        key = (names.api, names.module)
        try:
            return self._others[key]
        except KeyError:
            return self._others.setdefault(key, self._look(names))

    def _look(self, names: CallNames) -> Rule | None:
        self._note(names.api.stem)
        if names.module:
            self._note(names.module)
        inside = [rule for rule in self.rules if rule.takes_module(names.module)]
        called = [rule for rule in self.rules if rule.takes_api(names.api)]
        found = [*inside, *called]
        at_home = (rule for rule in found if rule.target == HOME)
        return next(at_home, found[0] if found else None)

    def find_operator(self, api: ApiName, name: str) -> Rule | None:
        """The rule for an op below autograd, which only aten's own names can mean."""
        own = self._by_call.get(split_direction(name)[0])
        if own is not None:
            return own
        if api not in self._operator_rules:
            self._note(f"aten.{api.api}")
            found = (rule for rule in self._operators if rule.takes_api(api))
            self._operator_rules[api] = next(found, None)
        return self._operator_rules[api]

    def _note(self, name: str) -> None:
        if len(self._seen) < _SEEN_LIMIT:
            self._seen[name] = None

    # The end

    def summary(self) -> Iterable[str]:
        """A line for each name that did something."""
        for rule in self.rules:
            if rule.rerouted and rule.target != HOME:
                calls = f"{rule.rerouted} call{'' if rule.rerouted == 1 else 's'}"
                yield f"rerouted {rule.name} to {rule.target}: {calls}"

    def problem(self) -> str | None:
        """What is wrong with the names, now that the program is over."""
        problems = [self._problem(rule) for rule in self.rules if not rule.rerouted]
        return ". ".join(problems) if problems else None

    def _problem(self, rule: Rule) -> str:
        if rule.stayed:
            count = sum(rule.stayed.values())
            why = "; ".join(rule.stayed)
            calls = f"{count} call{'' if count == 1 else 's'}"
            return f"reroute: '{rule.name}' matched {calls}, which cannot run elsewhere: {why}"
        near = self._near(rule)
        if near:
            hint = f"Near names: {', '.join(near)}"
        elif self._seen:
            hint = f"Calls were made of {', '.join(list(self._seen)[:5])}"
        else:
            hint = "No torch call was seen"
        return f"reroute: '{rule.name}' matched no call. {hint}"

    def _near(self, rule: Rule) -> list[str]:
        stem = rule.call.rpartition(".")[0] if rule.call else rule.name
        wanted = stem.replace("*", "").strip(".")
        if stem in self._seen:
            return [f"{stem}.0 and on; there was no call of that number"]
        short = {name.rpartition(".")[2]: name for name in self._seen}
        tail = wanted.rpartition(".")[2]
        found = [
            *difflib.get_close_matches(wanted, self._seen, n=3),
            *(short[name] for name in difflib.get_close_matches(tail, short, n=3)),
            *(name for name in self._seen if tail and tail.lower() in name.lower()),
        ]
        return list(dict.fromkeys(found))[:4]
