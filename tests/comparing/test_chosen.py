"""Runs compared at chosen places: what is chosen, which rows and modules go together, how far."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe as tp
from tensorprobe.cli.main import main
from tensorprobe.comparing.places.row_pairs import Rows, parse_rows


class Net(nn.Module):
    """A causal model: each token's result is of the mean of those before it."""

    def __init__(self, seed: int = 0, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, 20)
        self.factor = factor

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        real = torch.ones(ids.shape) if mask is None else mask
        real = real.to(x.dtype)
        mean = (x * real[..., None]).cumsum(1) / real.cumsum(1).clamp(min=1)[..., None]
        return self.head(self.body(mean)) * self.factor


class Cached(Net):
    """The same with a sum of what was read before."""

    def begin(self) -> None:
        self.total, self.n = torch.zeros(1), 0

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        total = self.total.reshape(-1, 1, self.total.shape[-1]) + self.embed(ids).cumsum(1)
        n = positions[..., None] + 1
        self.total = total[:, -1]
        return self.head(self.body(total / n)) * self.factor


class Apart(nn.Module):
    """Queries, keys and values by three linears; or, `joined`, by one."""

    def __init__(self, order: list[int] | None = None, joined: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size = 8
        q, k, v = (nn.Linear(self.size, self.size) for _ in range(3))
        self.out = nn.Linear(self.size, self.size)
        self.order = order
        if not joined:
            self.q, self.k, self.v = q, k, v
            return
        self.qkv = nn.Linear(self.size, 3 * self.size)
        with torch.no_grad():
            weight = torch.cat([part.weight for part in (q, k, v)])
            bias = torch.cat([part.bias for part in (q, k, v)])
            places = order or list(range(3 * self.size))
            self.qkv.weight.copy_(weight[places])
            self.qkv.bias.copy_(bias[places])

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "qkv"):
            joined = self.qkv(x)
            if self.order:
                joined = joined[..., torch.tensor(self.order).argsort()]
            q, k, v = joined.chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(F.scaled_dot_product_attention(q, k, v))


def record(folder: Path, program: Callable[..., Any], **options: Any) -> Path:
    options = {"level": "L0", "keep": "tensors", **options}
    with torch.no_grad(), tp.Recorder(folder, **options) as recorder:
        program(recorder)
    return folder


def sides(
    tmp_path: Path, actual: Callable[..., Any], expected: Callable[..., Any], **options: Any
) -> tuple[Path, Path]:
    return record(tmp_path / "a", actual, **options), record(tmp_path / "e", expected, **options)


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


# What is chosen


def test_a_word_or_a_pattern_chooses_places(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS))

    def places(*at: str) -> set[str]:
        found = tp.compare(*both, at=at).verdict.boundaries
        return {each.actual for each in found if each.kind == "output"}

    assert places("outputs") == {""}
    assert places("modules") == {"", "embed", "body", "body.0", "body.1", "body.2", "head"}
    assert places("body.*") == {"body.0", "body.1", "body.2"}
    assert places("outputs", "he?d") == {"", "head"}


def test_calls_are_chosen_by_their_names(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS), level="L1")
    verdict = tp.compare(*both, at="Functional.linear.*").verdict
    assert [each.call for each in verdict.boundaries] == [
        f"Functional.linear.{n}.forward" for n in range(3)
    ]
    assert verdict.verdict == "match"


def test_what_selects_nothing_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, e = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS))
    assert main(["compare", str(a), str(e), "--at", "bodi.*"]) == 2
    told = capsys.readouterr().err
    assert f"--at bodi.* selects nothing in actual '{a}'; near names: body" in told
    assert main(["compare", str(a), str(e), "--at", "gradients"]) == 2
    assert "no gradients of parameters were recorded" in capsys.readouterr().err


