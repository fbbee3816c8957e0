"""Captures and dumps with something planted anywhere: each by its number, the same every time."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attacks
from hostile_captures import ANY_CONTENT, Attack, evil_files, planted
from victims import (
    Sandbox,
    Step,
    reading_facts,
    reading_graphs,
    reading_trends,
    reading_weights,
)

LAYOUTS = ("L0", "L1", "mix", "L2")
LAYOUTS += tuple(f"{peer}-{level}" for peer in ("msprobe", "ptdbg") for level in LAYOUTS[:3])
# What is no capture, and what reads it.
OTHERS = {
    "graphs": reading_graphs,
    "trends": reading_trends,
    "peer-trends": reading_trends,
    "weights": reading_weights,
    "facts": reading_facts,
}
LAYOUTS += tuple(OTHERS)
_TEXT_FILES = (".json", ".jsonl", ".pkl", ".csv", ".yaml")
_MAIN_FILES = ("calls.jsonl", "dump.json", "compiled.jsonl")
_MAX_PLANTED = 3

_GROUPS = (
    attacks.WALKS,
    attacks.ENTRIES,
    attacks.TYPES,
    attacks.MODULES,
    attacks.NO_SPACES,
    attacks.TEXTS,
)
_HOMES = {
    "torch.nn.functional.": "Functional",
    "torch.Tensor.": "Tensor",
    "torch.ops.aten.": "Aten",
    "torch_npu.": "NPU",
    "torch.distributed.": "Distributed",
    "torch.": "Torch",
}
_OPS = [each.call["op"] for each in attacks.ALL if "op" in each.call]
_NOTES = [note for each in attacks.MODULES for note in each.end["notes"]]
TEXTS = [
    *dict.fromkeys(text for text in (*_OPS, *_NOTES) if len(text) < 10_000),
    *(text for what, text in attacks.BREAKS.items() if what != "very long"),
    *(attacks.SHELL, attacks.PYTHON, attacks.EXPRESSION, attacks.NO_SPACE, "@PICKLE@", "@SECRET@"),
    *(f"Functional.{op.removeprefix('torch.nn.functional.')}.0.forward" for op in _OPS[:40]),
    *(f"Functional_{op.removeprefix('torch.nn.functional.')}_0_forward_input.0" for op in _OPS[:9]),
    *("torch.float32", "torch.Tensor", "<class 'os.system'>", "torch.Size", "slice", "cuda:99"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 7, 2**31, 2**63 - 1, 10**19, 10**30, 1e308, -0.0, 1e-320),
    *("", "nan", [], {}, [[]], [None], {"": None}),
    *({"int": "9" * 5000}, {"float": "inf"}, {"float": "x"}, {"complex": [1, 2]}, {"complex": []}),
    *({"slice": [1, 2]}, {"slice": "abcdef"}, {"ellipsis": False}, {"tuple": 7}, {"dict": [[1]]}),
    *({"tensor": {}}, {"tensor": 7}, {"special": []}, {"special": ["dtype"]}, {"fields": [1]}),
    *(attack.call["args"][-1] for attack in attacks.TYPES if attack.call.get("args")),
    *({"type": "torch.Tensor"}, {"type": "slice", "value": ["os"]}, {"type": attacks.EXPRESSION}),
    *({"type": "torch.dtype", "value": "torch.load"}, {"type": "int", "value": "x"}),
]


def _deep(depth: int) -> Any:
    value: Any = attacks.EXPRESSION
    for _ in range(depth):
        value = [value]
    return value


VALUES += [_deep(50), _deep(300)]


class Mutation:
    """Number `number`: which recording, what is planted where, and what is done with it."""

    def __init__(
        self, number: int, recorded: Path, sandbox: Sandbox, bases: Sequence[str] = LAYOUTS
    ) -> None:
        self._random = random.Random(number)
        self._number = number
        self._sandbox = sandbox
        self.name = f"m{number}"
        self.folder = sandbox.folder / self.name
        self._base = self._random.choice(bases)
        self._twin = recorded / self._base
        _link(self._twin, self.folder)
        self._evil: set[Path] = set()  # files that are replaced already
        for _ in range(self._random.randint(1, _MAX_PLANTED)):
            self._plant()
        self._name_places()

    def steps(self) -> list[Step]:
        """One or two verbs on it; its twin is the same without anything planted."""
        draw = self._random
        twin = str(self._twin)
        name, out = self.name, f"out/{self.name}"
        if self._base in OTHERS:
            end = "/env.json" if self._base == "facts" else ""
            return OTHERS[self._base](f"{name}{end}", f"{twin}{end}", out)
        pair = draw.choice(([name, twin], [twin, name], [name, name]))
        layout = draw.choice(("native", "msprobe", "ptdbg"))
        call = draw.choice(self._call_names() or ["Functional.relu.0.forward"])
        choices: list[list[Step]] = [
            [{"verb": ["show", name]}, {"verb": ["show", "--", name, "*"]}],
            [{"verb": ["show", "--", name, call]}, {"load": name}],
            [{"verb": ["check", name, "-o", f"{out}-check"]}],
            [{"verb": ["compare", *pair, "-o", f"{out}-compared"]}],
            [{"verb": ["convert", name, "--to", layout, "-o", f"{out}-converted"]}],
            [{"view": name}, {"verb": ["ranks", name]}, {"verb": ["env", "compare", *pair]}],
            [
                {"verb": ["repro", "-o", f"{out}-repro", "--", name, call]},
                {"script": str(self._sandbox.folder / f"{out}-repro" / "repro.py")},
            ],
        ]
        return draw.choices(choices, weights=(1, 1, 2, 2, 1, 1, 3))[0]

    def _call_names(self) -> list[str]:
        """Names of calls, planted ones among them."""
        found: list[str] = []
        for path in self.folder.rglob("*"):
            if path.name == "calls.jsonl":
                lines = [_parsed(text) for text in path.read_text(errors="replace").split("\n")]
                names = [line.get("name") for line in lines if isinstance(line, dict)]
                found += [name for name in names if isinstance(name, str)]
            elif path.name == "dump.json":
                content = _parsed(path.read_text(errors="replace"))
                data = content.get("data") if isinstance(content, dict) else None
                found += list(data) if isinstance(data, dict) else []
        return sorted(name for name in set(found) if "\0" not in name and len(name) < 10_000)

    # What is planted

    def _plant(self) -> None:
        if self._random.random() < 0.3:
            self._attack()
            return
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        texts = [path for path in files if path.suffix in _TEXT_FILES]
        binary = [path for path in files if path.suffix in (".pt", ".npy", ".safetensors")]
        others = [path for path in binary if path not in self._evil]
        if others and self._random.random() < 0.15:
            self._spoil(self._random.choice(others))
        elif texts:
            # the file with the calls is where most of it is read from
            weights = [8 if path.name in _MAIN_FILES else 1 for path in texts]
            self._edit(self._random.choices(texts, weights)[0])

    def _attack(self) -> None:
        """An attack of the corpus in place of a call."""
        attack = self._random.choice(self._random.choice(_GROUPS))
        for path in sorted(self.folder.rglob("*")):
            if path.name == "calls.jsonl":
                self._overlay(path, attack)
            elif path.name == "dump.json":
                self._rename(path, attack.call.get("op", "torch.nn.functional.torch.os.system"))

    def _overlay(self, path: Path, attack: Attack) -> None:
        lines = path.read_text(errors="surrogateescape").split("\n")
        parsed = [_parsed(line) for line in lines]
        calls = [line for line in parsed if isinstance(line, dict) and line.get("type") == "call"]
        if not calls:
            return
        number = self._random.choice(calls).get("id")
        for i, line in enumerate(parsed):
            if isinstance(line, dict) and line.get("id") == number:
                kind = line.get("type")  # which may be anything by now
                fields = attack.call if kind == "call" else attack.end if kind == "end" else {}
                if line.get("type") in ("call", "end"):
                    lines[i] = json.dumps(self._blamed(line | _with_content(fields)))
        _replace(path, "\n".join(lines).encode("utf-8", "surrogateescape"))

    def _blamed(self, line: Any) -> Any:
        """Often with another output, so that `compare` has to run the call to say who is wrong."""
        output = line.get("outputs")
        tensor = output.get("tensor") if isinstance(output, dict) else None
        if isinstance(tensor, dict) and self._random.random() < 0.5:
            tensor["value"] = self._random.randrange(1, 12)
        return line

    def _rename(self, path: Path, op: str) -> None:
        content = _parsed(path.read_text(errors="surrogateescape"))
        data = content.get("data") if isinstance(content, dict) else None
        if not isinstance(data, dict) or not data:
            return
        name = self._random.choice(sorted(data))
        value = data.pop(name)
        home, prefix = next((each for each in _HOMES.items() if op.startswith(each[0])), ("", "VF"))
        if self._random.random() < 0.2:
            prefix = self._random.choice(sorted(_HOMES.values()))
        api = op.removeprefix(home)
        if isinstance(value, dict):
            command = self._random.choice((attacks.SHELL, attacks.PYTHON))
            value |= {"input_args": [{"type": "str", "value": command}], "input_kwargs": {}}
        data[f"{prefix}.{api}.0.forward"] = value
        _replace(path, json.dumps(content, indent=1).encode("utf-8", "surrogateescape"))

    def _spoil(self, path: Path) -> None:
        """A file of numbers: another one in its place, or other bytes in it."""
        draw = self._random
        data = path.read_bytes()
        if draw.random() < 0.5:
            evil = evil_files(self._sandbox.marker(f"a{self._number}."))
            data = evil[draw.choice(sorted(evil))]
            self._evil.add(path)
        else:
            at = self._place(min(len(data), 2000))
            text = self._text().encode("utf-8", "surrogatepass")
            kept = data[at + draw.choice((0, len(text))) :]
            data = draw.choice((data[:at] + text + kept, data[:at], data[at:]))
        _replace(path, data)

    def _edit(self, path: Path) -> None:
        draw = self._random
        text = path.read_text(errors="surrogateescape")
        if draw.random() < 0.06:  # not even JSON
            at = self._place(len(text))
            text = text[:at] + draw.choice((self._text(), "", text[:at])) + text[at + 9 :]
        elif path.suffix in (".csv", ".yaml"):
            mark = "," if path.suffix == ".csv" else ":"
            cells = text.split(mark)
            at = draw.randrange(len(cells))
            cells[at] = draw.choice((self._text(), str(draw.choice(VALUES[:13])), cells[at] * 9))
            text = mark.join(cells)
        elif path.suffix == ".json":
            text = json.dumps(self._changed(_parsed(text)), indent=1)
        else:
            lines = text.split("\n")
            at = draw.randrange(len(lines))
            change = draw.random()
            if change < 0.9:
                lines[at] = json.dumps(self._changed(_parsed(lines[at])))
            elif change < 0.95:
                lines.insert(draw.randrange(len(lines)), lines[at])
            else:
                del lines[at]
            text = "\n".join(lines)
        _replace(path, text.encode("utf-8", "surrogatepass"))

    def _changed(self, document: Any) -> Any:
        """The document with one node of it made into another."""
        nodes = list(_nodes([document]))
        texts = [at for at in nodes if isinstance(at[0][at[1]], str) or isinstance(at[1], str)]
        draw = self._random
        holder, key = draw.choice(texts if texts and draw.random() < 0.7 else nodes)
        value = holder[key]
        how = draw.random()
        if isinstance(key, str) and how < 0.15:  # its name
            holder[self._text()] = holder.pop(key)
        elif isinstance(value, str) and how < 0.55:
            holder[key] = self._text()
        elif isinstance(value, str) and how < 0.75:  # in the middle of what is there
            at = self._place(len(value) + 1)
            holder[key] = value[:at] + self._text() + value[at:]
        elif how < 0.9:
            holder[key] = _with_content(draw.choice(VALUES))
        elif how < 0.95 and isinstance(holder, dict):
            del holder[key]
        else:  # a copy of another part
            other, place = draw.choice(nodes)
            holder[key] = copy.deepcopy(other[place])
        return nodes[0][0][0]

    def _place(self, length: int) -> int:
        """Somewhere in a text; one draw, however long that is in this run."""
        return int(self._random.random() * length)

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _name_places(self) -> None:
        """The marks of this sandbox, last of all: their length must not change what is drawn."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path not in self._evil:
                data = path.read_bytes()
                named = planted(data.decode("latin-1"), self._sandbox, self._number)
                if named.encode("latin-1") != data:
                    _replace(path, named.encode("latin-1"))


def _with_content(value: Any) -> Any:
    """A copy, whose tensors have a content that is there."""
    text = json.dumps(value).replace(f'"value": {ANY_CONTENT}', '"value": 1')
    return json.loads(text)


def _nodes(holder: Any) -> Any:
    """Every place in a document: what holds it, and where in that."""
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in list(items):
        yield holder, key
        if isinstance(value, dict | list):
            yield from _nodes(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _link(source: Path, target: Path) -> None:
    """A copy that shares what is not changed."""
    shutil.copytree(source, target, copy_function=os.link)


def _replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
