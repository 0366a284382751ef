"""A mixture of experts for training on a CPU; names and results match transformers' Qwen3MoeForCausalLM."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import Shape

BALANCE = 0.01  # of the load-balancing loss, beside a nat


class Experts(nn.Module):
    """The weights of a layer's experts, each a SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(0.04 * torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden))
        self.down = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.intermediate))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [rows, hidden], ordered by expert, `counts` of each -> [rows, hidden]."""
        weights = zip(self.gate_up.to(rows.dtype).unbind(), self.down.to(rows.dtype).unbind(), strict=True)
        outputs = []
        for own, (gate_up, down) in zip(rows.split(counts), weights, strict=True):
            gate, up = F.linear(own, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


class Mixture(nn.Module):
    """A router and its experts. A row's weights of its experts sum to 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.used = shape.used
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.balance: Tensor | None = None  # of the last rows

    @torch.compiler.disable  # the number of an expert's rows differs from batch to batch
    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        rows = x.flatten(0, 1)
        shares = self.gate(rows).float().softmax(-1)
        weights, chosen = shares.topk(self.used)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = chosen.flatten().bincount(minlength=shares.shape[1])
        self.balance = balance(shares, counts)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.experts(rows[order // self.used], counts.tolist()) * weights.to(x.dtype).flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.used, outputs).view(x.shape)


def balance(shares: Tensor, counts: Tensor) -> Tensor:
    """The load-balancing loss (Fedus et al. 2021, equation 4) of shares [rows, experts] and how many rows chose each
    expert: 1 if all are chosen alike, more if not."""
    return len(counts) * (shares.mean(0) * counts / counts.sum()).sum()


def balanced(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The loss of a model and of the balance of its mixtures, of ids int64 [batch, length + 1]."""
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]

    def loss(ids: Tensor) -> Tensor:
        nats: Tensor = model.loss(ids)  # type: ignore[operator]
        return nats + BALANCE * sum(each.balance for each in mixtures if each.balance is not None) / len(mixtures)

    return loss
