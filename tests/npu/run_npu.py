"""make test-npu: tensorprobe on the real torch_npu, on a machine without an NPU.

    python run_npu.py [--version 2.7.1] [--keep DIR] [FILES AND OPTIONS OF PYTEST]

Makes an environment outside of the tree: torch and torch_npu from the index, and the libraries of
`cann/` in the place of CANN. A torch that was built for CUDA gets empty libraries in the place of
CUDA's 4 GB. Then the checks of this folder run in it, and it is removed.

Where a wheel cannot be had, one line says so, and that is no failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHONS = ("3.11", "3.10", "3.12", "3.13")
# What torch, torch_npu, tensorprobe and the tests import. Versions are bounded where torch breaks.
NEEDED = (
    *("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools<81"),
    *("PyYAML", "decorator", "scipy", "attrs", "psutil", "transformers<5"),
    *("msgspec", "ml_dtypes<0.6", "rich", "safetensors", "pytest", "pytest-timeout", "hypothesis"),
)


class NoWheel(Exception):
    """What cannot be installed here, in a line."""


def run(*command: object, **more: object) -> subprocess.CompletedProcess[str]:
    parts = [str(part) for part in command]
    return subprocess.run(parts, capture_output=True, text=True, check=False, **more)  # type: ignore


def interpreter(python: str) -> str | None:
    """A command that is this Python; None if this machine has none."""
    homes = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{python}.*/bin/python"))
    for command in (f"python{python}", *map(str, reversed(homes))):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if shutil.which(command) and run(command, "-c", code).stdout.strip() == python:
            return command
    return None


def make_environment(version: str, place: Path) -> Path:
    """An environment with torch and torch_npu of that version; its Python."""
    program = place / "bin" / "python"
    if (place / "ready").exists():
        return program
    said = "no Python of " + ", ".join(PYTHONS)
    for python in PYTHONS:
        command = interpreter(python)
        if command is None:
            continue
        shutil.rmtree(place, ignore_errors=True)
        run(command, "-m", "venv", place)
        pip = (program, "-m", "pip", "install", "-q", "--no-cache-dir")
        # a post release of torch_npu belongs to the same torch; it asks for a build of torch that
        # the index may not have
        done = run(*pip, "--no-deps", f"torch_npu=={version}.*")
        if done.returncode:
            said = f"the index has no torch_npu {version} for Python {python}"
            continue
        done = run(*pip, "--no-deps", f"torch=={version}+cpu")
        if done.returncode:
            done = run(*pip, "--no-deps", f"torch=={version}")
        if done.returncode:
            raise NoWheel(f"the index has no torch {version} for Python {python}")
        numpy = "numpy<2" if [int(n) for n in version.split(".")[:2]] < [2, 3] else "numpy<2.4"
        done = run(*pip, numpy, *NEEDED)
        if done.returncode:
            raise NoWheel(f"what the tests need cannot be installed: {done.stderr.strip()[-300:]}")
        (place / "ready").touch()
        return program
    raise NoWheel(said)


def build(program: Path, home: Path) -> dict[str, str]:
    """The libraries that stand in for CANN; what the environment of a program needs of them."""
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    packages = Path(run(program, "-c", code).stdout.strip())
    cann, cuda = home / "cann", home / "without_cuda"
    sys.path.insert(0, str(HERE / "cann"))
    import without_cuda

    without_cuda.build(packages / "torch", cuda)
    done = run(
        program, HERE / "cann" / "build.py", packages / "torch", packages / "torch_npu", cann
    )
    if done.returncode:
        raise SystemExit(f"the stand-in for CANN cannot be built: {done.stdout}{done.stderr}")
    print(done.stdout.strip())
    return {
        "LD_LIBRARY_PATH": f"{cann}:{cuda}",
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "TENSORPROBE_BUILD": "0",
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="2.7.1", help="of torch_npu and torch")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="make it there, and leave it there"
    )
    args, options = parser.parse_known_args()
    for tool in ("gcc", "g++", "nm", "readelf", "strings"):
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is needed (apt-get install g++ binutils)")
            return 0
    home = args.keep or Path(tempfile.mkdtemp(prefix="tensorprobe-npu-"))
    try:
        home.mkdir(parents=True, exist_ok=True)
        program = make_environment(args.version, home / "environment")
        environment = {**os.environ, **build(program, home)}
        command = [program, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if not any(option.endswith(".py") or ".py::" in option for option in options):
            command += sorted(HERE.glob("check_*.py"))
        parts = [*map(str, command), *options]
        return subprocess.run(parts, cwd=ROOT, env=environment, check=False).returncode
    except NoWheel as error:
        print(f"skipped: {error}")
        return 0
    finally:
        if not args.keep:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
