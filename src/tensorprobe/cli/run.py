"""`tensorprobe run`: record a script without editing it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.cli.doors import DOORS, open_doors, read_names
from tensorprobe.cli.options import as_options, former_name
from tensorprobe.config import RecordConfig, from_msprobe_config
from tensorprobe.errors import (
    BadUsage,
    GuardStopped,
    NothingRecorded,
    RecordingStopped,
    TensorprobeError,
    WriteFailed,
    why_no_torch,
)
from tensorprobe.store.outputs import check_folder, check_writable
from tensorprobe.store.remote import is_url, place_of
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named

if TYPE_CHECKING:
    from tensorprobe.guarding.guard import Guard
    from tensorprobe.monitoring.monitor import Monitor
    from tensorprobe.record.child_processes import ChildProcesses
    from tensorprobe.record.launcher import Program
    from tensorprobe.record.recorder import Recorder
    from tensorprobe.record.start_state import StartState
    from tensorprobe.rerouting.reroute import Reroute

DEFAULT_SEED = 1234

_EPILOG = """\
examples:
  tensorprobe run --level mix --keep stats --steps 0-1 -o runs/a train.py --lr 0.1
  tensorprobe run --keep tensors --modules '*.attn*' -o runs/b -m mypackage.train
  torchrun --nproc-per-node 2 -m tensorprobe run -o runs/c train.py
  tensorprobe run --guard overflow train.py
  tensorprobe run --monitor runs/d train.py
  tensorprobe run --as ptdbg_ascend,msprobe train.py
  tensorprobe run --no-record --reroute torch.group_norm=cpu,F.softmax=float32 train.py

Options come before the script; everything after it is the script's own.
A step ends when the first optimizer steps (or a GradScaler skips it), and in inference with
each call of the model; --step-on says otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "tensorprobe run [options] script.py [arguments]\n"
        "       tensorprobe run [options] -m module [arguments]"
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # an option mistyped must not become another one
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", dest="module_words", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where the recording goes (runs/NAME of the script)"
    )
    parser.add_argument("--config", metavar="FILE", help="a config.json in msprobe's form")
    parser.add_argument(
        "--json",
        action="store_true",
        help="what was recorded as one line of JSON, the last on stderr: stdout is the program's",
    )
    parser.add_argument(
        "--as",
        dest="doors",
        metavar="NAME,...",
        help="let the script's own `import ptdbg_ascend` or `import msprobe` find tensorprobe. The "
        "script says what to record; more is recorded where -o or something to select is given",
    )
    parser.add_argument(
        "--sim-npu",
        action="store_true",
        help="with a simulated NPU and a stand-in torch_npu, where the hardware is missing",
    )
    parser.add_argument(
        "--step-on",
        metavar="WHAT",
        default="auto",
        help="what ends a step: auto, module (each call of the model), "
        "or the number of an optimizer, the first to step being 0",
    )
    add_selection(parser.add_argument_group("what to record"))
    _add_manner(parser.add_argument_group("how"))
    parser.add_argument(
        "--children",
        choices=("processes", "all", "none"),
        default="processes",
        help="record processes that the program starts, each into a folder of its own: processes "
        "(default), all (also workers of DataLoaders, pools and executors), none",
    )
    _add_guard(parser.add_argument_group("watching instead of recording, or beside it"))
    _add_monitor(parser.add_argument_group("watching a whole training"))
    _add_start(parser.add_argument_group("the same start for two runs"))
    _add_reroute(parser.add_argument_group("run calls elsewhere"))


def _add_reroute(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--reroute",
        action="append",
        metavar="NAME=TARGET",
        default=[],
        help="run the calls of that name elsewhere: torch.group_norm=cpu, F.softmax=float32",
    )
    group.add_argument("--reroute-file", metavar="FILE", help="the same as JSON: {NAME: TARGET}")
    group.add_argument("--reroute-report", metavar="FILE", help=argparse.SUPPRESS)
    group.add_argument("--no-record", action="store_true", help="record nothing, only reroute")


