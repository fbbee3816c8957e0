"""The NPU's own ops: all there, seen once by each kind of mode, and right where it matters."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.follow.naming import Namer


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def boxes(count: int, seed: int = 0) -> torch.Tensor:
    """Boxes as rows of left, top, right, bottom."""
    corner = rand(count, 2, seed=seed).abs() * 5
    return torch.cat([corner, corner + rand(count, 2, seed=seed + 1).abs() * 5 + 1], 1)


ONE = [1.0] * 4
ZERO = [0.0] * 4

# One call of every op in the guide's table, arguments on the host.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one_": ((rand(3),), {}),
    "npu_sort_v2": ((rand(3, 4),), {}),
    "npu_transpose": ((rand(2, 3, 4), (2, 0, 1)), {}),
    "npu_broadcast": ((rand(3, 1), (3, 4)), {}),
    "npu_dtype_cast": ((rand(3), torch.float16), {}),
    "empty_with_format": (((2, 3),), {"dtype": torch.float32, "device": "npu", "acl_format": 2}),
    "npu_one_hot": ((torch.tensor([5, 3, 2, 1]),), {"depth": 5}),
    "npu_stride_add": ((rand(1, 2, 2, 2, 16), rand(1, 2, 2, 2, 16), 0, 0, 1), {}),
    "npu_ps_roi_pooling": (
        (rand(1, 8, 6, 6), torch.tensor([[[0.0], [1.0], [1.0], [4.0], [4.0]]]), 1.0, 2, 2),
        {},
    ),
    "npu_roi_align": ((rand(1, 2, 6, 6), torch.tensor([[0.0, 1, 1, 4, 4]]), 1.0, 2, 2, 2, 0), {}),
    "npu_nms_v4": ((boxes(6), rand(6), 4, torch.tensor(0.5), torch.tensor(-9.0)), {}),
    "npu_iou": ((boxes(3), boxes(2, 5)), {}),
    "npu_nms_with_mask": ((torch.cat([boxes(5), rand(5, 1)], 1), 0.5), {}),
    "npu_pad": ((rand(2, 3), (1, 0, 0, 2)), {}),
    "npu_bounding_box_encode": ((boxes(3), boxes(3, 5), *ZERO, *ONE), {}),
    "npu_bounding_box_decode": ((boxes(3), rand(3, 4) / 9, *ZERO, *ONE, (20, 20), 0.1), {}),
    "npu_batch_nms": ((boxes(6).view(1, 6, 1, 4), rand(1, 6, 2), 0.0, 0.5, 3, 4), {}),
    "npu_slice": ((rand(3, 4), (0, 1), (2, 2)), {}),
    "_npu_dropout": ((rand(4, 4), 0.5), {}),
    "npu_indexing": ((rand(3, 4), (0, 0), (2, 4), (1, 2)), {}),
    "npu_ifmr": (
        (
            rand(8),
            torch.tensor([-3.0]),
            torch.tensor([3.0]),
            torch.arange(8),
            0.99,
            0.99,
            0.7,
            1.3,
            0.1,
            False,
        ),
        {},
    ),
    "npu_max": ((rand(3, 4), 1), {}),
    "npu_scatter": ((rand(2, 2), torch.tensor([0, 1]), rand(2, seed=3), 0), {}),
    "npu_layer_norm_eval": ((rand(2, 4), (4,), rand(4, seed=1), rand(4, seed=2)), {}),
    "npu_alloc_float_status": ((rand(2),), {}),
    "npu_get_float_status": ((torch.zeros(8),), {}),
    "npu_clear_float_status": ((torch.zeros(8),), {}),
    "npu_confusion_transpose": ((rand(2, 3, 4), (0, 2, 1), (2, 12), True), {}),
    "npu_bmmV2": ((rand(2, 3, 4), rand(2, 4, 5), []), {}),
    "fast_gelu": ((rand(3, 4),), {}),
    "npu_sub_sample": ((torch.tensor([1, 0, 1, 0, 1]), 3, 0.4), {}),
    "npu_deformable_conv2d": (
        (rand(1, 2, 5, 5), rand(3, 2, 3, 3), rand(1, 27, 5, 5) / 9, None),
        {"kernel_size": (3, 3), "stride": (1, 1, 1, 1), "padding": (1, 1, 1, 1)},
    ),
    "npu_mish": ((rand(3),), {}),
    "npu_anchor_response_flags": ((boxes(3), (4, 4), (4, 4), 2), {}),
    "npu_yolo_boxes_encode": ((boxes(3), boxes(3, 5), torch.tensor([2, 2, 2])), {}),
    "npu_grid_assign_positive": (
        (
            torch.zeros(4),
            rand(2, 4).abs(),
            torch.ones(4, dtype=torch.uint8),
            rand(4).abs(),
            torch.tensor([0, 1, 0, 1]),
            rand(2).abs(),
            torch.tensor([1, 2]),
            2,
            0.5,
            0.0,
            True,
        ),
        {},
    ),
    "npu_normalize_batch": ((rand(2, 3, 5), torch.tensor([3, 5])), {}),
    "npu_masked_fill_range": (
        (rand(2, 5), torch.tensor([[0, 1]]), torch.tensor([[2, 4]]), torch.tensor([9.0])),
        {},
    ),
    "npu_linear": ((rand(2, 3, 4), rand(5, 4), rand(5)), {}),
    "npu_bert_apply_adam": (
        (0.1, 0.9, 0.99, 1e-8, rand(3), 0.0, 0.0, 0.01),
        {"out": (rand(3, seed=1), torch.zeros(3), torch.zeros(3))},
    ),
    "npu_giou": ((boxes(3).T.contiguous(), boxes(3, 5).T.contiguous()), {}),
    "npu_ciou": ((boxes(3).T.contiguous(), boxes(3, 5).T.contiguous()), {"is_cross": False}),
    "npu_ciou_backward": (
        (rand(1, 3), boxes(3).T.contiguous(), boxes(3, 5).T.contiguous(), None),
        {"is_cross": False},
    ),
    "npu_diou": ((boxes(3).T.contiguous(), boxes(3, 5).T.contiguous()), {}),
    "npu_diou_backward": (
        (rand(1, 3), boxes(3).T.contiguous(), boxes(3, 5).T.contiguous()),
        {},
    ),
    "npu_sign_bits_pack": ((rand(16), 2), {}),
    "npu_sign_bits_unpack": ((torch.tensor([159, 15], dtype=torch.uint8), 1, torch.float32), {}),
}


def on_npu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone().npu()
    if isinstance(value, tuple):
        return tuple(on_npu(item) for item in value)
    return value


def call(name: str) -> Any:
    args, kwargs = CALLS[name]
    moved = {key: on_npu(value) for key, value in kwargs.items()}
    if "out" in moved:
        moved.update(zip(("var", "m", "v"), moved.pop("out"), strict=True))
    return getattr(torch_npu, name)(*on_npu(args), **moved)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def test_the_table_of_the_guide_is_complete() -> None:
    assert len(CALLS) == 47
    beside = Path(__file__).parents[3] / ".." / "shared"
    shared = Path(os.environ.get("TENSORPROBE_SHARED", beside))
    guides = list(shared.glob("seeds/004_*.txt"))
    if not guides:
        pytest.skip("the guide is not beside this checkout")
    table = re.findall(r"^\| *\d+ *\| *torch_npu\.(\w+) *\|", guides[0].read_text(), re.MULTILINE)
    assert set(table) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_every_op_runs_on_the_device(name: str) -> None:
    results = tensors(call(name))
    assert results
    assert all(result.is_npu for result in results)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def vendor_calls(functions: list[Any]) -> list[str]:
    """What a recorder calls those of these functions that are the vendor's own ops."""
    names = map(Namer(torch.overrides.resolve_name), functions)
    return [name.stem for name in names if name.prefix == "NPU"]


