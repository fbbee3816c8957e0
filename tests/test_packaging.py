"""Wheels have the library of numerics/tally.c where there is a compiler, and are made without."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = "tensorprobe/numerics/libtally.so"


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
    assert LIBRARY not in zipfile.ZipFile(made).namelist()
    reason = "no-such-compiler: No such file or directory"
    assert f"statistics of CPU tensors stay with numpy: {reason}" in said


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_with_a_compiler_it_is_of_one_platform_and_every_python(tmp_path: Path) -> None:
    made, _ = wheel(tmp_path, "cc")
    assert "-py3-none-" in made.name
    assert not made.name.endswith("-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert LIBRARY in names
    assert "tensorprobe/numerics/tally.c" in names
