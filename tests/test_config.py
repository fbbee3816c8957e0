"""What people type becomes one configuration, or an error that says what to type."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorprobe.config import (
    RecordConfig,
    format_numbers,
    from_msprobe_config,
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


# msprobe's config.json


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


def test_msprobe_template(tmp_path: Path) -> None:
    """The shape of the file that comes with msprobe: every section, most fields empty."""
    path = write(
        tmp_path,
        {
            "task": "statistics",
            "dump_path": "./dump_path",
            "rank": [],
            "step": [],
            "level": "L1",
            "async_dump": False,
            "extra_info": True,
            "statistics": {
                "scope": [],
                "list": [],
                "tensor_list": [],
                "data_mode": ["all"],
                "summary_mode": "statistics",
            },
            "tensor": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"},
            "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
        },
    )
    config, dump_path, notes = from_msprobe_config(path)
    assert config == RecordConfig.make(level="L1", keep="stats")
    assert dump_path == "./dump_path"
    assert notes == ()


def test_msprobe_fields_are_honoured(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "task": "tensor",
            "rank": [0, "2-3"],
            "step": ["1", 4],
            "level": "mix",
            "extra_info": False,
            "risk_level": "FOCUS",
            "precision": "high",
            "async_dump": True,
            "dump_enable": True,
            "custom_op_namespaces": ["_C_ascend"],
            "tensor": {
                "scope": ["Functional.conv2d.0.forward", "Tensor.__add__.1.forward"],
                "data_mode": ["backward", "input"],
                "slice": [],
                "request_id": "",
            },
        },
    )
    config, dump_path, notes = from_msprobe_config(path)
    assert config == RecordConfig.make(
        level="mix",
        keep="tensors",
        steps=[1, 4],
        ranks=[0, 2, 3],
        stacks=False,
        directions="backward",
        sides="input",
        between=("Functional.conv2d.0.forward", "Tensor.__add__.1.forward"),
    )
    assert dump_path is None
    assert [note.split(":")[0] for note in notes] == [
        "dump_enable",
        "risk_level",
        "precision",
        "async_dump",
        "custom_op_namespaces",
    ]


def test_msprobe_md5_is_a_digest(tmp_path: Path) -> None:
    section = {"list": ["relu"], "tensor_list": ["conv2d"], "summary_mode": "md5"}
    config, _, notes = from_msprobe_config(write(tmp_path, {"statistics": section}))
    assert (config.level, config.keep) == ("L1", "digest")
    assert (config.names, config.keep_tensors) == (("relu",), ("conv2d",))
    assert notes == ("summary_mode md5: a position-aware digest is kept, not a CRC-32",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"tsak": "tensor"}, "unknown field 'tsak'. Did you mean 'task'? Allowed: task, dump_path"),
        (
            {"statistics": {"scpoe": []}},
            "unknown field 'scpoe' in 'statistics'. Did you mean 'scope'? Allowed: scope, list",
        ),
        ({"tensor": {"diff_num": 1}}, "unknown field 'diff_num' in 'tensor'"),
        ({"statistics": []}, "statistics=[]: expected an object"),
        ({"task": "nan_check"}, "task='nan_check' is not supported: it reads an NPU register"),
        ({"task": "acc_check"}, "Allowed: statistics, tensor, structure"),
        ({"task": "tensors"}, "task='tensors': expected one of statistics, tensor, structure"),
        ({"task": ["tensor"]}, "task=['tensor']: expected one of"),
        ({"level": "debug"}, "level='debug' is not a level here: rec.save(name, value)"),
        ({"level": "L3"}, "level='L3': expected one of L0, L1, L2, mix"),
        ({"step": ["x"]}, "step=['x']: expected numbers"),
        ({"statistics": {"scope": ["a"]}}, "statistics.scope=['a']: expected two call names"),
        (
            {"statistics": {"scope": ["a", "b"], "list": ["c"]}},
            "statistics.scope and statistics.list contradict each other",
        ),
        (
            {"statistics": {"data_mode": ["all", "forward"]}},
            "statistics.data_mode=['all', 'forward']: expected 'all' alone",
        ),
        ({"statistics": {"data_mode": ["up"]}}, "expected one of all, forward, backward, input"),
        ({"statistics": {"summary_mode": "xor"}}, "an xor cannot see two values swapped"),
        ({"statistics": {"summary_mode": "crc"}}, "expected one of statistics, md5"),
        (
            {"statistics": {"slice": [{"dim": 0}]}},
            "statistics.slice is not supported: tensors are recorded whole",
        ),
        ({"statistics": {"request_id": "r1"}}, "statistics.request_id is not supported"),
        ({"statistics": {"device": "device"}}, "statistics.device='device': expected 'host'"),
        ({"task": "tensor", "tensor": {"bench_path": "x"}}, "tensor.bench_path is not supported"),
        ({"load": {"path": "x"}}, "load is not supported: feeding a module"),
        ({"dump_enable": False}, "dump_enable=False is not supported"),
        ({"risk_level": "LOW"}, "risk_level='LOW': expected one of ALL, FOCUS, CORE"),
        ({"precision": "mid"}, "precision='mid': expected one of low, high"),
        ({"dump_path": ""}, "dump_path='': expected the folder to write to"),
        ([], "expected a JSON object"),
    ],
)
def test_msprobe_fields_are_refused_by_name(tmp_path: Path, content: object, text: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(BadUsage) as error:
        from_msprobe_config(path)
    assert text in str(error.value)
    assert str(error.value).startswith(str(path))


def test_msprobe_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{task: 1}")
    with pytest.raises(BadUsage, match="is not JSON"):
        from_msprobe_config(path)
