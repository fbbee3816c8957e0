"""Two environments compared: their differences, those first that can change numbers most."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensorprobe.environment.effects import Effect, effect_of
from tensorprobe.environment.environment_reading import read_environment
from tensorprobe.errors import BadArtefact
from tensorprobe.record.program_facts import plain_name
from tensorprobe.records import count

# Of these a name that one side lacks was not set or not there; elsewhere it was not written down.
_COMPLETE = (
    *("environment", "installed", "packages", "hyperparameters", "arguments", "model"),
    "program.modules",
)
_SHOWN = 20
_LONGEST = 100
_FEW = 4  # weights, modules and batches that are named one by one
_MAX_FACTS = 200_000
_LONGEST_KEY = 300


class EnvironmentDifference(NamedTuple):
    """One fact that differs; None stands for what is not set, or not there."""

    fact: str
    actual: Any
    expected: Any
    effect: Effect
    why: str


class EnvironmentComparison(NamedTuple):
    """What two environments differ by, worst first; and what only one side says."""

    actual: Path
    expected: Path
    differences: list[EnvironmentDifference]
    equal: int
    not_compared: list[str]

    @property
    def verdict(self) -> Literal["match", "differ"]:
        return "differ" if any(each.effect != "none" for each in self.differences) else "match"


def compare_environments(actual: Path, expected: Path) -> EnvironmentComparison:
    """Compare the environments of two captures or files."""
    ours, theirs = (_prepared(read_environment(path)) for path in (actual, expected))
    if "installed" in ours and "installed" in theirs:  # the longer list is enough
        ours.pop("packages", None)
        theirs.pop("packages", None)
    if "hyperparameters" in ours and "hyperparameters" in theirs:
        _pair_hyperparameters(ours, theirs)
        ours.pop("arguments", None)
        theirs.pop("arguments", None)
    alone: list[str] = []
    rows: list[EnvironmentDifference] = []
    equal = 0
    if isinstance(ours.get("batches"), list) and isinstance(theirs.get("batches"), list):
        mine, its = ours.pop("batches"), theirs.pop("batches")
        rows += _compare_batches(mine, its)
        both = min(len(mine), len(its))
        if len(mine) != len(its):
            side = "actual" if len(mine) > both else "expected"
            alone.append(f"batches from {both} on ({side} only)")
    for number, (fact, a, e) in enumerate(_facts("", ours, theirs, alone)):
        if number > _MAX_FACTS:
            raise BadArtefact(f"'{actual}' and '{expected}' have more than {_MAX_FACTS} facts")
        if a == e or (a != a and e != e):  # NaN
            equal += 1
        else:
            rows.append(EnvironmentDifference(fact, a, e, *effect_of(fact)[1][1:]))
    rows = _gathered(rows)
    rows.sort(key=lambda row: effect_of(row.fact)[0])
    return EnvironmentComparison(actual, expected, rows, equal, alone)


def _prepared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts in one form: packages by plain names, and what other tools call otherwise."""
    made = dict(facts)
    for name in ("packages", "installed"):
        if isinstance(made.get(name), dict):
            made[name] = {plain_name(str(k)): v for k, v in made[name].items()}
    made.pop("ranks", None)
    command = made.get("command")
    if isinstance(command, list):
        made["arguments"] = arguments_of([str(word) for word in command])
    return made


def arguments_of(command: list[str]) -> dict[str, str]:
    """What a script is given: {"lr": "0.1"} of `python train.py --lr 0.1`, others by number."""
    script = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
    if script is None:
        return {}
    found: dict[str, str] = {}
    words = command[script + 1 :]
    at = number = 0
    while at < len(words):
        word = words[at]
        name, mark, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            found[str(number)] = word
            number += 1
        elif mark:
            found[name] = value
        elif at + 1 < len(words) and not words[at + 1].startswith("--"):
            found[name] = words[at + 1]
            at += 1
        else:
            found[name] = "given"
        at += 1
    return found