def add_selection(group: argparse._ArgumentGroup) -> None:
    """The options that say what to record, named as the arguments of tp.Recorder."""

    def add(*names: str, text: str, **more: Any) -> None:
        group.add_argument(*names, help=text, default=argparse.SUPPRESS, **more)

    add("--level", metavar="LEVEL", text="L0 modules, L1 torch calls, mix both (default), L2 ATen")
    add("--keep", metavar="WHAT", text="structure, stats (default), digest or tensors")
    add("--steps", metavar="N-M,...", text="these steps, from 0 (default: all)")
    add("--ranks", metavar="N,...", text="these ranks (default: all)")
    add("--directions", metavar="D", text="forward or backward (default: both)")
    add("--sides", metavar="S", text="input or output (default: both)")
    several: dict[str, Any] = {"action": "append", "metavar": "NAME,..."}
    add("--calls", "--call", dest="calls", text="these calls, by their full names", **several)
    add("--between", metavar="FIRST,LAST", text="from one call to another, both included")
    add("--apis", "--api", dest="apis", text="these functions: relu, F.linear, *norm*", **several)
    add("--modules", "--module", dest="modules", text="inside modules: '*.attn*'", **several)
    add("--names", "--name", dest="names", text="calls with this in their name", **several)
    add("--keep-tensors", dest="keep_tensors", text="of these calls keep tensors", **several)
    add("--dtypes", metavar="KIND", text="all (default), or float: no integers and bools")


def _add_manner(group: argparse._ArgumentGroup) -> None:
    def add(name: str, text: str, **more: Any) -> None:
        group.add_argument(name, help=text, default=argparse.SUPPRESS, **more)

    add("--no-stacks", "leave out the Python stacks", dest="stacks", action="store_false")
    add(
        "--compiled",
        "parts compiled by torch.compile: as one call (default), or with their graphs, or kernels",
        metavar="HOW",
    )
    add("--flush", "queue (default), or call: every value at once", metavar="HOW")
    add("--max-disk", "keep only statistics once this much is written", metavar="SIZE")
    add("--compress", "store tensors in fewer bytes, which takes time", action="store_true")
    add("--queue", "memory for what is on its way to the disk (256M)", metavar="SIZE")
    add("--stop-after-last-step", "end the program after the last of --steps", action="store_true")
    add("--strict", "end the program, or exit 1, if it cannot be recorded", action="store_true")
    add("--on-write-error", argparse.SUPPRESS, metavar="HOW")  # what --strict was called before


def _add_guard(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--guard",
        metavar="WHAT",
        help="overflow, errors or both (overflow,errors): say which call does it. Records only "
        "where -o, --keep-last or something to select is given",
    )
    group.add_argument(
        "--guard-output", metavar="DIR", default="guard", help="where findings go (guard)"
    )
    group.add_argument(
        "--overflow-nums",
        type=int,
        metavar="N",
        default=1,
        help="end the program at the N-th overflow (1); -1: never",
    )
    group.add_argument(
        "--look-every",
        type=int,
        metavar="N",
        help="look at what a device found every N calls (host: 1; devices: each step)",
    )
    group.add_argument(
        "--inputs-budget",
        metavar="SIZE",
        default="1G",
        help="for errors: hold so much of what recent calls were given (1G). With --calls NAME "
        "the inputs of that call are held, and no others",
    )
    group.add_argument(
        "--guard-timeout",
        dest="timeout",
        type=float,
        metavar="S",
        default=120.0,
        help="seconds a call that failed may run alone (120); 0: write its repro, do not run it",
    )
    group.add_argument(
        "--keep-last",
        metavar="K",
        default=argparse.SUPPRESS,
        help="of what is recorded keep the last K steps, until the guard finds something",
    )
    former_name(group, "--guard-out", "guard_output")
    former_name(group, "--alone-timeout", "timeout", type=float)


def _add_monitor(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--monitor",
        metavar="DIR",
        help="write statistics of every step there, and say an alarm when one is unusual. Records "
        "only where -o or something to select is given",
    )
    group.add_argument(
        "--monitor-every",
        metavar="N",
        default="",
        help="every how many steps: 10, or activations=50,moments=10 (0: never)",
    )
    group.add_argument(
        "--monitor-rules", metavar="NAME,...", default="all", help="all, frozen,spike or all,-drift"
    )
    group.add_argument(
        "--monitor-disk", metavar="SIZE", default="1G", help="thin out older steps beyond this (1G)"
    )
    group.add_argument(
        "--monitor-format",
        metavar="FORM",
        default="jsonl",
        help="of steps that are over: jsonl, or parquet (tensorprobe[monitor])",
    )
    group.add_argument(
        "--monitor-to",
        metavar="NAME,...",
        default=(),
        help="tensorboard, wandb, mlflow: there as well",
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with the files of --monitor, after a restart"
    )
    group.add_argument(
        "--record-on-alarm",
        nargs="?",
        type=int,
        const=2,
        metavar="N",
        help="record the N steps (2) that follow an alarm, as --level, --keep... say",
    )
    group.add_argument(
        "--guard-on-alarm", action="store_true", help="guard them against overflow instead"
    )


