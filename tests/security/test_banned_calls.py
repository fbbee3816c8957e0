"""What makes code or an object out of text is used in few places, each with a reason."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent.parent / "src" / "tensorprobe"

_CODE = ("eval", "exec", "compile", "__import__")
_LOADERS = {"pickle": ("load", "loads", "Unpickler"), "torch": ("load",), "marshal": ("loads",)}
_LOADERS |= {"shelve": ("open",), "dill": ("load", "loads"), "joblib": ("load",)}
_LOADERS |= {"yaml": ("load", "unsafe_load", "full_load"), "runpy": ("run_path", "run_module")}
_ATTRIBUTES = ("getattr", "setattr", "delattr")
# Rooms that look at what a file says: `python -O` takes asserts away.
_READERS = ("peers", "replay", "store")

# (file, what): how often, and why. A name out of a file never gets there.
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("__init__.py", "getattr"): (1, "the same: a key of that table"),
    ("__init__.py", "importlib"): (1, "public names load lazily, from the table of the package"),
    ("checking/target.py", "importlib.util"): (
        1,
        "the vendor's package of a device, from our table",
    ),
    ("cli/bisect.py", "getattr"): (1, "options of our own parser"),
    ("cli/demo.py", "importlib.util"): (1, "whether torch is there"),
    ("cli/doctor.py", "importlib.metadata"): (1, "the version of triton"),
    ("cli/doctor.py", "importlib.util"): (1, "whether triton is there"),
    ("cli/doors.py", "importlib"): (1, "the doors of the peers, by their own names"),
    ("cli/doors.py", "importlib.abc"): (1, "types"),
    ("cli/doors.py", "importlib.machinery"): (1, "the same: a finder for those names"),
    ("cli/env.py", "importlib"): (1, "torch and torch_npu, by these names"),
    ("cli/main.py", "importlib"): (1, "verbs, from our table"),
    ("cli/run.py", "getattr"): (2, "options of our own parser"),
    ("comparing/align.py", "getattr"): (2, "fields of our own records"),
    ("comparing/comparison.py", "importlib.util"): (1, "whether torch is there"),
    ("comparing/culprit.py", "getattr"): (1, "fields of our own records"),
    ("comparing/measure.py", "pickle.load"): (1, "what our own worker sends back, on its socket"),
    ("comparing/rank_pairs.py", "pickle.loads"): (
        1,
        "metrics that this process has measured itself",
    ),
    ("comparing/rank_processes.py", "pickle.load"): (
        2,
        "what `compare` and its workers send each other, on their pipes",
    ),
    ("comparing/rank_processes.py", "pickle.loads"): (1, "the same"),
    ("comparing/ray_engine.py", "pickle.loads"): (
        2,
        "what `compare` and its workers in Ray send each other",
    ),
    ("comparing/received.py", "pickle.loads"): (
        1,
        "calls that this process, or a worker of it, has read",
    ),
    ("comparing/suspects.py", "getattr"): (1, "fields of our own records"),
    ("comparing/suspects.py", "importlib.util"): (1, "whether torch is there"),
    ("compiling/graph_encoding.py", "getattr"): (1, "tensors of a live graph, by its own names"),
    ("compiling/graph_replay.py", "attrgetter"): (1, "attributes of a tensor, from a closed list"),
    ("compiling/graph_replay.py", "getattr"): (2, "Python's operators, from our closed list"),
    ("compiling/kernel_watch.py", "getattr"): (1, "functions of inductor's, in the program"),
    ("demo/train_npu.py", "runpy"): (1, "the demo's own script"),
    ("demo/train_npu.py", "runpy.run_path"): (1, "the same"),
    ("devices/ascend_runtime.py", "getattr"): (
        2,
        "functions of torch_npu, under their new or old name",
    ),
    ("devices/device_table.py", "getattr"): (
        1,
        "torch's module of a device type that torch.device has let pass",
    ),
    ("devices/device_table.py", "importlib"): (
        1,
        "the module that simulates a device, from our table",
    ),
    ("devices/mistakes.py", "importlib"): (1, "versions of installed packages"),
    ("devices/mistakes.py", "importlib.util"): (1, "whether a vendor's package is there"),
    ("devices/sim_npu/__init__.py", "getattr"): (2, "operators of ATen, named in our own tables"),
    ("devices/sim_npu/__init__.py", "importlib.util"): (1, "whether the real torch_npu is there"),
    ("devices/sim_npu/__main__.py", "runpy"): (1, "the user's script, given on the command line"),
    ("devices/sim_npu/__main__.py", "runpy.run_path"): (1, "the same"),
    ("devices/sim_npu/autocast.py", "getattr"): (2, "operators of ATen, named in our own tables"),
    ("devices/sim_npu/faults.py", "getattr"): (2, "the operator that a test plants a fault in"),
    ("devices/sim_npu/library.py", "getattr"): (
        2,
        "operators that this package has registered itself",
    ),
    ("devices/sim_npu/torch_npu.py", "getattr"): (1, "the same"),
    ("devices/sim_npu/torch_npu.py", "importlib.abc"): (1, "types"),
    ("devices/sim_npu/torch_npu.py", "importlib.machinery"): (
        1,
        "the spec of the stand-in for torch_npu",
    ),
    ("follow/tracebacks.py", "getattr"): (1, "the cause and the context of an exception"),
    ("guarding/guard.py", "importlib"): (1, "parts of the guard, by names of our own"),
    ("monitoring/monitor_options.py", "importlib.util"): (
        1,
        "whether packages are there, by names of our own",
    ),
    ("monitoring/parquet_steps.py", "importlib"): (1, "pyarrow"),
    ("native/__init__.py", "importlib.machinery"): (1, "our own library in C++"),
    ("native/__init__.py", "importlib.util"): (1, "the same"),
    ("native/attributes.py", "getattr"): (1, "classes that C++ reads, from the table of that file"),
    ("parts.py", "importlib"): (1, "layouts, columns and tables, from tables of our own"),
    ("peers/foreign_records.py", "assert"): (1, "a pattern that matches any text"),
    ("peers/msprobe/msprobe_columns.py", "assert"): (
        2,
        "about its own state, for the type checker",
    ),
    ("peers/msprobe/msprobe_command.py", "getattr"): (3, "options of our own parser"),
    ("peers/msprobe/msprobe_seeding.py", "getattr"): (
        1,
        "dropout functions, from the table of that file",
    ),
    ("peers/msprobe/msprobe_seeding.py", "setattr"): (
        1,
        "the same: put in their place when the user asks",
    ),
    ("peers/msprobe/msprobe_session.py", "assert"): (
        1,
        "about its own state, for the type checker",
    ),
    ("peers/ptdbg/ptdbg_acl.py", "importlib.util"): (1, "whether torch_npu is there"),
    ("peers/ptdbg/ptdbg_columns.py", "assert"): (1, "about its own state, for the type checker"),
    ("peers/ptdbg/ptdbg_layout.py", "assert"): (1, "about its own state, for the type checker"),
    ("record/child_processes.py", "importlib.util"): (1, "the sitecustomize that ours stands for"),
    ("record/encode.py", "getattr"): (1, "fields of a live dataclass of the program"),
    ("record/facts.py", "getattr"): (1, "paths into torch that this file has as a table"),
    ("record/facts.py", "importlib.metadata"): (1, "versions of installed packages"),
    ("record/launcher.py", "compile"): (1, "the user's script, as `python script.py` does"),
    ("record/launcher.py", "exec"): (1, "the same: `tensorprobe run` runs it"),
    ("record/launcher.py", "importlib"): (1, "what `run` is told to import on the command line"),
    ("record/launcher.py", "importlib.abc"): (1, "types"),
    ("record/launcher.py", "importlib.machinery"): (1, "the spec of the user's script"),
    ("record/launcher.py", "importlib.util"): (1, "`run -m MODULE`: where it is"),
    ("record/making.py", "getattr"): (1, "whether a live function is found by its own name"),
    ("record/selection.py", "getattr"): (1, "fields of our own configuration"),
    ("record/start_state.py", "getattr"): (
        5,
        "attributes of live objects; modules of devices, from our table",
    ),
    ("record/tape.py", "setattr"): (2, "sections of our own line"),
    ("replay/allowed.py", "getattr"): (
        7,
        "members of torch, by names that torch itself has listed: this is the table",
    ),
    ("replay/allowed.py", "importlib"): (1, "packages that the user names, and torch_npu"),
    ("replay/calibrate.py", "getattr"): (1, "torch's dtype of a record, from our closed list"),
    ("replay/rebuild.py", "getattr"): (1, "fields of a result that a call has just given"),
    ("replay/references.py", "importlib.util"): (1, "a file that the user names"),
    ("replay/repro.py", "importlib"): (1, "the template of the script, a resource of ours"),
    ("rerouting/elsewhere.py", "getattr"): (1, "the dtype that a user gives to reroute"),
    ("store/native_copy.py", "setattr"): (1, "sections of our own line"),
    ("store/picking.py", "assert"): (1, "about its own state, for the type checker"),
    ("store/remote.py", "importlib.util"): (1, "whether fsspec is there, and what it takes"),
    ("store/writer.py", "assert"): (5, "about its own caller and state; it reads nothing"),
    ("tensors/arrays.py", "getattr"): (1, "torch's dtype of a name that numpy_dtype has let pass"),
    ("tensors/backends.py", "importlib.util"): (1, "whether triton is there"),
    ("tensors/dtypes.py", "getattr"): (1, "dtypes of ml_dtypes, from the list of that file"),
    ("tensors/finiteness.py", "getattr"): (2, "dtypes of torch, from the table of that file"),
    ("tensors/finiteness.py", "importlib.util"): (1, "whether triton is there"),
    ("tensors/memory.py", "getattr"): (
        2,
        "dispatch keys and dtypes of torch, from the tables of that file",
    ),
    ("tensors/stored_pairs.py", "pickle.load"): (
        1,
        "what `compare` sends to its worker, on its socket",
    ),
    ("tensors/torch_ops.py", "getattr"): (1, "torch's module of the device of a live tensor"),
    ("tensors/yaml_files.py", "yaml.load"): (1, "with a loader made of yaml.BaseLoader"),
    ("torch_versions.py", "getattr"): (2, "dispatch keys and devices, by names of our own"),
}


def uses(path: Path) -> Iterator[str]:
    """What of the above a file uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name for name in names if name.partition(".")[0] in ("importlib", "runpy"))
        elif isinstance(node, ast.ImportFrom):
            yield from _imported(node)
        elif isinstance(node, ast.Call):
            yield from _called(node)
        elif isinstance(node, ast.Assert) and path.relative_to(SRC).parts[0] in _READERS:
            yield "assert"


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    home = node.module or ""
    if home.partition(".")[0] in ("importlib", "runpy"):
        yield home
    if home in _LOADERS:
        yield from (f"{home}.{a.name}" for a in node.names if a.name in _LOADERS[home])


