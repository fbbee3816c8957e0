"""Nests of lists, tuples and dicts: their leaves, changed and listed."""

import math
from collections import namedtuple

from tensorprobe.nests import change_leaves, leaves_of, strict_json

Pair = namedtuple("Pair", ["first", "second"])


def test_changing_leaves_keeps_the_kinds_of_containers() -> None:
    nest = (1, [2, {"a": 3, 4: (5,)}], [])
    assert change_leaves(nest, lambda leaf: leaf * 10) == (10, [20, {"a": 30, 4: (50,)}], [])
    assert change_leaves(7, str) == "7"


def test_a_named_tuple_is_a_leaf_of_a_change() -> None:
    pair = Pair(1, 2)
    assert change_leaves([pair], lambda leaf: leaf) == [pair]
    assert type(change_leaves([pair], lambda leaf: leaf)[0]) is Pair


def test_leaves_come_in_order_from_whatever_holds_them() -> None:
    nest = {"b": [1, (2, Pair(3, [4]))], "a": {}, "c": "text"}
    assert list(leaves_of(nest)) == [1, 2, 3, 4, "text"]
    assert list(leaves_of(None)) == [None]


def test_json_has_names_for_what_is_not_finite() -> None:
    value = {1: (math.nan, [math.inf, -math.inf, 0.5]), "none": None, "yes": True}
    assert strict_json(value) == {"1": ["nan", ["inf", "-inf", 0.5]], "none": None, "yes": True}
