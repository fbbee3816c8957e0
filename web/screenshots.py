"""Makes the pictures of docs/report.md and the README: the two runs of the demo, compared.

make screenshots
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import tensorprobe

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]


def tensorprobe_in(folder: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tensorprobe", *words], cwd=folder, check=False)
    if done.returncode not in (0, 3):
        sys.exit(f"tensorprobe {words[0]} ended with {done.returncode}")


def main() -> None:
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        for name in ("train.py", "train_npu.py"):
            shutil.copy(Path(tensorprobe.__file__).parent / "demo" / name, home)
        record = ["run", "--keep", "tensors", "--steps", "0-1", "-o"]
        tensorprobe_in(home, *record, "runs/cpu", "train.py")
        tensorprobe_in(home, *record, "runs/npu", "--sim-npu", "train_npu.py")
        tensorprobe_in(home, "compare", "runs/npu", "runs/cpu", "-o", "report")
        report = Path(home) / "report"
        culprit = json.loads((report / "verdict.json").read_text())["culprits"][0]["name"]
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        url = (report / "report.html").as_uri()
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.locator("#timeline canvas").wait_for()
        page.screenshot(path=PICTURES / "verdict.png")
        page.locator("#graph").scroll_into_view_if_needed()
        page.locator("#graph .box").first.wait_for()
        page.get_by_role("button", name="Way to the loss").click()
        page.locator("#graph").screenshot(path=PICTURES / "graph.png")
        page.goto("about:blank")
        page.goto(f"{url}#call={culprit}")
        page.locator("#call canvas").first.wait_for()
        page.screenshot(path=PICTURES / "call.png")
        browser.close()


if __name__ == "__main__":
    main()
