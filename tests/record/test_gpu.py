"""Recording on a CUDA device: nothing disturbed, nothing waited for, nothing wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from tensorprobe.records import Capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture(autouse=True)
def equal_twice() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed)
        return nn.functional.gelu(x)


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def train(step: Callable[[], None], recompute: bool = False, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net(recompute).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 16, 64, device="cuda", dtype=torch.bfloat16)
        loss = model(nn.functional.dropout(x, 0.1)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *grads, *model.parameters(), torch.cuda.get_rng_state()]


def recorded(folder: Path, program: Callable[..., Any], **options: Any) -> tuple[Any, Capture]:
    with tp.Recorder(folder, log=lambda text: None, **options) as recorder:
        result = program(recorder.step)
    return result, tp.load(folder)


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
@pytest.mark.parametrize("keep", ["structure", "stats", "digest", "tensors"])
def test_same_bits(level: str, keep: str, tmp_path: Path) -> None:
    bare = train(lambda: None)
    with_recorder, capture = recorded(tmp_path / "run", train, level=level, keep=keep)
    assert all(torch.equal(a, b) for a, b in zip(bare, with_recorder, strict=True))
    assert capture.gaps == ()
    assert capture.steps == (0, 1, 2)
    if keep == "structure":
        return
    for call in capture.calls:
        for tensor in call.tensors:
            assert tensor.summary is not None, (tensor.name, tensor.gap)


def test_nothing_is_waited_for_inside_a_step(tmp_path: Path) -> None:
    model = Net().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 16, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for level in ("L0", "L1", "L2", "mix"):
        for keep in ("stats", "digest", "tensors"):
            folder = tmp_path / f"{level}-{keep}"
            with tp.Recorder(folder, level=level, keep=keep, log=lambda text: None) as recorder:
                step()  # the first one compiles kernels and makes buffers
                recorder.step()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                recorder.step()
            assert tp.load(folder).gaps == ()


def test_content_is_what_it_was(tmp_path: Path) -> None:
    live: dict[str, torch.Tensor] = {}

    def program(step: Callable[[], None]) -> None:
        torch.manual_seed(0)
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        y = x * 2
        live["input"] = y.detach().clone()
        y.add_(1)  # written in place after it was recorded
        live["output"] = y.detach().clone()
        z = (y @ y.t()).relu()
        live["product"] = (y @ y.t()).detach().clone()
        z.sum().backward()
        live["grad"] = x.grad.clone()
        step()

    _, capture = recorded(tmp_path / "run", program, level="L1", keep="tensors")
    add = capture.call("Tensor.add_.0.forward")
    assert torch.equal(add.tensor("input.0").load(), live["input"].cpu())
    assert torch.equal(add.tensor("output.0").load(), live["output"].cpu())
    product = capture.call("Tensor.matmul.0.forward").tensor("output.0")
    assert torch.equal(product.load(), live["product"].cpu())
    grad = capture.call("Tensor.mul.0.backward").tensor("output.0")
    assert torch.equal(grad.load(), live["grad"].cpu())
    assert product.device == "cuda:0"


def test_memory_that_is_given_out_again_brings_no_old_numbers(tmp_path: Path) -> None:
    def program(step: Callable[[], None]) -> None:
        for number in range(200):
            tensor = torch.full((1 << 16,), float(number), device="cuda")  # the same block anew
            tensor.relu()
            del tensor
        step()

    _, capture = recorded(tmp_path / "run", program, level="L1", keep="digest")
    for number in range(200):
        summary = capture.call(f"Tensor.relu.{number}.forward").tensor("input.0").summary
        assert (summary.min, summary.max) == (number, number)


def test_side_streams(tmp_path: Path) -> None:
    def program(step: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        for number in range(50):
            x = torch.full((1 << 18,), float(number), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
                x.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            y.relu()
        step()

    _, capture = recorded(tmp_path / "run", program, level="L1", keep="tensors")
    for number in range(50):
        output = capture.call(f"Tensor.mul.{number}.forward").tensor("output.0")
        assert output.summary.max == 2 * number
        assert bool((output.load() == 2 * number).all())


def test_a_copy_does_not_see_what_is_written_in_place_after_it(tmp_path: Path) -> None:
    def program(step: Callable[[], None]) -> None:
        x = torch.ones(1 << 26, device="cuda")  # a quarter of a gigabyte: its copy takes a while
        for _ in range(4):
            y = x * 2
            y.data.fill_(7.0)  # at once, by the next kernel
        step()

    _, capture = recorded(tmp_path / "run", program, level="L1", keep="tensors", apis=["mul"])
    for number in range(4):
        output = capture.call(f"Tensor.mul.{number}.forward").tensor("output.0")
        assert output.summary.max == 2
        assert bool((output.load() == 2).all())


def test_recomputation_in_the_engines_thread_is_seen(tmp_path: Path) -> None:
    def program(step: Callable[[], None]) -> list[torch.Tensor]:
        return train(step, recompute=True, steps=1)

    bare = program(lambda: None)
    with_recorder, capture = recorded(tmp_path / "run", program, level="L1", keep="stats")
    assert all(torch.equal(a, b) for a, b in zip(bare, with_recorder, strict=True))
    again = [call for call in capture.calls if any("recomputation" in n for n in call.notes)]
    assert {call.name.split(".")[1] for call in again} >= {"linear", "layer_norm"}


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_a_graph_is_captured_while_results_land(
    keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA fails a capture when another thread asks an event, unless it says not to mind it."""
    monkeypatch.setattr("tensorprobe.tensors.readback.SLOTS", 8)
    x = torch.randn(2048, 2048, device="cuda")
    y = torch.ones(64, device="cuda")
    with tp.Recorder(tmp_path / "a", keep=keep, step_on="explicit", log=print) as recorder:
        for _ in range(5):
            z = x
            for _ in range(20):
                z = (z @ x).tanh()
            recorder.step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(200):
                    y = y * 1.0001 + 1.0
                    time.sleep(0.0005)
            graph.replay()
    assert tp.load(tmp_path / "a").calls