def test_modules_have_to_be_recorded(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS), level="L1")
    with pytest.raises(tp.BadUsage, match=r"no modules were recorded\. Record with level='L0'"):
        tp.compare(*both, at="outputs")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rows": "same"}, "`rows` goes with chosen places"),
        ({"within": 0.1}, "`within` goes with chosen places"),
        ({"mapping": {"a": ["b", "c"]}}, "a list of modules in `mapping` goes with chosen places"),
        ({"mapping": {"ignore": ["a"]}}, "ignore in `mapping` goes with chosen places"),
        ({"at": "outputs", "rows": "some"}, "rows='some': expected one of auto, same"),
        ({"at": "outputs", "rows": "[a] = [:]"}, "'\\[a\\]' is no slice"),
        ({"at": "outputs", "within": -1.0}, "within=-1.0: expected a share"),
        ({"at": "outputs", "rows": "saved"}, "has saved none"),
        ({"at": "outputs", "mapping": {"x": ["y", "z"]}}, "no modules of both sides have these"),
    ],
)
def test_wrong_usage(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    other = IDS if options.get("rows") != "saved" else IDS[:1]
    both = sides(tmp_path, lambda _: Net()(other), lambda _: Net()(IDS))
    with pytest.raises(tp.BadUsage, match=told):
        tp.compare(*both, **options)


# Which rows go together


def test_slices_are_parsed() -> None:
    text = "[:, 1:] = [0, :-1]"
    assert parse_rows(text) == Rows(text, (slice(None), slice(1, None)), (0, slice(None, -1)))


def test_rows_by_slices(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS[:, :3]))
    assert tp.compare(*both, at="outputs", rows="[:, :3] = [:, :]").verdict.verdict == "match"
    assert tp.compare(*both, at="outputs", rows="[:, :3] = [:, :2]").verdict.verdict != "match"
    assert tp.compare(*both, at="outputs", rows="[:, 1:4] = [:, :]").verdict.verdict == "diverged"


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_known_by_the_mask(tmp_path: Path, padding: str) -> None:
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    place = slice(2, 5) if padding == "left" else slice(0, 3)
    ids[0], mask[0] = IDS[0], 1
    ids[1, place], mask[1, place] = IDS[1, :3], 1

    def one_by_one(_: Any) -> None:
        net = Net()
        net(IDS[1:, :3])
        net(IDS[:1])

    both = sides(tmp_path, lambda _: Net()(ids, mask=mask), one_by_one)
    verdict = tp.compare(*both, at="modules").verdict
    assert verdict.verdict == "match"
    (found,) = (each for each in verdict.boundaries if each.actual == "")
    assert found.rows == 8


def _read_with_cache(ids: Tensor, factor: float = 1.0) -> Callable[[Any], None]:
    def program(_: Any) -> None:
        net = Cached(factor=factor)
        net.begin()
        for n in range(ids.shape[1]):
            net(ids[:, n : n + 1], positions=torch.full((len(ids), 1), n))

    return program


def test_a_cache_reads_on(tmp_path: Path) -> None:
    both = sides(tmp_path, _read_with_cache(IDS), lambda _: Net()(IDS))
    verdict = tp.compare(*both, at="modules").verdict
    assert verdict.verdict == "match"
    assert sum(each.rows or 0 for each in verdict.boundaries if each.actual == "") == IDS.numel()


def test_a_fault_of_one_side_is_found_with_a_cache(tmp_path: Path) -> None:
    both = sides(tmp_path, _read_with_cache(IDS, 1.001), lambda _: Net()(IDS))
    culprit = tp.compare(*both, at="outputs").verdict.culprits[0]
    assert culprit.name == "Module.Cached.forward.0"
    assert "of its size" in culprit.reason


def test_runs_that_have_read_nothing_in_common_are_no_match(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net()(IDS + 7))
    verdict = tp.compare(*both, at="outputs").verdict
    assert verdict.verdict == "incomparable"
    assert verdict.reason is not None
    assert "the model was given other data" in verdict.reason


