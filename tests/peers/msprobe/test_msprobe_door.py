"""Scripts of msprobe run as they are and leave msprobe's files."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msprobe_making import ROOT
from torch import nn

import tensorprobe as tp
from recorded import run_script
from tensorprobe.errors import BadUsage, GuardStopped
from tensorprobe.msprobe.pytorch import (
    PrecisionDebugger,
    compare,
    compare_distributed,
    module_dump,
    module_dump_end,
    seed_all,
)

PROC = f"proc{os.getpid()}"


@pytest.fixture(autouse=True)
def one_debugger_a_test() -> Iterator[None]:
    yield
    PrecisionDebugger.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(2 * self.fc1(x) + 1))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def config(tmp_path: Path, **fields: Any) -> Path:
    content = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "rank": [], "step": []}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**content, **fields}))
    return path


def data(tmp_path: Path, step: int = 0, file: str = "dump.json") -> dict[str, Any]:
    path = tmp_path / "dump" / f"step{step}" / PROC / file
    return json.loads(path.read_text())["data"]


def run(debugger: Any, model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        debugger.start(model=model)
        model(X).sum().backward()
        debugger.stop()
        debugger.step()


def test_the_usual_loop(tmp_path: Path) -> None:
    # Python 3.10 does not tell which side the tensor was on
    times = "__rmul__" if sys.version_info >= (3, 11) else "__mul__"
    debugger = PrecisionDebugger(config_path=str(config(tmp_path, level="mix")))
    run(debugger, Net(), steps=2)
    for step in (0, 1):
        assert list(data(tmp_path, step)) == [
            "Functional.linear.0.forward",
            "Module.fc1.Linear.forward.0",
            f"Tensor.{times}.0.forward",
            "Tensor.__add__.0.forward",
            "Functional.relu.0.forward",
            "Functional.linear.1.forward",
            "Module.fc2.Linear.forward.0",
            "Tensor.sum.0.forward",
            "Tensor.sum.0.backward",
            "Functional.linear.1.backward",
            "Module.fc2.Linear.backward.0",
            "Functional.relu.0.backward",
            "Tensor.__add__.0.backward",
            f"Tensor.{times}.0.backward",
            "Functional.linear.0.backward",
            "Module.fc1.Linear.backward.0",
            "Module.fc1.Linear.parameters_grad.0",
            "Module.fc2.Linear.parameters_grad.0",
        ]
    folder = tmp_path / "dump" / "step0" / PROC
    assert sorted(p.name for p in folder.iterdir()) == ["construct.json", "dump.json", "stack.json"]
    PrecisionDebugger.close()
    assert not (tmp_path / "dump" / ".tensorprobe").exists()
    assert len(tp.load(tmp_path / "dump").calls) == 36


def test_the_files_are_there_after_stop_and_backward_comes_until_step(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path / "dump", task="tensor", level="L1")
    model = Net()
    debugger.start()
    loss = model(X).sum()
    debugger.stop()
    assert "Tensor.sum.0.forward" in data(tmp_path)
    torch.relu(X)
    loss.backward()
    debugger.step()
    names = list(data(tmp_path))
    assert "Functional.linear.0.backward" in names
    assert "Torch.relu.0.forward" not in names
    files = tmp_path / "dump" / "step0" / PROC / "dump_tensor_data"
    weight = torch.load(files / "Functional.linear.0.backward.output.1.pt", weights_only=True)
    assert torch.equal(weight, model.fc1.weight.grad)


def test_a_second_stop_has_the_backward_that_came_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Releases until 2024 end the forward part with a call of its own."""
    debugger = PrecisionDebugger(config(tmp_path, statistics={"summary_mode": "md5"}))
    debugger.start()
    loss = Net()(X).sum()
    debugger.forward_backward_dump_end()
    loss.backward()
    debugger.stop()
    (gradient,) = data(tmp_path)["Tensor.sum.0.backward"]["input"]
    assert (gradient["Max"], len(gradient["md5"])) == (1.0, 8)
    debugger.step()
    assert "without content" not in capsys.readouterr().err


