"""Trends of trainings and facts of environments from somebody else."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import attacks
from hostile_captures import lay_out_bait
from hostile_files import write_trends
from test_attacks import assert_harmless
from victims import Sandbox, Step, Victim, reading_facts, reading_trends

HEADER = '{"format":1,"kind":"monitor"}'
NAMES = '{"names":0,"list":["a"]}'


def step(number: Any, loss: Any = 1.0, norm: Any = 1.0) -> str:
    tables = {"gradient": {"names": 0, "norm": [norm], "count": [1]}}
    return json.dumps({"step": number, "time": 0.0, "scalars": {"loss": loss}, "tables": tables})


def rows_for_nothing() -> list[str]:
    names = json.dumps({"names": 0, "list": ["a"] * 300_000})
    line = '{"step":%d,"time":0,"scalars":{},"tables":{"gradient":{"names":0}}}'
    return [names, *(line % n for n in range(2000))]


LINES: dict[str, list[str]] = {
    "huge steps": [NAMES, *(step(n) for n in (10**18, -(10**18), 1e300, 2**64 - 1, "9" * 400))],
    "huge numbers": [NAMES, *(step(n, 1.7e308, 1.7e308) for n in range(80)),
                     *(step(n, -1.7e308, -1.0) for n in range(80, 160))],
    "small numbers": [NAMES, *(step(n, 5e-324 if n % 2 else 1e308, 5e-324) for n in range(90))],
    "text": [NAMES, *(step(n, "nan", "inf") for n in range(20))],
    "rows for nothing": rows_for_nothing(),
    "names": ['{"names":0,"list":["\\u001b[2J\\u202e=cmd|x","' + "n" * 5000 + '"]}',
              '{"step":1,"time":0,"scalars":{"\\u001b[2J":1},"tables":{"\\u202e":{"names":0,'
              '"norm":[1,2]}}}'],
    "damaged": ["{"] * 300_000,
    "deep": ["[" * 100_000 + "]" * 100_000],
    "no rows": [NAMES, *(step(n, []) for n in range(5)), '{"step":1}', '{"names":{}}', "[]", "7"],
    "lists": ['{"names":[1],"list":7}', '{"names":0,"list":{"a":1}}', step(1)],
}  # fmt: skip


def test_steps_of_others(victim: Victim, sandbox: Sandbox) -> None:
    steps: list[Step] = []
    write_trends(sandbox.folder / "e")
    for number, lines in enumerate(LINES.values()):
        rank = sandbox.folder / f"a{number}" / "rank0"
        rank.mkdir(parents=True)
        text = "\n".join([HEADER, *lines, ""])
        (rank / "steps-00000000-00.jsonl").write_text(text)
        steps += reading_trends(f"a{number}", "e", f"out/{number}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)
    assert all(len(told) < 100_000 for told in outcome.texts[5::6])


def test_facts_and_alarms_of_others(victim: Victim, sandbox: Sandbox) -> None:
    lay_out_bait(sandbox)
    steps: list[Step] = []
    write_trends(sandbox.folder / "e")
    evil = [attacks.EXPRESSION, "\x1b[2J\u202e", "'; touch x; '", "{0.__class__}", 10**18, None]
    for number, value in enumerate(evil):
        folder = sandbox.folder / f"a{number}"
        shutil.copytree(sandbox.folder / "e", folder)
        attempt = {"first_segment": value, "first_step": value, "program": [value, f"{value}"]}
        facts = {"format": 1, "kind": "monitor", "attempts": [attempt, {**attempt,
                 "first_segment": 0, "first_step": 0}], "tool": value}  # fmt: skip
        (folder / "rank0" / "monitor.json").write_text(json.dumps(facts))
        alarm = {"rule": f"{value}", "step": 3, "since": 2, "last_good_step": None, "kind": "x"}
        alarm |= {"name": f"{value}", "reason": f"{value}", "recording": f"{value}"}
        (folder / "rank0" / "alarms.jsonl").write_text(json.dumps(alarm) + "\nx\n")
        lines = (folder / "rank0").glob("steps-*")
        for path in lines:
            path.write_text(path.read_text().replace('"loss":', '"loss":9'))
        steps += reading_trends(f"a{number}", "e", f"out/{number}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)


def test_what_is_no_file_of_a_training(victim: Victim, sandbox: Sandbox) -> None:
    steps: list[Step] = []
    write_trends(sandbox.folder / "e")
    segment = next((sandbox.folder / "e" / "rank0").glob("steps-*")).name
    for number, name in enumerate(("monitor.json", "alarms.jsonl", segment)):
        for way, put in enumerate((os.mkfifo, lambda path: path.symlink_to(sandbox.secret))):
            folder = f"a{number}{way}"
            shutil.copytree(sandbox.folder / "e", sandbox.folder / folder)
            path = sandbox.folder / folder / "rank0" / name
            path.unlink()
            put(path)
            steps += reading_trends(folder, "e", f"out/{folder}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert "not for you" not in "".join(outcome.texts)


def test_tables_of_the_peers_monitor(victim: Victim, sandbox: Sandbox) -> None:
    header = "vpp_stage,name,step,norm,mean,max,min"
    rows = {
        "huge steps": [f"0,a,{n},1,1,1,1" for n in ("9" * 400, "-" + "9" * 30, "1e5", "\u0663")],
        "long": ["0," + "a" * 200_000 + ",1,1,1,1,1", *(f"0,a,{n},1,1,1,1" for n in range(20))],
        "quotes": ['0,"a', *(f"0,a,{n},1,1,1,1" for n in range(20))],
        "zeros": ["\0" * 5000] * 20,
        "names": [f"0,\x1b[2J\u202e,{n},1e308,1,1,1" for n in range(40)],
        "formula": [f"0,=cmd|x,{n},nan,1,1,1" for n in range(40)],
    }
    steps: list[Step] = []
    for number, lines in enumerate(rows.values()):
        place = sandbox.folder / f"a{number}" / "rank0"
        place.mkdir(parents=True)
        (place / "grad_reduced_0-19.csv").write_text("\n".join([header, *lines, ""]))
        steps += reading_trends(f"a{number}", f"a{number}", f"out/{number}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)


def test_an_export_that_leads_elsewhere(victim: Victim, sandbox: Sandbox) -> None:
    write_trends(sandbox.folder / "a")
    elsewhere = sandbox.folder / "elsewhere"
    elsewhere.mkdir()
    for target, name, there in (("csv", "rank0.csv", "x.csv"), ("tensorboard", "rank0", "")):
        (sandbox.out / target).mkdir()
        (sandbox.out / target / name).symlink_to(elsewhere / there)
    outcome = victim.run(sandbox, reading_trends("a", "a")[-2:])
    assert_harmless(outcome)
    assert outcome.statuses == [2, 2]


# Environments

TEXTS = [
    "a" * 3_000_000,
    "eyJ-" * 500_000,
    "a:" * 500_000,
    "://" * 500_000,
    "x " * 500_000,
    "bearer " * 300_000,
    attacks.EXPRESSION,
    "\x1b[2J\u202e",
]


def test_facts_of_an_environment(victim: Victim, sandbox: Sandbox) -> None:
    e = {"python": "3.11", "torch": {"version": "2.13"}}
    (sandbox.folder / "e.json").write_text(json.dumps(e))
    facts: list[Any] = [
        *({"python": text, "environment": {text[:900_000]: text}} for text in TEXTS),
        *({"python": "3", "command": ["python", "a.py", f"--{text}", text]} for text in TEXTS),
        {"python": "3", "environment": {"k" * 5_000_000: {f"a{n}": n for n in range(150_000)}}},
        {"python": "3", "installed": {f"a{n}": "1" for n in range(500_000)}},
        {"python": "3", "batches": [{f"b{n}": "1"} for n in range(1000)]},
        *({"python": value, "torch": value} for value in ([], {}, 7, None, [[[]]], 1e308)),
        *({"python": "3", "model": value, "batches": value} for value in ([1], 7, "x", None)),
    ]
    for number, tree in enumerate(facts):
        (sandbox.folder / f"a{number}.json").write_text(json.dumps(tree))
        steps = reading_facts(f"a{number}.json", "e.json", f"out/{number}")
        outcome = victim.run(sandbox, steps)
        assert_harmless(outcome)
        assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)
        assert len(outcome.texts[0]) < 20_000


def test_what_is_no_file_of_an_environment(victim: Victim, sandbox: Sandbox) -> None:
    (sandbox.folder / "e.json").write_text('{"python": "3.11"}')
    steps: list[Step] = []
    os.mkfifo(sandbox.folder / "fifo.zip")
    os.mkfifo(sandbox.folder / "fifo.json")
    (sandbox.folder / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    for name in ("fifo.zip", "fifo.json", "deep.json"):
        steps += reading_facts(name, "e.json", f"out/{name}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert set(outcome.statuses) == {1}


def test_packages_of_the_peer(victim: Victim, sandbox: Sandbox) -> None:
    """Zip archives that unpack to more than there is room for, or not at all."""
    bombs = {
        "lists": [("hyperparameters/a.json", b'{"a":[' + b"[]," * 4_000_000 + b"1]}")],
        "many": [(f"hyperparameters/{n}.json", b'{"a":"' + b"x" * 9_000_000 + b'"}')
                 for n in range(40)],
        "entries": [(f"dataset/step{n}/rank0/a.json", b"{}") for n in range(100_000)],
        "pip": [("pip", b"a=1\n" * 3_000_000)],
        "huge": [("env", b'{"NCCL_A":' + b"9" * 100_000 + b"}")],
        "names": [("hyperparameters/\x1b[2J\u202e.json", b'{"\\u001b[2J":1}')],
        "number": [("random/rank" + "9" * 5000 + ".json", b"{}")],
    }  # fmt: skip
    steps: list[Step] = []
    for name, entries in bombs.items():
        path = sandbox.folder / f"{name}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("env", b"{}") if name != "huge" else None
            for entry, content in entries:
                archive.writestr(entry, content)
        steps += reading_facts(path.name, path.name, f"out/{name}")
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = sandbox.folder / f"damaged{method}.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("env", bytes(5000))
        data = bytearray(path.read_bytes())
        data[35:40] = b"\xff" * 5
        path.write_bytes(data)
        steps += reading_facts(path.name, path.name, f"out/damaged{method}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told for told in outcome.texts)


def test_reports_of_others(victim: Victim, sandbox: Sandbox) -> None:
    """What `view` is given; its links lead nowhere else."""
    secret = sandbox.folder / "secret.json"
    secret.write_text('{"verdict": "match", "counts": {}, "calls": [], "findings": []}')
    steps: list[Step] = []
    number = 0
    deep = "[" * 3000 + "]" * 3000
    for name in ("verdict.json", "check.json", "findings.json", "incident.json", "report.data"):
        for text in ("{}", "[]", deep, '{"calls":7,"counts":7}', '{"findings":[{"name":[]}]}',
                     '{"verdict":"x","culprits":[7]}', '{"format":1}\n{}\n', None):  # fmt: skip
            folder = sandbox.folder / f"a{number}"
            folder.mkdir()
            (folder / "verdict.json").write_text('{"verdict":"match","actual":"x","expected":"y"}')
            path = folder / name
            path.unlink(missing_ok=True)
            if text is None:
                path.symlink_to(secret)
            else:
                path.write_text(text)
            steps.append({"view": f"a{number}"})
            number += 1
    assert_harmless(victim.run(sandbox, steps))


def test_a_report_does_not_show_what_a_link_leads_to(tmp_path: Path) -> None:
    from tensorprobe.errors import BadArtefact
    from tensorprobe.report.serving import ServedPaths

    (tmp_path / "secret.json").write_text('{"findings": [], "secret": 1}')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "findings.json").symlink_to("../secret.json")
    library = ServedPaths([tmp_path / "a"])
    try:
        found = library.index(0)
    except BadArtefact as error:
        assert "leads out" in str(error)  # noqa: PT017 either it is refused here
    else:
        raise AssertionError(found)