def _called(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name):
        computed = function.id in _ATTRIBUTES and not _is_literal(node.args[1:2])
        if computed or function.id in (*_CODE, "attrgetter", "methodcaller"):
            yield function.id
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        home, name = function.value.id, function.attr
        if name in _LOADERS.get(home, ()):
            yield f"{home}.{name}"
        elif (home, name) in (("operator", "attrgetter"), ("operator", "methodcaller")):
            yield name


def _is_literal(arguments: list[ast.expr]) -> bool:
    return all(isinstance(each, ast.Constant) for each in arguments)


def test_what_makes_code_of_text_is_used_where_it_may_be() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(SRC.rglob("*.py")):
        for what in uses(path):
            found[str(path.relative_to(SRC)), what] += 1
    allowed = {key: count for key, (count, _) in ALLOWED.items()}
    new = {key: count for key, count in found.items() if allowed.get(key) != count}
    stale = {key: count for key, count in allowed.items() if key not in found}
    assert not new, f"not in the list, or not as often: {new}. May text of a file get there?"
    assert not stale, f"in the list and no longer in src: {stale}"


def test_every_place_has_a_reason() -> None:
    assert all(reason for _, reason in ALLOWED.values())
    assert list(ALLOWED) == sorted(ALLOWED), "sort the list by file"
