"""One recorded call as a folder that anybody with torch can run: a script and its tensors."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tensorprobe.errors import BadUsage, NotReplayable
from tensorprobe.keywords import keywords
from tensorprobe.records import Call, Capture, Fields, Special, TensorRecord
from tensorprobe.replay.allowed import allow_imported, dtype_named, format_named, is_word
from tensorprobe.replay.child_limits import run_limited
from tensorprobe.replay.decompositions import vendor_formula
from tensorprobe.replay.generate import load_or_generate
from tensorprobe.replay.kinds import Kind, backward_kind, kind_of
from tensorprobe.replay.modules import (
    Made,
    calls_inside,
    check_names,
    how_made,
    inside_of,
    literal,
    with_children,
)
from tensorprobe.replay.pairing import ForwardBackward, find_pair, is_generated
from tensorprobe.replay.rebuild import (
    Source,
    check_callable,
    device_type,
    is_device,
    numpy_number,
    refuse,
    remember,
    with_stride,
)
from tensorprobe.replay.rebuild import load as read
from tensorprobe.replay.reference import ROUNDOFF, coarsest, replay_both, rng_state
from tensorprobe.replay.references import bring_in, find, registered
from tensorprobe.replay.rules import length, limit, rule_for
from tensorprobe.store.loading import load
from tensorprobe.store.outputs import check_output
from tensorprobe.store.unread import Unread

_EXACT: tuple[Kind, ...] = ("exact", "selection", "conversion", "random")
_WIDTH = 96
_GENERATED = "Inputs without content are generated from statistics"
_CUSTOM_OPS = "custom_ops.py"
_FILES = {"repro.py", "tensors.pt", "environment.json", "README.md", _CUSTOM_OPS, "__pycache__"}
_TRY_S = 120.0
_NOTES = ("buffers.input.", "buffers.rng_state")  # kept beside a module's own buffers


@keywords(output="path", tell="log")
def repro(
    capture: str | os.PathLike[str] | Capture,
    call: str,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    rank: int | None = None,
    imports: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    recorded_here: bool = False,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Write a folder that shows one call alone: repro.py, its tensors, and what they are.

        tp.repro("runs/npu", "Functional.layer_norm.3.forward", "bug")
        # python bug/repro.py --device npu

    `imports` are packages whose operators, functions and modules the script may call, or a Python
    file that registers such operators, which goes into the folder. A call that was `recorded_here`,
    by this very process, may call what the process has imported. `log` is given a line where
    content is missing that the script can do without.
    """
    run = capture if isinstance(capture, Capture) else load(capture)
    pair = find_pair(run, call, step=step, rank=rank)
    folder = Path(path)
    check_output(folder, run.path)
    _check_folder(folder)
    given = [imports] if isinstance(imports, str | os.PathLike) else list(imports)
    names, files = bring_in([str(each) for each in given])
    if len(files) > 1:
        raise BadUsage("`imports`: one Python file goes into the folder; give packages else")
    file = files[0] if files else None
    if recorded_here:
        allow_imported(pair.forward.op)
    refuse(pair.forward)
    made = None
    if pair.forward.name.startswith("Module."):
        inside = calls_inside(pair.forward, run.calls(step=pair.forward.step))
        made = how_made(pair.forward, inside)
        check_names(made)
        pair = ForwardBackward(with_children(pair.forward, inside), pair.backward)
    else:
        check_callable(pair.forward.op)
    source = remember(load_or_generate)
    script = _script(pair, source, names, file, made)
    unread = Unread(each for each in pair if each is not None)
    tensors = _tensors(pair, source, unread)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "repro.py").write_text(script)
    torch.save(tensors, folder / "tensors.pt")
    (folder / "environment.json").write_text(_environment(run, pair))
    needs = sorted(made.packages()) if made is not None else []
    (folder / "README.md").write_text(_readme(pair, needs))
    if file is not None:
        shutil.copyfile(file, folder / _CUSTOM_OPS)
    if made is not None and made.attributes is not None:
        _try_out(pair.forward, made, folder)
    if log is not None:
        for line in unread.lines():
            log(f"{line}. {_GENERATED if is_generated(pair) else 'The script does without'}")
    return folder


def _check_folder(folder: Path) -> None:
    """A repro may replace a repro. Beside it nothing may lie: Python would import it."""
    if folder.exists() and not {path.name for path in folder.iterdir()} <= _FILES:
        raise BadUsage(f"'{folder}' holds other files than a repro's: give another `path`")


