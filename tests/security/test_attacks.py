"""Nothing that a capture says is run: a corpus of attacks against every verb that reads one."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import attacks
import pytest
from hostile_captures import Attack, Base, lay_out_bait, write_native
from traps import CANARY
from victims import Outcome, Sandbox, Victim, reading, reproducing

GROUPS = {
    "walks": attacks.WALKS,
    "entries": attacks.ENTRIES,
    "types": attacks.TYPES,
    "modules": attacks.MODULES,
    "texts": [*attacks.NO_SPACES, *attacks.EVERYWHERE],
}
# Packages that are imported late where there is no attack: of Python, of torch, and for tables.
IMPORTED = {*sys.stdlib_module_names, "tensorprobe", "torch", "torchgen", "numpy", "xlsxwriter"}
IMPORTED |= {"yaml"}  # for layout.yaml


def assert_harmless(outcome: Outcome, tried: Sequence[Attack] = ()) -> None:
    """No problem; those there are, by the attack that caused them as far as that can be told."""
    lines = list(dict.fromkeys(outcome.problems))
    packages = {name.partition(".")[0] for name in outcome.imported}
    lines[:0] = [f"'{name}' was imported" for name in sorted(packages - IMPORTED)]
    found = {int(n) for line in lines for n in re.findall(rf"{CANARY}-a(\d+)\.", line)}
    found |= {int(n) for line in lines for n in re.findall(r"repro(\d+)\b", line)}
    blamed = [f"attack {n}: {tried[n].name[:100]}" for n in sorted(found) if n < len(tried)]
    assert not lines, "\n".join([f"{len(lines)} problems", *lines[:60], *blamed])


# The bench itself

HARMFUL = """
import os, socket, sys, torch
os.system("touch {marker}1")
exec("x = '{marker}'")
open("{marker}2", "w").close()
open("{secret}").close()
torch.ops.aten.from_file("{marker}3", True, 8)
try:
    import {canary}_module
except ImportError:
    pass
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError:
    pass
import pickle
pickle.loads(pickle.dumps(os.getcwd))
import subprocess
subprocess.run(["true"])
os.mkdir("{marker}4")
import ctypes
try:
    ctypes.CDLL("{marker}.so")
except OSError:
    pass