@pytest.mark.parametrize("name", CALLS)
def test_every_op_is_seen_once(name: str) -> None:
    with Functions() as functions, Kernels() as kernels:
        call(name)
    assert vendor_calls(functions.seen) == [f"NPU.{name}"]
    ours = [kernel for kernel in kernels.seen if kernel.namespace == "npu"]
    assert [kernel._schema.name for kernel in ours] == [f"npu::{name}"]


def test_backward_is_a_kernel_and_no_call() -> None:
    x = rand(2, 4).npu().requires_grad_()
    gamma = torch.ones(4, device="npu", requires_grad=True)
    with Functions() as functions, Kernels() as kernels:
        torch_npu.npu_rms_norm(x, gamma)[0].sum().backward()
    assert vendor_calls(functions.seen) == ["NPU.npu_rms_norm"]
    names = [kernel._schema.name for kernel in kernels.seen if kernel.namespace == "npu"]
    assert names == ["npu::npu_rms_norm", "npu::npu_rms_norm_backward"]


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * 0.5).masked_fill(mask, -10000.0).softmax(-1)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, gamma.shape, gamma, 1e-5)


MASK = torch.ones(4, 4, dtype=torch.bool).triu(1)

# The op, the plain formula, the arguments that carry gradients.
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "npu_linear": (torch_npu.npu_linear, F.linear, [rand(2, 3, 4), rand(5, 4), rand(5)]),
    "npu_linear without bias": (torch_npu.npu_linear, F.linear, [rand(3, 4), rand(5, 4)]),
    "npu_scaled_masked_softmax": (
        lambda x: torch_npu.npu_scaled_masked_softmax(x, MASK.to(x.device), 0.5, False),
        lambda x: masked_softmax(x, MASK),
        [rand(2, 2, 4, 4)],
    ),
    "npu_scaled_masked_softmax, fixed mask": (
        lambda x: torch_npu.npu_scaled_masked_softmax(x, MASK.to(x.device), 0.5, True),
        lambda x: masked_softmax(x, MASK),
        [rand(2, 2, 4, 4)],
    ),
    "fast_gelu": (torch_npu.fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), [rand(3, 40)]),
    "npu_rms_norm": (
        lambda x, g: torch_npu.npu_rms_norm(x, g, epsilon=1e-5)[0],
        rms_norm,
        [rand(2, 3, 8), rand(8, seed=1)],
    ),
    "npu_rotary_mul": (
        torch_npu.npu_rotary_mul,
        lambda x, cos, sin: x * cos + rotated(x) * sin,
        [rand(2, 3, 4, 8), rand(1, 3, 1, 8), rand(1, 3, 1, 8, seed=2)],
    ),
    "npu_swiglu": (
        torch_npu.npu_swiglu,
        lambda x: F.silu(x[..., :4]) * x[..., 4:],
        [rand(2, 8)],
    ),
    "npu_confusion_transpose, transpose first": (
        lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1), (2, 12), True),
        lambda x: x.permute(0, 2, 1).reshape(2, 12),
        [rand(2, 3, 4)],
    ),
    "npu_confusion_transpose, shape first": (
        lambda x: torch_npu.npu_confusion_transpose(x, (1, 0), (6, 4), False),
        lambda x: x.view(6, 4).permute(1, 0),
        [rand(2, 3, 4)],
    ),
    "npu_bmmV2": (
        lambda a, b: torch_npu.npu_bmmV2(a, b, []),
        torch.bmm,
        [rand(2, 3, 4), rand(2, 4, 5)],
    ),
    "npu_dtype_cast": (
        lambda x: torch_npu.npu_dtype_cast(x, torch.float16),
        lambda x: x.half(),
        [rand(5)],
    ),
    "npu_format_cast": (lambda x: torch_npu.npu_format_cast(x, 29), lambda x: x * 1, [rand(5)]),
    "npu_mish": (torch_npu.npu_mish, F.mish, [rand(5)]),
    "npu_max": (lambda x: torch_npu.npu_max(x, 1)[0], lambda x: x.amax(1), [rand(3, 4)]),
    "npu_pad": (
        lambda x: torch_npu.npu_pad(x, (1, 0, 0, 2)),
        lambda x: F.pad(x, (0, 2, 1, 0)),
        [rand(2, 3)],
    ),
    "npu_slice": (
        lambda x: torch_npu.npu_slice(x, (1, 0), (1, 2)),
        lambda x: x[1:2, :2],
        [rand(2, 3)],
    ),
    "npu_deformable_conv2d without offsets": (
        lambda x, w: torch_npu.npu_deformable_conv2d(
            x,
            w,
            torch.cat([torch.zeros(1, 18, 5, 5), torch.ones(1, 9, 5, 5)], 1).to(x.device),
            None,
            kernel_size=(3, 3),
            stride=(1, 1, 1, 1),
            padding=(1, 1, 1, 1),
        )[0],
        lambda x, w: F.conv2d(x, w, padding=1),
        [rand(1, 2, 5, 5), rand(3, 2, 3, 3)],
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_gradients(name: str) -> None:
    op, formula, arguments = FORMULAS[name]
    host = [argument.clone().requires_grad_() for argument in arguments]
    npu = [argument.clone().npu().requires_grad_() for argument in arguments]
    expected, actual = formula(*host), op(*npu)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)
    weights = rand(*expected.shape, seed=9).to(expected.dtype)
    expected.backward(weights)
    actual.backward(weights.npu())
    for one, other in zip(npu, host, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-6)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.25, **more)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.transpose(1, 2).flatten(2).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [4, 2], ids=["mha", "gqa"])
