"""The NPU's fused ops for training, with the formulas its documentation gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tensorprobe.replay.npu_op_table import OpTable

OPS = OpTable()
Tensor = torch.Tensor

_MASKED = -10000.0  # what the masked-softmax kernel puts where the mask is true


@OPS.op(grad=True)
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


@OPS.op(grad=True)
def npu_dtype_cast(input: Tensor, dtype: torch.dtype, input_dtype: int | None = None) -> Tensor:
    return input.to(dtype, copy=True)


@OPS.op(
    "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, "
    "int? input_dtype=None) -> Tensor",
    grad=True,
)
def npu_format_cast(
    input: Tensor,
    acl_format: int,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    return input.clone()  # the inner layout is the chip's affair: values and shape stay


@OPS.op(
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False)"
    " -> Tensor",
    grad=True,
)
def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> Tensor:
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    scores = (x.float() * scale).masked_fill(mask.bool(), _MASKED)
    return scores.softmax(-1).to(x.dtype)


@OPS.op(grad=True)
def fast_gelu(input: Tensor) -> Tensor:
    x = input.float()
    size = x.abs()
    return (x / (1 + torch.exp(-1.702 * size)) * torch.exp(0.851 * (x - size))).to(input.dtype)


@OPS.op(grad=True)
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    x = input.float()
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


@OPS.op(grad=True)
def npu_rotary_mul(
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    if rotate is not None:
        raise NotImplementedError("npu_rotary_mul: rotate is not simulated")
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    elif rotary_mode == "interleave":
        turned = torch.stack([-input[..., 1::2], input[..., ::2]], -1).flatten(-2)
    else:
        raise NotImplementedError(f"npu_rotary_mul: rotary_mode '{rotary_mode}' is not simulated")
    return input * r1 + turned * r2


@OPS.op(grad=True)
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, value = input.chunk(2, dim)
    return F.silu(gate) * value


@OPS.op(grad=True)
def npu_confusion_transpose(
    input: Tensor, perm: list[int], shape: list[int], transpose_first: bool
) -> Tensor:
    if transpose_first:
        return input.permute(perm).contiguous().view(shape)
    return input.reshape(shape).permute(perm).contiguous()


@OPS.op("npu_bmmV2(Tensor input, Tensor mat2, int[] output_sizes) -> Tensor", grad=True)
def npu_bmm_v2(input: Tensor, mat2: Tensor, output_sizes: list[int]) -> Tensor:
    product = torch.matmul(input, mat2)
    return product.reshape(output_sizes) if output_sizes else product


@OPS.op()
def npu_layer_norm_eval(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


@OPS.op(grad=True)
def npu_mish(input: Tensor) -> Tensor:
    return F.mish(input)


@OPS.op("_npu_dropout(Tensor input, float p) -> (Tensor, Tensor)", grad=True, random=True, drawn=1)
def npu_dropout(input: Tensor, p: float, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`drawn` is the mask of the forward pass, for backward."""
    kept = torch.rand(input.shape) < 1 - p if drawn is None else drawn.bool()
    return input * kept / (1 - p), kept.to(torch.uint8)