def _try_out(call: Call, made: Made, folder: Path) -> None:
    """Run the script of a module made without its constructor: it may lack what it needs."""
    try:
        done = run_limited(folder / "repro.py", _TRY_S)
    except subprocess.TimeoutExpired:
        return
    text = done.stdout + done.stderr
    found = re.search(r"^(?:FAIL  raised )?(AttributeError|TypeError|KeyError): (.*)", text, re.M)
    if found is None:
        return
    shutil.rmtree(folder)
    unknown = made.unknown()
    lacking = f" (of {', '.join(unknown[:5])} only the names were recorded)" if unknown else ""
    raise NotReplayable(
        f"{call.name} cannot be run alone: {found[2]}{lacking}. Repro a call inside it: "
        f"tensorprobe show CAPTURE --module {inside_of(call)}"
    )


def _why_generated(pair: ForwardBackward) -> str:
    lines = Unread(each for each in pair if each is not None).lines()
    return lines[0] if lines else "the recording kept no tensors"


# The tensors


def _tensors(pair: ForwardBackward, source: Source, unread: Unread) -> dict[str, torch.Tensor]:
    call, back = pair
    tensors: dict[str, torch.Tensor] = {}

    def kept(name: str, record: TensorRecord) -> None:
        """What the program got, of its own inputs: the script shows it, and does without."""
        content = None if is_generated(pair) else unread.attempt(record, record.load)
        if content is not None:
            tensors[name] = content

    for record in call.tensors:
        name = record.name.removeprefix(call.name + ".")
        if name == "buffers.rng_state":
            tensors["rng_state"] = read(record)
        elif record.role in ("input", "parameter", "buffer") and not name.startswith(_NOTES):
            if record.alias_of is None:
                tensors[name] = _as_it_was(record, source)
        elif record.role == "output" and record.blob is not None:
            kept(f"recorded.{name}", record)
    if isinstance(call.outputs, bool | int | float):
        number = call.outputs
        dtype = torch.float64 if isinstance(number, float) else None
        tensors["recorded.output.0"] = torch.tensor(number, dtype=dtype)
    if back is not None:
        for record in back.tensors:
            path = record.name.removeprefix(back.name + ".").partition(".")[2]
            if record.role == "input":
                tensors[f"grad.{path}"] = _as_it_was(record, source).detach()
            elif record.role == "output" and record.blob is not None:
                kept(f"recorded.gradient of input.{path}", record)
    return {**tensors, **_stored_reference(pair, source)}


def _as_it_was(record: TensorRecord, source: Source) -> torch.Tensor:
    tensor = with_stride(source(record), record.stride)
    floats = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(record.requires_grad and floats)


def _stored_reference(pair: ForwardBackward, source: Source) -> dict[str, torch.Tensor]:
    """For ops whose reference is a formula: the script has no formula, so it gets the result."""
    op = pair.forward.op
    if find(op, registered()) is None and vendor_formula(pair.forward) is None:
        return {}
    there, back = replay_both(*pair, source=source)
    stored = {}
    for done in (there, back):
        for name, tensor in (done.outputs if done is not None else {}).items():
            label = f"gradient of input.{name.partition('.')[2]}" if done is back else name
            stored[f"reference.{label}"] = tensor.detach()
            if done is not None and name in done.moved:
                stored[f"moved.{label}"] = tensor.detach() + done.moved[name]
    return stored


# The script


def _script(
    pair: ForwardBackward,
    source: Source,
    names: Sequence[str],
    file: Path | None,
    made: Made | None,
) -> str:
    text = resources.files("tensorprobe.replay").joinpath("repro_template.txt").read_text()
    text = text.replace('"""TITLE', f'"""{_title(pair)}', 1)
    head, _, tail = text.partition("# the call\n")
    imported = [f"import {name}" for name in names]
    imported += ["import custom_ops  # registers the operator"] if file is not None else []
    if imported:
        head = head.rstrip() + "\n\n" + "\n".join(imported) + "\n\n"
    about = _about(pair, source, made) + "\n\n\n"
    if made is not None and "make(" in made.source():
        about += _MAKE
    return head + about + _call_source(pair.forward, made) + tail


