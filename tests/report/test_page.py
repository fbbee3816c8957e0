"""The page as a file: what is in it, that nothing can get out of it, and how large it gets."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorprobe as tp
from recorded import ROOT, record
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import distance
from tensorprobe.records import Capture
from tensorprobe.report import html
from tensorprobe.report.page_data import comparison_data, shown, unpacked
from tensorprobe.report.serving import _Details
from tensorprobe.report.tensor_pictures import picture_of

WEB = ROOT / "web"
PAGE = ROOT / "src" / "tensorprobe" / "report" / "page"


def network(scale: float = 1.0, eps: float = 1e-5) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps=eps), torch.nn.Linear(8, 2)
    )
    (net(torch.randn(3, 4)) * scale).square().sum().backward()


def two_runs(home: Path) -> list[Capture]:
    return [
        record(home / name, lambda e=eps: network(eps=e))
        for name, eps in (("actual", 1e-2), ("expected", 1e-5))
    ]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tp.Comparison:
    return tp.compare(*two_runs(tmp_path_factory.mktemp("runs")))


def blocks(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', page, re.S)
    return {name: json.loads(text) for name, text in found}


def test_the_columns_say_what_the_comparison_does(comparison: tp.Comparison) -> None:
    data = comparison_data(comparison)
    index, details = data.index, _Details(data.details)
    names = unpacked("i", index["calls"]["name"])
    errors = unpacked("f", index["calls"]["error_out"])
    assert index["n"] == len(comparison.pairs) == len(names)
    for at, pair in enumerate(comparison.pairs):
        assert index["strings"][names[at]] == pair.call.name
        outputs = [distance(row) for row in pair.tensors if row.role == "output"]
        if "empty" not in pair.call.op:
            assert errors[at] == pytest.approx(max(outputs, default=0.0), rel=1e-6)
        one = details.of(at)
        assert [one["strings"][n] for n in one["stacks"][0]] == list(map(shown, pair.call.stack))
        got = unpacked("d", one["values"])
        for k, (row, value) in enumerate(
            zip(pair.tensors, unpacked("i", one["tensors"]["value"]), strict=True)
        ):
            assert one["strings"][unpacked("i", one["tensors"]["name"])[k]] == row.name
            summary = row.actual.summary if row.actual else None
            if summary is not None and value >= 0 and summary.norm is not None:
                assert got[value * 24 + 3] == summary.norm
    (culprit,) = index["verdict"]["culprits"]
    assert culprit["name"] == "Functional.layer_norm.0.forward"
    assert "layer_norm" in culprit["op"]
    (more,) = index["culprits"]
    assert more["next"].startswith("tensorprobe show ")
    assert "torch.nn.LayerNorm" not in more["next"]


def test_edges_are_the_recorded_data_flow(comparison: tp.Comparison) -> None:
    index = comparison_data(comparison).index
    names = [index["strings"][n] for n in unpacked("i", index["calls"]["name"])]
    pairs = zip(*(unpacked("i", index["edges"][end]) for end in ("source", "target")), strict=True)
    edges = {(names[a], names[b]) for a, b in pairs}
    assert ("Functional.linear.0.forward", "Functional.layer_norm.0.forward") in edges
    assert ("Functional.layer_norm.0.forward", "Functional.linear.1.forward") in edges
    assert ("Functional.linear.0.forward", "Functional.linear.1.forward") not in edges


def test_the_file_is_one_page_with_a_policy(comparison: tp.Comparison, tmp_path: Path) -> None:
    paths = comparison.save(tmp_path / "out")
    assert [path.name for path in paths] == ["verdict.json", "comparison.csv", "report.html"]
    page = paths[2].read_text()
    assert set(blocks(page)) == {"index", "details"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.S).replace(
        "http-equiv", ""
    )
    verdict = json.loads(paths[0].read_text())
    assert blocks(page)["index"]["verdict"] == verdict


def test_no_text_gets_out_of_its_block() -> None:
    attack = "</script><script>alert(1)</script><!--"
    page = html.page(attack, [attack], {"index": html.json_block({"name": attack})}).decode()
    assert "alert(1)</script>" not in page.replace("&lt;", "")
    assert blocks(page)["index"] == {"name": attack}
    assert page.count("<script") == 2


def test_long_hidden_and_broken_texts_are_shown_safely() -> None:
    assert shown("a" * 10_000_000).endswith("... (10000000 characters)")
    assert shown("\u202egpj\ud800\x1b") == "\\u202egpj\\ud800\\x1b"


def test_the_script_waits_for_the_first_block_only() -> None:
    blocks = {"index": b"1", "details": b"2"}
    page = html.page("", (), blocks).decode()
    index, script, details = (page.index(f"<script{each}") for each in (
        ' type="application/json" id="index"', ">", ' type="application/json" id="details"',
    ))  # fmt: skip
    assert index < script < details


def test_the_page_without_data_is_small() -> None:
    assert len(html.page("", (), {})) < 900_000


def test_what_is_too_large_is_beside_the_page(
    comparison: tp.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "LARGEST_NBYTES", 40_000)
    monkeypatch.setattr(html, "_MOST_CALLS", 10)
    for limit in (40_000, 2_000):
        monkeypatch.setattr(html, "LARGEST_NBYTES", limit)
        paths = html.write_comparison(tmp_path, comparison)
        assert [path.name for path in paths] == ["report.html", "report.data"]
        index = blocks(paths[0].read_text())["index"]
        assert index["lacks"] is True
        whole = html.read_data(paths[1])
        assert whole.index["n"] == len(comparison.pairs)
        assert len(whole.details["stacks"]) > 0
        if limit == 2_000:
            assert index["of"] == len(comparison.pairs)
        names = {index["strings"][n] for n in unpacked("i", index["calls"]["name"])}
        assert comparison.verdict.culprits[0].name in names
    monkeypatch.setattr(html, "LARGEST_NBYTES", 20 << 20)
    html.write_comparison(tmp_path, comparison)
    assert not (tmp_path / "report.data").exists()


# --- pictures


def pair_of(a: np.ndarray, e: np.ndarray, tmp_path: Path) -> TensorPair:
    """Two arrays as a recording keeps them."""
    records = []
    for name, values in (("a", a), ("e", e)):
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        with tp.Recorder(folder, keep="tensors") as rec:
            rec.save("x", torch.from_numpy(values))
        (call,) = tp.load(folder).calls
        records.append(call.tensors[0])
    return TensorPair("output.0", *records)


def cells(picture: dict[str, Any], key: str) -> np.ndarray:
    rows, columns, text = picture["maps"]["of"][key]
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(rows, columns)


def test_a_heat_map_shows_the_row_that_is_wrong(tmp_path: Path) -> None:
    e = np.random.default_rng(0).standard_normal((4, 96, 64)).astype(np.float32)
    a = e.copy()
    a[2, 51] *= 1.5
    picture = picture_of(pair_of(a, e, tmp_path))
    assert picture is not None
    hot = np.argwhere(cells(picture, "0,1"))
    assert {tuple(each) for each in hot.tolist()} == {(2, 51 * 32 // 96)}
    assert sorted(picture["maps"]["of"]) == ["0,1", "0,2", "1,2"]
    place, ours, theirs = picture["worst"][0]
    assert place[:2] == [2, 51]
    assert (ours, theirs) == (float(a[tuple(place)]), float(e[tuple(place)]))
    assert abs(ours - theirs) == pytest.approx(float(np.abs(a - e).max()))
    assert picture["errors"]["equal"] == e.size - 64
    assert sum(picture["errors"]["counts"]) == 64
    assert sum(picture["histogram"]["counts"][1]) == e.size


@pytest.mark.parametrize(
    ("a", "e"),
    [
        (np.array(1.5), np.array(1.0)),
        (np.arange(6), np.arange(6)[::-1].copy()),
        (np.array([True, False]), np.array([True, True])),
        (np.array([1 + 1j, 2]), np.array([1, 2 - 1j])),
        (np.array([np.nan, 1, np.inf]), np.array([0.0, 1, -np.inf])),
        (np.full((2, 2), np.nan), np.full((2, 2), np.nan)),
        (np.array([3e38, 1], np.float32), np.array([-3e38, np.nan], np.float32)),
        (np.zeros((2,) * 8), np.ones((2,) * 8)),
    ],
    ids=["0-d", "integer", "bool", "complex", "nonfinite", "all nan", "huge", "8 dimensions"],
)
def test_every_kind_of_tensor_has_a_picture(a: np.ndarray, e: np.ndarray, tmp_path: Path) -> None:
    picture = picture_of(pair_of(a, e, tmp_path))
    assert picture is not None
    assert "problem" not in picture
    text = json.dumps(picture, allow_nan=False)
    assert json.loads(text)["shape"] == list(a.shape)
    with np.errstate(all="ignore"):
        differs = not np.array_equal(a, e, equal_nan=a.dtype.kind == "f")
    assert bool(picture["worst"]) == differs


def test_of_a_large_tensor_some_are_looked_at_and_the_worst_is_known(tmp_path: Path) -> None:
    e = np.zeros((64, 4096), np.float32)
    a = e.copy()
    a[13, 77] = 5.0
    for name, values in (("actual", a), ("expected", e)):
        with tp.Recorder(tmp_path / name, keep="tensors") as rec:
            rec.save("x", torch.from_numpy(values))
    comparison = tp.compare(tmp_path / "actual", tmp_path / "expected", replay=False)
    (row,) = comparison.pairs[0].tensors
    picture = picture_of(row, most=1 << 12)
    assert picture is not None
    assert picture["steps"] == [64, 1]
    assert picture["worst"][0] == [[13, 77], 5.0, 0.0]


def test_a_tensor_that_is_gone_is_said(tmp_path: Path) -> None:
    comparison = tp.compare(*two_runs(tmp_path), replay=False)
    for file in (tmp_path / "actual").rglob("*.safetensors"):
        file.unlink()
    index = comparison_data(comparison).index
    problems = [p.get("problem", "") for made in index["pictures"].values() for p in made]
    assert any("cannot be read" in text or "No such file" in text for text in problems)


def test_bfloat16_is_exact(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    for name, x in (("a", values), ("e", values.flip(0))):
        with tp.Recorder(tmp_path / name, keep="tensors") as rec:
            rec.save("x", x)
    (row,) = tp.compare(tmp_path / "a", tmp_path / "e", replay=False).pairs[0].tensors
    picture = picture_of(row)
    assert picture is not None
    assert sorted(each[1] for each in picture["worst"]) == [1.0, 1.0078125]
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


# --- Model Explorer


def test_model_explorer_has_the_graph_and_its_errors(
    comparison: tp.Comparison, tmp_path: Path
) -> None:
    paths = comparison.save(tmp_path / "out", model_explorer=True)
    graph = json.loads(paths[-2].read_text())
    errors = json.loads(paths[-1].read_text())
    (one,) = graph["graphs"]
    nodes = {node["label"]: node for node in one["nodes"]}
    norm = nodes["Functional.layer_norm.0.forward"]
    assert norm["namespace"] == "1"
    assert nodes["Functional.layer_norm.0.backward"]["namespace"] == "backward/1"
    assert nodes["Torch.randn.0.forward"]["namespace"] == "set-up"
    assert [edge["sourceNodeId"] for edge in norm["incomingEdges"]].count(
        nodes["Functional.linear.0.forward"]["id"]
    )
    found = errors[one["id"]]["results"][norm["id"]]
    assert found["value"] == pytest.approx(comparison.verdict.culprits[0].own_error, rel=0.5)
    assert found["bgColor"] == "#d1430b"
    assert all(math.isfinite(each["value"]) for each in errors[one["id"]]["results"].values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_model_explorers_own_classes_take_the_files(
    comparison: tp.Comparison, tmp_path: Path
) -> None:
    """The package is not run: it looks for updates. Its classes say which fields there are."""
    where = tmp_path / "package"
    words = ["pip", "install", "--quiet", "--no-deps", "--target", where, "ai-edge-model-explorer"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ai-edge-model-explorer cannot be installed: {done.stderr[-200:]}")
    paths = comparison.save(tmp_path / "out", model_explorer=True)
    code = MODEL_EXPLORER.format(where=str(where), graph=str(paths[-2]), errors=str(paths[-1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(nodes_of(paths[-2]))


def nodes_of(path: Path) -> list[Any]:
    return [node for graph in json.loads(path.read_text())["graphs"] for node in graph["nodes"]]


MODEL_EXPLORER = """
import json, sys, types
package = types.ModuleType("model_explorer")
package.__path__ = [{where!r} + "/model_explorer"]
sys.modules["model_explorer"] = package
from model_explorer import graph_builder as g, node_data_builder as n
found = json.load(open({graph!r}))
for graph in found["graphs"]:
    for node in graph["nodes"]:
        node["attrs"] = [g.KeyValue(**each) for each in node["attrs"]]
        node["incomingEdges"] = [g.IncomingEdge(**each) for each in node["incomingEdges"]]
    graph["nodes"] = [g.GraphNode(**node) for node in graph["nodes"]]
    ids = {{node.id for node in graph["nodes"]}}
    assert len(ids) == len(graph["nodes"])
    assert {{e.sourceNodeId for node in graph["nodes"] for e in node.incomingEdges}} <= ids
