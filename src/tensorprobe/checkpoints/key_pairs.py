"""Which tensors of two checkpoints are the same one: by mapping, name, content and shape."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tensorprobe.checkpoints.checkpoint_reading import Checkpoint
from tensorprobe.checkpoints.pickled_texts import Value
from tensorprobe.checkpoints.same_bytes import digest_of, have_same_bytes
from tensorprobe.checkpoints.stored_weights import StoredWeight, WeightPart, join
from tensorprobe.comparing.mapping import Layers, backward_renaming, plain_path
from tensorprobe.comparing.mapping import Mapping as Names
from tensorprobe.errors import BadArtefact

How = Literal["name", "mapping", "prefix", "content", "pattern", "shape", "joined"]
Only = Literal["all", "weights", "optimizer"]

_OPTIMIZER = re.compile(
    r"(^|[._])(optim|optimizer|optimizers|opt_state|distrib_optim)([._]|\d|$)"
    r"|(^|\.)(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|fp32_param)$"
    r"|^(state\.[^.]+\.(step|exp_avg\w*|momentum_buffer)|param_groups\.)"
)
_STATE = re.compile(r"^(?P<head>(?:.*\.)?)state\.(?P<number>\d+)\.(?P<field>.+)$")
_GROUP = re.compile(
    r"^(?P<head>(?:.*\.)?)param_groups\.(?P<group>\d+)\.(?P<what>params|param_names)\.(?P<n>\d+)$"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_PREFIXES = 4
_MOST_DIGESTS = 20_000
# What a word in a name says that a weight does; two words of one line are the same thing.
_ROLES = {
    word: role
    for role, words in {
        "query": "q query q_proj wq to_q q_lin linear_q query_proj",
        "key": "k key k_proj wk to_k k_lin linear_k key_proj",
        "value": "v value v_proj wv to_v v_lin linear_v value_proj",
        "gate": "gate gate_proj w1",
        "up": "up up_proj w3",
        "down": "down down_proj w2",
    }.items()
    for word in words.split()
}
_JOINED = (("query", "key", "value"), ("gate", "up"), ("key", "value"))
_JOINED_NAME = re.compile(r"qkv|query_key_value|c_attn|gate_up|fc1|w13|kv|Wqkv|in_proj")


class KeyPair(NamedTuple):
    """One tensor of each side; joined ones are several of a side, put one after the other."""

    actual: StoredWeight
    expected: StoredWeight
    how: How


class Pairs(NamedTuple):
    """All pairs, in the order of the model, and what has no partner."""

    pairs: list[KeyPair]
    only_actual: list[StoredWeight]
    only_expected: list[StoredWeight]
    renamed: list[tuple[str, str, How, int]]  # name of actual, of expected, how, how often
    notes: list[str]


def is_optimizer(key: str) -> bool:
    """Whether a tensor or value belongs to the state of an optimizer."""
    return _OPTIMIZER.search(key) is not None


def chosen(key: str, only: Only) -> bool:
    if only == "all":
        return True
    return is_optimizer(key) == (only == "optimizer")


def pair_keys(actual: Checkpoint, expected: Checkpoint, names: Names, only: Only) -> Pairs:
    """Pair the tensors of two checkpoints."""
    return _KeyPairing(actual, expected, names, only).result()


class _KeyPairing:
    def __init__(self, actual: Checkpoint, expected: Checkpoint, names: Names, only: Only) -> None:
        self.names = names
        self.left = self._chosen(actual, only)
        self.right = self._chosen(expected, only)
        self.order = {key: n for n, key in enumerate(_ordered(actual, self.left))}
        self.pairs: list[KeyPair] = []
        self.renamed: Counter[tuple[str, str, How]] = Counter()
        self.notes: list[str] = []

    def _chosen(self, side: Checkpoint, only: Only) -> dict[str, StoredWeight]:
        ignored = self.names.ignore
        named = _named_states(side)
        return {
            named.get(key, key): weight._replace(key=named.get(key, key))
            for key, weight in side.tensors.items()
            if chosen(key, only)
            and not any(fnmatch.fnmatchcase(plain_path(key), plain_path(p)) for p in ignored)
        }

    def result(self) -> Pairs:
        self._by_mapping()
        self._by_name(lambda key: key, "name")
        self._by_name(plain_path, "name")
        for _ in range(_MOST_PREFIXES):
            if not self._by_prefix():
                break
        self._by_parts()
        if self.left and self.right:
            self._by_content()
            self._by_joining()
            self._by_shape()
        self.pairs.sort(key=lambda pair: self.order.get(pair.actual.key, len(self.order)))
        renamed = [(*key, number) for key, number in self.renamed.items()]
        return Pairs(self.pairs, [*self.left.values()], [*self.right.values()], renamed, self.notes)

    def _add(self, ours: str, theirs: str, how: How) -> None:
        self.pairs.append(KeyPair(self.left.pop(ours), self.right.pop(theirs), how))
        if how != "name":
            self.renamed[_template(ours), _template(theirs), how] += 1

    def _by_mapping(self) -> None:
        if self.names.modules:
            ours_of = backward_renaming(self.names.modules)
            by_name = {plain_path(key): key for key in self.left}
            for theirs in [*self.right]:
                path = plain_path(theirs)
                ours = by_name.get(ours_of(path))
                if ours in self.left and ours_of(path) != path:
                    self._add(ours, theirs, "mapping")
        if self.names.layers:
            layers = Layers((), self.names.layers)
            by_name = {plain_path(key): key for key in self.right}
            for ours in [*self.left]:
                path = layers.renamed(plain_path(ours))
                if path != plain_path(ours) and by_name.get(path) in self.right:
                    self._add(ours, by_name[path], "mapping")

    def _by_name(self, form: Callable[[str], str], how: How) -> None:
        there = defaultdict(list)
        for key in self.right:
            there[form(key)].append(key)
        here = Counter(form(key) for key in self.left)
        for ours in [*self.left]:
            found = there.get(form(ours), [])
            if len(found) == 1 and here[form(ours)] == 1:
                self._add(ours, found[0], how)

    def _by_prefix(self) -> bool:
        """One container more on a side: `model.`, `state_dict.`, `transformer.`."""
        votes: Counter[tuple[str, str]] = Counter()
        ends = defaultdict(list)
        for key in self.right:
            for prefix, end in _splits(key):
                ends[end].append((prefix, key))
        for key, weight in self.left.items():
            for prefix, end in _splits(key):
                for other, theirs in ends.get(end, ())[:8]:
                    alike = self.right[theirs].shape == weight.shape
                    is_word = "." not in end and prefix and other  # `weight` says nothing
                    if (
                        alike
                        and prefix != other
                        and not is_word
                        and not _has_number(f"{prefix}.{other}")
                    ):
                        votes[prefix, other] += 1
        if not votes:
            return False
        (mine, its), _ = max(
            votes.items(),
            key=lambda vote: (vote[1], "ema" not in f"{vote[0]}", -len("".join(vote[0]))),
        )
        begin, other = (f"{prefix}." if prefix else "" for prefix in (mine, its))
        for key in [*self.left]:
            theirs = f"{other}{key[len(begin) :]}"
            if key.startswith(begin) and theirs in self.right:
                self.pairs.append(KeyPair(self.left.pop(key), self.right.pop(theirs), "prefix"))
                self.renamed[f"{begin}*", f"{other}*", "prefix"] += 1
        return True

    def _by_parts(self) -> None:
        """What the user says is joined: `q + k + v: qkv`."""
        for rule in self.names.parts:
            many, one = rule.actual, rule.expected
            if len(many) > 1 and len(one) == 1:
                self._join_named(many, one[0], self.left, self.right, "mapping", True)
            elif len(one) > 1 and len(many) == 1:
                self._join_named(one, many[0], self.right, self.left, "mapping", False)

    def _join_named(
        self, many: Sequence[str], one: str, there: dict[str, StoredWeight],
        here: dict[str, StoredWeight], how: How, many_are_ours: bool,
    ) -> None:  # fmt: skip
        for key in [*here]:
            for parts in _named_parts(key, one, many, there):
                self._pair_joined(key, parts, there, here, how, many_are_ours)
                break

    def _pair_joined(
        self, one: str, parts: Sequence[str], there: dict[str, StoredWeight],
        here: dict[str, StoredWeight], how: How, many_are_ours: bool,
    ) -> None:  # fmt: skip
        joined = _stack([there[part] for part in parts])
        if joined is None:
            return
        for part in parts:
            del there[part]
        whole = here.pop(one)
        pair = (joined, whole) if many_are_ours else (whole, joined)
        self.pairs.append(KeyPair(*pair, how))
        words = " + ".join(map(_template, parts)), _template(one)
        self.renamed[(*(words if many_are_ours else words[::-1]), how)] += 1
        if many_are_ours:
            self.order[joined.key] = min(self.order.get(part, 0) for part in parts)

    def _by_content(self) -> None:
        """Names that have nothing in common: what has the same bits, then what is called alike."""
        if len(self.left) + len(self.right) > _MOST_DIGESTS:
            self.notes.append("too many names that differ: not looked for by their content")
            return
        ours, theirs = _by_digest(self.left, self.right), _by_digest(self.right, self.left)
        patterns: Counter[tuple[str, str]] = Counter()
        for digest, keys in ours.items():
            others: Sequence[str] = theirs.get(digest, ())
            if len(keys) == len(others) == 1:
                if _roles_differ(keys[0], others[0]):
                    self.notes.append(
                        f"{keys[0]} has the content of {others[0]}, and another name: swapped?"
                    )
                    continue
                patterns[_template(keys[0]), _template(others[0])] += 1
                self._add(keys[0], others[0], "content")
            elif len(keys) == len(others):  # norms of ones, biases of zeros: one pattern of names?
                templates = {_template(key) for key in others}
                alike = len({_template(key) for key in keys}) == len(templates) == 1
                if alike and not _roles_differ(keys[0], others[0]):
                    its = templates.pop()
                    for key in keys:
                        if _filled(its, key) in self.right:
                            self._add(key, _filled(its, key), "content")
        known: dict[str, str] = {}
        for (mine, its), _ in patterns.most_common():
            known.setdefault(mine, its)
        # Prefixes that go together, for parameters of the same modules (a bias of zeros).
        for (mine, its), _ in patterns.most_common():
            known.setdefault(mine.rpartition(".")[0], its.rpartition(".")[0])
        for key in [*self.left]:
            template = _template(key)
            head, _, leaf = template.rpartition(".")
            there = known.get(template) or (f"{known[head]}.{leaf}" if head in known else None)
            if there is None:
                continue
            other = _filled(there, key)
            if other in self.right and self.right[other].shape == self.left[key].shape:
                self._add(key, other, "pattern")

    def _by_joining(self) -> None:
        """A weight that is several of the other side, one after the other: q, k and v."""
        for here, there, many_are_ours in (
            (self.right, self.left, True),
            (self.left, self.right, False),
        ):
            groups = _siblings(there)
            for key in [*here]:
                for parts in groups.get((_numbers_of(key), key.rpartition(".")[2]), ()):
                    if not all(part in there for part in parts):
                        continue
                    joined = _stack([there[part] for part in parts])
                    if joined is None or joined.shape != here[key].shape:
                        continue
                    if have_same_bytes(joined, here[key]) or _JOINED_NAME.search(key):
                        self._pair_joined(key, parts, there, here, "joined", many_are_ours)
                        break

    def _by_shape(self) -> None:
        """What is left: patterns of names that are the only ones with these shapes."""
        ours, theirs = _by_pattern(self.left), _by_pattern(self.right)
        shapes_here, shapes_there = _by_shapes(ours, self.left), _by_shapes(theirs, self.right)
        for shapes, patterns in shapes_here.items():
            others = shapes_there.get(shapes, [])
            if len(patterns) == len(others) == 1 and not _roles_differ(patterns[0], others[0]):
                for key, other in zip(ours[patterns[0]], theirs[others[0]], strict=True):
                    self._add(key, other, "shape")


def _named_states(side: Checkpoint) -> dict[str, str]:
    """Keys of an optimizer's state by the names of its parameters, where it tells them."""
    names = {
        (head, number): name for head, _, number, name in _named_parameters(side) if number and name
    }
    found = {}
    for key in side.tensors:
        state = _STATE.match(key)
        if state and (name := names.get((state["head"], state["number"]))):
            found[key] = f"{state['head']}state.{name}.{state['field']}"
    return found


