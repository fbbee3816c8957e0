"""Wheels have the library of tensors/tally.c where there is a compiler, and are made without."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = "tensorprobe/tensors/libtally.so"


def wheel(folder: Path, compiler: str) -> tuple[Path, str]:
    """Build one from a copy of what the builder needs; the wheel, and what was said."""
    pytest.importorskip("hatchling")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source, env={**os.environ, "CC": compiler}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (made,) = folder.glob("*.whl")
    return made, done.stdout


def test_without_a_compiler_the_wheel_is_plain_python(tmp_path: Path) -> None:
    made, said = wheel(tmp_path, "no-such-compiler")
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert LIBRARY not in names
    for name in ("page.js", "page.css", "LICENSES.txt"):
        assert f"tensorprobe/report/page/{name}" in names
    reason = "no-such-compiler: No such file or directory"
    assert f"statistics of CPU tensors stay with numpy: {reason}" in said


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_with_a_compiler_it_is_of_one_platform_and_every_python(tmp_path: Path) -> None:
    made, _ = wheel(tmp_path, "cc")
    assert "-py3-none-" in made.name
    assert not made.name.endswith("-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert LIBRARY in names
    assert "tensorprobe/tensors/tally.c" in names


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.timeout(1800)
def test_in_an_empty_environment_the_wheel_passes_the_demo(tmp_path: Path) -> None:
    made, _ = wheel(tmp_path, "cc")
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*install, f"{made}[torch]"], capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr

    environ = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "XDG_CACHE_HOME", "TENSORPROBE_NATIVE", "TENSORPROBE_BUILD"):
        environ.pop(name, None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "tensorprobe", *words],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    demo = run("demo")
    assert (demo.returncode, demo.stderr) == (0, ""), demo.stdout
    verdict = json.loads((tmp_path / "demo" / "report" / "verdict.json").read_text())
    assert [each["name"] for each in verdict["culprits"]] == ["Functional.layer_norm.2.forward"]
    parts = {part["name"]: part for part in json.loads(run("doctor", "--json").stdout)["parts"]}
    assert parts["C library"]["state"] == "active"
    assert parts["C library"]["why"].startswith(str(tmp_path / "venv"))
    assert parts["torch"]["state"] == "active"


@pytest.mark.slow
@pytest.mark.parametrize(("torch", "numpy"), [("2.1.0", "1.26.4"), ("2.7.1", "2.2.6")])
def test_installing_replaces_nothing(torch: str, numpy: str, tmp_path: Path) -> None:
    """pip is asked what it would do in an environment that says it has these."""
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for name, version in (("torch", torch), ("numpy", numpy)):
        about = packages / f"{name}-{version}.dist-info"
        about.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (about / "METADATA").write_text(text)
        (about / "RECORD").write_text("")
    report = tmp_path / "report.json"
    options = ["--dry-run", "--quiet", "--no-build-isolation", "--report", str(report)]
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    made, _ = wheel(tmp_path, "no-such-compiler")
    done = subprocess.run(
        [*pip, "install", *options, f"{made}[torch]"], capture_output=True, text=True, check=False
    )
    if "Could not find a version" in done.stderr or "Connection" in done.stderr:
        pytest.skip("the index cannot be reached")
    assert done.returncode == 0, done.stderr
    wanted = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
    assert "tensorprobe" in wanted
    assert not wanted & {"torch", "numpy"}