def _add_start(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seed", type=int, metavar="N", help="seed every generator first")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help=f"deterministic algorithms too (seeds with {DEFAULT_SEED} unless --seed is given)",
    )
    group.add_argument(
        "--save-start", metavar="DIR", help="save weights, random states and the first batches"
    )
    group.add_argument("--load-start", metavar="DIR", help="begin as the run that saved them")
    group.add_argument(
        "--start-batches", type=int, metavar="N", help="how many calls of the model to save"
    )


def run(args: argparse.Namespace) -> int:
    words = args.module_words if args.module_words is not None else args.script
    if args.module_words is None and words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise BadUsage("no script given. For example: tensorprobe run -o runs/a train.py")
    if args.script and args.module_words is not None:
        raise BadUsage("a script and -m were given: which of the two?")
    config, dump_path, notes = _configuration(args)
    step_on = _step_on(args.step_on)
    _check_start(args)
    doors = read_names(args.doors)
    alone = args.guard is None and args.monitor is None and not doors
    selects = args.record_on_alarm is None and _given(args).keys() - _STRICTNESS
    recorded = alone or bool(args.output or args.config or selects)
    monitor = _monitor_options(args, words, config, step_on)
    records = recorded and not args.no_record
    if args.save_start and not records:
        raise BadUsage("--save-start saves what is recorded, and nothing is: give -o, say")
    rules = _reroute_rules(args)

    from tensorprobe.record.launcher import Launch, default_output, import_before

    program = _load(words[0], is_module=args.module_words is not None)
    if program is None:
        return 1
    url = args.output if is_url(args.output) else None
    output = (
        place_of(url, "spools")
        if url
        else Path(args.output or dump_path or default_output(program))
    )
    for folder in _folders(args, output if records else None):
        _check_place(folder, strict=config.strict)  # before the program runs, not after
    session = _Session(args, config, step_on, output if records else None, notes, rules)
    if args.guard is not None:
        session.guard_with(_guard_options(args, words, config))
    session.monitor_with(monitor)
    if args.sim_npu:
        import_before("torch_npu", "torch")
    session.prepare()
    open_doors(doors)
    with session.children():
        end = Launch(program, words[1:]).run(session.torch_imported)
    if not session.explains(end):
        _explain(end)
    try:
        return session.finish(end)
    finally:
        if args.json:
            sys.stderr.write(json.dumps(session.summary()) + "\n")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options given that say what to record."""
    return {name: value for name, value in vars(args).items() if name in _FIELDS}


def selected(args: argparse.Namespace) -> dict[str, Any]:
    """The same as arguments of tp.Recorder."""
    given = _given(args)
    for name in ("calls", "apis", "modules", "names", "keep_tensors"):
        if name in given:
            given[name] = [part for text in given[name] for part in text.split(",") if part]
    return given


def _guard_options(
    args: argparse.Namespace, words: list[str], config: RecordConfig
) -> dict[str, Any]:
    """The arguments of tp.Guard; made before the program runs, so that mistakes show then."""
    from tensorprobe.guarding.guard_options import (
        check_budget,
        check_numbers,
        check_timeout,
        check_watches,
    )

    check_numbers(args.overflow_nums, args.look_every)
    return {
        "path": args.guard_output,
        "watch": check_watches(args.guard),
        "overflow_nums": args.overflow_nums,
        "look_every": args.look_every,
        "inputs_budget": check_budget(args.inputs_budget),
        "timeout": check_timeout(args.timeout),
        "calls": config.calls,
        "steps": config.steps,
        "rerun": shlex.join(_again(args, words)),
    }


def _again(args: argparse.Namespace, words: list[str]) -> list[str]:
    """The words after `tensorprobe run` that start this program again, as it was started."""
    start: list[str] = ["--sim-npu"] if args.sim_npu else []
    for option in ("step_on", "seed", "load_start"):
        value = getattr(args, option)
        if value is not None and (option, value) != ("step_on", "auto"):
            start += [f"--{option.replace('_', '-')}", str(value)]
    if args.deterministic:
        start.append("--deterministic")
    return [*start, *(["-m", *words] if args.module_words is not None else words)]


def _monitor_options(
    args: argparse.Namespace, words: list[str], config: RecordConfig, step_on: Any
) -> dict[str, Any] | None:
    """The arguments of tp.Monitor; made before the program runs, so that mistakes show then."""
    names = ("record_on_alarm", "guard_on_alarm", "resume", "monitor_to", "monitor_every")
    if args.monitor is None:
        for name in names:
            if getattr(args, name):
                raise BadUsage(f"--{name.replace('_', '-')} without --monitor DIR: give that too")
        return None
    if args.record_on_alarm is not None and args.guard_on_alarm:
        raise BadUsage("--record-on-alarm and --guard-on-alarm: which of the two?")
    if args.record_on_alarm is not None and args.record_on_alarm < 1:
        raise BadUsage(f"--record-on-alarm {args.record_on_alarm}: expected a number from 1")
    from tensorprobe.monitoring.monitor_options import check_options, check_rules
    from tensorprobe.monitoring.rule_names import RULE_NAMES

    options: dict[str, Any] = {
        "every": args.monitor_every,
        "max_disk": args.monitor_disk,
        "format": args.monitor_format,
        "writers": args.monitor_to,
    }
    check_options(**{**options, "every": args.monitor_every or {}}, modules=(), ranks=None)
    check_rules(args.monitor_rules, RULE_NAMES)
    recording = None
    if args.record_on_alarm is not None:
        given = {"steps", "ranks", "keep_last", "stop_after_last_step", *_STRICTNESS}
        chosen = {n: v for n, v in config.as_arguments().items() if n in _given(args)}
        recording = {name: value for name, value in chosen.items() if name not in given}
        recording["n_steps"] = args.record_on_alarm
    on_alarm = "record" if recording is not None else "guard" if args.guard_on_alarm else None
    return {
        **options,
        "path": args.monitor,
        "rules": args.monitor_rules,
        "on_alarm": on_alarm,
        "recording": recording,
        "resume": args.resume,
        "step_on": step_on,
        "program": _again(args, words),
    }


def _configuration(args: argparse.Namespace) -> tuple[RecordConfig, str | None, tuple[str, ...]]:
    """The file's configuration, with the options given on top."""
    given = selected(args)
    if args.config is None:
        return RecordConfig.make(**given), None, ()
    config, dump_path, notes = from_msprobe_config(args.config)
    if config.names and "between" in given:
        raise BadUsage(f"--between contradicts the list in '{args.config}': a range or a filter")
    if config.between and "names" in given:
        raise BadUsage(f"--names contradicts the scope in '{args.config}': a range or a filter")
    return RecordConfig.make(**{**config.as_arguments(), **given}), dump_path, notes