@OPS.op(grad=True, random=True, drawn=4)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    drawn: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention as the fused kernel does it; a mask is true where nothing may be seen.

    `drawn` is the seed of the forward pass's dropout, for backward.
    """
    absent = {"prefix": prefix, "actual_seq_qlen": actual_seq_qlen,
              "actual_seq_kvlen": actual_seq_kvlen, "padding_mask": padding_mask,
              "softmax_layout": softmax_layout or None, "sink": sink,
              "dropout_mask": dropout_mask}  # fmt: skip
    for name, argument in absent.items():
        if argument is not None:
            raise NotImplementedError(f"npu_fusion_attention: {name} is not simulated")
    q, k, v = (_to_bnsd(x, head_num, input_layout, query) for x in (query, key, value))
    repeats = head_num // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    scores = (scores + pse.float()) * scale if pse is not None else scores * scale
    hidden = _hidden(scores, atten_mask, sparse_mode, pre_tockens, next_tockens)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    top = scores.amax(-1, keepdim=True)
    total = torch.exp(scores - top).sum(-1, keepdim=True)
    weights = scores.softmax(-1)
    if keep_prob < 1:
        seed = drawn or seed or int(torch.randint(1, 2**31, ()))
        kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed)) < keep_prob
        weights = weights * kept / keep_prob
    out = torch.matmul(weights, v.float()).to(query.dtype)
    rows = (*scores.shape[:-1], 8)  # the kernel stores each row's maximum and sum eight times
    return (
        _from_bnsd(out, input_layout),
        top.detach().expand(rows).contiguous(),
        total.detach().expand(rows).contiguous(),
        torch.empty(0, dtype=query.dtype),
        seed,
        0,
        weights.numel() if keep_prob < 1 else 0,
    )


def _to_bnsd(x: Tensor, head_num: int, layout: str, query: Tensor) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout in ("BSH", "SBH"):
        x = x.transpose(0, 1).contiguous() if layout == "SBH" else x
        return x.view(*x.shape[:2], -1, query.shape[-1] // head_num).transpose(1, 2)
    raise NotImplementedError(f"npu_fusion_attention: input_layout '{layout}' is not simulated")


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x.contiguous()
    x = x.flatten(-2)
    return x.transpose(0, 1).contiguous() if layout == "SBH" else x


def _hidden(
    scores: Tensor, mask: Tensor | None, sparse_mode: int, pre_tockens: int, next_tockens: int
) -> Tensor | None:
    """Which scores must not be seen, by the sparse modes that need no sequence lengths."""
    queries, keys = scores.shape[-2:]
    if sparse_mode in (0, 1):
        if mask is None:
            return None
        hidden = mask.bool()
        if sparse_mode == 1:
            return hidden
        return hidden | _outside_band(queries, keys, pre_tockens, next_tockens, 0)
    if sparse_mode == 2:  # causal, aligned at the upper left
        return _outside_band(queries, keys, keys + queries, 0, 0)
    if sparse_mode == 3:  # causal, aligned at the lower right
        return _outside_band(queries, keys, keys + queries, 0, keys - queries)
    if sparse_mode == 4:
        return _outside_band(queries, keys, pre_tockens, next_tockens, keys - queries)
    raise NotImplementedError(f"npu_fusion_attention: sparse_mode {sparse_mode} is not simulated")


def _outside_band(queries: int, keys: int, before: int, after: int, shift: int) -> Tensor:
    row = torch.arange(queries)[:, None] + shift
    column = torch.arange(keys)[None, :]
    return (column < row - before) | (column > row + after)


@OPS.op("one_(Tensor(a!) input) -> Tensor(a!)")
def one_(input: Tensor) -> Tensor:
    return input.fill_(1)


@OPS.op(
    "npu_one_hot(Tensor input, int num_classes=-1, int depth=1, Scalar on_value=1, "
    "Scalar off_value=0) -> Tensor"
)
def npu_one_hot(
    input: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0
) -> Tensor:
    """`num_classes` is the axis the classes go to; a class outside `depth` is off everywhere."""
    hot = (input.unsqueeze(-1) == torch.arange(depth)).movedim(-1, num_classes)
    return torch.where(hot, float(on_value), float(off_value))


@OPS.op()
def empty_with_format(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    acl_format: int = 2,
    base_addr_aligned_kb: int | None = None,
) -> Tensor:
    return torch.empty(size, dtype=dtype)


@OPS.op()
def npu_alloc_float_status(input: Tensor) -> Tensor:
    return torch.zeros(8)


@OPS.op()
def npu_get_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """No overflow: what a chip says that has done nothing else."""
    input[0] = 0.0
    return input.clone()


@OPS.op()
def npu_clear_float_status(input: Tensor, mode: int = 0) -> Tensor:
    return torch.zeros_like(input)


@OPS.op(
    "npu_bert_apply_adam.out(Scalar lr, Scalar beta1, Scalar beta2, Scalar epsilon, Tensor grad, "
    "Scalar max_grad_norm, Scalar global_grad_norm, Scalar weight_decay, Scalar? step_size=None, "
    "int adam_mode=0, *, Tensor(a!) var, Tensor(b!) m, Tensor(c!) v)"
    " -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
def npu_bert_apply_adam(
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: float,
    global_grad_norm: float,
    weight_decay: float,
    step_size: float | None = None,
    adam_mode: int = 0,
    *,
    var: Tensor,
    m: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if 0 < max_grad_norm < global_grad_norm:
        grad = grad * (max_grad_norm / global_grad_norm)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = m / (v.sqrt() + epsilon) + weight_decay * var
    var.sub_(update, alpha=lr)
    return var, m, v