def _pair_hyperparameters(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two programs may hold them in variables of other names: one set each is the same one."""
    mine, its = ours.get("hyperparameters"), theirs.get("hyperparameters")
    if isinstance(mine, dict) and isinstance(its, dict) and len(mine) == len(its) == 1:
        (a, _), (e, values) = *mine.items(), *its.items()
        if a != e:
            theirs["hyperparameters"] = {a: values}


def _facts(
    prefix: str, actual: Mapping[str, Any], expected: Mapping[str, Any], alone: list[str]
) -> Iterator[tuple[str, Any, Any]]:
    is_complete = prefix.rstrip(".").startswith(_COMPLETE)
    for key in dict.fromkeys([*actual, *expected]):
        is_long = len(str(key)) > _LONGEST_KEY
        name = f"{prefix}{str(key)[:_LONGEST_KEY]}{'...' if is_long else ''}"
        if not is_complete and not (key in actual and key in expected):
            alone.append(f"{name} ({'actual' if key in actual else 'expected'} only)")
            continue
        a, e = actual.get(key), expected.get(key)
        if isinstance(a, Mapping) or isinstance(e, Mapping):
            sides = [side if isinstance(side, Mapping) else {} for side in (a, e)]
            yield from _facts(f"{name}.", sides[0], sides[1], alone)
        else:
            yield name, a, e


def _compare_batches(actual: list[Any], expected: list[Any]) -> Iterator[EnvironmentDifference]:
    """The first batch that differs, and whether it is one that comes at another time there."""
    for number, (a, e) in enumerate(zip(actual, expected, strict=False)):
        if a != e:
            why = "other data"
            if a in expected or e in actual:
                why = "the same data in another order"
            rest = zip(actual[number:], expected[number:], strict=False)
            more = sum(x != y for x, y in rest) - 1
            fact = f"batches.{number}"
            why = f"{why} from batch {number}{f', {more} more' if more else ''}"
            yield EnvironmentDifference(fact, _outline(a), _outline(e), "numbers", why)
            return


def _outline(value: Any) -> Any:
    """A batch in a few words."""
    return "; ".join(f"{k}: {v}" for k, v in value.items())[:200] if type(value) is dict else value


def _gathered(rows: list[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Weights and modules by the hundred are one difference, which names the first."""
    groups = Counter(_group(row.fact) for row in rows)
    made: list[EnvironmentDifference] = []
    told = set()
    for row in rows:
        group = _group(row.fact)
        if not group or groups[group] <= _FEW:
            made.append(row)
        elif group not in told:
            told.add(group)
            made.append(row._replace(why=f"{row.why}; {groups[group] - 1} more of {group}"))
    return made


def _group(fact: str) -> str:
    for group in ("model.weights", "model.modules", "weight_statistics", "data_statistics"):
        if fact.startswith(group):
            return group
    return ""


_WORDS: dict[Effect, str] = {"numbers": "can change numbers", "maybe": "may", "none": "cannot"}


def lines(found: EnvironmentComparison) -> Iterator[str]:
    """The answer for a person."""
    kinds = Counter(row.effect for row in found.differences)
    counts = [f"{kinds[effect]} {_WORDS[effect]}" for effect in _WORDS if kinds[effect]]
    if found.verdict == "match":
        rest = f", {count(kinds['none'], 'difference')} that cannot change numbers"
        yield f"match: {count(found.equal, 'fact')} equal{rest if kinds['none'] else ''}"
    else:
        yield f"differ: {', '.join(counts)}; {count(found.equal, 'fact')} equal"
    for row in found.differences[:_SHOWN]:
        yield f"  {row.effect:7}  {_short(row.fact)}: {_text(row.actual)} here, " + (
            f"{_text(row.expected)} there ({row.why})"
        )
    if len(found.differences) > _SHOWN:
        yield f"  and {len(found.differences) - _SHOWN} more"
    if found.not_compared:
        names = ", ".join(_short(name) for name in found.not_compared[:_FEW])
        more = len(found.not_compared) - _FEW
        yield f"  not compared: {names}{f' and {more} more' if more > 0 else ''}"


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return _short(str(value).lower() if isinstance(value, bool) else str(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def as_json(found: EnvironmentComparison) -> dict[str, Any]:
    return {
        "format": 1,
        "verdict": found.verdict,
        "actual": str(found.actual),
        "expected": str(found.expected),
        "equal": found.equal,
        "differences": [row._asdict() for row in found.differences],
        "not_compared": found.not_compared,
    }


def json_text(found: EnvironmentComparison) -> str:
    return json.dumps(as_json(found), indent=1)
