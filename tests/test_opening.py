"""Files of others are opened in one place, and printed through another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "tensorprobe"
OPENING = ("open", "read_bytes", "read_text", "memmap", "fromfile", "getline", "mmap", "ZipFile")
# What opens files by itself, and why it may.
OPENS = {
    "tensors/opening.py": "the gate",
    "tensors/arrays.py": "maps a file that the gate has opened",
    "checkpoints/stored_weights.py": "maps a file that the gate has opened",
    "checkpoints/torch_checkpoint.py": "unpacks a file that the gate has opened",
    "tensors/tensor_files.py": "maps, or unpacks, a file that the gate has opened",
    "store/remote.py": "objects that are written, and the lock of its own output",
    "comparing/rank_processes.py": "sockets of its own processes",
    "report/rank_tables.py": "its own output",
    "monitoring/monitor_file.py": "its own output",
    "monitoring/exporting.py": "its own output",
    "monitoring/series_files.py": "its own output",
    "monitoring/event_files.py": "its own output",
    "store/ending.py": "its own output",
    "store/claim.py": "/proc/PID/stat, and the lock of its own output",
    "store/shard.py": "its own output",
    "store/writer.py": "its own output",
    "store/program_file.py": "its own output",
    "peers/msprobe/msprobe_writing.py": "its own output",
    "peers/ptdbg/ptdbg_writing.py": "its own output",
    "peers/msprobe/msprobe_anomalies.py": "its own output",
    "peers/msprobe/msprobe_command.py": "its own output",
    "peers/msprobe/msprobe_config_check.py": "unpacks a file that the gate has opened",
    "report/csv.py": "its own output",
    "report/html.py": "the page that is built into the package",
    "report/chinese.py": "the sentences that are built into the package",
    "cli/doctor.py": "the list of versions of torch that were tried, in the package",
    "cli/view.py": "a browser, at its own address",
    "checking/results.py": "its own output",
    "peers/check_tables.py": "its own output",
    "checking/worker.py": "/dev/null",
    "cli/main.py": "/dev/null",
    "cli/demo.py": "the report that it has just made",
    "compiling/compile_watch.py": "what it writes itself",
    "rerouting/compile_bisect.py": "what torch's bisector told in a folder of its probes",
    "rerouting/bisect.py": "what its own probes printed",
    "peers/msprobe/msprobe_session.py": "the log that it is writing",
    "tensors/stored_pairs.py": "sockets of its own processes",
    "native/__init__.py": "its own source, and the version of torch",
    "native/background.py": "why its own build has failed, if nobody else can have written that",
    "native/builder.py": "its own output, and /proc/self",
    "record/address_space.py": "/proc/self",
    "record/facts.py": "/proc and the files of a driver",
    "record/program_facts.py": "the sources of the program that runs",
    "follow/spelling.py": "the program that runs",
    "replay/child_limits.py": "/proc/self",
    "replay/repro.py": "its own template",
    "replay/kernel_dump.py": "dumps that its own process has made",
    "devices/sim_npu/acl_dump.py": "the configuration of the program that runs",
}
ELSEWHERE = ("ascend/", "cli/ascend.py")  # artefacts of Ascend have a gate of their own
# Their lines are about the program that runs, or about files of Ascend.
WRITES = {"terminal.py", "cli/run.py", "cli/doors.py", "cli/demo.py", "cli/ascend.py"}


def calls_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def rooms() -> Iterator[tuple[str, Path]]:
    for path in sorted(SRC.rglob("*.py")):
        yield path.relative_to(SRC).as_posix(), path


def opens(called: str) -> bool:
    """Whether it is `open` or a method; the functions of the gate are called by their names."""
    owner, _, name = called.rpartition(".")
    loads = called in ("np.load", "json.load", "torch.load")
    return loads or (name in OPENING and (bool(owner) or name == "open"))


def test_files_are_opened_through_the_gate() -> None:
    found = {
        name
        for name, path in rooms()
        if not name.startswith(ELSEWHERE) and any(opens(called) for called in calls_in(path))
    }
    assert found - set(OPENS) == set(), "open these with contents.opening"
    assert set(OPENS) - found == set(), "these open nothing any more"


def test_lines_are_printed_in_one_place() -> None:
    found = {
        name
        for name, path in rooms()
        if name.startswith(("cli/", "report/", "comparing/", "ptdbg_ascend/", "msprobe/"))
        for called in calls_in(path)
        if called == "print" or called.startswith(("sys.stdout.write", "sys.stderr.write"))
    }
    assert found <= WRITES, "print these with tensorprobe.terminal"
