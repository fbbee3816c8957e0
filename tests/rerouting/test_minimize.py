"""The smallest passing set: found, minimal, and in few questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorprobe.rerouting.minimize import all_are_needed, smallest


def asked(items: Sequence[int], needed: set[int]) -> tuple[list[int], int]:
    questions: set[tuple[int, ...]] = set()

    def passes(part: Sequence[int]) -> bool:
        questions.add(tuple(part))
        return needed <= set(part)

    return smallest(items, passes), len(questions)


@pytest.mark.parametrize(
    ("needed", "at_most"), [({0}, 9), ({15}, 9), ({3, 12}, 14), ({0, 7, 15}, 24)]
)
def test_it_is_found_in_few_questions(needed: set[int], at_most: int) -> None:
    found, questions = asked(range(16), needed)
    assert set(found) == needed
    assert questions <= at_most


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_what_is_found_is_exactly_what_is_needed(case: tuple[int, set[int]]) -> None:
    count, needed = case
    if needed:
        assert asked(range(count), needed)[0] == sorted(needed)


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_what_is_found_passes_and_is_minimal_whatever_passes(count: int, random) -> None:
    answers: dict[tuple[int, ...], bool] = {}

    def passes(part: Sequence[int]) -> bool:
        key = tuple(part)
        if len(key) == count:
            return True
        if not key:
            return False
        return answers.setdefault(key, random.random() < 0.3)

    found = smallest(range(count), passes)
    assert passes(found)
    if len(found) > 1:
        assert not any(passes([i for i in found if i != out]) for out in found)


def test_samples_tell_that_all_are_needed() -> None:
    assert all_are_needed(range(20), lambda part: len(part) == 20)
    assert not all_are_needed(range(20), lambda part: 7 in part)
    assert not all_are_needed(range(5), lambda part: len(part) == 5)  # short: asked one by one
