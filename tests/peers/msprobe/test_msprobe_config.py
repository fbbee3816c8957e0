"""msprobe's config.json: each field is honoured, or refused by name."""

import json
from pathlib import Path

import pytest

from tensorprobe.config import RecordConfig, from_msprobe_config
from tensorprobe.errors import BadUsage


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


def test_template(tmp_path: Path) -> None:
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


def test_fields_are_honoured(tmp_path: Path) -> None:
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


def test_md5_is_a_digest(tmp_path: Path) -> None:
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
        ({"statistics": {"summary_mode": "crc"}}, "expected one of statistics, md5, xor"),
        ({"task": "grad_probe"}, "task='grad_probe' is not supported: use tensorprobe run --mon"),
        ({"task": "run_ut"}, "task='run_ut' is not supported: record with task 'tensor', then"),
        ({"enable_dataloader": True}, "enable_dataloader is not supported: steps do not end"),
        ({"load": {"path": "x"}}, "load is not supported: feeding a module"),
        ({"dump_enable": False}, "dump_enable=False is not supported"),
        ({"risk_level": "LOW"}, "risk_level='LOW': expected one of ALL, FOCUS, CORE"),
        ({"precision": "mid"}, "precision='mid': expected one of low, high"),
        ({"dump_path": ""}, "dump_path='': expected the folder to write to"),
        ([], "expected a JSON object"),
    ],
)
def test_fields_are_refused_by_name(tmp_path: Path, content: object, text: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(BadUsage) as error:
        from_msprobe_config(path)
    assert text in str(error.value)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "keep", "text"),
    [
        ({"task": "nan_check"}, "stats", "task nan_check: it reads an NPU register. Statistics of"),
        ({"task": "diff_check"}, "tensors", "task diff_check: as task tensor"),
        ({"statistics": {"summary_mode": "xor"}}, "digest", "summary_mode xor: a checksum is kept"),
        ({"statistics": {"slice": [{"dim": 0}]}}, "stats", "statistics.slice: tensors are record"),
        ({"statistics": {"request_id": "r1"}}, "stats", "statistics.request_id: tensors are rec"),
        ({"statistics": {"device": "device"}}, "stats", "statistics.device: it is for MindSpore"),
        (
            {"task": "tensor", "tensor": {"bench_path": "old", "diff_nums": 2}},
            "digest",
            "bench_path: checksums are kept, not tensors. Then: tensorprobe compare DUMP old",
        ),
        ({"task": "tensor", "tensor": {"is_online": True}}, "tensors", "tensor.is_online: nothing"),
        ({"enable_async_dump": True}, "stats", "async_dump: values always leave the device in"),
        ({"seed": 7}, "stats", "seed: recording seeds nothing; give run --seed 7"),
        ({"acl_config": "./acl.json"}, "stats", "acl_config: the dumps of ACL are torch_npu's"),
    ],
)
def test_fields_that_can_be_passed_over_are(
    tmp_path: Path, content: dict[str, object], keep: str, text: str
) -> None:
    config, _, notes = from_msprobe_config(write(tmp_path, content))
    assert config.keep == keep
    assert [note for note in notes if note.startswith(text)], notes


def test_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{task: 1}")
    with pytest.raises(BadUsage, match="is not JSON"):
        from_msprobe_config(path)
