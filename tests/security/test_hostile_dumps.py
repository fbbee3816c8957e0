"""Dumps of msprobe and ptdbg from somebody else, facts about a run, and files of pickles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacks
import pytest
from hostile_captures import MODULE, edit_json, evil_files, lay_out_bait, planted
from test_attacks import assert_harmless
from victims import Sandbox, Step, Victim, reading, reproducing

# Names of APIs, and what they are given. The kind before the first dot says where a name is looked
# up: each of these was the way to a function that is none of torch's operators.
APIS = [
    *("Functional.torch.os.system", "Torch.nn.functional.torch.os.system", "VF.torch.os.system"),
    *("Torch.os.system", "Torch.torch.os.system", "Tensor.torch.os.system", "NPU.os.system"),
    *("Functional.torch.builtins.exec", "Functional.importlib.import_module", "Aten.save"),
    *("Aten.from_file", "Torch.from_file", "Torch.load", "Functional.torch.load", "Torch.save"),
    *("Torch.hub.load", "Torch.ops.load_library", "Torch.classes.load_library", "Torch.jit.load"),
    *("Torch._import_dotted_name", "Torch.PyTorchFileWriter", "Distributed.torch.os.system"),
    *("Distributed.FileStore", "Jit.load", "Mint.torch.os.system", "builtins.exec", "os.system"),
    *("Functional.__loader__.set_data", "Functional.torch.o\uff53.system"),
    "Functional.{0.__class__}",
    *("Functional.../../../../tpmarker", "Functional.x\n@M@", "Functional.x\0", "Functional."),
    *(f"Functional.{attacks.EXPRESSION}", f"Functional.relu({attacks.EXPRESSION})"),
]  # fmt: skip
_COMMANDS = (attacks.SHELL, attacks.PYTHON, "@PICKLE@", "@MODULE@", "@M@")
TYPES = [
    *("os.system", "subprocess.Popen", "torch.Size", "torch.dtype", "slice", "ellipsis"),
    *("NoneType", "torch.device", "torch.memory_format", "function", "builtins.exec", "type"),
    *("complex", "str"),
    *("torch.return_types.max", "numpy.ndarray", "torch.os", attacks.EXPRESSION, "{0.__class__}"),
]  # fmt: skip


def msprobe(recorded: Path, sandbox: Sandbox, name: str = "a") -> Path:
    """A dump in the sandbox; the folder of its rank."""
    shutil.copytree(recorded / "msprobe-mix", sandbox.folder / name)
    return next((sandbox.folder / name).rglob("dump.json")).parent


def test_apis_of_a_dump_are_looked_up_and_not_followed(
    victim: Victim, recorded: Path, sandbox: Sandbox
) -> None:
    lay_out_bait(sandbox)
    names = []

    def plant(content: Any) -> None:
        calls = content["data"]
        template = calls["Functional.relu.0.forward"]
        for number, api in enumerate(APIS):
            for way, command in enumerate(_COMMANDS):
                given = [{"type": "str", "value": command}, *template["input_args"]][: 1 + way % 2]
                name = f"{api}.{number * 10 + way}.forward"
                record = {**template, "input_args": given, "input_kwargs": {}}
                calls[planted(name, sandbox, number)] = planted(record, sandbox, number)
                names.append(name)

    edit_json(msprobe(recorded, sandbox) / "dump.json", plant)
    shutil.copytree(sandbox.folder / "a", sandbox.folder / "b")
    edit_json(next((sandbox.folder / "b").rglob("dump.json")), _spoil)
    steps = [*reading("a", "b"), *reproducing("a", names[::5], sandbox)]
    assert_harmless(victim.run(sandbox, steps))


def _spoil(content: Any) -> None:
    """Other outputs, so that a comparison asks who is to blame."""
    wrong = content["data"]["Functional.relu.0.forward"]["input_args"][0]
    for record in content["data"].values():
        for tensor in record.get("output", []):
            if isinstance(tensor, dict) and tensor.get("shape") == wrong["shape"]:
                tensor |= wrong


def test_types_of_arguments_are_of_a_closed_list(
    victim: Victim, recorded: Path, sandbox: Sandbox
) -> None:
    lay_out_bait(sandbox)
    names = []

    def plant(content: Any) -> None:
        calls = content["data"]
        template = calls["Functional.relu.0.forward"]
        for number, kind in enumerate(TYPES):
            for way, value in enumerate((attacks.SHELL, ["touch", "@M@"], {"args": "@M@"}, None)):
                name = f"Functional.relu.{100 + number * 10 + way}.forward"
                given = [*template["input_args"], {"type": kind, "value": value}]
                keywords = {"x": {"type": kind, "value": value}, attacks.EXPRESSION: None}
                record = {**template, "input_args": given, "input_kwargs": keywords}
                calls[name] = planted(record, sandbox, number)
                names.append(name)

    edit_json(msprobe(recorded, sandbox) / "dump.json", plant)
    steps = [*reading("a"), *reproducing("a", names[::7], sandbox)]
    assert_harmless(victim.run(sandbox, steps))


PATHS = [
    *("../../../../secret.txt", "@SECRET@", "../dump.json", "/etc/passwd", "..", ".", "", "a/b"),
    *("..\\..\\secret.txt", "\0", "x\0.pt", "file://@SECRET@", "~/x.pt", "x" * 5000, "\ud800.pt"),
]  # fmt: skip


def test_names_of_files_do_not_lead_out_of_a_dump(
    victim: Victim, recorded: Path, sandbox: Sandbox
) -> None:
    def plant(content: Any) -> None:
        template = content["data"]["Functional.relu.0.forward"]
        for number, path in enumerate(PATHS):
            record = json.loads(json.dumps(template))
            for tensor in (*record["input_args"], *record["output"]):
                tensor["data_name"] = planted(path, sandbox, number)
            content["data"][f"Functional.relu.{number + 100}.forward"] = record
        content["dump_data_dir"] = str(sandbox.folder)

    edit_json(msprobe(recorded, sandbox) / "dump.json", plant)
    assert_harmless(victim.run(sandbox, reading("a")))


@pytest.mark.parametrize("layout", ["msprobe-mix", "ptdbg-L1"])
def test_files_of_pickles_are_not_unpickled(
    victim: Victim, recorded: Path, sandbox: Sandbox, layout: str
) -> None:
    shutil.copytree(recorded / layout, sandbox.folder / "a")
    files = sorted(
        path for path in (sandbox.folder / "a").rglob("*") if path.suffix in (".pt", ".npy")
    )
    evil = evil_files(sandbox.marker("a0."))
    for path, name in zip(files * 3, sorted(evil), strict=False):
        if name.startswith("npy"):
            path = path.with_suffix(".npy")
        path.write_bytes(evil[name])
    assert_harmless(victim.run(sandbox, reading("a")))


def test_files_of_pickles_in_a_native_capture(
    victim: Victim, recorded: Path, sandbox: Sandbox
) -> None:
    steps: list[Step] = []
    for number, (_, data) in enumerate(sorted(evil_files(sandbox.marker("a0.")).items())):
        shutil.copytree(recorded / "L0", sandbox.folder / f"a{number}")
        (sandbox.folder / f"a{number}/rank0/step0/tensors-0.safetensors").write_bytes(data)
        steps += [{"verb": ["show", f"a{number}", "*"]}, {"load": f"a{number}"}]
    assert_harmless(victim.run(sandbox, steps))


_FACTS: list[Any] = [
    *(attacks.EXPRESSION, "{0.__class__}%s", "\x1b[2J", ["@M@"], {"@M@": "@M@"}, 10**18, -1, None),
    *(True, 1e308, [[[[1]]]], "../../../tpmarker"),
]  # fmt: skip


def test_facts_about_a_run_are_only_told(victim: Victim, recorded: Path, sandbox: Sandbox) -> None:
    """Each fact in turn made into something else, in capture.json and in rank.json."""
    lay_out_bait(sandbox)
    steps: list[Step] = []
    keys = sorted(json.loads((recorded / "L1" / "capture.json").read_text()))
    for number, fact in enumerate(_FACTS):
        name = f"a{number}"
        shutil.copytree(recorded / "L1", sandbox.folder / name)
        for file, hostile in (("capture.json", keys[::2]), ("rank0/rank.json", keys[1::2])):
            edit_json(sandbox.folder / name / file, _hostile_facts(hostile, fact, sandbox))
        twin = str(recorded / "L1")
        steps += [{"verb": ["show", name]}, {"load": name}]
        steps += [{"verb": ["compare", name, twin, "-o", f"out/{name}"]}]
        steps += [{"verb": ["convert", name, "--to", "msprobe", "-o", f"out/{name}m"]}]
        call = "Functional.relu.0.forward"
        steps += [{"verb": ["check", name, "--only", call, "-o", f"out/{name}c"]}]
        steps += [{"verb": ["repro", name, call, "-o", f"out/{name}r"]}]
        steps += [{"script": str(sandbox.out / f"{name}r" / "repro.py")}]
    assert_harmless(victim.run(sandbox, steps))


def _hostile_facts(keys: list[str], fact: Any, sandbox: Sandbox) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        for key in keys:
            if key != "format":
                content[key] = planted(fact, sandbox, 0)
        for inner in content.values():
            if isinstance(inner, dict):
                inner |= {key: planted(fact, sandbox, 0) for key in list(inner)[::2]}

    return edit


def test_folders_of_odd_names(victim: Victim, recorded: Path, sandbox: Sandbox) -> None:
    """Steps and ranks are numbers; whatever else a folder is called, it is not run or written."""
    steps: list[Step] = []
    odd = ["rank0;touch x", "rank٣", "rank" + "9" * 60, "rank-1", "rank0 ", "rank²", "rank 0"]
    for number, name in enumerate(odd):
        target = sandbox.folder / f"a{number}" / name
        shutil.copytree(recorded / "L0" / "rank0", target)
        shutil.copytree(target / "step0", target / name.replace("rank", "step"))
        steps += [step for step in reading(f"a{number}", out=f"out/{number}") if _is_cheap(step)]
    assert_harmless(victim.run(sandbox, steps))


def _is_cheap(step: Step) -> bool:
    return "verb" not in step or step["verb"][0] in ("show", "convert")


def test_ptdbg_names(victim: Victim, recorded: Path, sandbox: Sandbox) -> None:
    lay_out_bait(sandbox)
    shutil.copytree(recorded / "ptdbg-L1", sandbox.folder / "a")
    log = next((sandbox.folder / "a").rglob("*.pkl"))
    lines = log.read_text().splitlines()
    shown = next(line for line in lines if "relu_0_forward_input" in line)
    for number, api in enumerate(APIS):
        record = json.loads(shown)
        kind, _, rest = api.partition(".")
        for name in (f"{kind}_{rest}_{number}_forward_input.0", f"{api}.{number}.forward.input.0"):
            record[0] = planted(name, sandbox, number)
            lines.append(json.dumps(record))
            lines.append(json.dumps([record[0], 1, [], f"<class '{api}'>", "[]", [MODULE] * 3]))
    log.write_text("\n".join(lines) + "\n")
    assert_harmless(victim.run(sandbox, reading("a")))
