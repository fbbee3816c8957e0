"""What people type becomes one configuration, or an error that says what to type."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorprobe.config import (
    RecordConfig,
    format_numbers,
    parse_numbers,
    parse_size,
)
from tensorprobe.errors import BadUsage


def test_defaults() -> None:
    config = RecordConfig.make()
    assert config == RecordConfig()
    assert (config.level, config.keep, config.dtypes, config.flush) == (
        "mix",
        "stats",
        "all",
        "queue",
    )
    assert config.steps is None
    assert config.stacks
    assert config.queue == 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        (None, None),
        ([], None),
        (3, (3,)),
        ("3", (3,)),
        ("0-1,4", (0, 1, 4)),
        ([0, "3-5"], (0, 3, 4, 5)),
        (["5", "0-1, 4"], (0, 1, 4, 5)),
        (range(2, 4), (2, 3)),
        ("7-7", (7,)),
        ([2, 2, "1-2"], (1, 2)),
    ],
)
def test_steps_as_typed(typed: Any, numbers: Any) -> None:
    assert RecordConfig.make(steps=typed).steps == numbers
    assert RecordConfig.make(ranks=typed).ranks == numbers


@pytest.mark.parametrize("typed", ["", "a", "5-3", -1, [True], 1.5, "0-9999999", ["-1"], [None]])
def test_bad_steps_are_named(typed: Any) -> None:
    with pytest.raises(BadUsage, match=r"steps="):
        RecordConfig.make(steps=typed)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_numbers_round_trip(numbers: set[int]) -> None:
    ordered = tuple(sorted(numbers))
    assert parse_numbers("steps", format_numbers(ordered)) == ordered


@pytest.mark.parametrize(
    ("typed", "size"),
    [
        (1, 1),
        ("1", 1),
        ("512", 512),
        ("50G", 50 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1 kb", 1000),
        ("1.5TB", 1_500_000_000_000),
        ("64k", 65536),
        ("10B", 10),
    ],
)
def test_sizes(typed: Any, size: int) -> None:
    assert parse_size("max_disk", typed) == size
    assert RecordConfig.make(max_disk=typed).max_disk == size


@pytest.mark.parametrize("typed", ["", "0", 0, -5, "5X", "G", True, 1.5, "-1G", "0.1"])
def test_bad_sizes_are_named(typed: Any) -> None:
    with pytest.raises(BadUsage, match=r"max_disk=.*50G"):
        RecordConfig.make(max_disk=typed)


def test_lists_take_a_single_name() -> None:
    config = RecordConfig.make(
        apis="relu", modules="*.attn*, *.mlp", calls=["Torch.relu.0"], directions="backward"
    )
    assert config.apis == ("relu",)
    assert config.modules == ("*.attn*", "*.mlp")
    assert config.calls == ("Torch.relu.0",)
    assert config.directions == ("backward",)


def test_choices_ignore_case_and_keep_their_order() -> None:
    config = RecordConfig.make(level="l1", keep="Tensors", directions=["backward", "forward"])
    assert (config.level, config.keep) == ("L1", "tensors")
    assert config.directions == ("forward", "backward")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"level": "L3"}, "level='L3': expected one of L0, L1, L2, mix"),
        (
            {"keep": "tensor"},
            "keep='tensor': expected one of structure, stats, digest, tensors. "
            "Did you mean 'tensors'?",
        ),
        ({"directions": []}, "directions=[]: expected at least one of forward, backward"),
        ({"sides": "inputs"}, "sides='inputs': expected one of input, output"),
        ({"between": "one"}, "between=['one']: expected two call names"),
        ({"between": ["a", ""]}, "between=['a', '']: expected two call names"),
        ({"stacks": "yes"}, "stacks='yes': expected True or False"),
        ({"apis": [3]}, "apis=3: expected a name"),
        ({"apis": 3}, "apis=3: expected a name or a list of names"),
        ({"dtypes": "int"}, "dtypes='int': expected one of all, float"),
        ({"step": 1}, "unknown argument 'step'. Did you mean 'steps'? Allowed: level, keep"),
        ({"stop_after_last_step": True}, "`stop_after_last_step` needs `steps`"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(BadUsage) as error:
        RecordConfig.make(**arguments)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "level": "L1",
            "keep": "tensors",
            "steps": "0-3,9",
            "ranks": 1,
            "sides": "output",
            "between": ("Torch.relu.0.forward", "Torch.relu.1.forward"),
            "apis": ["relu", "F.*"],
            "max_disk": "5G",
            "stop_after_last_step": True,
        },
    ],
)
def test_arguments_survive_json(arguments: dict[str, Any]) -> None:
    config = RecordConfig.make(**arguments)
    assert RecordConfig.make(**json.loads(json.dumps(config.as_arguments()))) == config
