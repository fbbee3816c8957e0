"""anomaly_analyze_{time}.json, which msprobe's overflow_check writes."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tensorprobe.overflow.across_ranks import FirstNonfinite
from tensorprobe.peers.msprobe.msprobe_writing import frame_text, record_of
from tensorprobe.records import Call, Capture


def write_anomalies(found: FirstNonfinite, capture: Capture, folder: Path) -> Path:
    """Write the first calls as msprobe does: what they were given, who called them and where."""
    result: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for origin in found.first:
        call = capture.call(origin.name, step=origin.step, rank=origin.rank)
        result[f"rank_{call.rank}"].append(
            {
                "op_name": call.name,
                "data_info": record_of(call),
                "construct_info": _around(call, capture),
                "stack_info": [frame_text(frame) for frame in call.stack],
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"anomaly_analyze_{time.time_ns()}.json"
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(result, file, indent=2)
    return path


def _around(call: Call, capture: Capture) -> list[str]:
    """The calls it ran in, the outermost first, and itself."""
    parents = {c.name: c.parent for c in capture.calls(step=call.step, rank=call.rank)}
    names = [call.name]
    while (parent := parents.get(names[0])) and parent not in names:
        names.insert(0, parent)
    return names
