"""The gated delta rule for training on a CPU; parameter names and results match transformers' Qwen4Exp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen4_exp.modeling_qwen4_exp import torch_chunk_gated_delta_rule

from .settings import IndexedShape

TAPS = 4  # of the convolution
EPS = 1e-5


class GatedNorm(nn.Module):
    """Root-mean-square norm of a head, times the sigmoid of its gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return ((self.weight * wide.to(x.dtype)) * gate.float().sigmoid()).to(x.dtype)


class Delta(nn.Module):
    """A layer's recurrent state: a short convolution, the gated delta rule, a gate."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__()
        self.dim, self.sizes = shape.state_dim, [shape.key_heads * shape.state_dim] * 2
        self.sizes.append(shape.value_heads * shape.state_dim)
        wide = sum(self.sizes)
        self.in_proj_qkv = nn.Linear(shape.hidden, wide, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, self.sizes[2], bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.conv1d = nn.Conv1d(wide, wide, TAPS, groups=wide, bias=False)
        step = torch.logspace(-3, -1, shape.value_heads)
        self.dt_bias = nn.Parameter(step.expm1().log())  # the inverse of softplus
        self.A_log = nn.Parameter(torch.empty(shape.value_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(self.dim)
        self.out_proj = nn.Linear(self.sizes[2], shape.hidden, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [batch, length, hidden] -> queries, keys, values and their gates [batch, length, heads, dim]; the rate and
        the decay's logarithm [batch, length, heads]."""
        wide = F.pad(self.in_proj_qkv(x), (0, 0, TAPS - 1, 0))
        taps = self.conv1d.weight.to(wide.dtype).unbind(2)
        mixed = F.silu(sum(wide[:, i : i + x.shape[1]] * tap[:, 0] for i, tap in enumerate(taps)))
        q, k, v = (each.unflatten(-1, (-1, self.dim)) for each in mixed.split(self.sizes, -1))
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q, k, v, self.in_proj_z(x).unflatten(-1, (-1, self.dim)), self.in_proj_b(x).sigmoid(), decay

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        """Both [batch, length, heads, dim] -> [batch, length, hidden]."""
        return self.out_proj(self.norm(out, gate).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate, rate, decay = self.before(x)
        with torch.autocast("cpu", enabled=False):
            out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=rate, use_qk_l2norm_in_kernel=True)
        return self.after(out, gate)
