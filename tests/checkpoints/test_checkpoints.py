"""Two checkpoints of any form: what differs, by how much, and by rounding only or not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import nn

from tensorprobe.checkpoints.checkpoint_comparison import (
    CheckpointComparison,
    as_json,
    compare_checkpoints,
    lines,
)
from tensorprobe.checkpoints.checkpoint_reading import read_checkpoint
from tensorprobe.checkpoints.stored_weights import WeightPieces, boxes
from tensorprobe.cli.main import main
from tensorprobe.errors import BadArtefact, BadUsage

State = dict[str, torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 8)
        self.v_proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(3))


@pytest.fixture
def state() -> State:
    torch.manual_seed(0)
    return {key: value.clone() for key, value in Model().state_dict().items()}


def compared(tmp_path: Path, actual: Any, expected: Any, **more: Any) -> CheckpointComparison:
    """Two contents, saved by torch and compared."""
    torch.save(actual, tmp_path / "a.pt")
    torch.save(expected, tmp_path / "e.pt")
    return compare_checkpoints(tmp_path / "a.pt", tmp_path / "e.pt", **more)


def verdict(tmp_path: Path, actual: Any, expected: Any, **more: Any) -> str:
    return compared(tmp_path, actual, expected, **more).verdict


# Reading


def odd_tensors() -> dict[str, torch.Tensor]:
    w = torch.arange(30.0).reshape(6, 5)
    return {
        "plain": w,
        "transposed": w.t(),
        "slice": w[1:4, 2:],
        "expanded": w[0].expand(7, 5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "conjugate": torch.view_as_complex(torch.randn(4, 2)).conj(),
        "negative": torch.view_as_complex(torch.randn(4, 2)).conj().imag,
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "uint16": torch.arange(3).to(torch.uint16),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path: Path, is_zip: bool) -> None:
    saved = odd_tensors()
    path = tmp_path / "x.pt"
    torch.save({"a": saved}, path, _use_new_zipfile_serialization=is_zip)
    found = read_checkpoint(path).tensors
    assert list(found) == [f"a.{key}" for key in saved]
    for key, tensor in saved.items():
        pieces = WeightPieces(found[f"a.{key}"])
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        wanted = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        assert pieces.size == 0 or pieces.piece(0, pieces.size).tobytes() == wanted, key
        pieces.close()


@pytest.mark.filterwarnings("ignore")  # of torch: sparse and quantised tensors
def test_other_values_are_read_and_classes_stay_names(tmp_path: Path) -> None:
    class Settings:
        def __init__(self) -> None:
            self.lr, self.table = 0.1, torch.ones(2)

    Settings.__qualname__ = "Settings"
    globals()["Settings"] = Settings
    Settings.__module__ = __name__
    content = {
        "args": Settings(),
        "state": OrderedDict(step=3, name="x" * 500),
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "numpy": np.arange(3.0),
        "random": random.getstate(),
        "big": 2**5000,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.qint8),
    }
    torch.save(content, tmp_path / "x.pt")
    del globals()["Settings"]
    found = read_checkpoint(tmp_path / "x.pt")
    assert found.values["args.lr"] == 0.1
    assert found.values["state.step"] == 3
    assert found.values["device"] == "torch.device('cpu')"
    assert found.values["dtype"] == "torch.float16"
    assert str(found.values["numpy"]).startswith("array f8 [3], sha256 ")
    assert str(found.values["big"]).startswith("a large number, sha256 ")
    assert found.tensors["args.table"].shape == (2,)
    assert found.tensors["sparse.indices"].shape == (2, 3)
    assert found.tensors["csr.values"].dtype == "float32"
    assert found.tensors["quantised"].dtype == "qint8"
    assert found.values["quantised.quantizer.1"] == 0.1


def test_boxes_cover_a_range_once() -> None:
    shape = (3, 4, 5)
    whole = np.arange(60).reshape(shape)
    for start in range(60):
        for stop in range(start, 61):
            cut = [whole[tuple(slice(*side) for side in box)] for box in boxes(start, stop, shape)]
            flat = np.concatenate([part.reshape(-1) for part in cut]) if cut else np.empty(0)
            assert flat.tolist() == [*range(start, stop)]


# What differs


def test_one_number(tmp_path: Path, state: State) -> None:
    other = {key: value.clone() for key, value in state.items()}
    other["layers.1.q_proj.weight"][2, 3] += 1
    found = compared(tmp_path, other, state)
    (row,) = as_json(found)["differences"]
    assert (row["key"], row["kind"], row["largest_at"]) == (
        "layers.1.q_proj.weight", "differ", [2, 3],
    )  # fmt: skip
    assert row["max_abs"] == pytest.approx(1)
    assert next(lines(found)) == "differ: 1 tensor by more than rounding; 24 of 25 tensors equal"
    assert "  first in layers.1: 1 of 8 tensors; 1 layer in all" in lines(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounding_is_told_apart(tmp_path: Path, state: State, dtype: torch.dtype) -> None:
    coarse = {key: value.to(dtype) for key, value in state.items()}
    assert verdict(tmp_path, coarse, state) == "rounding"
    if dtype != torch.float8_e4m3fn:
        wide = {key: value.float() for key, value in coarse.items()}
        assert verdict(tmp_path, wide, state) == "rounding"
        assert verdict(tmp_path, state, wide) == "rounding"
    coarse["layers.0.norm.weight"] = (state["layers.0.norm.weight"] * 1.5).to(dtype)
    assert verdict(tmp_path, coarse, state) == "differ"


def test_small_changes_are_no_rounding(tmp_path: Path, state: State) -> None:
    assert verdict(tmp_path, {k: v * (1 + 1e-4) for k, v in state.items()}, state) == "differ"
    one_step = {k: torch.nextafter(v, torch.full_like(v, 9)) for k, v in state.items()}
    assert verdict(tmp_path, one_step, state) == "rounding"
    flipped = {k: (v.float() > 0).int() for k, v in state.items()}
    assert verdict(tmp_path, {k: v + 1 for k, v in flipped.items()}, flipped) == "differ"


def test_special_values(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    base = {"x": torch.tensor([nan, inf, -0.0, 1]), "empty": torch.empty(0), "s": torch.tensor(2.0)}
    assert verdict(tmp_path, base, base) == "match"
    found = compared(tmp_path, {**base, "x": torch.tensor([nan, inf, 0.0, 1])}, base)
    assert found.verdict == "match"
    assert any("equal values and other bits" in line for line in lines(found))
    for values in ([1, inf, 0, 1], [nan, -inf, 0, 1], [nan, nan, 0, 1], [nan, inf, 0, nan]):
        assert verdict(tmp_path, {**base, "x": torch.tensor(values)}, base) == "differ"


def test_conjugates_and_complex_numbers(tmp_path: Path) -> None:
    x = torch.view_as_complex(torch.randn(4, 2))
    assert verdict(tmp_path, {"x": x.conj()}, {"x": x}) == "differ"
    assert verdict(tmp_path, {"x": x.conj()}, {"x": x.conj().resolve_conj()}) == "match"
    other = x.clone()
    other[2] += 1j
    (row,) = as_json(compared(tmp_path, {"x": other}, {"x": x}))["differences"]
    assert row["largest_at"] == [2]


def test_layouts_do_not_matter_and_shapes_do(tmp_path: Path) -> None:
    w = torch.randn(700, 900)  # larger than what is read at a time
    assert verdict(tmp_path, {"w": w.t().contiguous().t()}, {"w": w}) == "match"
    assert verdict(tmp_path, {"w": w.t()}, {"w": w}) == "differ"
    assert verdict(tmp_path, {"w": w.reshape(-1)}, {"w": w}) == "differ"


def test_what_only_one_side_has(tmp_path: Path, state: State) -> None:
    less = {key: value for key, value in state.items() if "layers.2" not in key}
    found = compared(tmp_path, less, state)
    assert found.verdict == "differ"
    assert len(found.pairs.only_expected) == 8
    assert not found.pairs.only_actual


def test_values(tmp_path: Path, state: State) -> None:
    content = {"model": state, "lr": 0.1, "n": float("nan")}
    assert verdict(tmp_path, content, {**content}) == "match"
    found = compared(tmp_path, {**content, "lr": 0.2}, content)
    assert (found.verdict, found.values) == ("differ", [("lr", 0.2, 0.1)])
    assert verdict(tmp_path, {**content, "lr": 0.2}, content, only="weights") == "match"
    alone = compared(tmp_path, content, state)
    assert (alone.verdict, alone.notes[-1]) == (
        "match", "2 values of actual not compared: the other side holds none",
    )  # fmt: skip
    with pytest.raises(BadArtefact, match="nothing to compare"):
        compared(tmp_path, content, state, only="optimizer")


def test_tied_weights(tmp_path: Path) -> None:
    w = torch.randn(3, 4)
    found = compared(tmp_path, {"embed": w, "head": w}, {"embed": w, "head": w.clone()})
    assert (found.verdict, found.notes) == ("match", ["tied in actual only: embed, head"])
    found = compared(tmp_path, {"embed": w}, {"embed": w, "head": w})  # as Hugging Face writes it
    note = "head is embed in expected, tied; actual holds it once"
    assert (found.verdict, found.notes) == ("match", [note])
    found = compared(tmp_path, {"embed": w}, {"embed": w, "head": w.clone()})
    assert found.verdict == "differ"


# Which go together


def test_wrappers_prefixes_and_files(tmp_path: Path, state: State) -> None:
    torch.save({"model": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "a.bin")
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    found = compare_checkpoints(tmp_path / "a.bin", tmp_path / "hf")
    assert (found.verdict, len(found.compared)) == ("match", 25)
    assert verdict(tmp_path, {"rows": state["embed.weight"]}, {"net.rows": state["embed.weight"]})
    same = compare_checkpoints(tmp_path / "a.bin", tmp_path / "a.bin")
    assert (same.verdict, same.notes) == ("match", ["both paths are the same checkpoint"])


def renamed(state: State) -> State:
    words = {"layers": "h", "q_proj": "attn.query", "k_proj": "attn.key", "v_proj": "attn.value"}
    words |= {"embed": "wte", "norm": "ln_1"}
    found = {}
    for key, value in state.items():
        for word, other in words.items():
            key = key.replace(word, other)
        found[key] = value
    return found


def test_other_names_are_found_by_content(tmp_path: Path, state: State) -> None:
    other = renamed(state)
    found = compared(tmp_path, state, other)
    assert (found.verdict, len(found.compared)) == ("match", 25)
    assert (
        "layers.{}.q_proj.weight",
        "h.{}.attn.query.weight",
        "content",
        3,
    ) in found.pairs.renamed
    other["h.1.attn.value.weight"] = other["h.1.attn.value.weight"] + 1
    changed = compared(tmp_path, state, other)
    assert [c.pair.actual.key for c in changed.compared if c.difference.kind != "equal"] == [
        "layers.1.v_proj.weight"
    ]


def test_swapped_weights_are_no_renamed_ones(tmp_path: Path, state: State) -> None:
    """By content alone q would be k: their names say that it is not."""
    other = renamed(state)
    for n in range(3):
        q, k = (f"h.{n}.attn.{word}.weight" for word in ("query", "key"))
        other[q], other[k] = other[k], other[q]
    assert verdict(tmp_path, state, other) == "differ"
    q, k = "layers.0.q_proj.weight", "layers.0.k_proj.weight"
    found = compared(tmp_path, {**state, q: state[k], k: state[q]}, state)
    assert found.verdict == "differ"
    assert sorted(found.moved) == [(k, q), (q, k)]


def fused(state: State) -> State:
    names = ("q_proj", "k_proj", "v_proj")
    found = {}
    for key, value in state.items():
        if "q_proj" in key:
            parts = [state[key.replace("q_proj", name)] for name in names]
            found[key.replace("q_proj", "qkv")] = torch.cat(parts)
        elif "k_proj" not in key and "v_proj" not in key:
            found[key] = value
    return found


def test_fused_weights(tmp_path: Path, state: State) -> None:
    assert verdict(tmp_path, state, fused(state)) == "match"
    assert verdict(tmp_path, fused(state), state) == "match"
    wrong = fused({**state, "layers.1.k_proj.weight": state["layers.1.k_proj.weight"] + 1})
    found = compared(tmp_path, state, wrong)
    (row,) = as_json(found)["differences"]
    assert row["expected_key"] == "layers.1.qkv.weight"
    assert row["largest_at"][0] in range(8, 16)  # the rows of k


def test_a_mapping_file(tmp_path: Path, state: State) -> None:
    other = {k.replace("embed", "tokens").replace("layers", "h"): v + 1 for k, v in state.items()}
    other = fused({k.replace("h.", "layers."): v for k, v in other.items()})
    other = {k.replace("qkv", "mixed"): v for k, v in other.items()}
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text("embed: tokens\nq_proj + k_proj + v_proj: mixed\nignore: ['*.norm.*']\n")
    found = compared(tmp_path, state, other, mapping=str(mapping))
    assert not found.pairs.only_actual
    assert not found.pairs.only_expected
    assert {pair.how for pair in found.pairs.pairs} == {"mapping"}
    assert all(each.difference.metrics.max_abs == pytest.approx(1) for each in found.compared)  # type: ignore[union-attr]


# Optimizers


def optimizer_state(named: bool, reverse: bool) -> Any:
    torch.manual_seed(0)
    model = Model()
    parameters = [*model.named_parameters()][:: -1 if reverse else 1]
    optimizer = torch.optim.AdamW(parameters if named else [p for _, p in parameters])
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"optimizer": optimizer.state_dict()}


def test_an_optimizer_with_its_parameters_in_another_order(tmp_path: Path) -> None:
    plain = optimizer_state(named=False, reverse=False)
    assert verdict(tmp_path, plain, optimizer_state(named=False, reverse=False)) == "match"
    found = compared(tmp_path, optimizer_state(named=False, reverse=True), plain)
    assert found.verdict == "differ"
    assert ("optimizer.state.0.exp_avg", "optimizer.state.24.exp_avg") in found.moved
    named = optimizer_state(named=True, reverse=False)
    if "param_names" in named["optimizer"]["param_groups"][0]:  # torch 2.6 and later
        assert verdict(tmp_path, optimizer_state(named=True, reverse=True), named) == "match"


def test_a_lost_optimizer_state(tmp_path: Path, state: State) -> None:
    full = {"model": state, **optimizer_state(named=False, reverse=False)}
    found = compared(tmp_path, {"model": state}, full)
    assert found.verdict == "differ"
    assert len(found.pairs.only_expected) == 75
    assert any(line.startswith("  next: ") and "--only weights" in line for line in lines(found))
    assert verdict(tmp_path, {"model": state}, full, only="weights") == "match"


# Many files


def test_a_folder_of_hugging_face(tmp_path: Path, state: State) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    keys = [*state]
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({key: state[key] for key in keys[:9]}, folder / names[0])
    save_file({key: state[key] for key in keys[9:]}, folder / names[1])
    table = {key: names[n >= 9] for n, key in enumerate(keys)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    torch.save(state, tmp_path / "e.pt")
    assert compare_checkpoints(folder, tmp_path / "e.pt").verdict == "match"
    assert compare_checkpoints(index, tmp_path / "e.pt").verdict == "match"
    index.write_text(json.dumps({"weight_map": {**table, "more": names[0]}}))
    with pytest.raises(BadArtefact, match=f"{names[0]}' has no more"):
        compare_checkpoints(folder, tmp_path / "e.pt")
    (folder / names[1]).unlink()
    with pytest.raises(BadArtefact, match=rf"{names[1]}' is missing, which has {keys[9]}"):
        compare_checkpoints(folder, tmp_path / "e.pt")


def test_links_of_the_cache_of_hugging_face(tmp_path: Path, state: State) -> None:
    cache = tmp_path / "models--me--it"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    save_file(state, cache / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    torch.save(state, tmp_path / "e.pt")
    assert compare_checkpoints(snapshot, tmp_path / "e.pt").verdict == "match"
    save_file(state, tmp_path / "outside")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(BadArtefact, match="leads out"):
        compare_checkpoints(snapshot, tmp_path / "e.pt")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    script = Path(__file__).with_name("sharded_saving.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, folder, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    return folder


def test_distributed_checkpoints(sharded: Path, tmp_path: Path) -> None:
    found = compare_checkpoints(sharded / "dcp", sharded / "whole.pt")
    assert (found.verdict, len(found.compared), found.values_equal) == ("match", 3, 1)
    assert len(found.actual.tensors["model.rows"].parts) == 2
    whole = torch.load(sharded / "whole.pt")
    whole["model"]["columns"][3, 5] += 1
    torch.save(whole, tmp_path / "e.pt")
    (row,) = as_json(compare_checkpoints(sharded / "dcp", tmp_path / "e.pt"))["differences"]
    assert (row["key"], row["largest_at"], row["differing"]) == ("model.columns", [3, 5], 1)
    damaged = tmp_path / "dcp"
    damaged.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (damaged / name).write_bytes((sharded / "dcp" / name).read_bytes())
    with pytest.raises(BadArtefact, match=r"model\.\w+: '.*__1_0.distcp' is missing"):
        compare_checkpoints(damaged, sharded / "whole.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_order_of_an_optimizer_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.distributed.checkpoint.save(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(tree, tmp_path / "e.pt")
    assert compare_checkpoints(tmp_path / "dcp", tmp_path / "e.pt").verdict == "match"


def test_files_of_fsdp(sharded: Path, tmp_path: Path) -> None:
    found = compare_checkpoints(sharded / "fsdp", sharded / "whole.pt")
    assert (found.verdict, len(found.compared)) == ("match", 3)
    name = "model_world_size_2_rank_0.pt"
    (tmp_path / name).write_bytes((sharded / "fsdp" / name).read_bytes())
    with pytest.raises(BadArtefact, match="the file of rank 1 is missing"):
        compare_checkpoints(tmp_path, sharded / "whole.pt")
    alone = compare_checkpoints(tmp_path / name, tmp_path / name)
    assert "actual: 2 tensors are one rank's part of a whole: rows" in alone.notes


# Megatron


def megatron_model(layers: int) -> State:
    torch.manual_seed(3)
    found = {"embedding.word_embeddings.weight": torch.randn(12, 4)}
    for n in range(layers):
        layer = f"decoder.layers.{n}."
        found |= {
            f"{layer}self_attention.linear_qkv.weight": torch.randn(12, 4),
            f"{layer}self_attention.linear_qkv.layer_norm_weight": torch.randn(4),
            f"{layer}self_attention.linear_proj.weight": torch.randn(4, 4),
            f"{layer}mlp.linear_fc1.weight": torch.randn(16, 4),
            f"{layer}mlp.linear_fc2.weight": torch.randn(4, 8),
        }
    return {**found, "output_layer.weight": torch.randn(12, 4)}


def cut(key: str, weight: torch.Tensor, tp: int, t: int) -> torch.Tensor:
    if "fc1" in key:  # gates, then the others
        halves = [half.chunk(tp)[t] for half in weight.chunk(2)]
        return torch.cat(halves)
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return weight.chunk(tp, 1)[t].contiguous()
    return weight if "norm" in key else weight.chunk(tp)[t].clone()


def save_megatron(folder: Path, model: State, tp: int, pp: int, layers: int) -> None:
    """A folder as Megatron writes it; layers are numbered from 0 in each stage."""
    each = layers // pp
    for t in range(tp):
        for p in range(pp):
            own = {}
            for key, weight in model.items():
                words = key.split(".")
                if words[0] == "decoder":
                    number = int(words[2]) - p * each
                    if not 0 <= number < each:
                        continue
                    words[2] = str(number)
                elif p != (0 if words[0] == "embedding" else pp - 1):
                    continue
                own[".".join(words)] = cut(key, weight, tp, t)
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            path = folder / "iter_0000010" / name
            path.mkdir(parents=True)
            content = {"model": own, "iteration": 10, "args": {"swiglu": True}}
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (4, 4)])
def test_megatron(tmp_path: Path, tp: int, pp: int) -> None:
    model = megatron_model(4)
    save_megatron(tmp_path / "one", model, 1, 1, 4)
    save_megatron(tmp_path / "many", model, tp, pp, 4)
    found = compare_checkpoints(tmp_path / "many", tmp_path / "one")
    assert (found.verdict, len(found.compared), found.notes) == ("match", 22, [])
    changed = {key: value.clone() for key, value in model.items()}
    changed["decoder.layers.3.mlp.linear_fc2.weight"][3, 7] += 1
    changed["decoder.layers.2.mlp.linear_fc1.weight"][9, 0] += 1
    save_megatron(tmp_path / "changed", changed, tp, pp, 4)
    rows = as_json(compare_checkpoints(tmp_path / "changed", tmp_path / "one"))["differences"]
    assert [(row["key"], row["largest_at"]) for row in rows] == [
        ("model.decoder.layers.2.mlp.linear_fc1.weight", [9, 0]),
        ("model.decoder.layers.3.mlp.linear_fc2.weight", [3, 7]),
    ]


def test_a_layout_that_is_not_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_megatron(tmp_path / "a", megatron_model(4), 2, 2, 4)
    layout = tmp_path / "layout.yaml"
    layout.write_text("tp: 4\npp: 2\n")
    words = ["checkpoints", str(tmp_path / "a"), str(tmp_path / "a")]
    assert main([*words, "--actual-layout", str(layout)]) == 2
    assert "tp 4 x pp 2 is 8 ranks, and there are 4" in capsys.readouterr().err
    layout.write_text("tp: 2\npp: 2\ndp: 8\norder: tp-dp-pp\n")
    assert main([*words, "--actual-layout", str(layout)]) == 0
    for text in ("tp: two", "tp: 0", "rows: 2", "tp: 2\norder: dp", "[]"):
        layout.write_text(text)
        with pytest.raises(BadUsage):
            compare_checkpoints(tmp_path / "a", tmp_path / "a", actual_layout=layout)


def test_files_of_ranks_with_a_layout(tmp_path: Path) -> None:
    """Rank files that say nothing of themselves: tp changes fastest, then dp, then pp."""
    model = megatron_model(4)
    save_megatron(tmp_path / "m", model, 2, 2, 4)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for number in range(8):
        t, p = number % 2, number // 4
        source = tmp_path / "m" / "iter_0000010" / f"mp_rank_{t:02d}_{p:03d}"
        content = (source / "model_optim_rng.pt").read_bytes()
        (ranks / f"rank_{number}.pt").write_bytes(content)
    (ranks / "layout.yaml").write_text("tp: 2\ndp: 2\npp: 2\norder: tp-dp-pp\n")
    save_megatron(tmp_path / "one", model, 1, 1, 4)
    assert compare_checkpoints(ranks, tmp_path / "one").verdict == "match"
    (ranks / "layout.yaml").write_text("tp: 2\npp: 2\n")
    with pytest.raises(BadUsage, match="is 4 ranks, and there are 8"):
        compare_checkpoints(ranks, tmp_path / "one")


# The command


def test_the_command(tmp_path: Path, state: State, capsys: pytest.CaptureFixture[str]) -> None:
    a, e = str(tmp_path / "a.safetensors"), str(tmp_path / "e.safetensors")
    save_file(state, a)
    save_file({key: value.bfloat16() for key, value in state.items()}, e)
    assert main(["checkpoints", a, a]) == 0
    assert main(["checkpoints", a, e]) == 3
    assert main(["checkpoints", a, e, "--allow-rounding"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", a, e, "--json", "-o", str(tmp_path / "out")]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "checkpoints.json").read_text())
    assert (printed["format"], printed["verdict"]) == (1, "rounding")
    assert main(["checkpoints", a, str(tmp_path / "none")]) == 2
    Path(e).write_bytes(b"hello")
    assert main(["checkpoints", a, e]) == 1
    assert "e.safetensors' is no checkpoint" in capsys.readouterr().err


_LARGE = """
import resource, sys
from tensorprobe.cli.main import main
limit = {limit}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
status = main(["checkpoints", *sys.argv[1:]])
assert "torch" not in sys.modules
sys.exit(status)
"""


def test_larger_than_memory_and_without_torch(tmp_path: Path) -> None:
    """2 x 384 MB (of holes: they take no disk) in 300 MB of addresses, numpy's own included."""
    rows = 24 << 10
    header = {
        f"layers.{n}.w": {
            "dtype": "F32",
            "shape": [rows, 1 << 10],
            "data_offsets": [n * rows << 12, (n + 1) * rows << 12],
        }
        for n in range(4)
    }
    text = json.dumps(header).encode()
    for name in ("a", "e"):
        with (tmp_path / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (4 * rows << 12))
            if name == "a":
                file.seek(8 + len(text) + (3 * rows << 12) + 4096)
                file.write(b"\x00\x00\x80\x3f")
    code = _LARGE.format(limit=300 << 20)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "e")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "layers.3.w: float32 [24576, 1024], 1 of 25,165,824 numbers" in done.stdout