def test_fusion_attention(layout: str, heads: int) -> None:
    q, k, v = rand(2, 4, 6, 16), rand(2, heads, 6, 16, seed=1), rand(2, heads, 6, 16, seed=2)
    host = [t.clone().requires_grad_() for t in (q, k, v)]
    npu = [t.clone().npu().requires_grad_() for t in (q, k, v)]
    expected = attention(*host, is_causal=True, enable_gqa=True)
    out, top, total, _, _, _, _ = torch_npu.npu_fusion_attention(
        *(LAYOUTS[layout](t) for t in npu),
        head_num=4,
        input_layout=layout,
        scale=0.25,
        atten_mask=torch.ones(6, 6, dtype=torch.bool).triu(1).npu(),
    )
    torch.testing.assert_close(out.cpu(), LAYOUTS[layout](expected), rtol=1e-5, atol=1e-6)
    assert top.shape == total.shape == (2, 4, 6, 8)
    expected.square().sum().backward()
    out.square().sum().backward()
    for one, other in zip(npu, host, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)


def test_fusion_attention_modes_and_refusals() -> None:
    q = rand(1, 2, 4, 8).npu()
    causal = attention(q.cpu(), q.cpu(), q.cpu(), is_causal=True)
    for sparse_mode in (2, 3):
        out = torch_npu.npu_fusion_attention(
            q, q, q, 2, "BNSD", scale=0.25, sparse_mode=sparse_mode
        )[0]
        torch.testing.assert_close(out.cpu(), causal)
    with pytest.raises(NotImplementedError, match="input_layout 'TND' is not simulated"):
        torch_npu.npu_fusion_attention(q, q, q, 2, "TND")


