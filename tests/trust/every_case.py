"""Every case, by family."""

from __future__ import annotations

import importlib.util

from trust import (
    arguments,
    beginnings,
    conversion,
    decisions,
    dtypes,
    effects,
    everyday,
    frameworks,
    huggingface,
    libraries,
    moved,
    nonfinite,
    optimizers,
    others_programs,
    real_models,
    rounding,
    scripts,
    shaped,
    strangers,
    structure,
    units,
    workspaces,
)
from trust.harness import Case

CASES: list[Case] = [
    *effects.CASES,
    *everyday.CASES,
    *optimizers.CASES,
    *beginnings.CASES,
    *arguments.CASES,
    *structure.CASES,
    *strangers.CASES,
    *decisions.CASES,
    *units.CASES,
    *moved.CASES,
    *dtypes.CASES,
    *nonfinite.CASES,
    *rounding.CASES,
    *libraries.CASES,
    *workspaces.CASES,
    *frameworks.CASES,
    *scripts.CASES,
    *huggingface.CASES,
    *shaped.CASES,
    *conversion.CASES,
    *others_programs.CASES,
    *real_models.CASES,
]
_BY_NAME = {case.name: case for case in CASES}
assert len(_BY_NAME) == len(CASES), "two cases have one name"


def by_name(name: str) -> Case:
    return _BY_NAME[name]


def is_possible(case: Case) -> bool:
    """Whether the package that the case needs is there."""
    return not case.needs or importlib.util.find_spec(case.needs) is not None
