"""Mutated Ascend artefacts, seeded: a report or one clear line, never a traceback or a marker.

The real artefacts where they are present, and small ones made here. Each mutation goes through
every verb that reads such a file, in this process: what it takes is measured at the end.
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from ascend_files import DUMP_NAME, KERNEL, shared_data, write_incident

from tensorprobe.cli.main import main

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
PLANTED = [
    b'__import__("os").system("touch MARKER")', b"'''+open('MARKER','w').write('')+'''",
    b'"""\nopen("MARKER","w")\n"""', b"{0.__class__.__init__.__globals__}", b"../../../MARKER",
    b"/tmp/MARKER-asc", b"\nopen('MARKER','w')\n", b"\\nopen('MARKER','w')\\n#", b"coding: utf-7",
    b"coding: unicode_escape", b"$(touch MARKER)", b"`touch MARKER`", b"\0", b"\x1b]0;x\x07\x1b[2J",
    b"\xe2\x80\xae", b"\xe2\x80\xa8", b"\xff\xfe", b"9" * 5000, b"-1", b"0x" + b"f" * 5000, b"nan",
    b"1e999", b'"', b"'", b"\\", b"{" * 300, b"[" * 2000, b"}" * 3, b"a" * 70_000, b": ", b"\n",
    "²".encode(), b"18446744073709551616", b"-9223372036854775808",
]  # fmt: skip
SECONDS = 10.0


def mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = chance.choice(PLANTED)
        elif kind == 3:  # in place of a word, which keeps the file in order around it
            end = next((i for i in range(at, len(out)) if out[i] in b' "\n,;:]=}'), len(out))
            out[at:end] = chance.choice(PLANTED)
        elif kind == 4:
            out[at : at + chance.choice((1, 8, 500))] = b""
        elif kind == 5:
            piece = out[at : at + chance.choice((8, 100, 3000))]
            out[at:at] = piece * chance.choice((1, 2, 20))
        else:
            out[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7))
    return bytes(out)


# All that a case does; a call that is not among these came out of an artefact.
CALLS = {
    "os.path.dirname", "os.path.abspath", "os.path.join", "os.path.isfile", "sys.stderr.write",
    "BIN_PATH.count", "OpUT", "ut_case.add_direct_case", "ut_case.run", "check_files",
    "run_sample_case", "len",
}  # fmt: skip


def calls(source: bytes) -> set[str]:
    tree = ast.parse(source, feature_version=(3, 7))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def tried(words: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["ascend", *words])
    return status, out.getvalue() + err.getvalue()


def commands(folder: Path, op: str) -> list[list[str]]:
    parts = {
        name: ["--" + name.replace("_", "-"), str(folder / name)]
        for name in ("log", "graph", "kernel_meta", "dump")
    }
    out = ["-o", str(folder / "out")]
    every = [word for name, pair in parts.items() if (folder / name).exists() for word in pair]
    return [
        ["incident", *every, *out],
        ["graph", str(folder / "graph"), "--op", op, "--all"],
        ["opcase", "--op", op, *every[2:], *out],
        ["inspect", str(folder / "dump")],
        ["convert", str(folder / "dump"), *out, "--format", "ND"],
    ]


def fuzz(folder: Path, op: str, count: int, seed: int, monkeypatch) -> None:
    """Change one file at a time of a whole incident and put it through every verb."""
    chance = random.Random(seed)
    home = folder / "at"
    home.mkdir()
    monkeypatch.chdir(home)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    before = {p: p.read_bytes() for p in files}
    kept = set(folder.rglob("*"))
    for turn in range(count):
        path = chance.choice(files)
        path.write_bytes(mutated(before[path], chance))
        for words in commands(folder, op):
            if not Path(words[1]).exists() and words[0] in ("inspect", "convert"):
                continue
            started = time.process_time()
            status, text = tried(words)
            spent = time.process_time() - started
            what = f"turn {turn} of seed {seed}: {path.name}: {words[0]}"
            assert status in (0, 1, 3) or "no such file" in text or "ops fit" in text, what
            assert "Traceback" not in text, what
            assert not set(text) & set("\x1b\x07\x9b\u202e\u2028\0"), what
            assert spent < SECONDS, what
        for path_made in set(folder.rglob("*")) - kept:
            assert path_made.name != "MARKER", f"turn {turn} of seed {seed}"
            assert folder / "out" in (path_made, *path_made.parents), f"turn {turn} of seed {seed}"
        for case in (folder / "out").glob("**/main.py"):
            assert calls(case.read_bytes()) <= CALLS, f"turn {turn} of seed {seed}"
        shutil.rmtree(folder / "out", ignore_errors=True)
        path.write_bytes(before[path])
    assert not Path("/tmp/MARKER-asc").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2_000_000  # KB, of the whole run


def made_incident(folder: Path) -> Path:
    write_incident(folder, X)
    (folder / "kernel_meta" / f"{KERNEL}.cce").write_text("line\n" * 20)
    (folder / "kernel_meta" / f"{KERNEL}.o.txt").write_text("k.cce:7\n 0: x\n 10: y\n 20: z\n")
    (folder / "kernel_meta" / f"{KERNEL}_loc.json").write_text(
        '[{"cce_line2loc": [{"cce_line": 7, "loc": ["l2_loss.py", 12]}]}]'
    )
    (folder / "dump" / "mapping.csv").write_text("123,L2Loss.long.4.1638329841577838\n")
    shutil.copy(folder / "dump" / DUMP_NAME, folder / "dump" / "123")
    np.save(folder / "dump" / "x.npy", X)
    with (folder / "log" / "screen.log").open("a") as log:
        log.write(
            "[AIC_INFO] node_name:L2Loss, node_type:L2Loss, stream_id:5, task_id:3\n"
            "[AIC_INFO] input:0;shape:[8,8];format:ND;dtype:DT_FLOAT;addr:0x124080044000;size:256\n"
            "[AIC_INFO] tiling_data:0x01 0x02\n0x03 0x04\n[AIC_INFO] block_dim:1\n"
            "DevMalloc: Succ, size=1024, type=2, ptr=0x124080044000\nDevFree: mem=0x124080044000\n"
            "The error from device(0), serial number is 1, there is an aicore error, core id is 0, "
            "error code = 0x800000, dump info: pc start: 0x10, current: 0x20, vec error info: 0x1\n"
        )
    return folder


def test_mutations_of_a_small_incident(tmp_path: Path, monkeypatch) -> None:
    fuzz(made_incident(tmp_path), "L2Loss", 40, 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_mutations_of_a_small_incident(tmp_path: Path, monkeypatch, seed: int) -> None:
    fuzz(made_incident(tmp_path), "L2Loss", 500, 100 + seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mutations_of_the_real_gather_incident(tmp_path: Path, monkeypatch) -> None:
    real = shared_data("incident-gatherv2")
    folder = tmp_path / "real"
    shutil.copytree(real, folder, copy_function=shutil.copyfile)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    (folder / "dump").mkdir()
    (folder / "dump" / DUMP_NAME).write_bytes(b"no dump at all")
    # The faults are in the last part of the log; the first is only long.
    log = next((folder / "log").iterdir())
    log.write_bytes(log.read_bytes()[-200_000:])
    for path in (folder / "graph").glob("*.pbtxt"):
        path.unlink()
    fuzz(folder, "GatherV2", 150, 7, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["ge_onnx_00000000_graph_1_Build.pbtxt", "ge_proto_00056_Build.txt"]
)
def test_mutations_of_real_graphs(tmp_path: Path, monkeypatch, name: str) -> None:
    folder = "incident-gatherv2/graph" if "onnx" in name else "incident-gatherv2d"
    real = shared_data(folder) / name
    (tmp_path / "graph").mkdir()
    shutil.copyfile(real, tmp_path / "graph" / name)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.log").write_text("Aicore kernel execute failed, func_name=k\n")
    fuzz(tmp_path, "GatherV2", 300, 11, monkeypatch)