def test_fusion_attention_drops_the_same_in_backward() -> None:
    q = rand(1, 2, 4, 8).npu()
    v = torch.eye(4, 8).expand(1, 2, 4, 8).contiguous().npu().requires_grad_()
    out, *_, seed, _, numels = torch_npu.npu_fusion_attention(q, q, v, 2, "BNSD", keep_prob=0.5)
    assert seed > 0
    assert numels == 32
    weights = out.detach().cpu()[..., :4]  # v is the identity, so the output shows the weights
    assert 0 < (weights == 0).sum() < 32
    out.sum().backward()
    torch.testing.assert_close(v.grad.cpu()[..., 0], weights.sum(-2))


def test_dropout_drops_the_same_in_backward() -> None:
    x = torch.ones(50, device="npu", requires_grad=True)
    out, _ = torch_npu._npu_dropout(x, 0.5)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert set(out.tolist()) == {0.0, 2.0}


def test_small_ops() -> None:
    x = rand(3).npu()
    assert torch_npu.one_(x) is x
    assert x.tolist() == [1, 1, 1]
    hot = torch_npu.npu_one_hot(torch.tensor([5, 3, 2, 1]).npu(), depth=5)
    assert hot.argmax(1).tolist() == [0, 3, 2, 1]
    assert hot.sum(1).tolist() == [0, 1, 1, 1]  # 5 is outside
    norm = torch_npu.npu_layer_norm_eval(rand(2, 4).npu(), (4,))
    torch.testing.assert_close(norm.cpu(), F.layer_norm(rand(2, 4), (4,)))
    bits = torch_npu.npu_sign_bits_pack(rand(16).npu(), 2)
    signs = torch_npu.npu_sign_bits_unpack(bits, 1, torch.float32)
    assert signs.flatten().tolist() == torch.where(rand(16) >= 0, 1.0, -1.0).tolist()
    iou = torch_npu.npu_iou(
        torch.tensor([[0.0, 0, 10, 10], [10, 10, 20, 20]]).npu(),
        torch.tensor([[0.0, 0, 10, 20], [10, 10, 20, 20]]).npu(),
    )
    torch.testing.assert_close(iou.cpu(), torch.tensor([[0.5, 0.0], [0.0, 1.0]]))
    assert math.isclose(torch_npu.npu_max(torch.tensor([[1.0, 3.0]]).npu(), 1)[0].item(), 3)


@pytest.mark.parametrize("name", ["npu_ciou", "npu_diou"])
def test_box_backward_ops_agree_with_autograd(name: str) -> None:
    a, b = boxes(3).T.contiguous().npu().requires_grad_(), boxes(3, 5).T.contiguous().npu()
    out = getattr(torch_npu, name)(a, b, is_cross=False)
    grad = rand(1, 3).npu()
    out.backward(grad)
    extra = (None,) if name == "npu_ciou" else ()
    by_op, _ = getattr(torch_npu, f"{name}_backward")(grad, a.detach(), b, *extra, is_cross=False)
    assert a.grad is not None
    assert torch.equal(a.grad, by_op)


def test_npu_ops_refuse_host_tensors_and_unknown_names() -> None:
    with pytest.raises(NotImplementedError, match="Could not run 'npu::npu_linear'"):
        torch_npu.npu_linear(rand(2, 4), rand(5, 4))
    with pytest.raises(NotImplementedError, match=r"torch_npu\.npu_moe_gating is not part of"):
        torch_npu.npu_moe_gating  # noqa: B018
    assert not hasattr(torch_npu, "npu_moe_gating")
