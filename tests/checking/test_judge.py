"""One result against its reference: each kind by its own measure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from recorded import record
from tensorprobe.checking.chance import judge_dropout, judge_random
from tensorprobe.checking.result_judge import judge, same_choice
from tensorprobe.records import Call
from tensorprobe.replay.kinds import Kind, kind_of
from tensorprobe.replay.reference import Replayed, replay_both
from tensorprobe.replay.rules import RULES, limit, rule_for

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def held(
    found: torch.Tensor, expected: torch.Tensor, kind: Kind, direction: str = "forward"
) -> tuple[bool, float | None]:
    roundoff = torch.finfo(found.dtype).eps / 2 if found.is_floating_point() else 0.0
    replayed = Replayed(kind, "float64", roundoff, {"output.0": expected})
    verdict = judge("output.0", found, replayed, direction, 1.0)
    return verdict.ok, verdict.error


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_passes_and_more_does_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    right = torch.randn(1000, dtype=torch.float64)
    found = right.to(dtype)
    for kind in ("elementwise", "product", "reduction", "general"):
        assert held(found, right, kind)[0], kind
        eps = torch.finfo(dtype).eps
        assert not held((right * (1 + 64 * eps)).to(dtype), right, kind)[0], kind
    assert held(found, found, "exact") == (True, 0.0)
    off = found.clone()
    off[7] = torch.nextafter(off[7], torch.tensor(math.inf, dtype=dtype))
    assert held(off, found, "exact") == (False, 1.0)
    assert held(off, found.double(), "elementwise")[0]


@pytest.mark.parametrize("kind", ["elementwise", "product"])
def test_one_wrong_element_among_many_is_found(kind: Kind) -> None:
    right = torch.ones(100_000, dtype=torch.float64)
    found = right.to(torch.bfloat16)
    found[5] = 2
    assert not held(found, right, kind)[0]


@pytest.mark.parametrize("kind", ["exact", "elementwise", "product"])
def test_nan_and_infinity_must_be_where_they_belong(kind: Kind) -> None:
    right = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert held(right, right, kind)[0]
    for index, value in ((0, math.nan), (1, 1.0), (2, -math.inf), (3, 0.0)):
        wrong = right.clone()
        wrong[index] = value
        assert not held(wrong, right, kind)[0], index


def test_what_overflows_a_narrow_dtype_may_be_infinite() -> None:
    right = torch.tensor([70000.0, -1e6], dtype=torch.float64)
    assert held(right.to(torch.float16), right, "product")[0]
    assert not held(right.to(torch.float32) * math.inf, right, "product")[0]


def test_subnormal_numbers_have_an_absolute_precision() -> None:
    right = torch.full((100,), 2e-8, dtype=torch.float64)
    assert held(right.to(torch.float16), right, "product", "backward")[0]


@pytest.mark.parametrize(
    ("found", "expected", "ok"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([]), torch.tensor([]), True),
        (torch.tensor(1.0), torch.tensor([1.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
    ],
)
def test_integers_bools_complex_and_shapes(
    found: torch.Tensor, expected: torch.Tensor, ok: bool
) -> None:
    assert held(found, expected, "exact")[0] == ok


def test_every_kind_has_a_rule() -> None:
    for kind, rule in RULES.items():
        assert rule.means
        assert limit(rule_for(kind, "forward"), 2.0**-24, 100.0) >= rule.wide
    assert limit(RULES["product"], 2.0**-8, 1.0) < limit(RULES["product"], 2.0**-24, 1.0)


def one_call(tmp_path: Path, program: object) -> Call:
    capture = record(tmp_path / "run", program, level="L1")  # type: ignore[arg-type]
    return capture.calls(direction="forward")[-1]


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("x + x", "elementwise"),
        ("x.add(x, alpha=2)", "compound"),
        ("x.view(-1)", "exact"),
        ("x > 0", "exact"),
        ("x.long() + x.long()", "exact"),
        ("x.half()", "conversion"),
        ("x.to(torch.float16)", "conversion"),
        ("F.dropout(x, 0.5)", "dropout"),
        ("F.dropout(x, 0.5, training=False)", "exact"),
        ("torch.rand(3)", "random"),
        ("torch.empty(3)", "uninitialised"),
        ("x @ x", "product"),
        ("torch.linalg.norm(x)", "reduction"),
        ("torch.fft.fft(x)", "product"),
        ("torch.topk(x, 1)", "selection"),
        ("torch.ops.aten.add_.Tensor(x, x)", "elementwise"),
        ("F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)", "random"),
        ("torch.linalg.svd(x)", "general"),
    ],
)
def test_the_kind_of_a_call(expression: str, kind: str, tmp_path: Path) -> None:
    x = torch.ones(3, 3)
    names = {"x": x, "torch": torch, "F": F}
    assert kind_of(one_call(tmp_path, lambda: eval(expression, names))) == kind


def test_which_of_equal_values_is_chosen_is_free(tmp_path: Path) -> None:
    call = one_call(tmp_path, lambda: torch.topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2))
    replayed, _ = replay_both(call)
    found = dict(replayed.outputs)
    found["output.1"] = replayed.outputs["output.1"].flip(-1)
    assert same_choice(call, found, replayed)
    found["output.1"] = torch.tensor([[1, 3]])
    assert not same_choice(call, found, replayed)


def test_dropout_by_share_scale_and_gradient(tmp_path: Path) -> None:
    x = torch.randn(100, 100)
    call = one_call(tmp_path, lambda: F.dropout(x, 0.25))
    y = F.dropout(x, 0.25)
    grad = torch.ones_like(x)
    sent = grad * (y != 0) / 0.75
    assert all(j.ok for j in judge_dropout(call, x, y, (grad, sent)))
    assert not judge_dropout(call, x, F.dropout(x, 0.3), None)[0].ok
    assert not judge_dropout(call, x, y * 1.01, None)[0].ok
    assert not judge_dropout(call, x, y, (grad, grad))[1].ok
    assert not judge_dropout(call, x, y, (grad, sent * 2))[1].ok


def test_random_numbers_by_their_moments(tmp_path: Path) -> None:
    call = one_call(tmp_path, lambda: torch.empty(1000).normal_(2.0, 0.5))
    good, bad = torch.empty(1000).normal_(2.0, 0.5), torch.empty(1000).normal_(2.0, 0.7)
    assert all(j.ok for j in judge_random(call, {"output.0": good}) or [])
    assert not any(j.ok for j in judge_random(call, {"output.0": bad}) or [])
    unknown = one_call(tmp_path / "other", lambda: torch.poisson(torch.ones(3)))
    assert judge_random(unknown, {"output.0": good}) is None


@pytest.mark.parametrize("given", [(-0.5, 0.5), ()])
def test_the_range_of_an_initialisation(given: tuple[float, ...], tmp_path: Path) -> None:
    """nn.init calls it a and b, Tensor.uniform_ from and to."""
    weight = torch.empty(64)
    capture = record(tmp_path / "run", lambda: torch.nn.init.uniform_(weight, *given), level="L1")
    (call,) = capture.calls(direction="forward")
    assert all(j.ok for j in judge_random(call, {"output.0": weight}) or [])
    assert not any(j.ok for j in judge_random(call, {"output.0": weight + 1}) or [])
