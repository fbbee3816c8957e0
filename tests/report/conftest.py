"""Reports made by the real commands, and a real browser to open them in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recorded import SRC

PROGRAM = Path(__file__).parent / "page_program.py"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
NEEDS_CHROMIUM = "no Chromium: apt-get install chromium, and pip install playwright"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]


def type_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run tensorprobe as a user does."""
    environ = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words], cwd=folder, env=environ,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


class Made:
    """A report, and the verdict that it shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = folder / "out" / "report.html"
        self.verdict: dict[str, Any] = json.loads((folder / "out" / "verdict.json").read_text())

    @property
    def url(self) -> str:
        return self.page.as_uri()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Records a model of page_program.py twice, once with a wrong kernel, and compares."""
    known: dict[tuple[str, str], Made] = {}

    def make(model: str, wrong: str) -> Made:
        if (model, wrong) not in known:
            with _once(tmp_path_factory, f"{model}-{wrong}") as folder:
                if not (folder / "out").exists():
                    _record_and_compare(folder, model, wrong)
            known[model, wrong] = Made(folder)
        return known[model, wrong]

    return make


@contextlib.contextmanager
def _once(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that the processes of one test run share, one at a time."""
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        home = home.parent
    folder = home / name
    folder.mkdir(exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _record_and_compare(folder: Path, model: str, wrong: str) -> None:
    for name, more in (("actual", ["--wrong", wrong]), ("expected", [])):
        words = ["run", "--keep", "tensors", "-o", name, str(PROGRAM), model, *more]
        done = type_command(folder, *words)
        assert done.returncode == 0, done.stderr
    done = type_command(folder, "compare", "actual", "expected", "-o", "out")
    assert done.returncode == 3, done.stderr


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip(NEEDS_CHROMIUM)
    sync_api = pytest.importorskip("playwright.sync_api", reason=NEEDS_CHROMIUM)
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


class Sight:
    """What went wrong in a page, and what it asked for."""

    def __init__(self) -> None:
        self.trouble: list[str] = []
        self.requests: list[str] = []


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; afterwards nothing may have gone wrong, and nothing may have left."""
    contexts = []
    sights: list[tuple[str, Sight]] = []

    def open_page(url: str, **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, "locale": "en-US", **options}
        )
        contexts.append(context)
        page, sight = context.new_page(), Sight()
        sights.append((url, sight))
        page.on("console", lambda m: sight.trouble.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: sight.trouble.append(str(error)))
        page.on("dialog", lambda dialog: (sight.trouble.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda request: sight.requests.append(request.url))
        page.goto(url)
        page.wait_for_selector("main")
        return page

    yield open_page
    for context in contexts:
        context.close()
    for url, sight in sights:
        assert sight.trouble == []
        home = url.partition("#")[0]
        start = home if home.startswith("file:") else home[: home.index("/", 8)]
        left = [each for each in sight.requests if not each.startswith((start, "data:"))]
        assert left == []
