"""msprobe's monitors as its scripts call them: TrainerMon and TrainerMonitorV2, over tp.Monitor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tensorprobe.errors import BadUsage
from tensorprobe.monitoring.monitor import Monitor
from tensorprobe.record.recorder import say
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named

OUTPUT_VARIABLE = "MONITOR_OUTPUT_DIR"
OUTPUT = "monitor_output"
_FOREVER = 100_000_000
# Fields of TrainerMon that say what is measured, and what of ours that is.
SWITCHES = {
    "xy_distribution": "activations",
    "wg_distribution": "gradients",
    "mv_distribution": "moments",
    "ur_distribution": "updates",
    "param_distribution": "parameters",
}
_SECTIONS = {
    "module": ("activations",),
    "weight_grad": ("gradients",),
    "optimizer": ("moments", "updates"),
    "param": ("parameters",),
}
# Fields that change nothing here: the files are ours, and hold more.
PASSED_OVER = frozenset(
    {
        "targets", "start_step", "collect_times", "step_interval", "module_ranks", "format", "ops",
        "eps", "ndigits", "step_count_per_record", "append_output", "squash_name", "alert",
        "monitor_mbs_grad", "framework", "output_dir", "async_write", "rank", "stop_step",
        "patch_optimizer_step", "monitors", "dynamic_on", "print_struct",
    }
) | frozenset(SWITCHES)  # fmt: skip
NOT_DONE = {
    "cc_distribution": "communication: use tensorprobe run, and tensorprobe ranks",
    "l2_targets": "attention entropy and the like",
    "recording_l2_features": "attention entropy and the like",
    "sa_order": "attention entropy and the like",
    "mg_direction": "whether gradient and momentum agree",
    "stack_info": "stacks: use tensorprobe run",
    "all_xy": "inputs of every module: the model's own are measured",
    "forward_only": "one direction alone: both are measured",
    "backward_only": "one direction alone: both are measured",
}


class MonitorPlan(NamedTuple):
    """What a configuration asks for."""

    every: dict[str, int]
    modules: tuple[str, ...]
    ranks: tuple[int, ...] | None
    first: int
    last: int  # the step after the last one
    folder: Path
    notes: tuple[str, ...]


class TrainerMon:
    """As msprobe's: measures a training by the file that describes it.

    monitor = TrainerMon("monitor.json", params_have_main_grad=False)
    monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = True,
    ) -> None:
        self._plan = plan_of(read_config(Path(config_file_path)))
        self.monitor: Monitor | None = None

    def set_monitor(
        self,
        model: Any,
        grad_acc_steps: int = 1,
        optimizer: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Measure from here on; a step ends with that of the optimizer."""
        self.monitor = started(self._plan, model, start_iteration, step_on="auto")

    monitor_gnorm_with_ad = set_monitor  # its name in earlier releases

    def generate_wgrad_metrics(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("generate_wgrad_metrics")

    def generate_xy_metrics(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("generate_xy_metrics")


class TrainerMonitorV2:
    """As msprobe's: `start`, `step` and `stop` around a training."""

    def __init__(self, config_path: str | os.PathLike[str], fr: str | None = None) -> None:
        config = read_config(Path(config_path))
        self._plan = plan_of(config)
        self._patches = bool(config.get("patch_optimizer_step"))
        self.monitor: Monitor | None = None
        self._is_stepped = False

    def start(self, model: Any = None, optimizer: Any = None, **more: Any) -> None:
        """Measure from here on; with an optimizer a step ends with that of it."""
        self._is_stepped = optimizer is None and not self._patches
        step_on = "explicit" if self._is_stepped else "auto"
        if self.monitor is None:
            self.monitor = started(self._plan, model, 0, step_on=step_on)
        else:
            self.monitor.start()

    def step(self) -> None:
        """One step has ended; where the optimizer ends steps nothing happens."""
        if self.monitor is not None and self._is_stepped:
            self.monitor.step()

    def stop(self) -> None:
        """Measure no more."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None


def started(plan: MonitorPlan, model: Any, first_step: int, *, step_on: Any) -> Monitor:
    """The monitor that measures what a configuration asks for."""
    monitor = Monitor(
        plan.folder, every=plan.every, modules=plan.modules, ranks=plan.ranks,
        first_step=first_step, step_on=step_on, steps=range(plan.first, plan.last),
    )  # fmt: skip
    for note in plan.notes:
        say(note)
    monitor.start()
    models = list(model) if isinstance(model, list | tuple) else [model]
    for number, each in enumerate(models):
        if each is not None:
            monitor.name_root(each, str(number) if models[1:] else "")
    return monitor


def read_config(path: Path) -> dict[str, Any]:
    """The content of the file; BadUsage says what is wrong with it."""
    try:
        found = read_json(open_named(path), path)
    except OSError as error:
        raise BadUsage(f"cannot read '{path}': {error.strerror}") from error
    except ValueError as error:
        raise BadUsage(f"'{path}' is no JSON: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise BadUsage(
            f"'{path}': expected a JSON object with the fields targets, step_interval..."
        )
    return found


def plan_of(config: Mapping[str, Any]) -> MonitorPlan:
    """What a configuration of either monitor asks for."""
    interval = _count(config, "step_interval", 1)
    sections = config.get("monitors")
    sections = sections if isinstance(sections, dict) else None
    every = dict.fromkeys(("inputs", *SWITCHES.values()), 0)
    targets = config.get("targets")
    if sections is None:
        for field, kind in SWITCHES.items():
            every[kind] = interval if config.get(field) else 0
    else:
        for name, kinds in _SECTIONS.items():
            section = sections.get(name)
            section = section if isinstance(section, dict) else {}
            if section.get("enabled", name == "module"):
                every.update(dict.fromkeys(kinds, interval))
                targets = targets or section.get("targets")
    every["inputs"] = interval
    first = _count(config, "start_step", 0)
    times = min(_count(config, "collect_times", _FOREVER), _FOREVER)
    last = _count(config, "stop_step", first + times * interval)
    ranks = config.get("module_ranks") or ()
    folder = os.environ.get(OUTPUT_VARIABLE) or config.get("output_dir")
    unknown = sorted(set(config) - PASSED_OVER - set(NOT_DONE))
    notes = [f"{n} is not measured: {NOT_DONE[n]}" for n in NOT_DONE if config.get(n)]
    if isinstance(sections, dict) and sections.get("cc"):
        notes.append(f"cc is not measured: {NOT_DONE['cc_distribution']}")
    notes += [f"unknown field of the monitor's configuration: {name}" for name in unknown]
    return MonitorPlan(
        every, _patterns(targets), _ranks(ranks), first, last,
        Path(OUTPUT) if folder in (None, "", "./") else Path(str(folder)), tuple(notes),
    )  # fmt: skip


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < (name == "step_interval"):
        raise BadUsage(f"{name}={value!r} in the monitor's configuration: expected a number")
    return value


def _patterns(targets: Any) -> tuple[str, ...]:
    """The modules that are named, with all below them; none: all."""
    names = [str(name) for name in targets] if isinstance(targets, dict | list | tuple) else []
    if not names or any(name in ("", "module") for name in names):
        return ()
    return tuple(part for name in names for part in (name, f"{name}.*"))


def _ranks(ranks: Any) -> tuple[int, ...] | None:
    if isinstance(ranks, Iterable) and not isinstance(ranks, str | bytes):
        found = tuple(int(rank) for rank in ranks if str(rank).isdigit())
        return found or None
    return None


def refuse(name: str) -> NoReturn:
    """What msprobe's object has and this one has not."""
    raise BadUsage(
        f"{name} is not supported: the numbers are in the folder of the monitor; read them with "
        "tensorprobe monitor show DIR NAME --json"
    )