def test_notes_are_said_once_however_often_it_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debugger = PrecisionDebugger(config(tmp_path, task="nan_check"))
    for _ in range(2):
        run(debugger, Net())
        debugger.service.reset_status()
    assert capsys.readouterr().err.count("task nan_check") == 1


def test_nothing_is_disturbed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain, recorded = Net(), Net()
    recorded.load_state_dict(plain.state_dict())
    plain(X).sum().backward()
    run(PrecisionDebugger(dump_path=tmp_path / "dump", level="mix"), recorded)
    for a, b in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_md5_is_the_crc_of_what_was_there(tmp_path: Path) -> None:
    path = config(tmp_path, level="L1", statistics={"summary_mode": "md5"})
    debugger = PrecisionDebugger(path)
    x = torch.ones(3)
    debugger.start()
    x.add_(1)  # an input that is no more when its checksum is made
    debugger.stop()
    record = data(tmp_path)["Tensor.add_.0.forward"]

    def crc(tensor: torch.Tensor) -> str:
        return f"{zlib.crc32(tensor.numpy().tobytes()):08x}"

    assert record["input_args"][0]["md5"] == crc(torch.ones(3))
    assert record["output"][0]["md5"] == crc(torch.full((3,), 2.0))
    assert list(record["output"][0])[-2:] == ["requires_grad", "md5"]
    assert record["output"][0]["Max"] == 2


def test_md5_of_bfloat16_is_of_its_own_bytes(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, statistics={"summary_mode": "md5"}))
    debugger.start()
    y = X.bfloat16()
    debugger.stop()
    md5 = data(tmp_path)["Tensor.bfloat16.0.forward"]["output"][0]["md5"]
    assert md5 == f"{zlib.crc32(y.view(torch.int16).numpy().tobytes()):08x}"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"step": [1]}, []),
        ({"statistics": {"list": ["relu.0.back"]}}, ["Functional.relu.0.backward"]),
        (
            {"statistics": {"scope": ["Tensor.__rmul__.0.forward", "Tensor.__add__.0.forward"]}},
            ["Tensor.__rmul__.0.forward", "Tensor.__add__.0.forward", "Tensor.__add__.0.backward",
             "Tensor.__rmul__.0.backward"],
        ),
        (
            {"statistics": {"list": ["Tensor.__add__"], "data_mode": ["forward"]}},
            ["Tensor.__add__.0.forward"],
        ),
    ],
)  # fmt: skip
def test_selection(tmp_path: Path, fields: dict[str, Any], names: list[str]) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="L1", **fields))
    run(debugger, Net())
    if names:
        assert list(data(tmp_path)) == names
    else:
        assert not (tmp_path / "dump" / "step0").exists()


def test_data_mode_leaves_out_the_other_side(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, statistics={"data_mode": ["output"]}))
    run(debugger, Net())
    record = data(tmp_path)["Functional.relu.0.forward"]
    assert list(record) == ["output"]
    assert list(data(tmp_path)["Functional.relu.0.backward"]) == ["output"]


def test_tensor_list_keeps_tensors_of_some(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, statistics={"tensor_list": ["relu"]}))
    run(debugger, Net())
    files = {p.name for p in (tmp_path / "dump" / "step0" / PROC / "dump_tensor_data").iterdir()}
    assert files == {
        "Functional.relu.0.forward.input.0.pt",
        "Functional.relu.0.forward.output.0.pt",
        "Functional.relu.0.backward.input.0.pt",
        "Functional.relu.0.backward.output.0.pt",
    }
    assert "Max" in data(tmp_path)["Functional.linear.0.forward"]["output"][0]


def test_extra_info_false_writes_no_stack(tmp_path: Path) -> None:
    run(PrecisionDebugger(config(tmp_path, extra_info=False)), Net())
    names = {p.name for p in (tmp_path / "dump" / "step0" / PROC).iterdir()}
    assert names == {"dump.json"}


