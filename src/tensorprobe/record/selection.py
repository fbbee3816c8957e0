"""What to keep: decides for each step, rank, call and tensor whether a RecordConfig wants it."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable

from tensorprobe.config import RecordConfig, format_numbers
from tensorprobe.follow.naming import (
    ApiName,
    CallNames,
    aliases,
    dotted_call_name,
    native_call_name,
    own_names,
    split_direction,
    with_direction,
)
from tensorprobe.records import Direction, Keep, Role

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# Enough to find near names in; a long run must not collect them for ever.
_SEEN_LIMIT = 5000
_PATTERN = re.compile(r"[*?\[]")
_NOT_FLOAT = re.compile(r"u?int\d+|bool|qu?int\w+|bits\w+")


class Selection:
    """The decisions for one recorder. It never counts calls: numbers are the recorder's.

    When `everything` is true every call is wanted and `decide` need not be asked. Otherwise it
    must be asked exactly once for every call, in execution order and with the number already
    taken, for a range between two calls moves on with each.

        selection = Selection(RecordConfig.make(apis="relu"))
        if selection.everything or selection.decide(names): ...
    """

    def __init__(self, config: RecordConfig) -> None:
        self._config = config
        self._steps = None if config.steps is None else frozenset(config.steps)
        self._last_step = config.steps[-1] if config.steps else None
        self._ranks = None if config.ranks is None else frozenset(config.ranks)
        self._forward = "forward" in config.directions
        self._backward = "backward" in config.directions
        self._only_float = config.dtypes == "float"
        # how calls are named in this recording
        spelt = native_call_name if config.operators == "native" else dotted_call_name
        self._spelt: Callable[[str], str] = spelt
        self._calls = frozenset(exact_names(map(spelt, config.calls)))
        self._range = _range_of(config.between and tuple(map(spelt, config.between)))
        self._apis = ApiFilter(config.apis) if config.apis else None
        self._modules = ModuleFilter(config.modules) if config.modules else None
        self._names = _PartFilter(map(spelt, config.names)) if config.names else None
        self._keep_tensors = (
            _PartFilter(map(spelt, config.keep_tensors)) if config.keep_tensors else None
        )
        self.everything = not (
            self._calls or self._range or self._apis or self._modules or self._names
        )
        self._step: int | None = None
        self._asked = 0
        self._seen: dict[str, None] = {}
        self._seen_steps: dict[int, None] = {}
        self._seen_ranks: dict[int, None] = {}

    # Steps and ranks.

    def wants_step(self, step: int) -> bool:
        """Whether anything of this step is recorded. A step other than the last one asked about
        begins anew."""
        if step != self._step:
            self._step = step
            self.begin_step()
        if len(self._seen_steps) < _SEEN_LIMIT:
            self._seen_steps[step] = None
        return self._steps is None or step in self._steps

    def wants_rank(self, rank: int) -> bool:
        """Whether anything of this rank is recorded."""
        self._seen_ranks[rank] = None
        return self._ranks is None or rank in self._ranks

    def past_last_step(self, step: int) -> bool:
        """Whether neither this step nor any later one is wanted."""
        return self._last_step is not None and step > self._last_step

    def begin_step(self) -> None:
        """Arm a range between two calls again; `wants_step` does it when the step changes."""
        if self._range:
            self._range.reset()

    # Calls.

    def decide(self, names: CallNames) -> bool:
        """Whether this call is wanted. Once for each call, in execution order."""
        self._asked += 1
        if len(self._seen) < _SEEN_LIMIT:
            self._seen[names.name] = None
        # The range comes first: it has to see every call, whatever else decides.
        wanted = self._range is None or self._range.decide(names)
        return (
            wanted
            and (not self._calls or names.name in self._calls)
            and (self._apis is None or self._apis.decide(names.api))
            and (self._modules is None or self._modules.decide(names.module))
            and (self._names is None or self._names.decide(names))
            and (self._forward if names.direction == "forward" else self._backward)
        )

    def may_want_backward(self, names: CallNames) -> bool:
        """Whether the backward of this forward call could be wanted, so that it must be watched.

        Asked after `decide` of the forward call; `decide` has the last word when backward runs.
        """
        if not self._backward:
            return False
        if self.everything:
            return True
        name = with_direction(split_direction(names.name)[0], "backward")
        return (
            (self._range is None or self._range.may_want_backward(names.name))
            and (not self._calls or name in self._calls)
            and (self._apis is None or self._apis.decide(names.api))
            and (self._modules is None or self._modules.decide(names.module))
            and (self._names is None or self._names.decide(names.but(name=name)))
        )

    def keep_for(self, names: CallNames) -> Keep:
        """What is kept of a wanted call: tensors where `keep_tensors` names it, else `keep`."""
        if self._keep_tensors is not None and self._keep_tensors.decide(names):
            return "tensors"
        return self._config.keep

    # Inside a call.

    def wants_direction(self, direction: Direction) -> bool:
        """Whether calls of this direction are recorded."""
        return self._forward if direction == "forward" else self._backward

    def wants_side(self, role: Role) -> bool:
        """Whether tensors in this role are recorded; parameters and buffers count as inputs, their
        gradients as outputs (of the backward)."""
        return ("output" if role in ("output", "parameter_grad") else "input") in self._config.sides

    def wants_tensor(self, dtype_name: str) -> bool:
        """Whether tensors of this dtype ("int64", "bfloat16") are recorded."""
        return not (self._only_float and _NOT_FLOAT.fullmatch(dtype_name))

    # The end.

    def explain_nothing(self, begun: int | None = None) -> str:
        """Why nothing was recorded: what was asked, what was there, what may have been meant.

        `begun` is the step that no one has ended, of which there may be nothing but its number.
        """
        return "nothing was recorded: " + " ".join(self._reasons(begun))

    def _reasons(self, begun: int | None) -> Iterable[str]:
        config = self._config
        if self._ranks is not None and self._ranks.isdisjoint(self._seen_ranks):
            here = format_numbers(sorted(self._seen_ranks)) or "unknown"
            yield f"ranks {format_numbers(config.ranks)} were asked for, this is rank {here}."
            return
        if self._steps is not None and self._steps.isdisjoint(self._seen_steps):
            ended = sorted(step for step in self._seen_steps if step != begun)
            ran = format_numbers(ended or sorted(self._seen_steps))
            ran = f"the steps that ran were {ran}" if ran else "no step ran"
            yield f"steps {format_numbers(config.steps)} were asked for, {ran}."
            return
        if not self._asked:
            yield "no call was made while recording was on."
            return
        asked = {
            name: value
            for name in ("calls", "between", "apis", "modules", "names")
            if (value := getattr(config, name))
        }
        if set(config.directions) != set(_DIRECTIONS):
            asked["directions"] = config.directions
        what = ", ".join(f"{name}={_as_typed(value)}" for name, value in asked.items())
        yield f"{what or 'everything'} matched none of {self._asked} calls."
        near = self._near_names()
        if near:
            yield f"Near names: {', '.join(near)}."
        elif self._seen:
            yield f"The first calls were {', '.join(list(self._seen)[:5])}."

    def _near_names(self) -> list[str]:
        config = self._config
        exact = [*map(self._spelt, config.calls)]
        exact += map(self._spelt, config.between or ())
        found: dict[str, None] = {}
        for wanted in exact:
            found.update(dict.fromkeys(difflib.get_close_matches(wanted, self._seen, n=3)))
        by_api: dict[str, str] = {}  # the part a person types for apis= and names=, a call of it
        for name in self._seen:
            parts = split_direction(name)[0].split(".")
            for part in (parts[-2] if len(parts) > 1 else parts[0], ".".join(parts[:-1])):
                by_api.setdefault(part, name)
        for wanted in (*config.apis, *config.names):
            wanted = wanted.strip("*")
            near = difflib.get_close_matches(wanted, by_api, n=3) or [
                part for part in by_api if wanted and wanted.lower() in part.lower()
            ]
            found.update(dict.fromkeys(by_api[part] for part in near[:3]))
        for wanted in config.modules:
            found.update(dict.fromkeys(self._near_modules(wanted)))
        return list(found)[:8]

    def _near_modules(self, wanted: str) -> list[str]:
        paths = self._modules.seen if self._modules else []
        plain = wanted.replace("*", "").strip(".")
        return difflib.get_close_matches(plain, paths, n=3, cutoff=0.5)


def _as_typed(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        return repr(value[0])
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def exact_names(calls: Iterable[str]) -> Iterable[str]:
    """The full names wanted; one without a direction means both."""
    for call in calls:
        stem, direction = split_direction(call)
        if direction:
            yield call
        else:
            yield stem  # an optimizer's step and a saved value have no direction
            yield from (with_direction(stem, direction) for direction in _DIRECTIONS)


class ApiFilter:
    """Exact names against all that a call goes by; patterns against the ones it is known by."""

    def __init__(self, apis: Iterable[str]) -> None:
        self._exact = {native_call_name(api) for api in apis if not _PATTERN.search(api)}
        self._exact |= {api for api in apis if not _PATTERN.search(api)}
        self._matches = _any_pattern(api for api in apis if _PATTERN.search(api))
        self._verdicts: dict[ApiName, bool] = {}

    def decide(self, api: ApiName) -> bool:
        verdict = self._verdicts.get(api)
        if verdict is None:
            verdict = not self._exact.isdisjoint(aliases(api)) or any(
                map(self._matches, own_names(api))
            )
            self._verdicts[api] = verdict
        return verdict


class ModuleFilter:
    """Patterns against a module's path, and against those of the modules it is inside of."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._matches = _any_pattern(patterns)
        self._verdicts: dict[str, bool] = {}

    @property
    def seen(self) -> list[str]:
        return list(self._verdicts)

    def decide(self, path: str) -> bool:
        verdict = self._verdicts.get(path)
        if verdict is None:
            verdict = self._matches(path) or ("." in path and self.decide(path.rpartition(".")[0]))
            self._verdicts[path] = verdict
        return verdict


