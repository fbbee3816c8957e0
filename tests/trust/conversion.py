"""A Llama written by hand with fused weights against transformers': healthy, and wrong."""

from __future__ import annotations

from typing import Any

import torch

from trust.harness import Case, Program, Start
from trust.rewritten import MAPPING, converted, hf_gpt2, hf_llama, split_gpt2, turned_llama

FAMILY = "conversion"
RUNS = ("tensors L0", "tensors mix")
AT = ("--at", "modules")


def _ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(11))


def _llamas(fault: str = "", *, make: Any = converted, **options: Any) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        model = hf_llama(**options)
        mine = make(model, fault, 1 if fault else None) if is_actual else None
        with torch.no_grad(), start():
            if mine is not None:
                mine(_ids())
            else:
                model(input_ids=_ids())

    return program


def _gpt2s(start: Start, is_actual: bool) -> None:
    model = split_gpt2(hf_gpt2()) if is_actual else hf_gpt2()
    with torch.no_grad(), start():
        model(input_ids=_ids())


def _trained(fault: str = "") -> Program:
    """One backward pass: gradients of joined weights are those of their parts."""

    def program(start: Start, is_actual: bool) -> None:
        model = hf_llama()
        mine = converted(model, fault, 1) if is_actual else model
        with start():
            out = mine(_ids()) if is_actual else model(input_ids=_ids()).logits
            out.float().logsumexp(-1).square().mean().backward()

    return program


def _case(name: str, program: Program, at: str = "", cause: str = "", **more: Any) -> Case:
    more = {"runs": RUNS, "options": AT, "needs": "transformers", **more}
    return Case(f"conversion-{name}", FAMILY, program, at=at, cause=cause, **more)


CASES = [
    _case("fused-llama", _llamas(), quick=True, runs=("tensors L0",)),
    _case("fused-llama-mix", _llamas(), runs=("tensors mix",)),
    _case("fused-llama-mapped", _llamas(), mapping=MAPPING),
    _case("fused-llama-bf16", _llamas(dtype=torch.bfloat16), mapping=MAPPING),
    _case("fused-llama-deep", _llamas(layers=6)),
    _case("rope-of-neighbours-and-turned-weights", _llamas(make=turned_llama)),
    _case("split-gpt2", _gpt2s),
    _case("fused-llama-gradients", _trained(), options=("--at", "gradients", "--at", "outputs")),
    # faults
    _case("gqa-repeated", _llamas("gqa"), "Module.blocks.1.attn.*", "result", quick=True,
          runs=("tensors L0",)),
    _case("gqa-repeated-mapped", _llamas("gqa"), "Module.blocks.1.attn.*", "result",
          mapping=MAPPING),
    _case("gqa-repeated-bf16", _llamas("gqa", dtype=torch.bfloat16), "Module.blocks.1.attn.*",
          "result"),
    _case("rope-of-neighbours", _llamas("rope"), "Module.blocks.1.attn.*", "result"),
    _case("scaled-twice", _llamas("scale"), "Module.blocks.1.attn.*", "result"),
    _case("norm-without-weight", _llamas("norm"), "Module.blocks.1.norm1.*", "result"),
    _case("norm-without-weight-mapped", _llamas("norm"), "Module.blocks.1.norm1.*", "result",
          mapping=MAPPING),
    _case("other-eps", _llamas("eps"), "Module.blocks.1.norm1.*", "result"),
    _case("gate-and-up-swapped", _llamas("swapped"), "Module.blocks.1.mlp.*", "result"),
    _case("gate-and-up-swapped-in-the-weights", _llamas("gate order"), "Module.blocks.1.mlp.*",
          "result", mapping=MAPPING),
    _case("keys-and-values-swapped-in-the-weights", _llamas("kv order"),
          "Module.blocks.1.attn.*", "result"),
    _case("other-activation", _llamas("activation"), "Module.blocks.1.mlp.*", "result"),
    _case("no-residual", _llamas("residual"), "Module.blocks.1.Block.*", "result"),
    _case("one-row-of-a-weight", _llamas("weights"), "Module.blocks.1.mlp.down.*", "weights"),
    _case("gradient-of-other-scale", _trained("scale"), "Module.*parameters_grad.*", "result",
          options=("--at", "gradients")),
]  # fmt: skip
