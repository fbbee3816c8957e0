"""The page in a real browser, beside the verdict.json that it is to show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tensorprobe as tp
from conftest import PROGRAM, Made
from recorded import record
from tensorprobe.comparing.rounding import number_text
from tensorprobe.records import Call, Capture, Gap, Special, TensorRecord
from tensorprobe.report.chinese import in_chinese
from tensorprobe.report.documents import FILES, write_document
from tensorprobe.store.frames import users_line

Make = Callable[[str, str], Made]
Open = Callable[..., Any]
MODELS = [
    ("llama", "silu"),
    pytest.param("mixtral", "silu", marks=pytest.mark.slow),
    pytest.param("unet", "conv", marks=pytest.mark.slow),
    pytest.param("llama", "nan", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "wrong"), MODELS)
def test_what_is_shown_is_what_the_verdict_says(
    made: Make, opened: Open, model: str, wrong: str
) -> None:
    report = made(model, wrong)
    first = report.verdict["culprits"][0]
    page = opened(report.url)

    # the answer, without a click
    answer = page.locator("#answer").inner_text()
    assert "Diverged" in answer
    assert first["name"] in answer
    section = page.locator("#verdict").inner_text()
    assert first["reason"] in section
    assert first["module"] in section
    assert f"The {first['side']} side is wrong" in section
    assert f"{first['affected']:,}" in section
    if isinstance(first["own_error"], float):
        assert number_text(first["own_error"]) in section
    assert "tensorprobe repro actual " + first["name"] in section
    line = re.search(r"(\w+\.py):(\d+)", users_line(first["stack"]))
    assert line is not None
    assert page.locator(".source .at").first.inner_text().strip().startswith(line[2])

    # one call
    page.get_by_role("button", name="Open this call").click()
    panel = page.locator("#call")
    panel.get_by_text("Where the error sits").wait_for()
    assert first["name"] in panel.inner_text()
    assert panel.locator("canvas.heat").count() >= (wrong != "nan")
    assert panel.locator("svg.chart").count() >= 1
    assert "worst elements" in panel.inner_text()
    assert first["stack"][0] in panel.inner_text()
    if "worst" in first["metrics"]:
        assert "float64 says" in panel.inner_text()
    assert (wrong == "nan") != ("worst" in first["metrics"])
    assert f"call={first['name']}" in page.url

    # the table
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    counts = report.verdict["counts"]
    total = counts["aligned"] + counts["only_actual"] + counts["only_expected"]
    assert f"{total:,} of {total:,} rows" in page.locator("#calls").inner_text()
    page.locator("#calls input").fill("culprit")
    row = page.locator("#calls .vt-spacer .vt-row").first
    assert first["name"] in row.inner_text()
    row.click()
    panel.wait_for(state="visible")
    assert first["name"] in panel.locator("h2").inner_text()

    # ranks and steps
    page.keyboard.press("Escape")
    matrix = page.locator("#ranks .matrix")
    lines = report.verdict["ranks"]
    assert f"{lines[0]['diverged']:,}" in matrix.inner_text()
    matrix.get_by_role("button").first.click()
    panel.wait_for(state="visible")
    assert panel.locator("h2").inner_text() == lines[0]["culprit"]

    # the graph
    panel.get_by_role("button", name="The model").click()
    box = page.locator("#graph .box.culprit")
    box.first.wait_for()
    assert first["name"] in box.first.get_attribute("aria-label")
    page.get_by_role("button", name="Way to the loss").click()
    assert page.locator("#graph .edge.way").count() > 0


@pytest.mark.slow
def test_the_timeline_zooms_and_narrows_the_table(made: Make, opened: Open) -> None:
    page = opened(made("llama", "silu").url)
    plot = page.locator("#timeline .u-over")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 100, steps=4)
    page.mouse.up()
    chip = page.locator("#calls .chip")
    chip.wait_for()
    counted = page.locator("#calls .count").inner_text().replace(",", "")
    n, total = map(int, re.findall(r"\d+", counted))
    assert 0 < n < total
    chip.click()
    chip.wait_for(state="detached")

    page.locator("#timeline .plot").focus()
    for key in ("+", "ArrowRight", "-", "0"):
        page.keyboard.press(key)
    # the plot is drawn anew with the next frame; positions are of what is drawn
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    report = "window.tensorprobe.report"
    # a click opens the call that is nearest
    at, x, y = page.evaluate(
        f"""() => {{ const t = window.tensorprobe.timeline, r = {report};
        const k = t.calls.indexOf([...r.culpritAt.keys()][0]);
        return [t.calls[k], t.plot.valToPos(k, "x"), t.plot.valToPos(t.y[k], "y")] }}"""
    )
    plot.hover(position={"x": x, "y": y})  # what is under the pointer is named
    page.locator("#timeline .tip").wait_for(state="visible")
    assert page.evaluate(f"i => {report}.nameOf(i)", at) in page.locator(".tip").inner_text()
    page.mouse.wheel(0, -240)
    span = "(() => { const x = window.tensorprobe.timeline.plot.scales.x; return x.max - x.min })()"
    assert 0 < page.evaluate(span) < total
    page.keyboard.press("0")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    plot.click(position={"x": x, "y": y})
    page.locator("#call").wait_for(state="visible")
    shown = page.locator("#call h2").inner_text()
    assert shown == page.evaluate(f"i => {report}.nameOf(i)", at)
    assert shown == made("llama", "silu").verdict["culprits"][0]["name"]


def test_by_keyboard_alone(made: Make, opened: Open) -> None:
    page = opened(made("llama", "silu").url)
    page.locator("#calls .vt-body").focus()
    for key in ("ArrowDown", "ArrowDown", "PageDown", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    page.locator("#call").wait_for(state="visible")
    name = page.locator("#call h2").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#call").is_visible()
    assert name
    page.locator("#graph").scroll_into_view_if_needed()
    module = page.locator("#graph .box.module").first
    module.wait_for()
    name = module.get_attribute("data-module")
    module.focus()
    page.keyboard.press("Enter")
    assert page.locator(f'[data-module="{name}"]').get_attribute("aria-expanded") == "true"
    # one stop for Tab; arrows go on from there
    assert page.locator("#graph svg [tabindex='0']").count() == 1
    focused = "document.activeElement.getAttribute('aria-label')"
    page.locator("#graph .box.culprit").focus()
    before = page.evaluate(focused)
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) != before
    assert page.locator("#graph svg [tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#graph') === null")


def test_links_languages_and_colours_survive(made: Make, opened: Open) -> None:
    report = made("llama", "silu")
    page = opened(f"{report.url}#call=Functional.linear.3.forward&step=1")
    page.locator("#call").wait_for(state="visible")
    assert page.locator("#call h2").inner_text() == "Functional.linear.3.forward"
    assert "step 1" in page.locator("#call").inner_text()
    page.locator("#call").press("Escape")
    verdict = page.locator("#verdict")
    assert "hyperparameters.args.wrong: silu here, not set there" in verdict.inner_text()
    assert "The actual side is wrong: actual" in verdict.inner_text()
    commands = verdict.locator("code").all_inner_texts()
    assert any(each.endswith(f"=cpu {PROGRAM} llama --wrong silu") for each in commands)
    page.locator("#language").click()
    assert "出现偏差" in page.locator("#answer").inner_text()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    reason = report.verdict["culprits"][0]["reason"]
    assert page.locator("#verdict .reason").first.inner_text() == in_chinese(reason)
    assert reason not in page.locator("body").inner_text()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before

    page = opened(report.url, locale="zh-CN", color_scheme="dark")
    assert "出现偏差" in page.locator("#answer").inner_text()


@pytest.mark.slow
def test_on_paper_nothing_is_folded(made: Make, opened: Open) -> None:
    page = opened(made("llama", "silu").url)
    assert page.locator("#environments[open]").count() == 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.locator("#graph .box").first.wait_for()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#environments[open]").count() == 0
    page.emulate_media(media="print")
    grey = page.locator("#verdict").evaluate("e => getComputedStyle(e).borderLeftColor")
    assert len(set(re.findall(r"\d+", grey))) == 1


def test_both_runs_stand_side_by_side(made: Make, opened: Open) -> None:
    page = opened(made("llama", "silu").url)
    page.locator("#graph").scroll_into_view_if_needed()
    page.locator("#graph .box").first.wait_for()
    page.locator("#graph select").nth(2).select_option("two")
    panes = page.locator("#graph .pane")
    assert panes.count() == 2
    panes.first.evaluate("pane => { pane.scrollTop = 40 }")
    page.wait_for_timeout(200)
    assert panes.last.evaluate("pane => pane.scrollTop") == 40
    page.get_by_placeholder("Find a module or call").fill("down_proj")
    page.keyboard.press("Enter")
    selected = page.locator("#graph .box.selected").first
    selected.wait_for()
    assert selected.get_attribute("data-call")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_it_is_accessible(made: Make, opened: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    report = made("llama", "silu")
    name = report.verdict["culprits"][0]["name"]
    page = opened(f"{report.url}#call={name}", color_scheme=scheme)
    page.locator("#call canvas").first.wait_for()
    page.locator("#graph").scroll_into_view_if_needed()
    page.locator("#graph .box").first.wait_for()
    found = axe.Axe().run(page).response["violations"]
    told = [(each["id"], each["impact"], each["nodes"][0]["html"][:200]) for each in found]
    assert told == []


ATTACKS = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "\"'><svg onload=alert(4)>",
    "javascript:alert(5)",
    "<!--<script>",
    "]]>{{constructor.constructor('alert(6)')()}}",
    "\u202egpj.exe\u2066",
    "\x00\x1b[2J\u2028\u2029\ud800",
    "http://127.0.0.1:9/x.png",
    "__proto__",
    "${alert(7)}`",
    "A" * 10_000_000,
]


def _hostile(capture: Capture, of: int) -> Capture:
    """The capture with an attack in the place of every name."""
    names: dict[str, str] = {}

    def attack(text: str) -> str:
        if text not in names:
            n = len(names)
            # the long one a few times only: it is as long as all others together
            kinds = ATTACKS if n < len(ATTACKS) else ATTACKS[:-1]
            names[text] = f"{kinds[n % len(kinds)]}{n}" if n % len(kinds) != 10 else "__proto__" * n
        return names[text]

    def tensor(record: TensorRecord, old: str, new: str) -> TensorRecord:
        return msgspec.structs.replace(record, name=record.name.replace(old, new))

    def call(each: Call) -> Call:
        new = attack(each.name)
        records = tuple(tensor(record, each.name, new) for record in each.tensors)
        return msgspec.structs.replace(
            each, name=new, op=attack(each.op), module=attack(each.module or "m"),
            stack=tuple(map(attack, each.stack)), notes=tuple(ATTACKS[:-1]),
            parent=attack(each.parent) if each.parent else None, thread=ATTACKS[0],
            tensors=records, args=(*ATTACKS[:-1], Special("dtype", ATTACKS[of]), 10**5000, of),
            kwargs={text: text for text in ATTACKS[:-1]},
        )  # fmt: skip

    gaps = [Gap(text, text) for text in ATTACKS]
    facts = {"python": ATTACKS[0], "command": ATTACKS[1], "tool": f"{ATTACKS[2]}{of}"}
    return Capture(Path(f"<b>{of}"), "native", map(call, capture.calls), gaps, facts)


def test_nothing_in_a_hostile_capture_is_executed(tmp_path: Path, opened: Open) -> None:
    def program(scale: float) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        (net(torch.ones(2, 4)) * scale).square().sum().backward()

    sides = [
        _hostile(record(tmp_path / f"{n}", lambda s=scale: program(s)), n)
        for n, scale in enumerate((1.0, 1.5))
    ]
    comparison = tp.compare(*sides, replay=False)
    assert comparison.verdict.culprits
    comparison.save(tmp_path / "out")
    path = tmp_path / "out" / "report.html"
    assert path.stat().st_size < 8e6
    page = opened(path.as_uri())
    page.get_by_role("button", name="Open this call").click()
    page.locator("#call").wait_for(state="visible")
    page.locator("#call h3", has_text="Stack").wait_for()
    page.locator("#graph").scroll_into_view_if_needed()
    page.locator("#graph .box").first.wait_for()
    page.get_by_role("button", name="Way to the loss").click()
    page.locator("#calls input").fill("<script>")
    page.locator("#calls .vt-row").nth(1).click()
    page.locator("#language").click()
    page.wait_for_timeout(300)
    # what the page is made of has no element of theirs
    assert page.locator("img, svg[onload], iframe, object, embed").count() == 0
    assert page.locator("script:not([type])").count() == 1
    assert page.evaluate("({}).polluted === undefined")


def _attacked(value: Any, attack: str) -> Any:
    """The same with the attack in the place of every text."""
    if isinstance(value, dict):
        return {key: _attacked(part, attack) for key, part in value.items()}
    if isinstance(value, list):
        return [_attacked(part, attack) for part in value]
    return attack if isinstance(value, str) else value


DOCUMENTS: dict[str, dict[str, Any]] = {
    "check": {
        "counts": {"calls": 1, "checked": 1, "pass": 0, "fail": 1, "crashed": 0, "skipped": 0},
        "notes": ["n"],
        "calls": [{
            "name": "a", "op": "o", "module": "m", "verdict": "fail", "reason": "r", "error": 2.0,
            "alike": 0, "repro": "c", "recorded": "w", "tensors": [{
                "name": "t", "device_dtype": "d", "shape": ["s"], "error": 1.0, "limit": 1.0,
                "max_abs": 1.0, "reason": "r",
            }],
        }],
    },
    "guard": {
        "warnings": [{"reason": "w"}],
        "findings": [{
            "name": "a", "kind": "nonfinite", "step": 0, "rank": 0, "module": "m", "op": "o",
            "reason": "r", "stack": ["s"], "metrics": {"output.0": {"dtype": "d"}}, "affected": 2,
            "inputs": "i", "repro": "p", "travelled": ["b"], "reached": "l", "next": "n",
        }],
    },
    "incident": {
        "incidents": [{
            "node": "a", "op_type": "t", "conclusion": "c", "next": ["n", "tensorprobe x"],
            "kernel": "k", "files": {"f": "g"}, "inputs": [{"x": "y"}], "warnings": ["w"],
            "missing": [{"what": "w", "why": "y", "settings": ["s"]}], "error_codes": ["0x1"],
        }],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_nothing_in_a_hostile_document_is_executed(kind: str, tmp_path: Path, opened: Open) -> None:
    for number, attack in enumerate(ATTACKS[:4]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = _attacked(DOCUMENTS[kind], attack)
        if kind == "check":
            found["calls"][0]["verdict"] = "fail"
        (folder / FILES[kind][0]).write_bytes(msgspec.json.encode(found))
        page = opened(write_document(kind, folder).as_uri())
        if kind == "check":
            page.locator("#calls .vt-spacer .vt-row").first.click()
        page.locator("#language").click()
        assert attack in page.locator("main").inner_text()
        assert page.locator("img, svg[onload], iframe, object, embed").count() == 0
        assert page.locator("script:not([type])").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 720])  # a telephone; a screen at 200 %
def test_nothing_sticks_out_of_a_narrow_window(made: Make, opened: Open, width: int) -> None:
    page = opened(made("llama", "silu").url, viewport={"width": width, "height": 800})
    page.locator("#graph").scroll_into_view_if_needed()
    page.locator("#graph .box").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("button.primary").first.click()
    page.locator("#call canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_policy_lets_no_other_script_run(made: Make, browser: Any) -> None:
    page = browser.new_page()
    page.goto(made("llama", "silu").url)
    page.wait_for_selector("main")
    ran = page.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';
        document.body.append(s); return window.ran ?? 0 }"""
    )
    assert ran == 0
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 1, () => 0)") == 0
    page.close()