_MAKE = '''def make(kind, attributes, modules={}):
    """A module as it was recorded, without its constructor; parameters come with the call."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.__dict__.update(attributes)
    for name, child in modules.items():
        module.add_module(name, child)
    return module


'''


def _title(pair: ForwardBackward) -> str:
    call = pair.forward
    lines = [f"{call.op} alone, as recorded: {call.name}, step {call.step}, rank {call.rank}."]
    if call.module:
        lines.append(f"Module: {call.module}")
    lines += [f"Called from {frame}" for frame in call.stack[:3]]
    if is_generated(pair):
        lines.append(
            "INPUTS ARE GENERATED from recorded statistics (shape, dtype, range, mean, norm): "
            f"{_why_generated(pair)}."
        )
    return "\n".join(map(_plain, lines))


def _plain(text: str) -> str:
    """Text from a file that can end no string and no line: every odd character is escaped."""
    return text.encode("unicode_escape").decode("ascii").replace('"', "'").replace("`", "'")


def _about(pair: ForwardBackward, source: Source, made: Made | None) -> str:
    call = pair.forward
    kind = kind_of(call)
    unit = coarsest(*pair) or 2.0**-24
    notes = (note.split()[-1] for note in call.notes if note.startswith("autocast "))
    autocast = next((str(dtype_named(note)) for note in notes), None)
    facts = {
        "EXACT": (kind in _EXACT, "its outputs are determined to the last bit"),
        "UNIT": (f"2.0**{int(math.log2(unit))}", "unit roundoff of the coarsest dtype in the call"),
        "APART": (kind in ("elementwise", "compound"), "its inputs are moved as wholes"),
        "COMPOUND": (kind == "compound", "each of its steps may be rounded"),
        "WRITES": (_writes(call), "the call writes to its arguments"),
        "AUTOCAST": (autocast, "the dtype autocast was on with"),
        "RANDOM_ON": (
            repr(_random_device(call, made)),
            "the device its random numbers were drawn on",
        ),
    }
    lines = [f"{name} = {value}  # {comment}" for name, (value, comment) in facts.items()]
    lines.append(
        "ALLOWED = {  # how each result is judged, and how far off a healthy device may be"
    )
    for name, (measure, most) in _allowed(pair, source).items():
        lines.append(f'    {json.dumps(name)}: ("{measure}", {most:.4g}),')
    return "\n".join([*lines, "}"])


def _allowed(pair: ForwardBackward, source: Source) -> dict[str, tuple[str, float]]:
    """The measure and the limit for each output and gradient, as `tensorprobe check` has them."""
    found = {}
    if isinstance(pair.forward.outputs, bool | int | float):
        found["output.0"] = ("equal", 0.0)
    for call in pair:
        if call is None:
            continue
        back = call if call is pair.backward else None
        kind = kind_of(pair.forward) if back is None else backward_kind(pair.forward)
        rule = rule_for(kind, "forward" if back is None else "backward")
        roundoff = coarsest(pair.forward, back)
        for record in call.tensors:
            if record.role != "output":
                continue
            name = record.name.removeprefix(call.name + ".")
            if back is not None:
                name = f"gradient of input.{name.partition('.')[2]}"
            if rule.measure not in ("ulp", "unit"):
                found[name] = ("equal", 0.0)
                continue
            if rule.measure == "ulp":
                roundoff = ROUNDOFF.get(record.dtype, 2.0**-24)
            many = length(pair.forward, back, kind, record.numel, source)
            found[name] = (rule.measure, limit(rule, roundoff, many))
    return found


def _random_device(call: Call, made: Made | None) -> str | None:
    """Where the state of its random numbers can be set; "nowhere" if it draws and has none."""
    device = next((r.device for r in call.tensors if r.role in ("input", "output")), "cpu")
    device = device_type(device)
    if rng_state(call, device) is not None:
        return device
    draws = kind_of(call) in ("random", "dropout") or (made is not None and made.may_draw())
    return "nowhere" if draws else None


def _writes(call: Call) -> bool:
    name = call.op.rpartition(".")[2]
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or call.kwargs.get("inplace") is True
        or "out" in call.kwargs
        or any(note.startswith("outputs are the arguments") for note in call.notes)
        or any(".buffers.input." in record.name for record in call.tensors)
        or (True in call.args and _is_output_an_input(call))
    )