def test_structure_has_a_tree_and_no_data(tmp_path: Path) -> None:
    run(PrecisionDebugger(config(tmp_path, task="structure")), Net())
    folder = tmp_path / "dump" / "step0" / PROC
    dump = json.loads((folder / "dump.json").read_text())
    assert (dump["task"], dump["level"], dump["data"]) == ("structure", "mix", {})
    tree = json.loads((folder / "construct.json").read_text())
    assert tree["Functional.linear.0.forward"] == "Module.fc1.Linear.forward.0"


def test_debug_saves_values_and_their_gradients(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="debug", task="tensor"))
    h = torch.ones(2, requires_grad=True) * 3
    PrecisionDebugger.save(h, "h")
    debugger.save({"a": h, "b": [1, 2.5, "txt", h]}, "nested", save_backward=False)
    debugger.save([h.detach(), 3.5], "idle")
    (h * h).sum().backward()
    debugger.step()
    saved = data(tmp_path, file="debug.json")
    names = ["h.0.debug", "h_grad.0.debug", "nested.0.debug", "idle.0.debug", "idle_grad.0.debug"]
    assert list(saved) == names
    assert saved["idle_grad.0.debug"] == [None, None]  # as msprobe says that none came
    assert saved["nested.0.debug"]["a"]["requires_grad"]
    assert saved["nested.0.debug"]["b"][:3] == [
        {"type": "int", "value": 1},
        {"type": "float", "value": 2.5},
        {"type": "str", "value": "txt"},
    ]
    files = tmp_path / "dump" / "step0" / PROC / "dump_tensor_data"
    assert sorted(p.name for p in files.iterdir()) == [
        "h.0.debug.pt",
        "h_grad.0.debug.pt",
        "idle.0.debug.0.pt",
        "nested.0.debug.a.pt",
        "nested.0.debug.b.3.pt",
    ]
    assert torch.load(files / "h_grad.0.debug.pt", weights_only=True).tolist() == [6, 6]
    assert not (files.parent / "dump.json").exists()


def test_set_init_step(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, step=[7]))
    debugger.set_init_step(6)
    run(debugger, Net(), steps=3)
    assert [p.name for p in (tmp_path / "dump").glob("step*")] == ["step7"]


def test_several_models_are_told_apart_by_their_place(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="L0"))
    models = [Net(), Net()]
    debugger.start(model=models)
    models[1](X), models[0](X)
    debugger.stop()
    assert [name for name in data(tmp_path) if "fc1" in name] == [
        "Module.1.fc1.Linear.forward.0",
        "Module.0.fc1.Linear.forward.0",
    ]


def test_names_begin_at_the_model_that_is_given(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="L0"))
    inner = Net()
    outer = nn.Sequential(inner, nn.ReLU())
    debugger.start(model=inner)
    outer(X)
    debugger.stop()
    assert "Module.fc1.Linear.forward.0" in data(tmp_path)


def test_token_range_counts_calls_of_the_model(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="mix"))
    model = Net()
    debugger.start(model, token_range=[1, 2])
    with torch.no_grad():
        for _ in range(5):
            model(X)
    debugger.stop()
    names = [name for name in data(tmp_path) if "fc1" in name]
    assert names == ["Module.fc1.Linear.forward.0", "Module.fc1.Linear.forward.1"]
    assert not model._forward_pre_hooks


def test_module_dump_is_a_black_box(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="mix"))
    model = Net()
    debugger.start(model)
    module_dump(model.fc2, "second")
    model(X).sum().backward()
    module_dump_end()
    torch.relu(X)
    debugger.stop()
    debugger.step()
    assert list(data(tmp_path)) == [
        "Module.second.Linear.forward.0",
        "Module.second.Linear.backward.0",
        "Module.second.Linear.parameters_grad.0",
        "Torch.relu.0.forward",
    ]


def test_custom_apis_need_no_registration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debugger = PrecisionDebugger(config(tmp_path))
    debugger.register_custom_api(F, "relu")
    assert "not needed, every torch call in it is seen" in capsys.readouterr().err
    with pytest.raises(BadUsage, match="does not exist"):
        debugger.register_custom_api(F, "rlu")
    debugger.restore_custom_api(F, "relu")


