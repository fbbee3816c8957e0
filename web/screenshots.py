"""Makes the pictures of docs/report.md and the README: the two runs of the demo, compared.

make screenshots

And four ranks, of which the third computes a silu wrong. The button for Chinese needs a font
that has it: apt-get install fonts-wqy-microhei
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import tensorprobe

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]
RANKS = """
import torch
import torch.distributed as dist
from planting import Device, Fault, gain
import tensorprobe as tp

dist.init_process_group("gloo")
fault = Fault("silu", 1, gain(1.01)) if dist.get_rank() == 2 else None
for name, device in (("right", Device(True)), ("wrong", Device(True, fault, seed=1))):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 32), torch.nn.SiLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16) + dist.get_rank()
    with device, tp.Recorder(name, keep="tensors") as recorder:
        for _ in range(3):
            model(x).square().mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
dist.destroy_process_group()
"""


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
        picture_ranks(home, page)
        browser.close()


def picture_ranks(home: str, page: Page) -> None:
    (Path(home) / "ranks.py").write_text(RANKS)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", "ranks.py"]
    tests = Path(__file__).parent.parent / "tests"
    paths = (Path(tensorprobe.__file__).parents[1], tests, tests / "comparing")
    environ = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher], cwd=home, env=environ, check=True)
    tensorprobe_in(home, "compare", "wrong", "right", "-o", "ranks")
    page.goto((Path(home) / "ranks" / "report.html").as_uri())
    page.locator("#collectives svg").wait_for()
    page.locator("#ranks").screenshot(path=PICTURES / "ranks.png")


if __name__ == "__main__":
    main()
