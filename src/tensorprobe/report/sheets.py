"""Pages of an answer with tables below it: ranks, checkpoints, environments, stages of a compiler.

Each is made of the JSON that its verb writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tensorprobe.records import count
from tensorprobe.report.page_data import source_of
from tensorprobe.report.ranks_file import HEADS
from tensorprobe.store.frames import users_line

_MOST_ROWS = 500
_MOST_FACTS = 50

Row = Sequence[Any]
Outcome = Literal["match", "diverged", "incomparable"]


class SheetPart(msgspec.Struct, omit_defaults=True):
    """A table, lines of source or curves, under a title."""

    title: str
    head: list[str] = []
    right: list[int] = []  # columns that are aligned right
    rows: list[Row] = []
    more: int = 0  # rows that are left out
    source: dict[str, Any] | None = None
    curves: list[dict[str, Any]] = []
    sides: list[str] = []  # of curves


class Sheet(msgspec.Struct):
    """What a page shows, from top to bottom. Sentences are translated; names stay as they are."""

    outcome: Outcome
    badge: str
    answer: str
    about: list[str] = []
    facts: list[str] = []
    commands: list[str] = []
    parts: list[SheetPart] = []
    notes: list[str] = []


def sentence(text: str) -> dict[str, str]:
    """A cell with words of ours."""
    return {"text": text}


def table(
    title: str, head: list[str], rows: Iterable[Row], right: list[int] | None = None
) -> SheetPart:
    """A table of the first rows, and how many there are more."""
    every = list(rows)
    return SheetPart(title, head, right or [], every[:_MOST_ROWS], max(0, len(every) - _MOST_ROWS))


def _filled(parts: Iterable[SheetPart]) -> list[SheetPart]:
    return [part for part in parts if part.rows or part.source or part.curves]


def ranks_sheet(found: Mapping[str, Any]) -> Sheet:
    """Of ranks.json: in what the ranks of a run do not agree, and their first NaN."""
    findings, nonfinite = found.get("findings", []), found["nonfinite"]
    several = len(found["ranks"]) > 1
    first = nonfinite["first"]
    looked = ", ".join(
        count(n, word)
        for n, word in (
            (found["calls"], "call"), (len(found["ranks"]), "rank"), (len(found["steps"]), "step")
        )
    )  # fmt: skip
    sheet = Sheet("match", "Agree", "the ranks agree, and no call makes NaN or infinity")
    if findings:
        sheet.outcome, sheet.badge = "diverged", HEADS[findings[0]["kind"]].capitalize()
        sheet.answer = findings[0]["reason"]
        sheet.about = [_place(findings[0])]
    elif first:
        sheet.outcome, sheet.badge = "diverged", f"First {first[0]['holds']}"
        sheet.answer = f"{first[0]['name']} (step {first[0]['step']}, rank {first[0]['rank']})"
        sheet.about = [_place(first[0]), first[0]["reason"]]
    elif nonfinite["notes"] or not several:
        sheet.outcome = "incomparable"
        sheet.badge = "Not all is known"
        sheet.answer = "no call was seen to make NaN or infinity"
        if several:
            sheet.answer = f"the ranks agree where they were looked at; {sheet.answer}"
        else:
            sheet.notes.append("only one rank was recorded: it was not held against others")
    sheet.about = [line for line in sheet.about if line]
    sheet.facts = [f"'{found['run']}': {looked}", *_ranks_counts(found.get("counts", {}))]
    worst = (findings or first)[:1]
    if worst and worst[0].get("name") and worst[0].get("step") is not None:
        rank = worst[0]["rank"] if "rank" in worst[0] else (worst[0]["ranks"] or (0,))[0]
        call = f"{shlex.quote(worst[0]['name'])} --step {worst[0]['step']} --rank {rank}"
        sheet.commands = [f"tensorprobe show {shlex.quote(found['run'])} {call}"]
    sheet.parts = _filled((
        _source_part(worst),
        table(
            "Where ranks do not agree", ["what", "ranks", "step", "call", "line", "reason"],
            [
                (sentence(HEADS[each["kind"]]), _listed(each["ranks"]), _step(each), each["name"],
                 users_line(each["stack"]), sentence(each["reason"]))
                for each in findings
            ],
            [2],
        ),
        *(
            table(
                title, ["call", "holds", "step", "rank", "module", "line", "reason"],
                [
                    (each["name"], each["holds"], str(each["step"]), str(each["rank"]),
                     each["module"], users_line(each["stack"]), sentence(each["reason"]))
                    for each in nonfinite[name]
                ],
                [2, 3],
            )
            for title, name in (
                ("Where NaN or infinity begins", "first"),
                ("How it came to other ranks", "received"),
                ("Further calls that make it", "later"),
            )
        ),
    ))  # fmt: skip
    sheet.notes += [*found.get("notes", []), *nonfinite["notes"]]
    return sheet


def _ranks_counts(counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    linked = count(counts.get("communications", 0), "communication")
    judged = counts.get("communications judged", 0)
    replicas = count(counts.get("replicas", 0), "replica")
    return [
        f"{linked} linked, {judged} of them judged by what was given, {replicas} held against "
        "each other"
    ]


def _place(each: Mapping[str, Any]) -> str:
    step = each.get("step")
    parts = (each["name"], "" if step is None else f"step {step}", users_line(each["stack"]))
    return ", ".join(part for part in parts if part)


def _step(each: Mapping[str, Any]) -> str:
    return "" if each["step"] is None else str(each["step"])


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _source_part(found: Sequence[Mapping[str, Any]]) -> SheetPart:
    """The lines around the one that a finding names."""
    return SheetPart("Source", source=users_source(found[0]["stack"] if found else ()))


def users_source(stack: Sequence[str]) -> dict[str, Any] | None:
    """The lines around the user's own line of a stack, where this machine has them."""
    line = users_line(stack)
    frame = next((each for each in stack if line and each.endswith(line)), "")
    return source_of(frame) if frame else None