def test_a_second_debugger_is_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    first = PrecisionDebugger(path)
    assert PrecisionDebugger(path) is first
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert PrecisionDebugger(path, level="L0") is first
    assert first.config.level == "L1"
    (line,) = capsys.readouterr().err.splitlines()
    assert "it stays as it is, and config_path=" in line
    assert "level='L0' has no effect" in line


def test_what_a_script_sets_in_the_service_is_in_effect_from_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="L1"))
    assert (debugger.config.task, debugger.config.rank) == ("statistics", [])
    assert debugger.config.dump_path == str(tmp_path / "dump")
    model = Net()
    service = debugger.service
    run(debugger, model)
    service.config.level = "L0"
    service.config.step = [1, 3]
    run(debugger, model, steps=2)
    assert service.current_iter == 2
    service.config.dump_path = None
    service.config.level = "L9"  # which is none: said once, and it goes on
    service.config.summary_mode = "md5"
    run(debugger, model)
    service.config.level = "L0"
    service.config.dump_path = debugger.config.dump_path
    run(debugger, model)
    assert debugger.config.level == "L1"  # as it was read
    assert [p.name for p in sorted((tmp_path / "dump").glob("step*"))] == [
        "step0",
        "step1",
        "step3",
    ]
    assert "Functional.linear.0.forward" in data(tmp_path, 0)
    for step in (1, 3):
        assert "Module.fc1.Linear.forward.0" in data(tmp_path, step)
        assert "Functional.linear.0.forward" not in data(tmp_path, step)
    err = capsys.readouterr().err
    assert err.count("service.config: level='L9': expected one of") == 1
    with pytest.raises(AttributeError):
        _ = debugger.config.no_such_field


def test_a_reset_begins_anew_in_the_same_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debugger = PrecisionDebugger(config(tmp_path, level="L1"))
    for name in ("first", "second"):
        debugger.service.config.dump_path = tmp_path / "dump" / name
        debugger.start()
        torch.relu(X)
        debugger.stop()
        debugger.service.reset_status()
    for name in ("first", "second"):
        path = tmp_path / "dump" / name / "step0" / PROC / "dump.json"
        assert list(json.loads(path.read_text())["data"]) == ["Torch.relu.0.forward"]
    debugger.start()  # the same step of the same folder once more
    torch.relu(X), torch.relu(X)
    debugger.stop()
    PrecisionDebugger.close()
    assert len(json.loads(path.read_text())["data"]) == 2
    err = capsys.readouterr().err
    assert "was dumped before in this run: it is written anew" in err
    assert err.count("the dump is in") == 2
    assert not list(tmp_path.glob("dump/**/.tensorprobe"))


def test_a_request_that_is_not_scheduled_is_left_out(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, statistics={"request_id": "b"}))
    for tokens in ({"a": 1}, {"b": 2}, None):
        debugger.start(scheduled_tokens=tokens)
        torch.relu(X)
        debugger.stop()
        debugger.step()
    assert sorted(p.name for p in (tmp_path / "dump").glob("step*")) == ["step1", "step2"]


# What msprobe shipped over time, by kind
TEMPLATES: dict[str, dict[str, Any]] = {
    "2024-05": {
        "seed": 1234, "is_deterministic": False, "enable_dataloader": False, "acl_config": "",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "backward_input": [],
                   "file_format": "npy"},
        "statistics": {"scope": [], "list": [], "data_mode": ["all"],
                       "summary_mode": "statistics"},
        "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
        "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    },
    "2024-08": {
        "seed": 1234, "is_deterministic": False, "enable_dataloader": False, "acl_config": "",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "backward_input": [],
                   "file_format": "npy", "online_run_ut": False, "nfs_path": "", "host": "",
                   "port": -1},
        "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
        "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu",
                           "pert_mode": "improve_precision", "handler_type": "check",
                           "fuzz_level": "L1", "fuzz_stage": "forward", "if_preheat": False,
                           "preheat_step": 15, "max_sample": 20},
        "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./",
                   "is_online": False, "nfs_path": "", "host": "", "port": -1, "rank_list": [0],
                   "tls_path": "./", "master_ip": "127.0.0.1", "master_port": "2688"},
    },
    "2024-12": {"enable_async_dump": False, "tensor": {"online_run_ut_recompute": False},
                "is_deterministic": True, "seed": 0},
    "2025-02": {"async_dump": False, "extra_info": True, "precision": "low",
                "statistics": {"tensor_list": [], "device": "host", "stat_cal_mode": "host"},
                "exception_dump": {"data_mode": ["all"]},
                "tensor": {"bench_path": "", "summary_mode": "md5", "diff_nums": 1}},
    "2025-06": {"risk_level": "FOCUS", "statistics": {"summary_mode": "xor"},
                "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
                "nan_check": {"list": [], "scope": []}},
    "2026": {"load": {}, "dump_enable": True, "custom_op_namespaces": ["_C_ascend"],
             "statistics": {"slice": [], "request_id": ""}},
}  # fmt: skip


