"""make test-versions: the compatibility set in an environment of its own for each version of torch.

An environment is made outside of the tree, with what a user would have: torch from the index with
all that it needs, a numpy that fits it, and then this package, which must replace neither. It is
removed afterwards. The results go to src/tensorprobe/tried_versions.json, which `doctor` reads, and
docs/versions.md is written from them.

With --without-cuda empty libraries take the place of CUDA's 4 GB, which a machine without a GPU
loads and never calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from torch_names import VERSIONS, links, minor

ROOT = Path(__file__).parents[2]
SET = Path(__file__).with_name("compatibility.txt")
RESULTS = ROOT / "src" / "tensorprobe" / "tried_versions.json"
TEMPLATE, PAGE = Path(__file__).with_name("page.md"), ROOT / "docs" / "versions.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
NEEDED = (
    *("pytest", "pytest-timeout", "hypothesis", "openpyxl", "protobuf", "PyYAML", "XlsxWriter"),
    *("safetensors", "ipython"),
)
LIMIT_S = 3600
# What 2.4 says of itself: pickle calls torch.load there, and a checkpoint calls that autocast.
WARNINGS = (
    "ignore:You are using `torch.load` with:FutureWarning",
    "ignore:`torch.cpu.amp.autocast(args...)` is deprecated:FutureWarning",
)
SHORT = "Only the first test of each file of the set"
# What torch needs, but for CUDA's packages.
WITHOUT_CUDA = """
import re, subprocess, sys
from importlib.metadata import requires
needs = [need for need in requires("torch") if not re.match("nvidia|cuda|triton|.*extra ==", need)]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", "-q", *needs, *sys.argv[1:]]))
"""

Row = dict[str, Any]


# ---- which environments --------------------------------------------------------------------------


def pythons_of(version: str) -> list[str]:
    """The Pythons that the index has wheels of this torch for."""
    tags = {
        match[1]
        for name in links()
        if (
            match := re.fullmatch(rf"torch-{re.escape(version)}-cp3(\d+)-cp3\d+-.*x86_64.whl", name)
        )
    }
    return [python for python in PYTHONS if python.partition(".")[2] in tags]


def interpreter(python: str) -> str | None:
    """A command that is this Python; None if this machine has none."""
    homes = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{python}.*/bin/python"))
    for command in (f"python{python}", *map(str, reversed(homes))):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([command, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.strip() == python:
            return command
    return None


def plan(word: str) -> tuple[list[tuple[str, str]], list[Row]]:
    """The environments (version, Python) that a word of VERSIONS asks for, and rows that say why
    there is none. `2.1.0` is its oldest and newest Python, `2.1.0@3.11` that one."""
    version, _, python = word.partition("@")
    offered = pythons_of(version)
    if not offered:
        return [], [{"torch": version, "note": "the index has no such version"}]
    here = [python for python in offered if interpreter(python) is not None]
    missing = [python for python in offered if python not in here]
    wanted = [python] if python else list(dict.fromkeys([*here[:1], *here[-1:]]))
    rows = [
        {"torch": version, "python": each, "note": "this machine has no such Python"}
        for each in (missing if not python else [])
        if each in (offered[0], offered[-1])
    ]
    rows += [
        {"torch": version, "python": each, "note": "the index has no wheel for this Python"}
        for each in wanted
        if each not in offered
    ]
    return [(version, each) for each in wanted if each in here], rows


# ---- one environment -----------------------------------------------------------------------------


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **more)


def try_version(version: str, python: str, home: Path, args: argparse.Namespace) -> Row:
    """Make an environment, and run the compatibility set in it."""
    row: Row = {"torch": version, "python": python}
    place = home / f"{version}-{python}"
    program = str(place / "bin" / "python")
    if not (place / "ready").exists():
        numpy = "numpy<2" if before(version, "2.3") or python in ("3.10", "3.11") else "numpy>=2"
        steps = [
            [str(interpreter(python)), "-m", "venv", "--clear", str(place)],
            [program, "-m", "pip", "install", "-q", "--upgrade", "pip"],
        ]
        torch = [program, "-m", "pip", "install", "-q", f"torch=={version}"]
        if not args.without_cuda:
            steps.append([*torch, numpy, "setuptools"])
        else:
            steps += [[*torch, "--no-deps"], [program, "-c", WITHOUT_CUDA, numpy, "setuptools"]]
        for step in steps:
            done = run(step, env={**os.environ, "PIP_CACHE_DIR": str(home / "cache")})
            if done.returncode:
                return row | {"note": f"cannot be installed: {last_line(done.stderr)}"}
        if args.without_cuda:
            where = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
            packages = Path(run([program, "-c", where]).stdout.strip())
            sys.path.insert(0, str(ROOT / "tests" / "npu" / "cann"))
            import without_cuda

            without_cuda.build(packages / "torch", place / "without_cuda")
        (place / "ready").touch()
    before_us = installed(program)
    done = run([program, "-m", "pip", "install", "-q", str(ROOT), *NEEDED])
    if done.returncode:
        return row | {"note": f"tensorprobe cannot be installed: {last_line(done.stderr)}"}
    run([program, "-m", "pip", "uninstall", "-q", "-y", "tensorprobe"])  # src is tested
    row["numpy"] = installed(program)["numpy"]
    row["replaced"] = sorted(name for name, v in before_us.items() if installed(program)[name] != v)
    built = run([program, "-m", "tensorprobe.native.build"], env=with_src(place))
    made = re.match(r"built: (.*)", built.stdout)
    row["native"] = "built" if made else last_line(built.stderr)
    try:
        row |= tested(program, place, args.short)
    finally:
        if made:
            Path(made[1]).unlink(missing_ok=True)
    return row


def tested(program: str, place: Path, short: bool) -> Row:
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    tests = SET.read_text().split("\n")
    if short:
        tests = list({test.partition("::")[0]: test for test in reversed(tests)}.values())[::-1]
    command = [program, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append("--continue-on-collection-errors")
    command += [part for warning in WARNINGS for part in ("-W", warning)]
    options = [f"--junitxml={report}", *filter(None, tests)]
    try:
        done = run([*command, *options], env=with_src(place), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"note": f"the tests took more than {LIMIT_S} s"}
    if not report.exists():
        return {"note": f"the tests ended early: {last_line(done.stderr or done.stdout)}"}
    return counted(report) | ({"note": SHORT} if short else {})


def counted(report: Path) -> Row:
    """What a report of pytest says."""
    suite = ElementTree.parse(report).getroot()[0]
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    count = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    passed = count["tests"] - count["skipped"] - len(failed)
    return {"passed": passed, "skipped": count["skipped"], "failed": sorted(failed)}


def installed(program: str) -> dict[str, str]:
    """The versions of what a user brings along."""
    names = ("torch", "numpy")
    code = f"from importlib.metadata import version as v; print(*map(v, {names}))"
    return dict(zip(names, run([program, "-c", code]).stdout.split(), strict=True))


def with_src(place: Path) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TENSORPROBE_BUILD": "0"}
    if (place / "without_cuda").exists():
        found["LD_LIBRARY_PATH"] = str(place / "without_cuda")
    return found


def before(version: str, other: str) -> bool:
    return [int(n) for n in version.split(".")[:2]] < [int(n) for n in other.split(".")[:2]]


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no word"


# ---- the results ---------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    if not RESULTS.exists():
        return []
    rows: list[Row] = json.loads(RESULTS.read_text())["rows"]
    return rows


def remember(row: Row) -> None:
    """Put a row in the place of the one that was there."""
    key = (row["torch"], row.get("python"))
    rows = [other for other in read_rows() if (other["torch"], other.get("python")) != key]
    rows = sorted([*rows, row], key=lambda row: (numbers(row["torch"]), numbers(row.get("python"))))
    RESULTS.write_text(json.dumps({"format": 1, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(page(rows))


def numbers(version: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version or "")]


def page(rows: list[Row]) -> str:
    lines = [
        "| torch | Python | numpy | tests | C++ parts | simulated NPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["torch"], row.get("python", ""), row.get("numpy", ""), *results_of(row)]
        lines.append(f"| {' | '.join(cells)} |")
    tried = {minor(row["torch"]) for row in rows if "passed" in row}
    untried = [minor(version) for version in VERSIONS if minor(version) not in tried]
    if untried:
        lines += ["", f"Not tried yet: {', '.join(untried)}."]
    failures = [
        f"- torch {row['torch']}, Python {row['python']}: `{name}`"
        for row in rows
        for name in row.get("failed", [])
    ]
    lines += ["", "Failed:", "", *failures] if failures else []
    return TEMPLATE.read_text().replace("{table}", "\n".join(lines))


def results_of(row: Row) -> list[str]:
    simulated = "from 2.10 on" if before(row["torch"], "2.10") else "yes"
    if "passed" not in row:
        return [row.get("note", ""), row.get("native", ""), simulated]
    said = f"{row['passed']} passed"
    said += f", {len(row['failed'])} failed" if row["failed"] else ""
    said += f", {row['skipped']} skipped" if row["skipped"] else ""
    said += f"; replaced {', '.join(row['replaced'])}" if row["replaced"] else ""
    said += f". {row['note']}" if "note" in row else ""
    return [said, row["native"], simulated]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="2.1.0, or 2.1.0@3.11 for one Python")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the environments there")
    parser.add_argument(
        "--without-cuda", action="store_true", help="with empty libraries in the place of CUDA's"
    )
    parser.add_argument(
        "--short", action="store_true", help="only the first test of each file of the set"
    )
    parser.add_argument("--page", action="store_true", help="only write the page again")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(read_rows()))
        return 0
    failed = False
    for word in args.versions or [f"{minor(version)}.0" for version in VERSIONS]:
        environments, rows = plan(word)
        for row in rows:
            remember(row)
            print(f"torch {word}: {row['note']}", flush=True)
        home = args.keep or Path(tempfile.mkdtemp(prefix="tensorprobe-versions-"))
        try:
            for version, python in environments:
                row = try_version(version, python, home, args)
                remember(row)
                sys.stdout.write(
                    f"torch {version}, Python {python}: {'; '.join(results_of(row))}\n"
                )
                sys.stdout.flush()
                failed |= bool(row.get("failed") or row.get("replaced") or "passed" not in row)
                if not args.keep:
                    shutil.rmtree(home / f"{version}-{python}", ignore_errors=True)
        finally:
            if not args.keep:
                shutil.rmtree(home, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