_STRICTNESS = frozenset({"strict", "on_write_error"})
_FIELDS = frozenset(RecordConfig.__struct_fields__) | _STRICTNESS


def _folders(args: argparse.Namespace, output: Path | None) -> list[Path]:
    """What will be written to."""
    guard = Path(args.guard_output) if args.guard is not None else None
    start = Path(args.save_start) if args.save_start else None
    monitor = Path(args.monitor) if args.monitor is not None else None
    return [folder for folder in (output, guard, monitor, start) if folder is not None]


def _check_place(folder: Path, *, strict: bool) -> None:
    """A file in the place of a folder is wrong usage; a folder that refuses is trouble (exit 1)."""
    check_folder(folder)
    if strict:
        try:
            check_writable(folder)
        except BadUsage as error:
            raise WriteFailed(str(error)) from error


def _step_on(text: str) -> Any:
    if text in ("auto", "module"):
        return text
    if text.isdigit():
        return int(text)
    raise BadUsage(f"--step-on {text}: expected auto, module or the number of an optimizer")


def _check_start(args: argparse.Namespace) -> None:
    if args.save_start and args.load_start:
        raise BadUsage("--save-start and --load-start in one run: save in one, load in the other")
    if args.start_batches is not None and not args.save_start:
        raise BadUsage("--start-batches says how much --save-start saves: give that too")
    if args.start_batches is not None and args.start_batches < 0:
        raise BadUsage(f"--start-batches {args.start_batches}: expected a number from 0")


