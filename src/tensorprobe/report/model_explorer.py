"""A comparison for Google's Model Explorer (ai-edge-model-explorer): a graph, and its errors.

    model-explorer OUT/model_explorer.json        then add model_explorer_errors.json as node data

Each step of a rank is a graph: the modules of forward, and beside them a box each for what came
before the model, for backward and for the optimizer. Infinite errors are written as the largest
float: JSON has no word for them, and a node without a value would look healthy.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.report.page_data import (
    BOTH,
    CONTAINER,
    ONLY_ACTUAL,
    PHASES,
    comparison_data,
    shown,
    unpacked,
)

if TYPE_CHECKING:
    from tensorprobe.comparing.comparison import Compared

GRAPH_FILE = "model_explorer.json"
ERRORS_FILE = "model_explorer_errors.json"
_SIDES = {BOTH: "both", ONLY_ACTUAL: "actual only"}
# In roundings, as far as each colour goes.
_COLOURS = [(0.0, "#f1f3f5"), (16.0, "#cfe6f5"), (1e4, "#fde3b0"), (sys.float_info.max, "#f7b58f")]


def write_model_explorer(folder: Path, comparison: Compared) -> list[Path]:
    """Write both files and give their paths."""
    graphs, errors = _graphs(comparison)
    paths = [folder / GRAPH_FILE, folder / ERRORS_FILE]
    label = shown(f"{comparison.verdict.actual} against {comparison.verdict.expected}")
    paths[0].write_bytes(msgspec.json.encode({"label": label, "graphs": graphs}))
    paths[1].write_bytes(msgspec.json.encode(errors))
    return paths


def _graphs(comparison: Compared) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    index = comparison_data(comparison, pictures=False).index
    calls, strings = index["calls"], index["strings"]
    columns = {
        name: unpacked("i", calls[name]) for name in ("name", "op", "module", "step", "rank")
    }
    flags, side = unpacked("H", calls["flags"]), unpacked("B", calls["side"])
    phases = unpacked("B", calls["phase"])
    boxes = ["" if phase == "forward" else phase for phase in PHASES]
    if PHASES.index("forward") not in phases:  # a program without modules
        boxes[0] = ""
    given, made = unpacked("f", calls["error_in"]), unpacked("f", calls["error_out"])
    culprits = {(c["rank"], c["step"], c["name"]) for c in index["verdict"]["culprits"]}
    sources: dict[int, list[int]] = {}
    edges = index["edges"]
    for source, target in zip(
        unpacked("i", edges["source"]), unpacked("i", edges["target"]), strict=True
    ):
        sources.setdefault(target, []).append(source)
    graphs: dict[str, dict[str, Any]] = {}
    errors: dict[str, Any] = {}
    for at in range(index["n"]):
        if flags[at] & CONTAINER:
            continue
        text = {name: strings[columns[name][at]] for name in ("name", "op", "module")}
        step, rank = columns["step"][at], columns["rank"][at]
        key = f"step {step}, rank {rank}"
        graph = graphs.setdefault(key, {"id": key, "nodes": []})
        is_culprit = (rank, step, text["name"]) in culprits
        facts = {
            "op": text["op"], "side": _SIDES.get(side[at], "expected only"),
            "error in": f"{given[at]:g}", "error out": f"{made[at]:g}",
            "culprit": "yes" if is_culprit else "no",
        }  # fmt: skip
        graph["nodes"].append({
            "id": str(at), "label": text["name"],
            "namespace": _namespace(boxes[phases[at]], text["module"]),
            "attrs": [{"key": name, "value": value} for name, value in facts.items()],
            "incomingEdges": [
                {"sourceNodeId": str(source), "targetNodeInputId": str(n)}
                for n, source in enumerate(sources.get(at, ()))
                if (columns["step"][source], columns["rank"][source]) == (step, rank)
            ],
        })  # fmt: skip
        found = errors.setdefault(key, {"results": {}, "thresholds": _thresholds()})["results"]
        found[str(at)] = {"value": min(made[at], sys.float_info.max)}
        if is_culprit:
            found[str(at)] |= {"bgColor": "#d1430b", "textColor": "#ffffff"}
    return list(graphs.values()), errors


def _namespace(box: str, module: str) -> str:
    return "/".join(filter(None, (box, module.replace("/", "_").replace(".", "/"))))


def _thresholds() -> list[dict[str, Any]]:
    return [{"value": value, "bgColor": colour} for value, colour in _COLOURS]
