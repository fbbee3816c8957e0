"""Two runs of some ranks with a fault on one, written by hand: no torch is needed."""

from __future__ import annotations

import json
from pathlib import Path

_OPS = ("sin", "cos", "relu", "tanh", "exp")


def write_run(folder: Path, ranks: int, faulty: int | None = None, calls: int = 20) -> Path:
    """A run of which rank `faulty` gives other numbers from its fifth call on."""
    for rank in range(ranks):
        step = folder / f"rank{rank}" / "step0"
        step.mkdir(parents=True)
        (step / "calls.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in _lines(calls, rank == faulty))
        )
        about = {"format": 1, "run": "x", "rank": rank}
        (folder / f"rank{rank}" / "rank.json").write_text(json.dumps(about))
    facts = {"format": 1, "run": "x", "config": {"keep": "stats"}}
    (folder / "capture.json").write_text(json.dumps(facts))
    return folder


def _lines(calls: int, is_faulty: bool) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = [_value(0, 1.0)]
    for n in range(calls):
        op = _OPS[n % len(_OPS)]
        size = 1.0 / (n + 2) * (1.5 if is_faulty and n >= 4 else 1.0)
        name = f"Torch.{op}.{n // len(_OPS)}.forward"
        lines += [
            {"type": "call", "id": n, "name": name, "op": f"torch.{op}", "args": [_tensor(n)]},
            _value(n + 1, size),
            {"type": "end", "id": n, "outputs": _tensor(n + 1)},
        ]
    return [*lines, {"type": "closed", "calls": calls, "gaps": 0}]


def _value(number: int, size: float) -> dict[str, object]:
    return {"type": "value", "id": number, "summary": [-size, size, size / 8, size * 3, 0, 0, 0]}


def _tensor(value: int) -> dict[str, object]:
    body = {"dtype": "float32", "shape": [4, 4], "stride": [4, 1], "value": value}
    return {"tensor": body}