def _named_parameters(side: Checkpoint) -> Iterator[tuple[str, str, str, str]]:
    """Of each parameter of an optimizer: where the optimizer is, its group, number and name."""
    lists: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for key, value in side.values.items():
        if found := _GROUP.match(key):
            lists[found["head"], found["group"], found["n"]][found["what"]] = str(value)
    for (head, group, _), row in lists.items():
        yield head, group, row.get("params", ""), row.get("param_names", "")


def values_by_name(side: Checkpoint) -> dict[str, Value]:
    """The values of a checkpoint; where an optimizer names its parameters, their groups by name:
    two optimizers may have the same ones in another order."""
    named = {(head, group) for head, group, _, name in _named_parameters(side) if name}
    found: dict[str, Value] = {}
    for key, value in side.values.items():
        of_group = _GROUP.match(key)
        if of_group is None or (of_group["head"], of_group["group"]) not in named:
            found[key] = value
    for head, group, _, name in _named_parameters(side):
        if (head, group) in named:
            found[f"{head}param_groups.of.{name}"] = int(group)
    return found


def _ordered(side: Checkpoint, keys: Iterable[str]) -> list[str]:
    """The order of the model: that of the file, or of the names where a file is sorted."""
    if "torch" in side.form or "Megatron" in side.form or "ranks" in side.form:
        return [*keys]
    return sorted(keys, key=_natural)