found["graphs"] = [g.Graph(**graph) for graph in found["graphs"]]
collection = g.GraphCollection(**found)
text = open({errors!r}).read()
errors = json.loads(text)
for each in errors.values():
    each["results"] = {{k: n.NodeDataResult(**v) for k, v in each["results"].items()}}
    each["thresholds"] = [n.ThresholdItem(**v) for v in each["thresholds"]]
data = n.ModelNodeData({{k: n.GraphNodeData(**each) for k, each in errors.items()}})
written = json.loads(data.to_json_string())
for key, each in json.loads(text).items():
    assert {{k: written[key][k] for k in each}} == each
assert set(data.graphsData) == {{graph.id for graph in collection.graphs}}
assert all(set(data.graphsData[graph.id].results) == {{node.id for node in graph.nodes}}
           for graph in collection.graphs)
print(sum(len(graph.nodes) for graph in collection.graphs))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_model_explorer_itself_opens_them(
    comparison: tp.Comparison, tmp_path: Path, browser: Any
) -> None:
    """With no error, every call of forward in sight, and the largest error as the files have it."""
    where = tmp_path / "package"
    words = ["pip", "install", "--quiet", "--target", where, "ai-edge-model-explorer"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ai-edge-model-explorer cannot be installed: {done.stderr[-200:]}")
    paths = comparison.save(tmp_path / "out", model_explorer=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = SERVER.format(graph=str(paths[-2]), errors=str(paths[-1]), port=port)
    environ = {**os.environ, "PYTHONPATH": str(where), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, text=True, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("http://")).strip()
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(url, wait_until="domcontentloaded")  # fonts are asked for elsewhere, and not had
        page.get_by_text("model_explorer_errors.json").first.wait_for(timeout=120_000)
        page.get_by_text("Aggregated stats").wait_for()
        shown = page.inner_text("body")
        page.close()
        server.terminate()
    (errors,) = json.loads(paths[-1].read_text()).values()
    assert f"{len(nodes_of(paths[-2]))} nodes" in shown
    largest = max(each["value"] for each in errors["results"].values())
    assert float(re.search(r"Max\t([\d.e+]+)", shown)[1]) == pytest.approx(largest)
    assert all(box in shown for box in ("backward", "set-up", "step 0, rank 0"))


SERVER = """
import model_explorer
config = model_explorer.config()
config.add_model_from_path({graph!r})
config.add_node_data_from_path({errors!r})
model_explorer.visualize_from_config(config, port={port}, no_open_in_browser=True)
"""


# --- what it is built from


def test_no_source_of_the_page_makes_markup_of_text() -> None:
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    )
    for path in sorted((WEB / "src").rglob("*.ts")):
        text = path.read_text()
        assert [word for word in banned if word in text] == [], path


def test_the_lockfile_names_no_address_of_a_registry() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert all("resolved" not in package for package in lock["packages"].values())
    wanted = json.loads((WEB / "package.json").read_text())
    exact = {**wanted["dependencies"], **wanted["devDependencies"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in exact.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_has_what_the_source_builds(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm: Node 20 builds the page")
    copy = tmp_path / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "src" / "tensorprobe" / "report").mkdir(parents=True)
    done = subprocess.run(["npm", "ci"], cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode and "ENOTFOUND" in done.stderr + done.stdout:
        pytest.skip("npm reaches no registry")
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        ["npm", "run", "build"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = tmp_path / "src" / "tensorprobe" / "report" / "page"
    files = sorted(path.name for path in PAGE.iterdir())
    assert sorted(path.name for path in built.iterdir()) == files
    for name in files:
        assert (built / name).read_bytes() == (PAGE / name).read_bytes(), f"{name}: make web"