_OUTCOMES: dict[str, tuple[Outcome, str]] = {
    "match": ("match", "Match"),
    "rounding": ("incomparable", "Differ by rounding only"),
    "differ": ("diverged", "Differ"),
}
_WEIGHT_KINDS = {
    "differ": "differ", "shape": "other shape", "rounding": "rounding", "same values": "same values"
}  # fmt: skip


def checkpoints_sheet(found: Mapping[str, Any]) -> Sheet:
    """Of checkpoints.json: which weights and values differ, in which layers."""
    counts = found["counts"]
    outcome, badge = _OUTCOMES[found["verdict"]]
    words = (
        ("differ", "tensor", "by more than rounding"), ("rounding", "tensor", "by rounding"),
        ("only_actual", "tensor", "only in actual"),
        ("only_expected", "tensor", "only in expected"),
        ("values_differ", "value", "with other content"),
    )  # fmt: skip
    told = [f"{count(counts[key], noun)} {rest}" for key, noun, rest in words if counts[key]]
    equal = counts["equal"] + counts["same_values"]
    answer = ", ".join([*told, f"{equal} of {count(counts['compared'], 'tensor')} equal"])
    layers = [row for row in found["layers"] if row["differ"] or row["rounding"]]
    first = next((row for row in layers if row["differ"]), layers[0] if layers else None)
    sheet = Sheet(outcome, badge, answer)
    if first is not None:
        sheet.about = [f"first in {first['layer']}"]
    sheet.facts = [
        f"actual: {found['actual']} ({found['forms'][0]})",
        f"expected: {found['expected']} ({found['forms'][1]})",
    ]
    order = list(_WEIGHT_KINDS)
    rows = sorted(found["differences"], key=lambda row: order.index(row["kind"]))
    sheet.parts = _filled((
        table(
            "Layers that differ, in the order of the model",
            ["layer", "tensors", "differ", "by rounding", "of its size, at most"],
            [
                (row["layer"], row["tensors"], row["differ"], row["rounding"], row["max_rel_l2"])
                for row in layers
            ],
            [1, 2, 3, 4],
        ),
        table(
            "Tensors that differ",
            ["tensor", "", "dtype, shape", "numbers", "largest error", "of its size", "reason"],
            [
                (row["key"], sentence(_WEIGHT_KINDS[row["kind"]]),
                 " / ".join(dict.fromkeys(map(_form, row["dtype"], row["shape"]))),
                 f"{row['differing']:,} of {row['numel']:,}" if "differing" in row else "",
                 row.get("max_abs"), row.get("rel_l2"), sentence(row["reason"]))
                for row in rows
            ],
            [3, 4, 5],
        ),
        *(
            table(title, ["tensor", "dtype, shape"],
                  [(row["key"], _form(row["dtype"], row["shape"])) for row in found[name]])
            for title, name in (
                ("Only in actual", "only_actual"), ("Only in expected", "only_expected")
            )
        ),
        table(
            "Values that differ", ["name", "actual", "expected"],
            [(row["key"], _text(row["actual"]), _text(row["expected"])) for row in found["values"]],
        ),
        table("Content of another tensor", ["tensor", "the content there"],
              [(row["key"], row["there"]) for row in found["moved"]]),
        table("Names", ["actual", "expected", "how", "tensors"],
              [tuple(row[key] for key in ("actual", "expected", "how", "count"))
               for row in found["names"]],
              [3]),
    ))  # fmt: skip
    sheet.notes = list(found["notes"])
    return sheet


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)