def _natural(key: str) -> tuple[int, list[tuple[int, int, str]]]:
    parts = key.split(".")
    is_embedding = any("embed" in w or w in ("wte", "wpe") or w.startswith("tok_") for w in parts)
    words = [(0, int(w), "") if w.isdecimal() and len(w) < 12 else (1, 0, w) for w in parts]
    return 0 if is_embedding and not _has_number(key) else 1, words


def _splits(key: str) -> list[tuple[str, str]]:
    """A key in two: up to three parts of it, and the rest."""
    words = key.split(".")
    return [(".".join(words[:n]), ".".join(words[n:])) for n in range(min(4, len(words)))]


def _has_number(text: str) -> bool:
    return _NUMBER.search(text) is not None


def _template(key: str) -> str:
    return _NUMBER.sub("{}", key)


def _numbers_of(key: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(key))


def _filled(template: str, key: str) -> str:
    """A template with the numbers of a key."""
    numbers = iter(_numbers_of(key))
    return re.sub(r"\{\}", lambda _: next(numbers, "{}"), template)


def _by_digest(
    keys: Mapping[str, StoredWeight], others: Mapping[str, StoredWeight]
) -> dict[str, list[str]]:
    """Keys by their bits; of those only that the other side has a tensor of the same form for."""
    forms = {(weight.dtype, weight.shape) for weight in others.values()}
    found = defaultdict(list)
    for key, weight in keys.items():
        if (weight.dtype, weight.shape) in forms and weight.numel > 1:
            kind = "optimizer" if is_optimizer(key) else "weight"
            found[f"{kind} {weight.dtype} {weight.shape} {digest_of(weight)}"].append(key)
    return found


