"""Pairs with a GPU on one side or both: python tests/trust/gpu.py --page docs/trust-gpu.md

A small Llama with random weights trains for some steps. Healthy pairs differ by what people change
on a GPU; faults are wrong kernels of a bfloat16 model on the GPU, held against float32 on the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from trust.harness import PLANTED, Case, Outcome, Program, Start, run_case  # noqa: E402 - see above
from trust.kernels import (  # noqa: E402
    Alter,
    add,
    gain,
    one_row,
    swapped_rows,
    through,
    wrong_kernel,
)

FAMILIES = ("healthy", "bf16 against fp32 with a wrong kernel")
STEPS = 3
HEADS = 8


def llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def train(
    recorder: Any,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    attention: str = "sdpa",
    sdpa: str = "",
    adamw: dict[str, bool] | None = None,
    checkpointed: bool = False,
    compiled: bool = False,
    accumulated: int = 1,
    tf32: bool = False,
    steps: int = STEPS,
) -> None:
    """Steps of training, recorded by `recorder`."""
    model = llama(attention).to(device=device, dtype=dtype)
    if checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **(adamw or {}))
    scaler = torch.amp.GradScaler(device, enabled=autocast is torch.float16)
    forward = torch.compile(model) if compiled else model
    torch.manual_seed(1)
    batches = torch.randint(0, 512, (steps, 4, 64)).to(device)
    with contextlib.ExitStack() as stack:
        if tf32:
            stack.enter_context(_tf32())
        if sdpa:
            kernel = getattr(torch.nn.attention.SDPBackend, sdpa)
            stack.enter_context(torch.nn.attention.sdpa_kernel([kernel]))
        rec = stack.enter_context(recorder)
        for batch in batches:
            for part in batch.chunk(accumulated):
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    loss = forward(input_ids=part, labels=part).loss / accumulated
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            rec.step()


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _pair(actual: dict[str, Any], expected: dict[str, Any] | None = None) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        train(start(), **(actual if is_actual else expected or {}))

    return program


def _wrong(op: str, alter: Alter, nth: int, output: int) -> Program:
    def program(start: Start, is_actual: bool, alone: bool = False) -> None:
        on_gpu = {"dtype": torch.bfloat16, "steps": 1, "sdpa": "FLASH_ATTENTION"}
        torch.use_deterministic_algorithms(alone, warn_only=True)
        if not is_actual:
            train(start(), **(on_gpu if alone else {"device": "cpu", "steps": 1}))
            return
        with wrong_kernel(op, alter, nth=nth, output=output, device="CUDA"):
            train(start(), **on_gpu)

    return program


def one_head(x: torch.Tensor) -> torch.Tensor:
    x[:, HEADS // 2] *= 1.05
    return x


RUNS = ("tensors mix", "stats mix")


def _healthy(name: str, *sides: dict[str, Any], allowed: str = "") -> Case:
    return Case(name, FAMILIES[0], _pair(*sides), allowed=allowed, runs=(*RUNS, "digest mix"))


def _fault(name: str, op: str, alter: Alter, nth: int = 0, output: int = 0) -> Case:
    program = _wrong(op, alter, nth, output)
    return Case(name, FAMILIES[1], program, at=PLANTED, cause="result", runs=RUNS)


BF16, FP16 = torch.bfloat16, torch.float16
PERCENT = gain(1.01)
FLASH = "_scaled_dot_product_flash_attention"
CASES = [
    _healthy("twice", {}),
    _healthy("eager-attention", {"attention": "eager"}),
    _healthy("math-sdpa", {"sdpa": "MATH"}),
    _healthy("efficient-sdpa", {"sdpa": "EFFICIENT_ATTENTION"}),
    _healthy("fused-adamw", {"adamw": {"fused": True}}),
    _healthy("loop-adamw", {"adamw": {"foreach": False}}),
    _healthy("capturable-adamw", {"adamw": {"capturable": True}}),
    _healthy("cpu", {}, {"device": "cpu"}),
    _healthy("cpu-fused-adamw", {"adamw": {"fused": True}}, {"device": "cpu"}),
    _healthy("checkpointed", {"checkpointed": True}),
    _healthy("tf32", {"tf32": True}, allowed="flag"),
    _healthy("tf32-both-cpu", {"tf32": True}, {"device": "cpu"}, allowed="flag"),
    _healthy("bf16-autocast", {"autocast": BF16}, allowed="dtype|flag"),
    _healthy("fp16-autocast-scaler", {"autocast": FP16}, allowed="dtype|flag"),
    _healthy("bf16-model", {"dtype": BF16}, allowed="dtype"),
    _healthy("bf16-model-cpu", {"dtype": BF16}, {"device": "cpu"}, allowed="dtype"),
    _healthy("bf16-both-cpu", {"dtype": BF16}, {"device": "cpu", "dtype": BF16}),
    _healthy("compiled", {"compiled": True}),
    _healthy("accumulated", {"accumulated": 2}, allowed="structure"),
    _fault("linear-one-percent", "mm", PERCENT, 5),
    _fault("linear-row", "mm", one_row(gain(1.05)), 9),
    _fault("linear-rows-swapped", "mm", swapped_rows, 3),
    _fault("linear-through-fp8", "mm", through(torch.float8_e4m3fn), 12),
    _fault("silu-one-percent", "silu", PERCENT, 1),
    _fault("silu-row", "silu", one_row(gain(1.05)), 2),
    _fault("rsqrt-one-percent", "rsqrt", PERCENT, 3),
    _fault("mean-one-percent", "mean.dim", PERCENT, 2),
    _fault("attention-one-percent", FLASH, PERCENT, 1),
    _fault("attention-head", FLASH, one_head, 2),
    _fault("log-softmax-shifted", "_log_softmax", add(0.05)),
    _fault("silu-backward-one-percent", "silu_backward", PERCENT, 1),
    _fault("attention-backward-one-percent", f"{FLASH}_backward", PERCENT, 1),
    _fault("embedding-backward-one-percent", "embedding_dense_backward", PERCENT),
    _fault("cosine-one-percent", "cos", PERCENT),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=8)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    parser.add_argument("names", nargs="*", help="of cases; without one, all")
    args = parser.parse_args()
    chosen = [
        (case.name, run)
        for case in CASES
        for run in case.runs
        if not args.names or case.name in args.names
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        outcomes = []
        for said, seconds in pool.map(_judge, chosen):
            mark = "WRONG" if said.wrong else "cause" if said.wrong_cause else "right"
            print(
                f"{mark} {said.name} {seconds:.0f}s  {said.wrong or said.wrong_cause}", flush=True
            )
            if said.wrong or said.wrong_cause:
                print(
                    "".join(f"      {line}\n" for line in said.text.splitlines()[-14:]), flush=True
                )
            outcomes.append(said)
    if args.page is not None:
        args.page.write_text(_page(outcomes))
    return 0


def _judge(chosen: tuple[str, str]) -> tuple[Outcome, float]:
    case = next(case for case in CASES if case.name == chosen[0])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        return run_case(case, chosen[1], Path(folder)), time.perf_counter() - began


def _page(outcomes: list[Outcome]) -> str:
    text = f"""\
# How far a verdict can be trusted: with a GPU

{__doc__.partition(chr(10) * 2)[2].strip()}

```
python tests/trust/gpu.py --page docs/trust-gpu.md
```

Made on {torch.cuda.get_device_name()} with torch {torch.__version__}. A healthy pair is right with
`match`, or with one cause that names the flag or dtype that differs; a fault is right if the first
culprit is the planted call.

"""
    for family in FAMILIES:
        some = [said for said in outcomes if said.family == family]
        text += f"## {family.capitalize()}\n\n| pair | keep | verdict | |\n|---|---|---|---|\n"
        for said in some:
            wrong = said.wrong or said.wrong_cause
            text += f"| {said.case} | {said.keep} | {said.verdict} | {wrong or 'right'} |\n"
        text += "\n" + "".join(f"{line}\n" for line in _sums(some)) + "\n"
    return text


def _sums(some: list[Outcome]) -> Iterator[str]:
    for keep in dict.fromkeys(said.keep for said in some):
        kept = [said for said in some if said.keep == keep]
        right = sum(not said.wrong for said in kept)
        yield f"- keep={keep}: {right} of {len(kept)} right"


if __name__ == "__main__":
    sys.exit(main())