@pytest.mark.parametrize("year", TEMPLATES)
def test_templates_of_all_years_are_read(tmp_path: Path, year: str) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        run(PrecisionDebugger(config(tmp_path, level="L1", **TEMPLATES[year])), Net())
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert data(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="no PrecisionDebugger yet"):
        PrecisionDebugger.start()
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(BadUsage, match="dump_path is missing"):
        PrecisionDebugger(tmp_path / "empty.json")
    with pytest.raises(BadUsage, match="no configuration can be read"):
        PrecisionDebugger(tmp_path / "none.json")
    with pytest.raises(BadUsage, match="Did you mean 'summary_mode'"):
        PrecisionDebugger(config(tmp_path, statistics={"sumary_mode": "md5"}))


def test_overflow_check_stops_at_the_nth_overflow(tmp_path: Path) -> None:
    path = config(tmp_path, task="overflow_check", overflow_check={"overflow_nums": 2})
    debugger = PrecisionDebugger(path)
    debugger.start()
    big = torch.full((2,), 1e30)
    big * big
    big.square()
    with pytest.raises(GuardStopped):  # at the latest when it is told to look no more
        debugger.stop()
    PrecisionDebugger.close()
    findings = json.loads((tmp_path / "dump" / "findings.json").read_text())["findings"]
    assert [found["name"] for found in findings] == [
        "Tensor.mul.0.forward",
        "Tensor.square.0.forward",
    ]


def test_the_command_line_of_msprobe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorprobe.peers.msprobe.msprobe_command import main

    debugger = PrecisionDebugger(config(tmp_path, task="tensor"))
    run(debugger, Net(), steps=2)
    PrecisionDebugger.close()
    a, b = (str(tmp_path / "dump" / f"step{i}") for i in (0, 1))
    out = str(tmp_path / "out")
    assert main(["-f", "pytorch", "compare", "-tp", a, "-gp", b, "-o", out, "-fm"]) == 0
    (tmp_path / "pair.json").write_text(json.dumps({"npu_path": a, "bench_path": b}))
    assert main(["compare", "-i", str(tmp_path / "pair.json"), "-o", out, "-s"]) == 0
    assert len(list((tmp_path / "out").glob("compare_result_*.csv"))) >= 1
    assert main(["acc_check", "-api_info", a, "-o", str(tmp_path / "ut")]) == 0
    assert list((tmp_path / "ut").glob("accuracy_checking_result*.csv"))
    assert main(["graph_visualize", "-tp", a]) == 2
    assert main(["compare", "-tp", a]) == 2
    known = ["--fuzzy_match", "--diff_analyze", "--is_print_compare_log", "-m", "auto", "-o"]
    assert main(["compare", "-tp", a, "-gp", b, *known, out, "--rank", "0"]) == 0
    for wrong, text in (
        (["-am"], "--api_mapping is not supported: it is for MindSpore"),
        (["--config", "x.yaml"], "--config is not supported: tensors are compared as they are"),
        (["-m", "atb"], "-m atb is not supported: for such dumps use tensorprobe ascend"),
        (["--layer_mapping", "no.yaml"], "no file 'no.yaml'"),
        (["--rank", "7"], "no call of that step and rank|rank 7"),
    ):
        capsys.readouterr()
        assert main(["compare", "-tp", a, "-gp", b, "-o", out, *wrong]) in (1, 2)
        assert re.search(text, capsys.readouterr().err)
    for verb in ("graph", "op_generate", "merge_result", "data2db", "parse"):
        assert main([verb, "-x"]) == 2
        assert f"msprobe {verb} is not supported; use " in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert "with the words of msprobe 26.2.0" in capsys.readouterr().out
    assert main(["compare", "-tp", a]) == 2
    assert "give both dumps: -tp DUMP -gp DUMP" in capsys.readouterr().err