def _reroute_rules(args: argparse.Namespace) -> dict[str, str]:
    """What to run elsewhere; a wrong target is told before the program runs."""
    if not (args.reroute or args.reroute_file):
        if args.no_record and args.guard is None and args.monitor is None:
            raise BadUsage(
                "--no-record without --reroute, --guard or --monitor: nothing would be done"
            )
        return {}
    from tensorprobe.rerouting.targets import parse_options, parse_rules

    rules = parse_options(args.reroute)
    if args.reroute_file:
        rules |= _rules_in(Path(args.reroute_file))
    targets = parse_rules(rules).values()
    if any(target.device not in (None, "cpu") for target in targets):
        from tensorprobe.rerouting.targets import check_present

        if args.sim_npu:
            from tensorprobe.devices import sim_npu

            sim_npu.install()
        check_present(targets)
    return rules


def _rules_in(path: Path) -> dict[str, str]:
    try:
        rules = read_json(open_named(path), path)
    except OSError as error:
        raise BadUsage(f"cannot read '{path}': {error.strerror}") from error
    except ValueError as error:
        raise BadUsage(f"'{path}' is not JSON: {error}") from error
    if not isinstance(rules, dict) or not all(isinstance(each, str) for each in rules.values()):
        raise BadUsage(f'\'{path}\': expected names and targets, as {{"torch.group_norm": "cpu"}}')
    return rules


def _load(word: str, *, is_module: bool) -> Program | None:
    """The program; None when it is not valid Python, which has been said as Python says it."""
    from tensorprobe.record.launcher import load_module, load_script

    try:
        return load_module(word) if is_module else load_script(word)
    except SyntaxError as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return None