def _generate(net: Net, choose: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def program(_: Any) -> None:
        ids = IDS[:1, :2]
        for _ in range(3):
            ids = torch.cat([ids, choose(net(ids)[:, -1])], 1)

    return program


def test_another_token_is_no_match_unless_the_logits_tie(tmp_path: Path) -> None:
    def second(logits: Tensor) -> Tensor:
        return logits.topk(2).indices[:, 1:]

    def first(logits: Tensor) -> Tensor:
        return logits.argmax(-1, keepdim=True)

    both = sides(tmp_path, _generate(Net(), second), _generate(Net(), first))
    verdict = tp.compare(*both, at="outputs").verdict
    assert verdict.verdict == "diverged"
    assert (verdict.culprits[0].cause, verdict.culprits[0].kind) == ("data", "input")
    assert "their logits are" in verdict.culprits[0].reason


def test_other_data_in_one_row_are_no_match_though_the_rest_agrees(tmp_path: Path) -> None:
    def one_by_one(first: int) -> Callable[[Any], None]:
        def program(_: Any) -> None:
            net = Net()
            for ids in (IDS[1:], torch.tensor([[first, 8, 7]]), IDS[:1]):
                net(ids)

        return program

    both = sides(tmp_path, one_by_one(0), one_by_one(2))
    verdict = tp.compare(*both, at="outputs", rows="inputs").verdict
    assert verdict.verdict == "incomparable"
    assert str(verdict.reason).startswith("only 10 of 13 rows that the model gave have a partner")
    same = sides(tmp_path / "same", one_by_one(0), one_by_one(0))
    assert tp.compare(*same, at="outputs", rows="inputs").verdict.verdict == "match"


class Tied(Net):
    """Its logits of tokens 5 and 7 are equal, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight[7] = self.head.weight[5]
            self.head.bias[5] = self.head.bias[7] = 10.0


@pytest.mark.parametrize(("other", "outcome"), [(False, "match"), (True, "incomparable")])
def test_what_comes_after_a_tie_needs_no_partner(tmp_path: Path, other: bool, outcome: str) -> None:
    def read(token: int, more: int) -> Callable[[Any], None]:
        def program(_: Any) -> None:
            net = Tied()
            net(torch.tensor([[3, 1, 4, 2, token, 6]]))
            net(torch.tensor([[more, 9]]))

        return program

    both = sides(tmp_path, read(5, 11 if other else 12), read(7, 12))
    verdict = tp.compare(*both, at="outputs", rows="inputs").verdict
    assert verdict.verdict == outcome
    assert any("1 sequence went on with other tokens (5 and 7)" in note for note in verdict.notes)


def test_a_token_that_is_no_tie_is_found_beside_other_data(tmp_path: Path) -> None:
    def read(token: int, more: int) -> Callable[[Any], None]:
        def program(_: Any) -> None:
            net = Net()
            net(torch.tensor([[3, 1, 4, 2, token, 6]]))
            net(torch.tensor([[more, 9]]))

        return program

    both = sides(tmp_path, read(5, 11), read(7, 12))
    verdict = tp.compare(*both, at="outputs", rows="inputs").verdict
    assert verdict.verdict == "diverged"
    assert (verdict.culprits[0].cause, verdict.culprits[0].kind) == ("data", "input")


def test_rows_that_the_program_has_saved(tmp_path: Path) -> None:
    def packed(recorder: Any) -> None:
        net = nn.Linear(4, 3)
        for rows in ([2, 0], [1]):
            recorder.save("rows", torch.tensor(rows))
            net(x[rows])

    def whole(recorder: Any) -> None:
        recorder.save("rows", torch.tensor([0, 1, 2, -1]))
        nn.Linear(4, 3)(torch.cat([x, torch.zeros(1, 4)]))

    def seeded(program: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda recorder: (torch.manual_seed(0), program(recorder))

    x = torch.randn(3, 4)
    both = sides(tmp_path, seeded(packed), seeded(whole))
    verdict = tp.compare(*both, at="outputs", rows="saved").verdict
    assert verdict.verdict == "match"
    assert [each.rows for each in verdict.boundaries] == [2, 1]


def test_rows_need_tensors(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net()(IDS[:1]), lambda _: Net()(IDS), keep="stats")
    verdict = tp.compare(*both, at="outputs").verdict
    assert verdict.verdict == "incomparable"
    assert "no tensors were kept" in str(verdict.reason)


def test_statistics_do_for_the_same_shapes(tmp_path: Path) -> None:
    a, e = sides(tmp_path, lambda _: Net()(IDS), lambda _: Net(factor=1.01)(IDS), keep="stats")
    assert tp.compare(a, a, at="modules").verdict.verdict == "match"
    verdict = tp.compare(a, e, at="modules").verdict
    assert verdict.culprits[0].name == "Module.Net.forward.0"


# How far


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [(1 + 4e-7, "match"), (1 + 3e-6, "incomparable"), (1 + 1e-4, "diverged")],
)
def test_between_rounding_and_no_rounding_nobody_can_tell(
    tmp_path: Path, factor: float, outcome: str
) -> None:
    both = sides(tmp_path, lambda _: Net(factor=factor)(IDS), lambda _: Net()(IDS))
    verdict = tp.compare(*both, at="outputs").verdict
    assert verdict.verdict == outcome
    if outcome == "incomparable":
        assert "what is between nobody can tell" in str(verdict.reason)


def test_what_is_allowed_can_be_stated(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net(factor=1.01)(IDS), lambda _: Net()(IDS))
    assert tp.compare(*both, at="outputs", within=0.02).verdict.verdict == "match"
    verdict = tp.compare(*both, at="outputs", within=0.005).verdict
    assert verdict.verdict == "diverged"
    assert "off by 1 % of its size; 0.5 % is allowed" in verdict.culprits[0].reason


def test_noise_of_the_expected_side_is_allowed(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net(factor=1.001)(IDS), lambda _: Net()(IDS))
    noise = record(tmp_path / "n", lambda _: Net(factor=1.0006)(IDS))
    assert tp.compare(*both, at="outputs", noise=[noise]).verdict.verdict == "match"
    little = record(tmp_path / "m", lambda _: Net(factor=1.0001)(IDS))
    assert tp.compare(*both, at="outputs", noise=[little]).verdict.verdict == "diverged"


def test_one_bad_row_is_not_lost_among_many(tmp_path: Path) -> None:
    class Odd(Net):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(ids, mask)
            out[0, 3] *= 1.00002
            return out

    many = torch.randint(0, 20, (8, 64), generator=torch.Generator().manual_seed(0))
    both = sides(tmp_path, lambda _: Odd()(many), lambda _: Net()(many))
    assert tp.compare(*both, at="outputs").verdict.verdict != "match"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_no_match(tmp_path: Path, value: float) -> None:
    both = sides(tmp_path, lambda _: Net(factor=value)(IDS), lambda _: Net()(IDS))
    assert tp.compare(*both, at="outputs").verdict.verdict == "diverged"
    assert tp.compare(*both, at="outputs", within=10.0).verdict.verdict == "diverged"


# Which modules go together

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_parts_are_found_by_their_weights(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Apart()(X), lambda _: Apart(joined=True)(X))
    comparison = tp.compare(*both, at="modules")
    assert comparison.verdict.verdict == "match"
    assert comparison.proposed == {"q + k + v": "qkv"}
    back = tp.compare(*reversed(both), at="modules")
    assert back.proposed == {"qkv": ["q", "k", "v"]}
    assert back.verdict.verdict == "match"


@pytest.mark.parametrize("mapping", [{"qkv": ["q", "k", "v"]}, {"Apart": {"qkv": ["q", "k", "v"]}},
                                     {"TopLayer": {"qkv": "q + k + v"}}])  # fmt: skip
def test_parts_can_be_mapped(tmp_path: Path, mapping: dict[str, Any]) -> None:
    both = sides(tmp_path, lambda _: Apart(joined=True)(X), lambda _: Apart()(X))
    verdict = tp.compare(*both, at="modules", mapping=mapping).verdict
    assert verdict.verdict == "match"
    assert {each.expected for each in verdict.boundaries if each.actual == "qkv"} == {"q + k + v"}
    split = tp.compare(*reversed(both), at="modules", mapping={"q + k + v": "qkv"}).verdict
    assert split.verdict == "match"


def test_features_may_be_in_another_order(tmp_path: Path) -> None:
    order = torch.arange(24).view(3, 4, 2).transpose(0, 1).reshape(-1).tolist()  # by heads
    both = sides(tmp_path, lambda _: Apart(order, joined=True)(X), lambda _: Apart()(X))
    verdict = tp.compare(*both, at="modules").verdict
    assert verdict.verdict == "match"
    assert any("in another order" in note for note in verdict.notes)


def test_modules_can_be_ignored(tmp_path: Path) -> None:
    def changed(_: Any) -> None:
        net = Net()
        with torch.no_grad():
            net.body[2].weight[0] *= 2
        net(IDS)

    both = sides(tmp_path, changed, lambda _: Net()(IDS))
    culprit = tp.compare(*both, at="body.*").verdict.culprits[0]
    assert (culprit.cause, culprit.module) == ("weights", "body.2")
    found = tp.compare(*both, at="body.*", mapping={"ignore": ["body.2"]}).verdict
    assert found.verdict == "match"


def test_weights_that_are_only_rounded_are_the_same(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Net().bfloat16()(IDS), lambda _: Net()(IDS))
    assert tp.compare(*both, at="modules").verdict.verdict == "match"


# Files


def test_files(tmp_path: Path) -> None:
    both = sides(tmp_path, lambda _: Apart()(X), lambda _: Apart(joined=True)(X))
    comparison = tp.compare(*both, at="modules")
    paths = {path.name: path for path in comparison.save(tmp_path / "report")}
    assert {"verdict.json", "comparison.csv", "errors.svg", "mapping.yaml"} <= set(paths)
    assert paths["mapping.yaml"].read_text() == '"q + k + v": "qkv"\n'
    again = tp.compare(*both, at="modules", mapping=paths["mapping.yaml"])
    assert again.verdict.verdict == "match"
    assert again.proposed == {}
    found = json.loads(paths["verdict.json"].read_text())
    assert (found["format"], found["at"]) == (1, ["modules"])
    assert {each["status"] for each in found["boundaries"]} <= {"equal", "within"}


def test_names_in_a_picture_are_text(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleDict({"<script>": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["<script>"](x)

    both = sides(tmp_path, lambda _: Odd()(torch.ones(2, 4)), lambda _: Odd()(torch.ones(2, 4)))
    tp.compare(*both, at="modules").save(tmp_path / "report")
    text = (tmp_path / "report" / "errors.svg").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_rows_of_a_cache_are_unclear_in_a_beam_search(tmp_path: Path) -> None:
    """The rows of beams change places between calls, and nobody tells."""

    def beams(_: Any) -> None:
        net = Cached()
        net.begin()
        net(IDS[:1, :2].expand(2, -1), positions=torch.arange(2).expand(2, -1))
        net.total = net.total.flip(0)
        net(IDS[:, 2:3], positions=torch.full((2, 1), 2))
        net(IDS[:, 3:4], positions=torch.full((2, 1), 3))

    def whole(_: Any) -> None:
        net = Net()
        for n in (2, 3, 4):
            net(torch.cat([IDS[:1, :2].expand(2, -1), IDS[:, 2:n]], 1))

    verdict = tp.compare(*sides(tmp_path, beams, whole), at="outputs").verdict
    assert verdict.verdict != "diverged"
    rows = verdict.rows
    assert rows is not None
    assert rows.only_actual == 4
