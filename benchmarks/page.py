"""How large a report is, how soon it can be used, and what writing it adds to `compare`.

    python benchmarks/page.py [size|share|open|view]...

Bars: the page without data under 900 kB; 5,000 calls under 8 MB and usable within 1.5 s in headless
Chromium on 2 cores; the script of a zoom or pan of 100,000 points under 16 ms, median; 100,000
calls through `view` within 3 s; writing the page adds at most 15 % to `compare`. `share` takes the
CPU time of this process, as others may use the machine. `open` and `view` need Chromium; they tell
how long it took by the clock, until the page itself says that table and timeline are drawn, and how
long its thread was at work. The first of three opens is that of a browser that has just started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compare import program  # the one beside this file

import tensorprobe as tp
from tensorprobe.records import Capture
from tensorprobe.report import html
from tensorprobe.report.serving import Viewer
from tensorprobe.store.loading import layout

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession

ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]
MARKS = "performance.getEntriesByName('usable').map(mark => mark.startTime)"
ALONE = 5  # times each


def sides(n_calls: int) -> list[Capture]:
    return [
        Capture(Path(name), "native", program(n_calls, shift))
        for name, shift in (("a", 1e-4), ("e", 0.0))
    ]


def size() -> None:
    empty = html.page("", (), {})
    print(f"page without data: {len(empty) / 1e3:.0f} kB (at most 900)")
    with tempfile.TemporaryDirectory() as folder:
        tp.compare(*sides(5000)).save(folder)
        print(
            f"5,000 calls: {(Path(folder) / 'report.html').stat().st_size / 1e6:.1f} MB (at most 8)"
        )


def share(*runs: str) -> None:
    """Of the CPU time of `compare`, how much is the page's: made-up statistics, or two runs."""
    with tempfile.TemporaryDirectory() as home:
        given = [(" ".join(runs), list(runs))] if runs else []
        for n in () if runs else (1000, 5000, 25_000):
            paths = [f"{home}/{n}{side}" for side in "ae"]
            for path, capture in zip(paths, sides(n), strict=True):
                layout("native").write(capture, Path(path))
            given.append((f"{n:,} calls", paths))
        for label, paths in given:
            _share(label, paths)


def _share(label: str, paths: list[str]) -> None:
    whole, page = [], []
    for _ in range(ALONE):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            comparison = tp.compare(*paths, jobs=1)
            comparison.save(folder)
            end = time.process_time()
            html.write_comparison(Path(folder), comparison)
            page.append(time.process_time() - end)
            whole.append(end - start)
    rest, more = min(whole) - min(page), min(page)
    print(f"{label}: compare {rest:.2f} s, its page {more:.2f} s: {more / rest:.1%} (at most 15)")


def opened() -> None:
    """Until a page from a file can be used, and how long a zoom of its timeline takes."""
    for n_calls, bar in ((5000, "at most 1.5 s"), (100_000, "no bar from a file")):
        with tempfile.TemporaryDirectory() as folder:
            tp.compare(*sides(n_calls)).save(folder)
            path = Path(folder) / "report.html"
            _look(path.as_uri(), f"{n_calls:,} calls, {path.stat().st_size / 1e6:.1f} MB", bar)


def view() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tp.compare(*sides(100_000)).save(folder)
        viewer = Viewer([Path(folder)])
        threading.Thread(target=viewer.serve, daemon=True).start()
        _look(viewer.address, "100,000 calls through view", "at most 3 s")
        viewer.close()


def _look(url: str, label: str, bar: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        inside = page.context.new_cdp_session(page)
        inside.send("Performance.enable", {"timeDomain": "threadTicks"})
        taken, worked = [], []
        for _ in range(3):
            page.goto("about:blank")
            before = _thread_s(inside)
            page.goto(url, wait_until="commit")
            while not (marks := page.evaluate(MARKS)):  # wait_for_function would need eval
                page.wait_for_timeout(20)
            worked.append(_thread_s(inside) - before)
            taken.append(marks[0] / 1e3)
            assert page.locator("#calls .vt-spacer .vt-row").count()
            assert page.locator("#timeline canvas").count()
        usable = " ".join(f"{each:.2f}" for each in taken)
        thread = " ".join(f"{each:.2f}" for each in worked)
        box = page.locator("#timeline .u-over").bounding_box()
        page.mouse.move(box["x"] + 500, box["y"] + 100)
        for delta in [-120] * 20 + [120] * 10:
            page.mouse.wheel(0, delta)
            page.wait_for_timeout(20)
        page.locator("#timeline .plot").focus()
        for key in ["ArrowRight"] * 15 + ["ArrowLeft"] * 15:
            page.keyboard.press(key)
            page.wait_for_timeout(20)
        frames = page.evaluate("window.tensorprobe.timeline.frames")
        print(
            f"{label}: usable after {usable} s ({bar}), {thread} s of its thread; a zoom or pan "
            f"takes {statistics.median(frames):.1f} ms of script, median of {len(frames)} (at most "
            f"16); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        browser.close()


def _thread_s(inside: CDPSession) -> float:
    """For how long the page's thread has been at work."""
    found = inside.send("Performance.getMetrics")["metrics"]
    return next(float(each["value"]) for each in found if each["name"] == "ThreadTime")


BENCHMARKS = {"size": size, "share": share, "open": opened, "view": view}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", metavar="WHAT", help=", ".join(BENCHMARKS))
    parser.add_argument("--runs", nargs=2, metavar="RUN", help="share: of two recorded runs")
    arguments = parser.parse_args()
    for name in arguments.which or BENCHMARKS:
        if name == "share" and arguments.runs:
            share(*arguments.runs)
        else:
            BENCHMARKS[name]()


if __name__ == "__main__":
    main()