class _Session:
    """The recorder and the guard of this run, made when torch is there."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: RecordConfig,
        step_on: Any,
        output: Path | None,  # None: nothing is recorded, the guard or the script does it
        notes: tuple[str, ...],
        rules: dict[str, str],
    ) -> None:
        self._args = args
        self._rules = rules
        self._reroute: Reroute | None = None
        self._config = config
        self._step_on = step_on
        self._output = output
        self._notes = notes
        self._recorder: Recorder | None = None
        self._start: StartState | None = None
        self._problem: TensorprobeError | None = None  # that ends the program
        self._trouble: TensorprobeError | None = None  # of our own; the program goes on
        self._guard_options: dict[str, Any] | None = None
        self._guard: Guard | None = None
        self._monitor_options: dict[str, Any] | None = None
        self._monitor: Monitor | None = None
        self._children: ChildProcesses | None = None

    def children(self) -> contextlib.AbstractContextManager[None]:
        """Inside, processes that the program spawns record themselves beside it."""
        chosen = self._args.children
        if self._output is None or self._args.sim_npu or chosen == "none":
            return contextlib.nullcontext()
        from tensorprobe.record.child_processes import ChildProcesses, Recipe
        from tensorprobe.store.claim import run_identity

        recipe = Recipe(
            self._output.absolute(),
            self._step_on,
            self._config.as_arguments(),
            self._seed,
            self._args.deterministic,
            run_identity(os.environ),
            chosen,
            os.environ.get("RANK"),
        )
        self._children = ChildProcesses(recipe)
        return self._children.armed()

    def guard_with(self, options: dict[str, Any]) -> None:
        """Watch the program with a tp.Guard of these arguments."""
        self._guard_options = options

    def monitor_with(self, options: dict[str, Any] | None) -> None:
        """Watch the program with a tp.Monitor of these arguments, if there are some."""
        self._monitor_options = options

    @property
    def _watches_errors(self) -> bool:
        return self._guard_options is not None and "errors" in self._guard_options["watch"]

    def prepare(self) -> None:
        """What has to be there before the program's first line; it imports torch."""
        self._simulate()  # a device that comes later would not be seeded
        if self._seed is None:
            return
        from tensorprobe.record.seeding import seed_all

        seed_all(self._seed, deterministic=self._args.deterministic)

    @property
    def _seed(self) -> int | None:
        is_default = self._args.seed is None and self._args.deterministic
        return DEFAULT_SEED if is_default else self._args.seed

    def torch_imported(self) -> None:
        try:
            self._divert()
            self._record()
        except TensorprobeError as error:
            # inside the script's own `import torch`: the script must not be able to catch it
            self._problem = error
            raise SystemExit(1) from None

    def _simulate(self) -> None:
        if self._args.sim_npu:
            from tensorprobe.devices import block_launches, sim_npu

            if self._watches_errors:
                block_launches()  # before there is a device: the guard comes after it
            sim_npu.install()

    def _divert(self) -> None:
        """What changes the program, and has to be there for it to be what was asked for."""
        if self._rules:
            from tensorprobe.rerouting.reroute import Reroute

            self._reroute = Reroute(self._rules, step_on=self._step_on).start()
        watched = self._guard_options or self._monitor_options
        if self._args.load_start and (self._output or watched or self._rules):
            from tensorprobe.record.start_state import LoadStart

            self._start = LoadStart(Path(self._args.load_start))

    def _record(self) -> None:
        others = (self._guard_options, self._monitor_options)
        if self._output is None and others == (None, None):
            return  # the script records by itself
        try:
            if self._output is not None:
                self._recorder = self._started_recorder(self._output)
            self._start_guard()
            self._start_monitor()
        except TensorprobeError:
            raise
        except Exception as error:
            self._trouble = RecordingStopped(
                f"recording could not begin: {type(error).__name__}: {error}"
            )
            if self._config.strict:
                raise self._trouble from error
            sys.stderr.write(f"tensorprobe run: {self._trouble}. The program goes on\n")

    def _started_recorder(self, output: Path) -> Recorder:
        from tensorprobe.record.recorder import Recorder, say

        place = self._args.output if is_url(self._args.output) else output
        recorder = Recorder(place, step_on=self._step_on, **self._config.as_arguments())
        for note in self._notes:
            say(note)
        if self._args.save_start:
            from tensorprobe.record.start_state import SaveStart

            start = Path(self._args.save_start)
            self._start = SaveStart(start, recorder, self._args.start_batches)
        return recorder.start()

    def _start_guard(self) -> None:
        if self._guard_options is None:
            return
        from tensorprobe.guarding.guard import Guard

        guard = Guard(recorder=self._recorder, step_on=self._step_on, **self._guard_options)
        self._guard = guard.start()

    def _start_monitor(self) -> None:
        if self._monitor_options is not None:
            from tensorprobe.monitoring.monitor import Monitor

            self._monitor = Monitor(**self._monitor_options).start()

    def explains(self, end: BaseException | None) -> bool:
        """Whether the guard has said what there is to say about an error of a device."""
        found = self._guard.findings if self._guard is not None else ()
        return end is not None and any(finding.kind == "error" for finding in found)

    def finish(self, end: BaseException | None) -> int:
        """Close the recording and give the program's own exit status, or leave as it left."""
        self._problem = self._problem or (self._start.problem if self._start else None)
        end = self._close_guard(end)
        self._close_monitor()
        if isinstance(end, WriteFailed | RecordingStopped):
            self._problem = end
        if self._problem is not None:
            for part in (self._start, self._recorder, self._reroute):
                with contextlib.suppress(TensorprobeError):  # the first problem is the one to tell
                    if part is not None:
                        part.close()
            raise self._problem
        self._close()
        self._tell_idle_faults()
        status = self._end_reroute() or int(self._config.strict and self._trouble is not None)
        if isinstance(end, GuardStopped):
            text = as_options(str(end), self._args.option_names)
            sys.stderr.write(f"tensorprobe run: {text}\n")
            return 3
        if isinstance(end, KeyboardInterrupt):
            # shown already; Python gives the status of a program ended by Ctrl-C
            sys.excepthook = lambda *_: None
            raise end
        if isinstance(end, SystemExit) and end.code not in (None, 0, False):
            raise end
        if end is not None and not isinstance(end, SystemExit):
            if isinstance(end, ModuleNotFoundError) and end.name in DOORS:
                sys.stderr.write(
                    f"tensorprobe run: a script of {end.name} runs unedited with --as {end.name}\n"
                )
            return 1
        if self._guard is not None and self._guard.findings:
            return 3
        return status

    def summary(self) -> dict[str, Any]:
        """What --json tells; the exit status is the program's."""
        from tensorprobe.store.claim import processes_in

        problem = self._problem or self._trouble
        recorder, guard, output = self._recorder, self._guard, self._output
        return {
            "format": 1,
            "output": None if output is None else str(self._args.output or output),
            "calls": 0 if recorder is None else recorder.n_calls,
            "processes": [] if output is None else processes_in(output),
            "guard": None if guard is None else str(self._args.guard_output),
            "findings": None if guard is None else len(guard.findings),
            "monitor": self._args.monitor,
            "problem": None if problem is None else str(problem),
        }

    def _tell_idle_faults(self) -> None:
        """A fault that hits nothing makes a healthy run, which looks like a fault not found."""
        if not self._args.sim_npu or self._rules or "torch" not in sys.modules:
            return  # rerouting is there to get around it
        from tensorprobe.devices import sim_npu

        for text in sim_npu.idle_faults():
            sys.stderr.write(f"tensorprobe run: {text}\n")

    def _end_reroute(self) -> int:
        """What the rerouting adds to the status of a program that ended well."""
        if not self._rules:
            return 0
        if self._reroute is None:
            sys.stderr.write("tensorprobe run: nothing was rerouted: torch was never imported\n")
            return 2
        if self._args.reroute_report:
            report = {"calls": self._reroute.calls, "failed": self._reroute.failed}
            Path(self._args.reroute_report).write_text(json.dumps(report))
            self._reroute.stop()
            return 0  # names without calls are for the reader of the report to judge
        try:
            self._reroute.close()
        except BadUsage as error:
            sys.stderr.write(f"tensorprobe run: {error}\n")
            return 2
        return 0

    def _close_guard(self, end: BaseException | None) -> BaseException | None:
        """What the program left by; the guard may find its last overflow only here."""
        if self._guard is None:
            return end
        try:
            self._guard.close(end)
        except GuardStopped as stopped:
            end = end or stopped
        self._trouble = self._trouble or self._guard.failed
        return end

    def _close_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._trouble = self._trouble or self._monitor.failed
        elif self._monitor_options is not None and self._trouble is None:
            sys.stderr.write("tensorprobe run: nothing was measured: torch was never imported\n")

    def _close(self) -> None:
        """End the recording; what is wrong with it is said."""
        if self._start is not None:
            self._start.close()
            self._trouble = self._trouble or self._start.failed
        if self._output is None:
            return
        started = self._children is not None and self._children.n_armed
        others = bool(started and _has_recordings(self._output))
        if self._recorder is not None:
            try:
                self._recorder.close(tell=not others or self._recorder.n_calls > 0)
            except TensorprobeError as error:
                if not (others and isinstance(error, NothingRecorded)):
                    sys.stderr.write(f"tensorprobe run: {error}\n")
            self._trouble = self._recorder.failed or self._trouble
        elif self._trouble is None:
            text = "nothing was recorded: the program never imported torch"
            self._trouble = NothingRecorded(text)
            sys.stderr.write(f"tensorprobe run: {text}\n")
        if others and isinstance(self._trouble, NothingRecorded):
            self._trouble = None  # the processes that it started have recorded
        if others:
            _tell_processes(self._output)
        if isinstance(self._trouble, NothingRecorded):
            sys.stderr.write(_about_processes())


def _has_recordings(folder: Path) -> bool:
    return any(folder.glob("rank*/rank.json")) or any(folder.glob("*/rank*/rank.json"))


def _tell_processes(folder: Path) -> None:
    from tensorprobe.store.claim import processes_in

    if names := processes_in(folder):
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")
        sys.stderr.write(
            f"tensorprobe: each process has a folder of its own: {shown}. "
            f"Next: tensorprobe show {shlex.quote(str(folder / names[0]))}\n"
        )


def _explain(end: BaseException | None) -> None:
    """Say what to do about a mistake with devices; the program's traceback has been shown."""
    if not isinstance(end, Exception):
        return
    advice = why_no_torch(end)
    if advice is None and "torch" in sys.modules:
        from tensorprobe.devices import explain

        advice = explain(end)
    if advice is not None:
        sys.stderr.write(f"tensorprobe run: {advice}\n")


def _about_processes() -> str:
    from tensorprobe.record.launcher import processes_started

    count = processes_started()
    if not count:
        return ""
    return (
        f"tensorprobe run: the program started {count} process{'' if count == 1 else 'es'} of its "
        "own, which are not recorded: start its ranks with torchrun ... -m tensorprobe run, or use "
        "tp.Recorder in them\n"
    )