def _is_output_an_input(call: Call) -> bool:
    """F.relu(x, True): what comes out has the layout and place of what went in."""
    return call.op.startswith("torch.nn.functional.")


def _call_source(call: Call, made: Made | None) -> str:
    writer = _Writer(call)
    lines = [
        "def call(t, real, device):",
        '    """The call. t: its tensors; real(dtype): that dtype, or the one asked for."""',
    ]
    if made is not None:
        lines += writer.module(made)
    else:
        lines += writer.function()
    return "\n".join(lines) + "\n"


class _Writer:
    """Writes a recorded call as the Python a person would type."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._args = [self.value(arg, f"argument {i}") for i, arg in enumerate(call.args)]
        wrong = next((key for key in call.kwargs if not is_word(key)), None)
        if wrong is not None:
            raise NotReplayable(f"{call.name} cannot be run alone: '{wrong}' is no keyword")
        self._words = [f"{key}={self.value(value, key)}" for key, value in call.kwargs.items()]

    def function(self) -> list[str]:
        given = self._args + self._words
        after = [n for n in self._call.notes if n.startswith("outputs are the arguments")]
        if not after:
            return [*self._import(), *self._wrapped("    return ", self._call.op, given)]
        outputs = [
            record.name.removeprefix(self._call.name + ".output.")
            for record in self._call.tensors
            if record.role == "output"
        ]
        pairs = (f"{json.dumps(path)}: {_tensor(f'input.{path}')}" for path in outputs)
        written = ", ".join(pairs)
        return [
            *self._import(),
            *self._wrapped("    ", self._call.op, given),
            f"    return {{{written}}}",
        ]

    def _import(self) -> list[str]:
        """Functions of other packages than torch."""
        home = self._call.op.rpartition(".")[0]
        return (
            [] if home.partition(".")[0] in ("torch", "torch_npu") else [f"    import {home}", ""]
        )

    def module(self, made: Made) -> list[str]:
        lines = [f"    import {package}" for package in sorted(made.packages())]
        lines += [""] if lines else []
        names = (r.name.removeprefix(self._call.name + ".") for r in self._call.tensors)
        held = {
            name.partition(".")[2]: name
            for name in names
            if name.startswith(("parameters.", "buffers."))
            and not name.startswith(_NOTES)
            and not name.endswith(".after")
        }
        items = [f"{json.dumps(key)}: {_tensor(name)}" for key, name in held.items()]
        state = [f"    state = {{{', '.join(items)}}}"]
        if len(state[0]) > _WIDTH:
            state = ["    state = {", *(f"        {item}," for item in items), "    }"]
        return [
            *lines,
            f"    module = {made.source()}.to(device)",
            *state,
            *self._seed(made),
            *self._wrapped(
                "    return ",
                "torch.func.functional_call",
                ["module", "state", f"({''.join(a + ', ' for a in self._args)})"]
                + ([f"dict({', '.join(self._words)})"] if self._words else []),
            ),
        ]

    def _seed(self, made: Made) -> list[str]:
        if _random_device(self._call, made) is None:
            return []
        return ["    seed(device)  # making the module drew random numbers"]

    def _wrapped(self, before: str, head: str, body: list[str]) -> list[str]:
        readable = self._readable(before, head, body)
        if readable is not None and len(readable) <= _WIDTH:
            return [readable]
        line = f"{before}{head}({', '.join(body)})"
        if len(line) <= _WIDTH:
            return [line]
        return [f"{before}{head}(", *(f"        {item}," for item in body), "    )"]

    def _readable(self, before: str, head: str, body: list[str]) -> str | None:
        """Methods and indexing as people write them."""
        if not head.startswith("torch.Tensor.") or not body or not body[0].startswith("t["):
            return None
        name = head.removeprefix("torch.Tensor.")
        me, *rest = body
        if name == "__getitem__" and len(rest) == 1:
            return f"{before}{me}[{self._index()}]"
        if name == "__setitem__" and len(rest) == 2:
            return f"{before}{me}[{self._index()}] = {rest[1]}"
        if name.endswith(".__get__"):
            return f"{before}{me}.{name.removesuffix('.__get__')}"
        if name.startswith("__") or "." in name:
            return None
        return f"{before}{me}.{name}({', '.join(rest)})"

    def _index(self) -> str:
        index = self._call.args[1]
        parts = index if isinstance(index, tuple) and index else (index,)
        comma = "," if isinstance(index, tuple) and len(parts) == 1 else ""
        return ", ".join(self._index_part(part) for part in parts) + comma

    def _index_part(self, part: Any) -> str:
        if not isinstance(part, slice):
            return self.value(part, "index")
        start, stop, step = (
            "" if each is None else self.value(each, "index")
            for each in (part.start, part.stop, part.step)
        )
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"

    def value(self, value: Any, where: str) -> str:
        if isinstance(value, TensorRecord):
            return _tensor((value.alias_of or value.name).removeprefix(self._call.name + "."))
        if isinstance(value, list):
            return f"[{', '.join(self.value(item, where) for item in value)}]"
        if isinstance(value, tuple):
            items = ", ".join(self.value(item, where) for item in value)
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self.value(item, where)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.value(part, where) for part in parts)})"
        if isinstance(value, Special):
            return self._special(value, where)
        if isinstance(value, Fields):
            if value.kind == "mapping":
                return self.value(value.fields, where)
            raise self._opaque(where, value.type, value.type)
        if value is ...:
            return "..."
        if isinstance(value, str) and (where == "device" or _is_device(self._call, value)):
            return "device"
        if not isinstance(value, bool | int | float | complex | str | bytes | None):
            raise self._opaque(where, type(value).__name__, type(value).__name__)
        if isinstance(value, int) and value.bit_length() > 128:  # torch takes 64
            raise NotReplayable(f"{self._call.name} cannot be run alone: {where} is too large")
        return literal(value)

    def _special(self, special: Special, where: str) -> str:
        kind, text = special.kind, special.text
        if kind == "dtype":
            return f"real({dtype_named(text)})"
        if kind == "device":
            return "device"
        if kind in ("layout", "memory_format"):
            return str(format_named(text))
        if kind == "generator":
            return "None"
        if kind == "numpy" and (number := numpy_number(text)) is not None:
            return literal(number)
        raise self._opaque(where, kind, text)

    def _opaque(self, where: str, kind: str, text: str) -> NotReplayable:
        return NotReplayable(
            f"{self._call.name} cannot be run alone: {where} is {_a(kind, text)}, "
            "of which only the name was recorded"
        )


def _a(kind: str, text: str) -> str:
    return f"of type {text}" if kind in ("unsupported", text) else f"a {kind} ({text})"


def _tensor(name: str) -> str:
    return f"t[{json.dumps(name)}]"


def _is_device(call: Call, text: str) -> bool:
    return call.op == "torch.Tensor.to" and is_device(text)


# What lies beside it

_FACTS = ("tensorprobe", "time", "platform", "python", "packages", "torch", "numerics", "cuda")


def _environment(capture: Capture, pair: ForwardBackward) -> str:
    call = pair.forward
    about = {
        "call": call.name,
        "op": call.op,
        "module": call.module,
        "step": call.step,
        "rank": call.rank,
        "stack": list(call.stack),
        "notes": list(call.notes),
        "inputs_generated": is_generated(pair),
        "tensors": {
            record.name: {"dtype": record.dtype, "shape": record.shape, "device": record.device}
            for each in pair
            if each is not None
            for record in each.tensors
        },
    }
    recorded = {key: capture.facts[key] for key in (*_FACTS, "npu") if key in capture.facts}
    return json.dumps({"call": about, "recorded_with": recorded}, indent=1, default=str) + "\n"


def _readme(pair: ForwardBackward, packages: Sequence[str]) -> str:
    call = pair.forward
    devices = sorted({_plain(record.device) for record in call.tensors}) or ["cpu"]
    made = "generated from recorded statistics" if is_generated(pair) else "exactly as recorded"
    ways = "forward and backward" if pair.backward is not None else "forward"
    needs = f"torch and {', '.join(packages)}" if packages else "torch only"
    return (
        f"`{_plain(call.op)}` alone ({_plain(call.name)}, {ways}), "
        f"recorded on {', '.join(devices)}.\n"
        f"Run: `python repro.py --device {device_type(devices[0])}` (needs {needs}; "
        "`--dtype float64` for the same in double precision).\n"
        "It exits with 0 when the device agrees with the CPU reference, with 3 when it does not.\n"
        f"`tensors.pt` holds inputs ({made}), incoming gradients, recorded outputs and gradients.\n"
        "`environment.json` says with which versions and from which line it was recorded.\n"
    )
