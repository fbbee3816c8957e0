"""Hostile captures: small real ones, with calls of an attacker's added to them.

In the text of an attack @M@ is the path of its marker, @PICKLE@ that of a pickle that writes one
when it is loaded, @MODULE@ the name of a Python module that does when it is imported, and @SECRET@
a file that is none of a reader's business.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import traps
from hostile_files import make_others
from victims import Sandbox

import tensorprobe as tp

Line = dict[str, Any]
MODULE = f"{traps.CANARY}_module"
ANY_CONTENT = -1  # as the value of a tensor: one of the shape [3, 4]
LEVELS = ("L0", "L1", "mix", "L2")


class Attack(NamedTuple):
    """A call as an attacker writes it: fields laid over those of a real call.

    `like` is the real one: a function of torch, a module made by its constructor, or a module made
    of others.
    """

    name: str
    call: Line
    end: Line = {}  # noqa: RUF012 never written to
    like: str = "function"


class Block(torch.nn.Module):
    """A module of no package that a reader may import."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.up(x) * self.factor}


def program() -> Callable[[], None]:
    """What is recorded; its modules are made before."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    block = Block()
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            x @ torch.ones(4, 4)
        y = block(model(x))["y"]
        values = torch.max(y, dim=1).values
        kept = torch.nn.functional.dropout(y.to(torch.float64)[0:2], 0.5)
        (kept.sum() + values.sum()).backward()

    return run


def record_all(folder: Path) -> None:
    """The program at every level, and what `convert` makes of that, each in a folder."""
    from tensorprobe.store.loading import layout

    for level in LEVELS:
        run = program()
        with tp.Recorder(folder / level, level=level, keep="tensors"):
            run()
        for peer in ("msprobe", "ptdbg"):
            if (peer, level) != ("msprobe", "L2"):  # it has no place for operators of ATen
                layout(peer).write(tp.load(folder / level), folder / f"{peer}-{level}")
    make_others(folder)


# Native captures

_TEMPLATES = {
    "function": "Functional.relu.0.forward",
    "module": "Module.0.Linear.forward.0",
    "made": "Module.Sequential.forward.0",
}


class Base(NamedTuple):
    """A recorded step taken apart."""

    folder: Path
    values: list[Line]  # stacks and values, which calls refer to
    calls: dict[str, tuple[Line, Line]]  # the templates, with their ends


def take_apart(capture: Path) -> Base:
    lines = [json.loads(text) for text in (_log(capture)).read_text().splitlines()]
    ends = {line["id"]: line for line in lines if line["type"] == "end"}
    begun = {line["name"]: line for line in lines if line["type"] == "call"}
    calls = {kind: (begun[name], ends[begun[name]["id"]]) for kind, name in _TEMPLATES.items()}
    values = [line for line in lines if line["type"] in ("stack", "value")]
    return Base(capture, values, calls)


def _log(capture: Path) -> Path:
    return capture / "rank0" / "step0" / "calls.jsonl"


def write_native(
    base: Base, sandbox: Sandbox, name: str, attacks: Sequence[Attack], *, wrong: bool = False
) -> list[str]:
    """A capture `name` in the sandbox, with these attacks; the names of its calls.

    `wrong`: outputs are others than those of the same capture made without, so that a comparison
    of the two has to find out who is to blame.
    """
    folder = sandbox.folder / name
    shutil.copytree(base.folder, folder)
    lines = list(base.values)
    names = []
    for number, attack in enumerate(attacks):
        call, end = hostile_lines(base, attack, number, sandbox)
        if wrong:
            _spoil(end, base)
        lines += [call, end]
        names.append(call["name"])
    lines.append({"type": "closed", "calls": len(attacks), "gaps": 0})
    # surrogates and all: what json cannot encode as UTF-8 is an attack as well
    text = "".join(json.dumps(line) + "\n" for line in lines)
    _log(folder).write_text(text)
    return [name for name in names if isinstance(name, str)]


def hostile_lines(base: Base, attack: Attack, number: int, sandbox: Sandbox) -> tuple[Line, Line]:
    call, end = copy.deepcopy(base.calls[attack.like])
    call["name"] = f"Functional.a{number}.0.forward"
    if attack.like != "function":
        call["module"] = f"a{number}"
        call["name"] = f"Module.a{number}.X.forward.0"
    call.pop("parent", None)
    call["id"] = end["id"] = number
    call.update(copy.deepcopy(attack.call))
    end.update(copy.deepcopy(attack.end))
    content = base.calls["function"][0]["args"][0]["tensor"]["value"]
    return planted(call, sandbox, number, content), planted(end, sandbox, number, content)


def _spoil(end: Line, base: Base) -> None:
    """Another content of the same shape for its first output."""
    wrong = base.calls["function"][0]["args"][0]["tensor"]["value"]
    outputs = end.get("outputs")
    if isinstance(outputs, dict) and "tensor" in outputs:
        outputs["tensor"]["value"] = wrong


def planted(value: Any, sandbox: Sandbox, number: int, content: int = 0) -> Any:
    """The same with paths of this sandbox in place of the marks; of attack `number`."""
    if isinstance(value, str):
        places = {
            "@M@": str(sandbox.marker(f"a{number}.")),
            "@PICKLE@": str(sandbox.folder / "evil.pkl"),
            "@MODULE@": MODULE,
            "@SECRET@": str(sandbox.secret),
        }
        for mark, path in places.items():
            value = value.replace(mark, path)
        return value
    if isinstance(value, list):
        return [planted(item, sandbox, number, content) for item in value]
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            at = planted(key, sandbox, number)
            found[at] = planted(item, sandbox, number, content)
        if found.get("value") == ANY_CONTENT:
            found["value"] = content
        return found
    return value


# What lies about for an attack to use


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def lay_out_bait(sandbox: Sandbox) -> None:
    """A pickle and a module that each leave a marker, in the working directory."""
    (sandbox.folder / "evil.pkl").write_bytes(pickle.dumps(Evil(sandbox.marker("pickle"))))
    marker = str(sandbox.marker("module"))
    (sandbox.folder / f"{MODULE}.py").write_text(f"open({marker!r}, 'w').close()\n")


def evil_files(marker: Path) -> dict[str, bytes]:
    """Files in place of a tensor's, by a name: each runs a command in a reader that unpickles."""
    command = f"touch {marker}".encode()
    protocols = {f"protocol {n}": pickle.dumps(Evil(marker), n) for n in range(6)}
    by_hand = {
        "GLOBAL": b"cos\nsystem\n(S'" + command + b"'\ntR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(command)])
        + command
        + b"\x85R.",
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command + b"'\no.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(S'" + command + b"'\ntR.",
        "BUILD": b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__setstate__'\ncos\nsystem\nsbS'"
        + command
        + b"'\nb.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"(X\x07\x00\x00\x00storagecos\nsystem\n(S'" + command + b"'\ntRtQ.",
        "nested": b"ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\n(S'" + command + b"'\ntRtR.",
        "getattr": b"c__builtin__\ngetattr\n(cos\nenviron\nS'clear'\ntR.",
        "endless": b"(" * 200_000 + b".",
        "memo": b"\x80\x02" + b"r\xff\xff\xff\x7f" + b".",
    }
    found = {f"bare {name}": data for name, data in {**protocols, **by_hand}.items()}
    for name, data in {**protocols, **by_hand}.items():
        found[f"zip {name}"] = _zip_of(data)
    legacy = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    found["legacy"] = legacy + pickle.dumps({}, 2) + pickle.dumps(Evil(marker), 2)
    found["npy of objects"] = _npy_of_objects(marker)
    found["script"] = _zip_of(pickle.dumps(Evil(marker)), "constants.pkl")
    for dtype in ("object", "O", "i4,O", "void", "str", "complex", "load"):
        found[f"a tensor of dtype {dtype}"] = _zip_of(_tensor_of(dtype), storage=b"A" * 192)
    found["two pickles"] = _zip_of(by_hand["GLOBAL"], "data.pkl", twice=True)
    return found


def _tensor_of(dtype: str) -> bytes:
    """Bytes that are taken for pointers to objects, where that dtype is believed."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x0ctQ"
    shape, strides = b"K\x03K\x04\x86", b"K\x04K\x01\x86"
    rest = shape + strides + b"\x89}ctorch\n" + dtype.encode() + b"\ntR."
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(" + storage + b"K\0" + rest


def _zip_of(
    data: bytes, name: str = "data.pkl", *, twice: bool = False, storage: bytes = b"\0" * 48
) -> bytes:
    entries = {f"archive/{name}": data, "archive/version": b"3\n", "archive/data/0": storage}
    if twice:
        entries[f"other/{name}"] = data
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(zipfile.ZipInfo(entry), content)  # of no time: the same every time
    return buffer.getvalue()


def _npy_of_objects(marker: Path) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (118 - len(header)) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    return head + pickle.dumps([Evil(marker)])


# Dumps of the peers


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=1))
