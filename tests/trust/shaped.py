"""The same work in other shapes: with a cache, in batches, in parts, packed, quantised."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trust.harness import Case, Program, Start
from trust.rewritten import Engine, hf_gpt2, hf_llama, hf_t5

FAMILY = "shaped differently"
RUNS = ("tensors L0", "tensors mix")
OUTPUTS, MODULES = ("--at", "outputs"), ("--at", "modules")
GRADIENTS = ("--at", "gradients", "--at", "outputs")
LENGTHS = (5, 3, 7)


def _ids(n: int, length: int, seed: int = 11) -> Tensor:
    return torch.randint(3, 96, (n, length), generator=torch.Generator().manual_seed(seed))


def _padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Three sequences; the same in one batch; its mask."""
    alone = [_ids(1, length, seed) for seed, length in enumerate(LENGTHS)]
    batch = torch.zeros(len(alone), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(alone):
        n = ids.shape[1]
        place = slice(-n, None) if side == "left" else slice(0, n)
        batch[row, place], mask[row, place] = ids[0], 1
    return alone, batch, mask


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _generated(make: Any, cached: bool = True, side: str = "left") -> Program:
    """With a cache against without one."""

    def program(start: Start, is_actual: bool) -> None:
        model = make()
        _, batch, mask = _padded(side)
        with torch.no_grad(), start():
            model.generate(
                batch, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0,
                use_cache=cached == is_actual,
            )  # fmt: skip

    return program


def _decoded(start: Start, is_actual: bool, *, fault: str = "") -> None:
    """Token after token with a cache, by hand; or all at once."""
    model, ids = hf_llama(), _ids(2, 10)
    with torch.no_grad(), start():
        if not is_actual:
            model(input_ids=ids)
            return
        cache, seen = None, 0
        for n in (6, 1, 1, 1, 1):
            at = torch.arange(seen, seen + n)[None].expand(2, -1)
            if fault == "positions" and seen:
                at = at - 1
            mask = torch.ones(2, seen + n, dtype=torch.long)
            given = {"attention_mask": mask, "position_ids": at, "past_key_values": cache}
            cache = model(
                input_ids=ids[:, seen : seen + n], use_cache=True, **given
            ).past_key_values
            seen += n
            if fault == "stale":
                cache.layers[1].values[:, :, -1] = cache.layers[1].values[:, :, -2]


def _one_or_batch(make: Any, side: str, *, positions: bool = True) -> Program:
    """Sequences one by one against a padded batch of them, in another order."""

    def program(start: Start, is_actual: bool) -> None:
        model = make()
        alone, batch, mask = _padded(side)
        given: dict[str, Any] = {}
        if make is not hf_t5:
            at = torch.arange(batch.shape[1]).expand_as(batch)
            given["position_ids"] = _positions(mask) if positions else at
        decoded = _ids(3, 4, 50)
        with torch.no_grad(), start():
            if is_actual:
                if make is hf_t5:
                    given["decoder_input_ids"] = decoded
                model(input_ids=batch, attention_mask=mask, **given)
                return
            for i in (2, 0, 1):
                more = {"decoder_input_ids": decoded[i : i + 1]} if make is hf_t5 else {}
                model(input_ids=alone[i], **more)

    return program


def _accumulated(factor: int, parts: int = 2, *, each_step: bool = False) -> Program:
    """Micro-batches against one batch."""

    def program(start: Start, is_actual: bool) -> None:
        model, ids = hf_llama(), _ids(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        n, divided = (parts, factor) if is_actual else (1, 1)
        with start() as recorder:
            for part in ids.chunk(n):
                (model(input_ids=part, labels=part).loss / divided).backward()
                if each_step and is_actual:
                    recorder.step()
                    optimizer.zero_grad()
            optimizer.step()
            recorder.step()

    return program


def _served(fault: str = "") -> Program:
    """An engine with packed batches and a cache of its own, against transformers."""

    def program(start: Start, is_actual: bool) -> None:
        model = hf_llama()
        alone, batch, mask = _padded("right")
        with torch.no_grad(), start() as recorder:
            if not is_actual:
                numbers = torch.arange(len(alone))[:, None] * 100 + _positions(mask)
                recorder.save("rows", numbers.masked_fill(mask == 0, -1))
                model(input_ids=batch, attention_mask=mask, position_ids=_positions(mask))
                return
            engine = Engine(model, fault)
            # two requests at first, one more later, then one token of each that has some left
            for packed in ([(0, 0, 4), (1, 0, 2)], [(2, 0, 5), (0, 4, 5), (1, 2, 3)], [(2, 5, 7)]):
                places = [(r, p) for r, first, last in packed for p in range(first, last)]
                requests, at = torch.tensor(places).T
                tokens = torch.stack([alone[r][0, p] for r, p in places])
                recorder.save("rows", requests * 100 + at)
                engine(tokens, requests, at)

    return program


class Int8(nn.Module):
    """A linear with weights of 8 bits, and a scale for each row; `bad`: one scale for all."""

    def __init__(self, linear: nn.Linear, bad: bool) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        if bad:
            scale = (scale.max() * 24).expand_as(scale)
        whole = (linear.weight / scale).round().clamp(-127, 127)
        self.register_buffer("whole", whole.to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.whole.float() * self.scale).T


def _quantised(bad: str = "", *, dynamic: bool = False) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        model = hf_llama(layers=3)
        with torch.no_grad():
            if is_actual and dynamic:
                import torch.ao.quantization as quantization

                model = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
            elif is_actual:
                model = copy.deepcopy(model)
                for name, linear in list(model.named_modules()):
                    if isinstance(linear, nn.Linear) and name != "lm_head":
                        above, _, last = name.rpartition(".")
                        setattr(model.get_submodule(above), last, Int8(linear, name == bad))
            with start():
                model(input_ids=_ids(2, 9))

    return program


def _case(name: str, program: Program, at: str = "", cause: str = "", **more: Any) -> Case:
    more = {"runs": RUNS, "needs": "transformers", **more}
    return Case(f"shaped-{name}", FAMILY, program, at=at, cause=cause, **more)


UP = "model.layers.1.mlp.up_proj"
CASES = [
    _case("cache-or-none", _generated(hf_llama), options=OUTPUTS, quick=True,
          runs=("tensors L0",)),
    _case("cache-or-none-in-modules", _generated(hf_llama), options=MODULES),
    _case("no-cache-or-one", _generated(hf_gpt2, cached=False), options=MODULES),
    _case("cache-or-none-t5", _generated(hf_t5, side="right"), options=MODULES),
    _case("cache-or-all-at-once", _decoded, options=MODULES),
    _case("batch-or-one-left", _one_or_batch(hf_gpt2, "left"), options=MODULES),
    _case("batch-or-one-right", _one_or_batch(hf_llama, "right"), options=MODULES),
    _case("batch-or-one-t5", _one_or_batch(hf_t5, "right"), options=OUTPUTS),
    _case("accumulated", _accumulated(2), options=GRADIENTS),
    _case("accumulated-in-4", _accumulated(4, 4), options=GRADIENTS),
    _case("accumulated-by-steps", _accumulated(2, each_step=True),
          options=("--at", "gradients", "--rows", "sum")),
    _case("engine-or-transformers", _served(), options=(*MODULES, "--rows", "saved")),
    _case("quantised-or-float", _quantised(), options=(*MODULES, "--within", "0.05")),
    _case("quantised-dynamically-or-float", _quantised(dynamic=True),
          options=(*MODULES, "--within", "0.15")),
    # faults
    _case("cache-and-positions-late", lambda s, a: _decoded(s, a, fault="positions"),
          "Module.model.layers.0.self_attn.*", "result", options=MODULES, quick=True,
          runs=("tensors L0",)),
    _case("cache-and-positions-late-in-logits", lambda s, a: _decoded(s, a, fault="positions"),
          "Module.LlamaForCausalLM.*", "result", options=OUTPUTS),
    _case("cache-with-a-stale-value", lambda s, a: _decoded(s, a, fault="stale"),
          "Module.model.layers.1.self_attn.*", "result", options=MODULES),
    _case("batch-and-positions-of-padding", _one_or_batch(hf_gpt2, "left", positions=False),
          "Module.transformer.wpe.*", "result", options=MODULES),
    _case("accumulated-and-not-divided", _accumulated(1), "Module.*parameters_grad.*", "result",
          options=GRADIENTS),
    _case("accumulated-by-steps-and-not-divided", _accumulated(1, each_step=True),
          "Module.*parameters_grad.*", "result", options=("--at", "gradients", "--rows", "sum")),
    _case("engine-with-another-requests-cache", _served("slot"), "Module.blocks.0.attn.*",
          "result", options=(*MODULES, "--rows", "saved")),
    _case("engine-with-positions-from-zero", _served("positions"), "Module.blocks.0.attn.*",
          "result", options=(*MODULES, "--rows", "saved")),
    _case("engine-with-another-requests-cache-in-logits", _served("slot"), "Module.Engine.*",
          "result", options=(*OUTPUTS, "--rows", "saved")),
    _case("quantised-with-one-bad-scale", _quantised(UP), f"Module.{UP}.*", "result",
          options=(*MODULES, "--within", "0.05")),
]  # fmt: skip