def test_words_of_earlier_releases_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorprobe.peers.msprobe.msprobe_command import main

    debugger = PrecisionDebugger(config(tmp_path))
    run(debugger, Net(), steps=2)
    PrecisionDebugger.close()
    a, b = (str(tmp_path / "dump" / f"step{i}") for i in (0, 1))
    (tmp_path / "x.json").write_text(
        json.dumps({"npu_path": a, "bench_path": b, "is_print_compare_log": True})
    )
    given = ["-f", "pytorch", "compare", "-i", str(tmp_path / "x.json"), "-o", str(tmp_path)]
    assert main([*given, "-s", "-c", "-f", "-hl"]) == 0
    assert main(["--framework=pytorch", *given[2:], "--highlight"]) == 0
    assert main(["-f", "mindspore", "compare"]) == 2
    assert "only pytorch is supported" in capsys.readouterr().err
    assert main(["compare", "-tp", a, "-gp", b, "-ofs", "False"]) == 2
    assert "it is for offline models" in capsys.readouterr().err
    assert main(["code_mapping", "-i", "x"]) == 2
    found = compare(
        {"npu_json_path": a, "bench_json_path": b}, tmp_path / "c", highlight=True,
        diff_analyze=True, first_diff_analyze=True,
    )  # fmt: skip
    assert found.verdict.verdict == "match"


@pytest.mark.parametrize("places", [(None, [1]), ([1],)], ids=["until 8.3", "26"])
def test_the_step_by_its_place(tmp_path: Path, places: tuple[Any, ...]) -> None:
    run(PrecisionDebugger(config(tmp_path), None, None, None, *places), Net(), steps=2)
    assert [path.name for path in (tmp_path / "dump").glob("step*")] == ["step1"]


@pytest.mark.parametrize("verb", ["overflow_check", "nan_analyze"])
def test_the_first_nan_under_msprobes_words(tmp_path: Path, verb: str) -> None:
    from tensorprobe.peers.msprobe.msprobe_command import main

    debugger = PrecisionDebugger(config(tmp_path, level="mix"))
    model = Net()
    debugger.start(model)
    torch.log(model(X) - 100).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    dump, out = str(tmp_path / "dump" / "step0"), tmp_path / "out"
    assert main(["-f", "pytorch", verb, "-i", dump, "-o", str(out)]) == 3
    (path,) = out.glob("anomaly_analyze_*.json")
    (found,) = json.loads(path.read_text())["rank_0"]
    assert found["op_name"] == "Torch.log.0.forward"
    assert math.isnan(found["data_info"]["output"][0]["Max"])
    assert found["construct_info"] == ["Torch.log.0.forward"]
    assert __file__ in found["stack_info"][0]
    assert json.loads((out / "ranks.json").read_text())["nonfinite"]["first"][0]["rank"] == 0