class _PartFilter:
    """Parts of call names, as in msprobe's `list`: a module's name takes all that runs in it."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = tuple(parts)
        inside = (path_of_module(part) for part in self._parts if part.startswith("Module."))
        self._inside = tuple(path for path in inside if path)

    def decide(self, names: CallNames) -> bool:
        if any(part in names.name for part in self._parts):
            return True
        return any(_is_inside(names.module, path) for path in self._inside)


class _Range:
    """From one call to another, both included, in the order in which they run.

    Named by forward calls, it holds those and their backwards; as soon as one end is a backward
    call, it holds whatever begins between the two. A module as the last end brings its inside.
    """

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last = first, last
        self._by_forward = not any(
            split_direction(end)[1] == "backward" for end in (self._first, self._last)
        )
        self._last_path = path_of_module(last)
        self.reset()

    def reset(self) -> None:
        self._open = False
        self._inside_last = False
        self._members: set[str] = set()

    def decide(self, names: CallNames) -> bool:
        name = names.name
        if self._by_forward and names.direction == "backward":
            return split_direction(name)[0] in self._members
        if name == self._first:
            self._open = True
        inside = self._open or self._is_inside_last(names)
        if inside and self._by_forward:
            self._members.add(split_direction(name)[0])
        if name == self._last and self._open:
            self._open = False
            self._inside_last = names.api.prefix == "Module"
        return inside

    def may_want_backward(self, name: str) -> bool:
        return not self._by_forward or split_direction(name)[0] in self._members

    def _is_inside_last(self, names: CallNames) -> bool:
        # Only beginnings of calls are told, so the module has ended when one comes from outside it.
        if self._inside_last:
            called_again = names.api.prefix == "Module" and names.module == self._last_path
            self._inside_last = not called_again and _is_inside(names.module, self._last_path)
        return self._inside_last


def _range_of(between: tuple[str, ...] | None) -> _Range | None:
    if between is None:
        return None
    first, last = (_directed(end) for end in between)
    return _Range(first, last)


def _directed(name: str) -> str:
    stem, direction = split_direction(name)
    if direction or name.startswith("Optimizer."):
        return name
    return with_direction(stem, "forward")


def path_of_module(name: str) -> str:
    """The path in "Module.{path}.{Class}.forward.0", and in what is left when its end is cut."""
    parts = name.removeprefix("Module.").split(".")
    if len(parts) > 1 and parts[-1].isdigit() and parts[-2] in _DIRECTIONS:
        parts = parts[:-2]
    elif parts[-1] in _DIRECTIONS:
        parts = parts[:-1]
    if parts and parts[-1][:1].isupper():  # a class; a path without it ends in a lower-case name
        parts = parts[:-1]
    return ".".join(parts)


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")  # "" is the whole model


def _any_pattern(patterns: Iterable[str]) -> Callable[[str], bool]:
    texts = [fnmatch.translate(pattern) for pattern in patterns]
    if not texts:
        return lambda name: False
    matches = re.compile("|".join(texts)).match
    return lambda name: matches(name) is not None
