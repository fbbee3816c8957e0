"""The sentences of reports in Chinese: that none of a verdict is forgotten, and none takes long."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator

import pytest

from recorded import SRC
from tensorprobe.report.chinese import _sentences, in_chinese, sentences_in_chinese

# Templates of which a part is a sentence of its own: how they read.
COMPOSED = {
    "x0 is x2": "output.0 is off by 31 roundings (0.2 % of its size); 16 are explained by rounding",
    "x0; x2": "numerics.matmul_tf32 is True on rank 1, False expected, as on the other ranks; x2",
}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def templates(value: ast.expr) -> Iterator[str]:
    """What text an expression makes, with `x1`, `x2` where something is filled in."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        filled = (
            part.value if isinstance(part, ast.Constant) else f"x{number}"
            for number, part in enumerate(value.values)
        )
        yield "".join(map(str, filled))
    elif isinstance(value, ast.IfExp):
        yield from templates(value.body)
        yield from templates(value.orelse)


def reasons() -> Iterator[str]:
    """The reasons and notes that verdicts give, as comparing/ has them."""
    for path in sorted((SRC / "tensorprobe" / "comparing").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                name = getattr(target, "id", None) or getattr(target, "attr", None)
                yield from templates(node.value) if name == "reason" else ()
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("notes.append"):
                yield from templates(node.args[0])


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_every_reason_of_a_verdict_has_its_chinese(reason: str) -> None:
    reason = COMPOSED.get(reason, reason)
    chinese = in_chinese(reason)
    assert chinese is not None, "add it to src/tensorprobe/report/chinese.txt"
    assert CHINESE.search(chinese)
    for filled in re.findall(r"x\d", reason):
        assert filled in chinese, f"{filled} of the English is not in the Chinese"


def test_what_is_filled_in_is_translated_too() -> None:
    reason = (
        "replayed in float64 on its own inputs, the actual result output.0 is off by 0.18 % of its "
        "size, 57,874 times what rounding explains; the expected side's is within rounding"
    )
    assert in_chinese(reason) == (
        "\u7528\u5404\u81ea\u8bb0\u5f55\u7684\u8f93\u5165\u4ee5 float64 \u91cd\u653e\uff1a"
        "actual \u4e00\u4fa7\u7684\u7ed3\u679c output.0 \u504f\u79bb\u5176\u5927\u5c0f\u7684 "
        "0.18 %\uff0c\u662f\u820d\u5165\u6240\u80fd\u89e3\u91ca\u7684 57,874 \u500d\uff1b"
        "expected \u4e00\u4fa7\u7684\u7ed3\u679c\u5728\u820d\u5165\u8303\u56f4\u5185"
    )


def test_only_sentences_of_ours_are_looked_up() -> None:
    shown = {
        "verdict": {"notes": ["no values were kept"], "actual": "altogether", "reason": None},
        "culprits": [{"reason": "its inputs are equal bit for bit; output.0 is not"}],
    }
    assert list(sentences_in_chinese(shown)) == [
        "its inputs are equal bit for bit; output.0 is not"
    ]


def test_each_sentence_is_there_once_and_loses_nothing() -> None:
    found = [(each.between, each.gaps) for each in _sentences()]
    assert len({between for between, _ in found}) == len(found)
    for each in _sentences():
        assert set(re.findall(r"\{(\w)\}", each.chinese)) == set(each.gaps), each
        assert CHINESE.search(each.chinese), each


def test_a_hostile_sentence_takes_no_time() -> None:
    start = time.process_time()
    for number in range(50):
        in_chinese(("its inputs are equal and its result " * 80)[: 1990 - number])
        in_chinese((": ; ; differs by of " * 120)[: 1990 - number])
    assert time.process_time() - start < 5