def test_an_old_configuration_is_read(tmp_path: Path) -> None:
    old = config(
        tmp_path, seed=0, is_deterministic=False, enable_dataloader=False, acl_config="",
        tensor={"scope": [], "list": [], "data_mode": ["all"], "backward_input": [],
                "file_format": "npy"},
        overflow_check={"overflow_nums": 1, "check_mode": "all"},
        run_ut={"white_list": [], "black_list": [], "error_data_path": "./"},
        free_benchmark={"scope": [], "fuzz_device": "npu"},
        grad_probe={"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
    )  # fmt: skip
    run(PrecisionDebugger(old), Net())
    assert data(tmp_path)


def test_dump_enable_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.peers.msprobe import msprobe_debugger

    monkeypatch.setattr(msprobe_debugger, "_LOOK_AGAIN_S", 0.0)
    path = config(tmp_path, dump_enable=False)
    debugger = PrecisionDebugger(path)
    model = Net()
    run(debugger, model)
    assert not (tmp_path / "dump").exists()
    config(tmp_path, dump_enable=True, level="L0")
    os.utime(path, ns=(1, 1))
    run(debugger, model)
    path.write_text("{ not json")
    run(debugger, model)
    assert [p.name for p in (tmp_path / "dump").glob("step*")] == ["step1"]
    assert "Module.fc1.Linear.forward.0" in data(tmp_path, 1)


def test_a_second_run_moves_the_first(tmp_path: Path) -> None:
    script = (
        "import torch\nfrom tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "d = PrecisionDebugger(dump_path='dump')\n"
        "d.start(); torch.relu(torch.ones(2)); d.stop(); d.step()\n"
    )
    for _ in range(2):
        done = run_script(tmp_path, script)
        assert done.returncode == 0, done.stderr
    assert "held an earlier run: it is in 'dump/earlier/1' now" in done.stderr
    assert len(list((tmp_path / "dump" / "step0").iterdir())) == 1
    assert len(tp.load(tmp_path / "dump").calls) == 2
    assert len(tp.load(tmp_path / "dump" / "earlier" / "1").calls) == 2


def test_a_killed_run_can_be_turned(tmp_path: Path) -> None:
    script = (
        "import os, signal, torch\nfrom tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "d = PrecisionDebugger(dump_path='dump')\n"
        "for i in range(2):\n"
        "    d.start(); torch.relu(torch.ones(2))\n"
        "    if i: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    d.stop(); d.step()\n"
    )
    assert run_script(tmp_path, script).returncode == -9
    capture = tp.load(tmp_path / "dump")
    assert [call.step for call in capture.calls] == [0, 0]
    assert "a step that the run did not finish" in capture.gaps[0].reason
    rest = tp.load(tmp_path / "dump" / ".tensorprobe")
    assert {call.step for call in rest.calls} == {1}
    done = run_script(tmp_path, script.replace("if i:", "if 0:"))
    assert done.returncode == 0, done.stderr
    capture = tp.load(tmp_path / "dump")
    assert ({call.step for call in capture.calls}, capture.gaps) == ({0, 1}, ())
    assert (tmp_path / "dump" / "earlier" / "1" / ".tensorprobe").is_dir()


def test_without_arguments_it_is_msprobes_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(PrecisionDebugger(), Net())
    assert (tmp_path / "dump_path" / "step0" / PROC / "dump.json").is_file()


@pytest.mark.parametrize(("given", "rank"), [(3, 3), (None, 0)])
def test_a_process_that_gets_its_rank_later(tmp_path: Path, given: int | None, rank: int) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "from tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "d = PrecisionDebugger(dump_path='dump')\n"
        "for i in range(2):\n"
        "    if i: dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)\n"
        f"    d.start(rank_id={given} if i else None)\n"
        "    torch.relu(torch.ones(2)); d.stop(); d.step()\n"
        "dist.destroy_process_group()\n"
    )
    done = run_script(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "dump").glob("step*/*")] == [f"rank{rank}"] * 2