_EFFECTS = {
    "numbers": "can change numbers",
    "maybe": "may change numbers",
    "none": "cannot change numbers",
}


def environments_sheet(found: Mapping[str, Any]) -> Sheet:
    """Of what `env compare` writes: the differences, those that move numbers first."""
    rows = found["differences"]
    outcome, badge = _OUTCOMES[found["verdict"]]
    kinds = {effect: sum(row["effect"] == effect for row in rows) for effect in _EFFECTS}
    told = [
        f"{count(number, 'difference')} that {_EFFECTS[effect]}"
        for effect, number in kinds.items()
        if number
    ]
    sheet = Sheet(outcome, badge, ", ".join([*told, f"{count(found['equal'], 'fact')} equal"]))
    if rows and rows[0]["effect"] != "none":  # the worst is the first
        ours, theirs = (_text(rows[0][side]) for side in ("actual", "expected"))
        sheet.about = [f"{rows[0]['fact']}: {ours} here, {theirs} there"]
    sheet.facts = [f"actual: {found['actual']}", f"expected: {found['expected']}"]
    sheet.parts = _filled((
        table(
            "What differs", ["effect", "fact", "actual", "expected", "reason"],
            [
                (sentence(_EFFECTS[row["effect"]]), row["fact"], _text(row["actual"]),
                 _text(row["expected"]), sentence(row["why"]))
                for row in rows
            ],
        ),
    ))  # fmt: skip
    alone = found["not_compared"]
    if alone:
        sheet.notes = [f"not compared: {', '.join(alone[:_MOST_FACTS])}"]
    return sheet


_STAGES: dict[str, tuple[Outcome, str, str]] = {
    "fault": ("diverged", "Fault", "a stage of torch.compile gave something else"),
    "match": ("match", "Match", "every graph that was judged gives what it says"),
    "incomparable": ("incomparable", "Not judged", "no run of a compiled graph could be judged"),
}


def compiled_sheet(found: Mapping[str, Any]) -> Sheet:
    """Of stages.json: which stage of torch.compile made a wrong result."""
    ranks = found["ranks"]
    findings = [each for rank in ranks for each in rank["findings"]]
    sheet = Sheet(*_STAGES[found["verdict"]])
    runs, judged = (sum(rank[name] for rank in ranks) for name in ("runs", "judged"))
    dynamo = sum(rank["judged_from_dynamo"] for rank in ranks)
    if judged and found["verdict"] == "incomparable":
        sheet.badge = "Not all is judged"
        sheet.answer = "the graphs that were judged give what they say; others could not be"
    sheet.facts = [
        f"{judged} of {count(runs, 'run')} of compiled graphs judged, {dynamo} of them against "
        "dynamo's graph"
    ]
    if findings:
        first = findings[0]
        sheet.badge = f"Fault: {first['stage']}"
        sheet.answer = first["text"]
        node = f"{first['node']} = {first['target']}" if first["node"] else ""
        parts = (first["compilation"], first["direction"], first["kernel"], node)
        sheet.about = [
            part for part in (", ".join(filter(None, parts)), users_line(first["stack"])) if part
        ]
        if first["script"]:
            sheet.commands = [f"python {shlex.quote(first['script'])}"]
    sheet.parts = _filled((
        _source_part(findings),
        table(
            "Faults", ["stage", "rank", "step", "compilation", "node", "kernel", "line", "reason"],
            [
                (each["stage"], str(each["rank"]), str(each["step"]),
                 f"{each['compilation']} {each['direction']}", each["node"] or "",
                 each["kernel"] or "", users_line(each["stack"]), sentence(each["text"]))
                for each in findings
            ],
            [1, 2],
        ),
        table(
            "Not judged", ["rank", "reason", "runs"],
            [
                (str(number), sentence(why), times)
                for number, rank in enumerate(ranks)
                for why, times in rank["unjudged"].items()
            ],
            [2],
        ),
    ))  # fmt: skip
    sheet.notes = [found["against"]] if found["against"] else []
    return sheet