import types
from torch.distributed.nn.jit import instantiator
instantiator._StringLoader("x = 1").exec_module(types.ModuleType("_remote_module_non_scriptable"))
raise ValueError("seen")
"""


def test_the_bench_sees_harm(victim: Victim, sandbox: Sandbox) -> None:
    marker = sandbox.marker("x")
    script = sandbox.out / "repro.py"
    script.write_text(HARMFUL.format(marker=marker, secret=sandbox.secret, canary=CANARY))
    outcome = victim.run(sandbox, [{"script": str(script)}])
    for said in (
        ": os.system: ",
        ": exec: code out of the capture",
        f": open: {marker.name}2 was written",
        ": open: secret.txt was opened",
        f"'{marker.name}1' appeared",
        f"'{marker.name}3' appeared",
        f"'{marker.name}4' appeared",
        f": import: {CANARY}_module",
        ": socket.connect: ",
        ": pickle.find_class: posix.getcwd",
        ": subprocess.Popen: ['true']",
        ": os.mkdir: ",
        ": ctypes.dlopen: ",
        ": exec: code of <_remote_module_non_scriptable>.py, run by ",
        ": a traceback: ValueError: seen",
    ):
        assert any(said in problem for problem in outcome.problems), (said, outcome.problems)


def test_the_bench_lets_torch_import_its_own(victim: Victim, sandbox: Sandbox) -> None:
    script = sandbox.out / "repro.py"
    script.write_text("import torch._dynamo, torch.distributed.nn\n")
    assert victim.run(sandbox, [{"script": str(script)}]).problems == []


def test_the_bench_sees_what_does_not_end(victim: Victim, sandbox: Sandbox) -> None:
    script = sandbox.out / "repro.py"
    script.write_text("import os, resource\nos.kill(os.getpid(), 24)\n")
    outcome = victim.run(sandbox, [{"script": str(script)}])
    assert outcome.problems == ["script out/repro.py: exit status -24"]


def test_a_capture_without_attacks_has_no_problems(
    victim: Victim, base: Base, recorded: Path, sandbox: Sandbox
) -> None:
    plain = [Attack(kind, {}, like=kind) for kind in ("function", "module", "made")]
    names = write_native(base, sandbox, "a", plain)
    write_native(base, sandbox, "b", plain, wrong=True)
    steps = [*reading("a", "b"), *reproducing("a", names, sandbox)]
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert None not in outcome.statuses, "no script was written"
    assert set(outcome.statuses) <= {0, 3}


# The corpus


@pytest.mark.parametrize("group", GROUPS)
def test_no_attack_gets_through(victim: Victim, base: Base, sandbox: Sandbox, group: str) -> None:
    """All of a group in one capture."""
    tried = GROUPS[group]
    lay_out_bait(sandbox)
    names = write_native(base, sandbox, "a", tried)
    write_native(base, sandbox, "b", tried, wrong=True)
    steps = reading("a", "b")
    for layout in ("msprobe", "ptdbg"):  # hostile dumps of the peers, as `convert` writes them
        steps += reading(f"out/{layout}", out=f"out/of-{layout}")[-9:-4]
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome, tried)
    outcome = victim.run(sandbox, reproducing("a", names, sandbox))
    assert_harmless(outcome, tried)


def test_no_attack_gets_through_two_ranks(victim: Victim, base: Base, sandbox: Sandbox) -> None:
    """Ranks are also held against each other, and blamed together."""
    lay_out_bait(sandbox)
    for name, wrong in (("a", False), ("b", True)):
        write_native(base, sandbox, name, attacks.ALL, wrong=wrong)
        shutil.copytree(sandbox.folder / name / "rank0", sandbox.folder / name / "rank1")
    steps = [
        {"verb": ["ranks", "a", "-o", "out/ranks"]},
        {"verb": ["ranks", "b", "--json"]},
        {"verb": ["compare", "a", "b", "-o", "out/compared"]},
        {"verb": ["compare", "a", "b", "--at", "modules", "-o", "out/chosen"]},
    ]
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome, attacks.ALL)
    assert "ranks 0, 1" in "".join(outcome.texts)


def test_no_attack_gets_through_without_asserts(
    careless: Victim, base: Base, sandbox: Sandbox
) -> None:
    """`python -O`: what is checked by an assert is not checked at all."""
    tried = [*attacks.MODULES, *attacks.NO_SPACES]
    lay_out_bait(sandbox)
    names = write_native(base, sandbox, "a", tried)
    write_native(base, sandbox, "b", tried, wrong=True)
    steps = [*reading("a", "b")[-8:-4], *reproducing("a", names, sandbox)]
    assert_harmless(careless.run(sandbox, steps), tried)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(24))
@pytest.mark.parametrize("flags", ["", "-O"])
def test_each_attack_alone(
    victim: Victim, careless: Victim, base: Base, tmp_path: Path, part: int, flags: str
) -> None:
    """Alone, so that none is spared because another came first."""
    problems = []
    for number, attack in enumerate(attacks.ALL[part::24]):
        sandbox = Sandbox(tmp_path / f"sandbox{number}")
        lay_out_bait(sandbox)
        names = write_native(base, sandbox, "a", [attack])
        write_native(base, sandbox, "b", [attack], wrong=True)
        steps = [*reading("a", "b"), *reproducing("a", names, sandbox)]
        outcome = (careless if flags else victim).run(sandbox, steps)
        problems += [f"{attack.name[:100]}: {line}" for line in dict.fromkeys(outcome.problems)]
        sandbox.clear()
    assert not problems, "\n".join(problems)


def test_commands_to_copy_are_quoted(victim: Victim, base: Base, sandbox: Sandbox) -> None:
    """What a verb tells a user to type holds names of the capture, as one word each."""
    text = attacks.BREAKS["shell"]
    inside = "{'x': 'torch.nn.modules.linear.Linear'}"
    tried = [
        Attack("name", {"name": f"Functional.relu.{text}.0.forward"}),
        Attack("module", {"module": text}, {"notes": [f"made with x({{}}, {inside}, [])"]}, "made"),
        Attack("main", {"module": text, "op": "__main__.X"}, like="made"),
        Attack("path", {"name": f"Module.{text}.Linear.forward.0", "module": text}, like="module"),
    ]
    names = write_native(base, sandbox, "a", tried)
    write_native(base, sandbox, "b", tried, wrong=True)
    steps = [*reading("a", "b"), *reading("b", out="out/b"), *reproducing("a", names, sandbox)]
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome, tried)
    told = "\n".join(outcome.texts)
    written = [path.read_text() for path in sandbox.out.rglob("*.json")]
    commands = re.findall(r"tensorprobe (?:show|repro|check|compare) .*touch.*", told)
    commands += re.findall(
        r'tensorprobe (?:show|repro|check) [^"\n]*touch[^"\n]*', "".join(written)
    )
    wrong = [command for command in commands if not _is_one_command(command)]
    assert not wrong, "\n".join(wrong)


def _is_one_command(text: str) -> bool:
    try:
        words = list(shlex.shlex(text, posix=True, punctuation_chars=True))
    except ValueError:
        return False
    return not {";", "|", "&", "&&", "||"} & set(words)
