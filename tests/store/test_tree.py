"""Trees come back as they went in, and their tensors have the names of the contract."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorprobe.records import Fields, Special
from tensorprobe.store import tree


def encode(value: Any) -> Any:
    """The written form of plain Python values."""
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, Special):
        return {"special": [value.kind, value.text]}
    if isinstance(value, Fields):
        fields = {key: encode(item) for key, item in value.fields.items()}
        return {"fields": [value.kind, value.type, fields]}
    return tree.encode_scalar(value)


def refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def through_json(value: Any) -> Any:
    text = msgspec.json.encode(encode(value))
    json.loads(text, parse_constant=refuse)
    return tree.decode(msgspec.json.decode(text), "x", lambda name, line: name)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=["Cs"]))
)
specials = st.builds(Special, st.sampled_from(["dtype", "unsupported"]), st.text("abc/<>"))
keys = st.text("abc") | st.integers() | st.tuples(st.integers(), st.booleans())
trees = st.recursive(
    scalars | st.builds(slice, st.integers(), st.none(), st.none()) | st.just(...) | specials,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.builds(
            Fields, st.just("dataclass"), st.just("m.T"), st.dictionaries(st.text("ab"), inner)
        )
    ),
    max_leaves=12,
)


@given(trees)
def test_trees_come_back(value: Any) -> None:
    assert repr(through_json(value)) == repr(value)  # repr: it tells 1 from True and sees NaN


@pytest.mark.parametrize(
    "value", [2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**40, True, 1, 1.0, "1"]
)
def test_scalars_keep_their_type(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_floats_that_json_lacks() -> None:
    assert math.isnan(through_json(math.nan))
    assert through_json([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert repr(through_json(-0.0)) == "-0.0"
    assert str(through_json(complex(math.inf, math.nan))) == "(inf+nanj)"


TENSOR = {"tensor": {"dtype": "float32", "shape": []}}


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (TENSOR, ["F.output.0"]),
        ([TENSOR, TENSOR], ["F.output.0", "F.output.1"]),
        ({"tuple": [TENSOR, [None, TENSOR]]}, ["F.output.0", "F.output.1.1"]),
        ({"dict": [["logits", TENSOR], [7, [TENSOR]]]}, ["F.output.logits", "F.output.7.0"]),
        ({"fields": ["dataclass", "m.Out", {"loss": TENSOR}]}, ["F.output.loss"]),
        ({"slice": [TENSOR, None, None]}, ["F.output.0.0"]),
        (3, []),
    ],
)
def test_names_of_output_tensors(outputs: Any, names: list[str]) -> None:
    seen: list[str] = []
    tree.decode(outputs, tree.output_root("F", outputs), lambda name, line: seen.append(name))
    assert seen == names
