"""What is infinite on purpose is no fault, and the first call that makes NaN of it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorprobe as tp
from tensorprobe.guarding.findings import Finding
from tiny_models import MODELS

INF = float("inf")


def found(folder: Path, program: Callable[[], object], **options: object) -> list[Finding]:
    options = {"overflow_nums": -1, "log": lambda text: None, **options}
    with tp.Guard(folder, **options) as guard:
        kept = program()
    del kept
    return list(guard.findings)


def additive_mask() -> Tensor:
    scores = torch.randn(2, 4, 4)
    mask = torch.full((4, 4), -INF).triu(1)
    return torch.softmax(scores * 2 + mask, -1) @ torch.randn(2, 4, 3)


def filled_mask() -> Tensor:
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    scores = torch.randn(2, 4, 4).masked_fill(~keep, -INF)
    return torch.log_softmax(scores / 3, -1).exp()


def where_mask() -> Tensor:
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    scores = torch.where(keep, torch.randn(4, 4), torch.tensor(-INF))
    return torch.where(keep, scores.softmax(-1), 0.0).sum()


def where_mask_by_number() -> Tensor:
    return torch.where(torch.tensor([True, False]), torch.ones(2), -INF).softmax(-1)


def logsumexp_of_masked() -> Tensor:
    x = torch.randn(3, 4)
    x[0] = -INF  # a whole row: torch gives -inf, which is right
    return torch.logsumexp(x, -1).exp()


def lowest_number_in_half() -> Tensor:
    lowest = torch.finfo(torch.float16).min
    mask = torch.zeros(4, 4, dtype=torch.float16).masked_fill(torch.ones(4, 4).triu(1) > 0, lowest)
    scores = torch.full((4, 4), -40.0, dtype=torch.float16)
    return (scores + mask).softmax(-1)  # below the lowest number: -inf


def two_lowest_numbers() -> Tensor:
    lowest = torch.finfo(torch.bfloat16).min
    causal = torch.full((4, 4), lowest, dtype=torch.bfloat16).triu(1)
    padding = torch.tensor([0, 0, 0, lowest], dtype=torch.bfloat16)
    return (torch.zeros(4, 4, dtype=torch.bfloat16) + (causal + padding)).softmax(-1)


def logarithm_of_a_mask() -> Tensor:
    return (torch.log(torch.tensor([1.0, 1.0, 0.0])) + torch.randn(3)).softmax(-1)


def flash_like() -> Tensor:
    q, k, v = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16, 8)
    top = torch.full((4, 1), -INF)
    total, out = torch.zeros(4, 1), torch.zeros(4, 8)
    for block in range(4):
        scores = q @ k[4 * block : 4 * block + 4].T
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new)
        shrink = torch.exp(top - new)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v[4 * block : 4 * block + 4]
        top = new
    return out / total


def running_minimum() -> Tensor:
    least = torch.full((3,), INF)
    for _ in range(3):
        least = torch.minimum(least, torch.randn(3))
    return least * 2


def made_and_overwritten() -> Tensor:
    x = torch.empty(1000)
    x.view(torch.int32).fill_(-1)  # what uninitialised memory may hold: NaN
    x.copy_(torch.ones(1000))
    return x * 2


def partly_filled_buffer() -> Tensor:
    cache = torch.full((4, 8), float("nan"))
    cache[0] = 1.0
    cache[1:2].copy_(torch.ones(1, 8))
    return cache[:2] * 2


def other_sign_of_a_mask() -> Tensor:
    mask = torch.full((4, 4), -INF).triu(1)
    return (-mask).abs().clamp(max=1.0)


def nan_replaced() -> Tensor:
    x = torch.tensor([1.0, float("nan")])
    return torch.nan_to_num(x) * 2 + torch.nansum(x)


def division_thrown_away() -> Tensor:
    x = torch.tensor([0.0, 2.0])
    return torch.where(x > 0, 1 / x, torch.zeros(2))


def logarithm_cast_to_an_integer() -> Tensor:
    return torch.minimum((torch.log(torch.arange(4.0)) * 3).long(), torch.ones(4).long())


ON_PURPOSE = [
    additive_mask, filled_mask, where_mask, where_mask_by_number, logsumexp_of_masked,
    lowest_number_in_half, two_lowest_numbers, logarithm_of_a_mask, flash_like, running_minimum,
    division_thrown_away, logarithm_cast_to_an_integer, made_and_overwritten,
    partly_filled_buffer, other_sign_of_a_mask, nan_replaced,
]  # fmt: skip


@pytest.mark.parametrize("look_every", [None, 1000], ids=["at once", "later"])
@pytest.mark.parametrize("program", ON_PURPOSE, ids=lambda program: program.__name__)
def test_what_is_on_purpose_is_no_fault(
    tmp_path: Path, program: Callable[[], Tensor], look_every: int | None
) -> None:
    if look_every and program in (logarithm_of_a_mask,):
        pytest.skip("only the tensors themselves tell a mask from data, and later they are gone")
    assert program().isfinite().all()
    assert found(tmp_path, program, look_every=look_every) == []


def row_of_masks() -> Tensor:
    return torch.full((2, 3), -INF).softmax(-1)


def inf_minus_inf() -> Tensor:
    top = torch.full((3,), -INF)
    return top - torch.maximum(top, top)


def mask_times_zero() -> Tensor:
    return torch.full((3,), -INF) * torch.zeros(3)


def never_written() -> Tensor:
    x = torch.empty(1000)
    x.view(torch.int32).fill_(-1)
    return (x * 2).sum()


def overflow_beside_a_mask() -> Tensor:
    scores = torch.tensor([300.0, 1.0], dtype=torch.float16) + torch.tensor([0.0, -INF]).half()
    return scores * 300.0


def loss_of_a_masked_class() -> Tensor:
    logits = torch.tensor([[0.0, -INF]])
    return F.cross_entropy(logits, torch.tensor([1]))


def division() -> Tensor:
    return torch.ones(3) / torch.zeros(3)


def division_and_a_loss() -> None:
    x = torch.zeros(3, requires_grad=True)
    ((torch.ones(3) / (x * 2)) * 2).sum().backward()


def cast() -> Tensor:
    return torch.full((3,), 1e6).half()


def times_infinity() -> Tensor:
    """Numbers of both signs: not only the infinity that it is told to put in."""
    weights = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    weights.data[0].mul_(float("inf"))
    return weights * 2


FAULTS = {
    row_of_masks: ("Tensor.softmax.0.forward", "a whole row of input.0 is -inf"),
    inf_minus_inf: ("Tensor.sub.0.forward", "input.0 holds -inf, which it turns into NaN"),
    mask_times_zero: ("Tensor.mul.0.forward", "input.0 holds -inf, which it turns into NaN"),
    never_written: ("Tensor.mul.0.forward", "memory that was never written to (torch.empty)"),
    overflow_beside_a_mask: ("Tensor.mul.0.forward", "1 of output.0 are infinite where no input"),
    loss_of_a_masked_class: ("Functional.cross_entropy.0.forward", "input.0 holds -inf"),
    division_and_a_loss: ("Tensor.div.0.forward", "it divides by zero, 3 of 3 in output.0"),
    division: ("Tensor.div.0.forward", "it divides by zero, 3 of 3 in output.0 (float32) are inf"),
    cast: ("Tensor.half.0.forward", "its inputs are finite (1e+06 to 1e+06), 3 of 3 in output.0"),
    times_infinity: ("Tensor.mul_.0.forward", "it is told an infinite number, 2 of 2 in output.0"),
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_the_first_call_that_reads_it_badly(tmp_path: Path, program: Callable[[], Tensor]) -> None:
    name, reason = FAULTS[program]
    [finding] = found(tmp_path, program)
    assert finding.name == name
    assert reason in finding.reason


LATER = [row_of_masks, inf_minus_inf, mask_times_zero, never_written, loss_of_a_masked_class]


@pytest.mark.parametrize(
    "program",
    [*LATER, division, division_and_a_loss, cast, times_infinity],
    ids=lambda program: program.__name__,
)
def test_the_same_call_found_later(tmp_path: Path, program: Callable[[], Tensor]) -> None:
    [finding] = found(tmp_path, program, look_every=1000)
    name, reason = FAULTS[program]
    assert finding.name == name
    if program in LATER:  # of the others the reason has numbers that are gone
        assert reason in finding.reason
    assert "tensorprobe run --calls " + finding.name in finding.next


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2", "t5"])
def test_masks_of_transformers(
    tmp_path: Path, kind: str, dtype: torch.dtype, attention: str
) -> None:
    model, _ = MODELS[kind]()
    model.set_attn_implementation(attention)
    model.to(dtype)
    ids = torch.arange(24).reshape(2, 12) % 50
    keep = torch.ones_like(ids)
    keep[0, :5] = 0  # padded on the left: whole rows of the causal mask are masked

    def program() -> None:
        more = {"decoder_input_ids": ids} if kind == "t5" else {}
        output = model(input_ids=ids, attention_mask=keep, **more)
        output.logits.float().square().mean().backward()

    assert found(tmp_path, program) == []
    assert found(tmp_path / "later", program, look_every=10**6) == []
