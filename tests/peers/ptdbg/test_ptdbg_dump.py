"""set_dump_path, register_hook and set_dump_switch: what is in the files, and where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dumping import Net, call_names, dump, lines, names, net, session, train

import tensorprobe as tp
from tensorprobe.errors import BadUsage
from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump, overflow_check


def test_a_whole_network(tmp_path: Path) -> None:
    folder = dump(tmp_path / "npu.pkl")
    index, data = folder / "npu.pkl", folder / "npu"
    assert sorted(p.name for p in folder.iterdir()) == ["npu", "npu.pkl"]
    assert sorted(p.name for p in (tmp_path / "ptdbg_dump_v2.3").iterdir()) == ["rank0"]
    found = names(index)
    assert [n for n in found if "batch_norm" in n] == [
        *(f"Functional_batch_norm_0_forward_input.{i}" for i in range(5)),
        "Functional_batch_norm_0_forward_output",
        "Functional_batch_norm_0_backward_input.0",
        "Functional_batch_norm_0_backward_output.0",
        "Functional_batch_norm_0_backward_output.4",
        "Functional_batch_norm_0_backward_output.3",
    ]
    assert {f"{name}.npy" for name in found} == {p.name for p in data.glob("*.npy")}
    assert "Torch_cat_0_forward_input.0.1" in found
    assert "Tensor___mul___0_forward_output" in found
    assert "Functional_linear_0_backward_output.1" in found  # the weight's gradient
    by_name = {line[0]: line for line in lines(index)}
    name, flag, digest, dtype, shape, stats = by_name["Functional_conv2d_0_forward_input.0"]
    assert (flag, digest, dtype, shape) == (1, [], "torch.float32", [2, 3, 6, 6])
    stored = np.load(data / f"{name}.npy", allow_pickle=False)
    assert stats == pytest.approx([stored.max(), stored.min(), stored.mean()])


def test_numbers_go_on_over_steps_and_switches(tmp_path: Path) -> None:
    model = net()
    with session(tmp_path / "a.pkl") as made:
        made.set_dump_switch("ON")
        train(model, steps=2)
        made.set_dump_switch("OFF")
        train(model)
        made.set_dump_switch("ON")
        train(model)
    index = tmp_path / "ptdbg_dump_v2.3" / "rank0" / "a.pkl"
    convs = [n for n in call_names(index) if "conv2d" in n and "forward" in n]
    # the third step, with the switch off, has taken its number
    assert convs == [f"Functional_conv2d_{i}_forward" for i in (0, 1, 3)]
    data = index.with_suffix("")
    assert {f"{name}.npy" for name in names(index)} == {p.name for p in data.glob("*.npy")}


def test_a_name_means_one_call_wherever_the_switch_is(tmp_path: Path) -> None:
    scope = ["Functional_linear_2_forward"]
    whole = dump(tmp_path / "a" / "x.pkl", lambda: train(net(), steps=3)) / "x.pkl"
    model = net()
    with session(tmp_path / "b" / "x.pkl") as made:
        train(model, steps=2)
        made.set_dump_switch("ON", mode="list", scope=scope)
        train_from(model, 2)
    late = tmp_path / "b" / "ptdbg_dump_v2.3" / "rank0" / "x.pkl"
    assert call_names(late) == scope
    wanted = [line for line in lines(whole) if line[0].startswith(scope[0])]
    assert [line for line in lines(late) if len(line) > 2] == wanted


def train_from(model: Net, step: int) -> None:
    """The one step of the training that comes after `step` others."""
    x = torch.arange(216, dtype=torch.float32).reshape(2, 3, 6, 6) / 100 + step
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()


def test_a_second_run_moves_the_first_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump(tmp_path / "a.pkl", lambda: torch.ones(2).add(1.0))
    old = (folder / "a.pkl").read_text()
    dump(tmp_path / "a.pkl", lambda: torch.ones(3).mul(2.0))
    said = capsys.readouterr().err
    assert said.count("an earlier dump was there") == 1
    assert (folder / "a.1.pkl").read_text() == old
    assert (folder / "a.1" / "Tensor_add_0_forward_output.npy").is_file()
    assert [n for n in call_names(folder / "a.pkl") if "Tensor" in n] == ["Tensor_mul_0_forward"]
    dump(tmp_path / "a.pkl", lambda: torch.ones(3).sub(2.0))
    assert (folder / "a.2.pkl").is_file()
    assert (folder / "a.1.pkl").read_text() == old
    # and the folder is still one capture
    assert [c.name for c in tp.load(folder).calls if "sub" in c.name]


MODES = [
    ({"mode": "list", "scope": ["Functional_conv2d_0_forward"]}, ["Functional_conv2d_0_forward"]),
    (
        {"mode": "list", "scope": ["Functional_linear_0", "Tensor___mul___0_forward"]},
        [
            "Tensor___mul___0_forward",
            "Functional_linear_0_forward",
            "Functional_linear_0_backward",
        ],
    ),
    (
        {"mode": "range", "scope": ["Torch_relu_0_forward", "Torch_cat_0_forward"]},
        [
            *("Torch_relu_0_forward", "Tensor_mean_0_forward"),
            *("Tensor___mul___0_forward", "Torch_cat_0_forward"),
            *("Torch_cat_0_backward", "Tensor___mul___0_backward"),
            *("Tensor_mean_0_backward", "Torch_relu_0_backward"),
        ],
    ),
    (
        {"mode": "api_list", "api_list": ["relu"]},
        ["Torch_relu_0_forward", "Torch_relu_0_backward"],
    ),
    (
        {"mode": "list", "scope": ["Functional_linear"], "dump_mode": "backward"},
        ["Functional_linear_0_backward"],
    ),
]


@pytest.mark.parametrize(("switch", "expected"), MODES)
def test_modes(switch: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    folder = dump(tmp_path / "a.pkl", **switch)
    assert call_names(folder / "a.pkl") == expected
    stacked = [n for n in names(folder / "a.pkl") if n.endswith("stack_info")]
    has_stacks = switch["mode"] != "api_list"
    assert len(stacked) == (len(expected) if has_stacks else 0)


def test_api_stack_has_a_prefix_and_a_stack_for_each_call(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a.pkl", mode="api_stack")
    assert sorted(p.name for p in folder.iterdir()) == ["api_stack_a", "api_stack_a.pkl"]
    by_call: dict[str, list[Any]] = {}
    for line in lines(folder / "api_stack_a.pkl"):
        by_call.setdefault(line[0].rpartition("ward_")[0], []).append(line)
    for found in by_call.values():
        assert found[-1][0].endswith("_stack_info")  # after the tensors, as their reader wants it
    frames = by_call["Functional_conv2d_0_for"][-1][1]
    assert any(path.endswith("dumping.py") and "self.conv" in code for path, _, _, code in frames)
    assert all(isinstance(line, str) for _, line, _, _ in frames)


def test_stack_mode_writes_stacks_only(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a.pkl", mode="stack", scope=["Functional_conv2d_0_forward"])
    assert names(folder / "a.pkl") == ["Functional_conv2d_0_forward_stack_info"]
    assert not (folder / "a").exists()


def test_the_filter_drops_integers_and_numbers_but_never_the_loss(tmp_path: Path) -> None:
    on = names(dump(tmp_path / "on" / "a.pkl") / "a.pkl")
    off = names(dump(tmp_path / "off" / "a.pkl", filter_switch="OFF") / "a.pkl")
    assert "Functional_cross_entropy_0_forward_output" in on
    assert "Functional_cross_entropy_0_forward_input.1" not in on  # the labels
    assert "Functional_conv2d_0_forward_input.3.0" not in on  # a stride
    assert {"Functional_cross_entropy_0_forward_input.1"} <= set(off)
    assert {"Functional_conv2d_0_forward_input.3.0", *on} <= set(off)
    scalar = next(
        line
        for line in lines(tmp_path / "off" / "ptdbg_dump_v2.3" / "rank0" / "a.pkl")
        if line[0] == "Functional_batch_norm_0_forward_input.5"
    )
    assert scalar[1:] == [1, [], "<class 'bool'>", "[]", [True, True, True]]


def test_later_spellings_are_taken(tmp_path: Path) -> None:
    made = PtdbgSession()
    made.set_dump_path(tmp_path / "folder", "tag")  # a folder, as since 4.0
    made.register_hook(net(), acc_cmp_dump)
    made.set_dump_switch(
        "on",
        mode="list",
        scope=["Functional.conv2d.0.forward"],
        dump_mode=["forward", "input"],
        summary_mode="md5",
    )
    train(net())
    made.close()
    index = tmp_path / "folder" / "tag_v2.3" / "rank0" / "dump.pkl"
    found = [line for line in lines(index) if len(line) > 2]
    assert [line[0] for line in found] == [
        f"Functional_conv2d_0_forward_input.{i}" for i in (0, 1, 2)
    ]
    assert all(len(line[2]) == 8 and line[5] == [] for line in found)
    assert not index.with_suffix("").exists()


def test_order_does_not_matter(tmp_path: Path) -> None:
    """The hook before the path, both before the model, and the switch before either."""
    expected = names(dump(tmp_path / "a" / "x.pkl") / "x.pkl")
    made = PtdbgSession()
    made.set_dump_switch("ON")
    made.set_dump_path(tmp_path / "b" / "x.pkl", "ptdbg_dump")
    model = net()
    made.register_hook(model, acc_cmp_dump)
    made.set_dump_path(tmp_path / "b" / "x.pkl", "ptdbg_dump")
    train(model)
    made.close()
    assert names(tmp_path / "b" / "ptdbg_dump_v2.3" / "rank0" / "x.pkl") == expected
    made = PtdbgSession()
    made.register_hook(None, acc_cmp_dump)
    model = net()
    made.set_dump_switch("ON")
    made.set_dump_path(tmp_path / "c" / "x.pkl", "ptdbg_dump")
    train(model)
    made.close()
    assert names(tmp_path / "c" / "ptdbg_dump_v2.3" / "rank0" / "x.pkl") == expected


def test_without_a_path_the_dump_goes_to_the_folder_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with session(None) as made:
        made.set_dump_switch("ON")
        torch.ones(2).add(1)
    assert (tmp_path / "ptdbg_dump_v2.3" / "rank0" / "dump.pkl").is_file()
    assert "no set_dump_path" in capsys.readouterr().err


def test_repeating_is_harmless_or_names_the_first_line(tmp_path: Path) -> None:
    with session(tmp_path / "a.pkl") as made:
        made.register_hook(net(), acc_cmp_dump)
        made.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
        made.set_dump_switch("ON")
        made.set_dump_switch("ON")
        made.set_dump_path(tmp_path / "a.pkl", "ptdbg_dump")
        torch.ones(2).add(1)
        with pytest.raises(BadUsage, match=r"test_ptdbg_dump\.py:\d+.*set_dump_switch\('OFF'\)"):
            made.set_dump_path(tmp_path / "other.pkl", "ptdbg_dump")
        with pytest.raises(BadUsage, match=r"register_hook\(acc_cmp_dump\) in .*\.py:\d+"):
            made.register_hook(net(), overflow_check)
    index = tmp_path / "ptdbg_dump_v2.3" / "rank0" / "a.pkl"
    assert call_names(index).count("Tensor_add_0_forward") == 1


WRONG = [
    ({"mode": "lst"}, "mode='lst'.*Did you mean 'list'"),
    ({"mode": "range", "scope": ["a"]}, "takes two names in scope, 1 given"),
    ({"mode": "list"}, "takes at least one name"),
    ({"mode": "acl", "scope": ["a", "b"]}, "takes one name in scope"),
    ({"mode": "api_list"}, r"api_list=\['relu'\]"),
    ({"filter_switch": "maybe"}, "filter_switch='maybe': expected 'ON' or 'OFF'"),
    ({"dump_mode": "sideways"}, "dump_mode='sideways': expected one or a list"),
    ({"scope": "relu", "mode": "list"}, "scope='relu': expected a list"),
    ({"summary_mode": "sha"}, "summary_mode='sha'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_say_what_to_write(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        PtdbgSession().set_dump_switch("ON", **arguments)


def test_wrong_hooks_and_paths_say_what_to_write(tmp_path: Path) -> None:
    made = PtdbgSession()
    with pytest.raises(BadUsage, match="expected acc_cmp_dump or overflow_check"):
        made.register_hook(None, print)
    with pytest.raises(BadUsage, match="no argument 'overflow_num'"):
        made.register_hook(None, acc_cmp_dump, overflow_num=1)
    with pytest.raises(BadUsage, match=r"set_dump_path\('./dump_path/npu_dump.pkl'\)"):
        made.set_dump_path(None, "ptdbg_dump")
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match="there is a file of that name"):
        made.set_dump_path(tmp_path / "file", "ptdbg_dump")
    with pytest.raises(BadUsage, match="switch='AN'"):
        made.set_dump_switch("AN")
    with pytest.raises(BadUsage, match="register_hook"):
        acc_cmp_dump("Functional_relu")


def test_odd_paths_are_fine(tmp_path: Path) -> None:
    folder = dump(tmp_path / "a++ b" / "ü" / "my dump.pkl", lambda: torch.ones(2).add(1))
    assert (folder / "my dump.pkl").is_file()


def test_the_rank_is_the_folder(tmp_path: Path) -> None:
    with session(tmp_path / "a.pkl", rank=3) as made:
        made.set_dump_switch("ON")
        torch.ones(2).add(1)
    assert (tmp_path / "ptdbg_dump_v2.3" / "rank3" / "a.pkl").is_file()


def test_nothing_matched_is_said_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path / "a.pkl", mode="list", scope=["Functional_conv2d_7_forward"])
    assert "Near names: Functional.conv2d.0.forward" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.recording-*"))


def test_a_dump_disturbs_nothing(tmp_path: Path) -> None:
    bare, dumped = net(), net()
    train(bare, steps=2)
    with session(tmp_path / "a.pkl") as made:
        made.set_dump_switch("ON", mode="api_stack")
        train(dumped, steps=2)
    for ours, theirs in zip(bare.state_dict().values(), dumped.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_several_models_are_one_dump(tmp_path: Path) -> None:
    first, second = Net(), Net()
    with session(tmp_path / "a.pkl") as made:
        made.register_hook(first, acc_cmp_dump)
        made.register_hook(second, acc_cmp_dump)
        made.set_dump_switch("ON")
        first(torch.ones(1, 3, 6, 6))
        second(torch.ones(1, 3, 6, 6))
    index = tmp_path / "ptdbg_dump_v2.3" / "rank0" / "a.pkl"
    assert "Functional_conv2d_1_forward" in call_names(index)
