"""Kernels the CPU lacks because PyTorch picks them on accelerators only, made of ones it has."""

from __future__ import annotations

from typing import Any

import torch

Gates = torch.Tensor


def lstm_cell(
    input_gates: Gates,
    hidden_gates: Gates,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New hidden state, new cell state, and the activated gates that backward needs."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    gates = torch.cat(
        [
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh_cy * o * (1 - o),
        ],
        1,
    )
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Gates,
    hidden_gates: Gates,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New hidden state, and what backward needs of the gates."""
    ir, iz, in_ = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * r * (1 - r)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    input_gates = torch.cat([grad_r, grad_z, grad_n], 1)
    hidden_gates = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad_hy * z, *biases


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Accelerators count integers too; the CPU's kernel takes floats only."""
    if self.is_floating_point():
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


def _with_bias(gates: Gates, bias: torch.Tensor | None) -> Gates:
    return gates if bias is None else gates + bias


def kernels() -> dict[Any, Any]:
    """The op each kernel here stands for."""
    aten = torch.ops.aten
    return {
        aten._thnn_fused_lstm_cell.default: lstm_cell,
        aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
        aten._thnn_fused_gru_cell.default: gru_cell,
        aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
        aten.histc.default: histc,
        # On the CPU these are flags on a tensor, which the outer one could not show.
        aten._conj.default: torch.conj_physical,
        aten._neg_view.default: torch.neg,
        aten._efficientzerotensor.default: torch.zeros,
        # Asked before a module's tensors are replaced; a change of device is never in place.
        aten._has_compatible_shallow_copy_type.default: lambda one, other: False,
    }