def _roles_differ(ours: str, theirs: str) -> bool:
    roles = [[_ROLES[w] for w in key.split(".") if w in _ROLES] for key in (ours, theirs)]
    return bool(roles[0] and roles[1] and roles[0][-1] != roles[1][-1])


def _named_parts(
    key: str, one: str, many: Sequence[str], there: Mapping[str, StoredWeight]
) -> list[list[str]]:
    """The keys that `many` has for a key of a module called `one`."""
    middle = f".{one}."
    at = f".{key}".rfind(middle)
    if at < 0:
        return []
    head, leaf = f".{key}"[:at], key[at + len(one) + 1 :]
    found = []
    ends = [f".{name}.{leaf}" for name in many]
    for other in there:
        if f".{other}".endswith(ends[0]):
            begin = f".{other}"[: -len(ends[0])]
            parts = [f"{begin}{end}".removeprefix(".") for end in ends]
            tail = begin.rpartition(".")[2]
            if all(part in there for part in parts) and (
                _numbers_of(begin[1:]) == _numbers_of(head[1:])
            ):
                found.append((tail != head.rpartition(".")[2], parts))
    return [parts for _, parts in sorted(found)]


def _stack(weights: Sequence[StoredWeight]) -> StoredWeight | None:
    """Weights one after the other in their first dimension, as one; None where they do not fit."""
    first = weights[0]
    if not first.shape or any(
        (w.dtype, w.shape[1:]) != (first.dtype, first.shape[1:]) for w in weights
    ):
        return None
    begin = 0
    parts: list[WeightPart] = []
    for weight in weights:
        parts += [
            part._replace(begins=(part.begins[0] + begin, *part.begins[1:]))
            for part in weight.parts
        ]
        begin += weight.shape[0]
    try:
        return join(" + ".join(w.key for w in weights), parts, (begin, *first.shape[1:]))
    except BadArtefact:
        return None


def _siblings(
    keys: Mapping[str, StoredWeight],
) -> dict[tuple[tuple[str, ...], str], list[list[str]]]:
    """Keys of one module that go together by their names, as q, k and v do."""
    by_parent: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for key in keys:
        *head, word, leaf = ["", "", *key.split(".")]
        if word in _ROLES:
            by_parent[".".join(head), leaf][_ROLES[word]] = key
    found = defaultdict(list)
    for (_, leaf), roles in by_parent.items():
        for wanted in _JOINED:
            if all(role in roles for role in wanted):
                parts = [roles[role] for role in wanted]
                found[_numbers_of(parts[0]), leaf].append(parts)
    return found


def _by_pattern(keys: Iterable[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for key in keys:
        found[_template(key)].append(key)
    return {pattern: sorted(group, key=_natural) for pattern, group in found.items()}


def _by_shapes(
    patterns: Mapping[str, list[str]], keys: Mapping[str, StoredWeight]
) -> dict[tuple[object, ...], list[str]]:
    """Patterns by the shapes of what has them, number by number."""
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for pattern, group in patterns.items():
        shapes = tuple((_numbers_of(key), keys[key].shape) for key in group)
        found[is_optimizer(pattern), shapes].append(pattern)
    return found
