"""The stage and the pass of torch.compile without which a check passes.

torch's own CompilerBisector switches them off. Each probe is a process of its own, told by the
environment and by files in a folder of ours what to leave out.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorprobe.errors import UnsupportedTorch
from tensorprobe.rerouting.bisect import Bisected, Bisection, Probe, Question, Tell
from tensorprobe.torch_versions import COMPILED_FROM, compiler_bisector

_STAGES = {
    "eager": "dynamo",
    "aot_eager": "aot_autograd",
    "aot_eager_decomp_partition": "decompositions and partitioner of aot_autograd",
    "inductor": "inductor",
}
_OFF = {"TORCH_COMPILE_DISABLE": "1"}
_MOST = 1 << 16  # times that a pass is applied
_NO_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


def bisect_compile(
    question: Question,
    folder: Path,
    *,
    timeout_s: float | None = None,
    restart: bool = False,
    tell: Tell = lambda line: None,
) -> Bisected:
    """Find the first stage of torch.compile that makes the check fail, and its pass."""
    if compiler_bisector() is None:
        raise UnsupportedTorch(
            f"torch {torch.__version__} cannot switch passes of torch.compile off one by one; "
            f"torch {COMPILED_FROM} and newer can"
        )
    return CompileBisection(question, folder, timeout_s, restart, tell).run()


@dataclass
class _Found:
    """A part of the compiler, the variables that leave it out, and the setting in a program."""

    name: str
    rules: dict[str, str]
    setting: str
    applied_to: str | None = None


class CompileBisection(Bisection):
    """The search for a pass. A probe's rules are variables of its environment."""

    def run(self) -> Bisected:
        if self._ask({}, "as it is").passed:
            return self._end("passes")
        if not self._ask(_OFF, "without torch.compile").passed:
            return self._end("no cure")
        return self._finish(self._search())

    def _search(self) -> _Found:
        failing = None
        before: dict[str, str] = _OFF
        for backend in _STAGES:
            rules = {"TORCH_BISECT_BACKEND": backend}
            if not self._ask(rules, f"with backend={backend!r}").passed:
                failing = backend
                break
            before = rules
        if failing is None:
            self._state.notes.append(
                "it passes with every backend of torch's bisector: the program's own backend or "
                "mode is at fault"
            )
            return _Found("the backend or the mode that the program asks for", before,
                          "torch.compile(..., backend='inductor')")  # fmt: skip
        for subsystem in compiler_bisector().BACKENDS.get(failing, ()):
            found = self._try(failing, subsystem)
            if found is not None:
                return found
        setting = "TORCH_COMPILE_DISABLE=1, or torch.compiler.disable on the function"
        if before is not _OFF:
            setting = f"torch.compile(..., backend={before['TORCH_BISECT_BACKEND']!r})"
        return _Found(_STAGES[failing], before, setting)

    def _try(self, backend: str, subsystem: Any) -> _Found | None:
        """A subsystem, where the check passes without it."""
        name = str(subsystem.name)
        rules = {"TORCH_BISECT_BACKEND": backend, "TORCH_BISECT_SUBSYSTEM": name}
        config = getattr(subsystem, "config_field", None)
        stage = _STAGES[backend]
        if config is not None:
            value = subsystem.config_value
            if not self._ask(rules, f"{stage}, with {config}={value}").passed:
                return None
            return _Found(
                f"{stage}: {config}", rules, f"torch._inductor.config.{config} = {value!r}"
            )
        if not self._ask({**rules, "TORCH_BISECT_MAX": "-1"}, f"{stage}, without {name}").passed:
            return None
        # the number of the first application with which it fails
        low, high = -1, 0
        while self._passes_with(rules, high, stage, name):
            low, high = high, 2 * high + 1
            if high > _MOST:
                return _Found(f"{stage}: {name}", {**rules, "TORCH_BISECT_MAX": "-1"}, "")
        while high - low > 1:
            middle = (low + high) // 2
            if self._passes_with(rules, middle, stage, name):
                low = middle
            else:
                high = middle
        applied_to = self._applied_to(backend, name, high)
        last = {**rules, "TORCH_BISECT_MAX": str(high - 1)}
        backends = list(_STAGES)
        setting = f"torch.compile(..., backend={backends[backends.index(backend) - 1]!r})"
        return _Found(f"{stage}: {name}, application {high}", last, setting, applied_to)

    def _passes_with(self, rules: dict[str, str], most: int, stage: str, name: str) -> bool:
        what = f"{stage}, with {name} up to number {most}"
        return self._ask({**rules, "TORCH_BISECT_MAX": str(most)}, what).passed

    def _applied_to(self, backend: str, name: str, number: int) -> str | None:
        """What torch says of one application of a pass; a run more, that tells it."""
        home = self._home(backend)
        (home / f"{name}_run_state.txt").write_text("bisect")
        (home / f"{name}_bisect_range.txt").write_text(f"low={number}\nhigh={number}\n")
        rules = {"TORCH_BISECT_BACKEND": backend, "TORCH_BISECT_SUBSYSTEM": name}
        self._ask(rules, f"{_STAGES[backend]}, for what {name} number {number} is")
        told = home / f"{name}_call_counter_debug_info.txt"
        for line in told.read_text().splitlines() if told.exists() else ():
            counter, _, text = line.partition("=")
            if counter == str(number):
                return text
        return None

    def _home(self, backend: str) -> Path:
        """Where torch looks for what a probe is to do."""
        home = self._folder / "torch" / "bisect" / backend
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _run_script(self, probe: Probe, folder: Path) -> None:
        backend, name = (
            probe.rules.get(f"TORCH_BISECT_{each}", "") for each in ("BACKEND", "SUBSYSTEM")
        )
        self._variables = {
            **_NO_CACHES,
            **probe.rules,
            "TORCHINDUCTOR_CACHE_DIR": str((self._folder / "torch").resolve()),
        }
        for subsystem in compiler_bisector().BACKENDS.get(backend, ()):
            if subsystem.name == name and hasattr(subsystem, "config_field"):
                file = self._home(backend) / f"{name}_config.txt"
                file.write_text(f"{subsystem.config_field}={subsystem.config_value!r}\n")
        options = list(self._question.run_options)
        words = [sys.executable, "-m", "tensorprobe", "run", "--no-record", *options]
        if not options:  # the script as it is: nothing of ours in its process
            words = [sys.executable]
        probe.status = self._execute(
            [*words, *self._question.command], folder, "stdout", "stderr"
        )  # fmt: skip
        probe.passed = probe.status == 0

    def _finish(self, found: _Found) -> Bisected:
        self._state.verdict = "found"
        self._state.to = "without"
        row: dict[str, Any] = {
            "name": found.name,
            "op": found.applied_to,
            "module": None,
            "stack": [],
        }
        self._state.culprits = [row]
        self._save()
        variables = " ".join(f"{name}={value}" for name, value in found.rules.items())
        config = "_config" if "SUBSYSTEM" in variables and "MAX" not in variables else ""
        command = shlex.join(["python", *self._question.command])
        commands = []
        if found.setting:
            commands.append(f"in the program: {found.setting}")
        if not config:  # as it was tried out; a setting of a config takes a file, too
            commands.append(f"as it was tried out: {variables} {command}")
        return Bisected(
            folder=self._folder,
            verdict="found",
            to="without",
            culprits=[row],
            n_apis=0,
            n_calls=0,
            n_probes=len(self._state.probes),
            commands=commands,
            notes=self._state.notes,
        )