@pytest.mark.slow
def test_torchrun_ranks_are_rank_folders(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from tensorprobe.msprobe.pytorch import PrecisionDebugger\n"
        "d = PrecisionDebugger(dump_path='dump', level='L1')\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.full((2,), float(dist.get_rank()))\n"
        "d.start(); dist.all_reduce(x); d.stop(); d.step()\n"
        "dist.destroy_process_group()\n"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dump = tmp_path / "dump"
    assert sorted(p.name for p in (dump / "step0").iterdir()) == ["rank0", "rank1"]
    assert not (dump / ".tensorprobe").exists()
    capture = tp.load(dump)
    assert capture.ranks == (0, 1)
    call = capture.call("Distributed.all_reduce.0.forward", rank=1)
    assert call.tensor("output.0").summary.max == 1
    comparisons = compare_distributed(dump, dump / "step0", tmp_path / "out")
    assert [c.verdict.verdict for c in comparisons] == ["match", "match"]
    names = sorted(p.name.rpartition("_")[0] for p in (tmp_path / "out").iterdir())
    assert names == ["compare_result_rank0", "compare_result_rank1"]


def test_seed_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        monkeypatch.setattr(F, name, getattr(F, name))
    seed_all(seed=7)
    first = torch.rand(2)
    seed_all(7, mode=False, rm_dropout=True)
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(nn.Dropout(0.9)(torch.ones(100)), torch.ones(100))
    with pytest.raises(ValueError, match="dropout probability"):
        F.dropout(torch.ones(2), 1.5)
    with pytest.raises(BadUsage, match="is_enhanced"):
        seed_all(is_enhanced=True)


def test_compare_by_file_and_by_folder(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config(tmp_path, task="tensor"))
    run(debugger, Net(), steps=2)
    PrecisionDebugger.close()
    a, b = (tmp_path / "dump" / f"step{i}" for i in (0, 1))
    param = {
        "npu_json_path": str(a / PROC / "dump.json"),
        "bench_json_path": str(b / PROC / "dump.json"),
        "stack_json_path": str(a / PROC / "stack.json"),
        "is_print_compare_log": True,
    }
    compare(param, str(tmp_path / "out"), stack_mode=True)
    compare({"npu_path": str(a), "bench_path": str(b)}, tmp_path / "out2", xlsx=True)
    (table,) = (tmp_path / "out").iterdir()
    assert table.name.startswith("compare_result_20")
    header = table.read_text().splitlines()[0].split(",")
    assert header[:2] == ["NPU Name", "Bench Name"]
    assert header[-2:] == ["NPU_Stack_Info", "Data_name"]
    assert [p.suffix for p in (tmp_path / "out2").iterdir()] == [".xlsx"]
    for wrong, text in (
        ({"npu_json_path": "x"}, "there is no such path|lacks"),
        ({"npu_jsn_path": "x"}, "input_param has 'npu_jsn_path'"),
        (3, "expected a dict"),
    ):
        with pytest.raises(tp.errors.TensorprobeError, match=text):
            compare(wrong, tmp_path / "out3")


def test_names_that_the_door_has_not_are_refused_by_name() -> None:
    with pytest.raises(ImportError, match="random_save is not supported; use tensorprobe run"):
        from tensorprobe.msprobe.pytorch import random_save  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from tensorprobe.msprobe.pytorch import Nothing  # noqa: F401


def test_everything_can_be_imported_from_where_msprobe_has_it() -> None:
    from tensorprobe.msprobe.pytorch.common import seed_all as a
    from tensorprobe.msprobe.pytorch.common.utils import seed_all as b
    from tensorprobe.msprobe.pytorch.compare.acc_compare import compare as c
    from tensorprobe.msprobe.pytorch.compare.distributed_compare import compare_distributed as d
    from tensorprobe.msprobe.pytorch.dump.debugger.precision_debugger import PrecisionDebugger as f
    from tensorprobe.peers.msprobe.msprobe_debugger import PrecisionDebugger as e

    assert (a, b, c, d) == (seed_all, seed_all, compare, compare_distributed)
    assert e is f is PrecisionDebugger


def test_a_dump_of_the_door_against_a_native_recording_names_the_culprit(tmp_path: Path) -> None:
    weight = torch.linspace(0.5, 2, 12).reshape(3, 4)

    def program(factor: float) -> None:
        torch.tanh(F.linear(X * factor, weight) + 1)

    debugger = PrecisionDebugger(config(tmp_path, task="tensor"))
    debugger.start()
    program(1.01)
    debugger.stop()
    with tp.Recorder(tmp_path / "native", level="L1", keep="tensors"):
        program(1.0)
    verdict = tp.compare(tmp_path / "dump", tmp_path / "native").verdict
    assert (verdict.verdict, verdict.counts["aligned"]) == ("diverged", 4)
    assert verdict.culprits[0].name == "Tensor.__mul__.0.forward"
    assert "1.01 here, 1.0 expected" in verdict.culprits[0].reason
