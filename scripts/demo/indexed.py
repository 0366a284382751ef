"""Attention with an index of blocks, for training on a CPU; names and results match transformers' Qwen4Exp.

In training every row attends to all tokens before it, and the index learns how much of that attention each block of
tokens has: its loss is the divergence between the two, and it has no other. In evaluation rows attend to what the
index chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import hide_future
from .mixture import balanced
from .model import LanguageModel, rotate
from .settings import IndexedShape

EPS = 1e-5
HIDDEN = -1e4  # the score of a block that a row does not see as a whole


class PlusNorm(nn.Module):
    """Root-mean-square norm of each of `groups` parts, times 1 + weight."""

    def __init__(self, size: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().unflatten(-1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (wide.flatten(-2) * (1 + self.weight)).to(x.dtype)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first numbers of x [batch, heads, length, dim]."""
    size = cos.shape[-1]
    return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), -1)


class Indexer(nn.Module):
    """The queries and keys of a layer's index."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__()
        self.dim, self.ratio = shape.index_dim, shape.ratio
        self.index_qk_proj = nn.Linear(shape.hidden, (shape.index_heads + 1) * self.dim, bias=False)
        self.q_layernorm, self.k_layernorm = PlusNorm(self.dim), PlusNorm(self.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, length, hidden] -> queries [batch, heads, length, dim] and blocks' keys [batch, 1, blocks, dim]."""
        heads = self.index_qk_proj(x.detach()).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        queries, raw = self.q_layernorm(heads[:, :-1]), heads[:, -1:]
        whole = raw.shape[2] // self.ratio * self.ratio
        pooled = raw[:, :, :whole].unflatten(2, (-1, self.ratio)).float().mean(3).to(raw.dtype)
        first = slice(0, whole, self.ratio)
        return rotate_first(queries, cos, sin), rotate_first(self.k_layernorm(pooled), cos[first], sin[first])


@dataclass(frozen=True)
class Part:
    """Some rows of a batch, from `first` on, with all tokens before them. q, k: [batch, heads, rows or tokens, dim].
    queries, keys: of the index. ratio: tokens of a block."""

    q: Tensor
    k: Tensor
    queries: Tensor
    keys: Tensor
    first: int
    ratio: int

    @property
    def blocks(self) -> int:
        return self.k.shape[2] // self.ratio

    def hidden(self) -> Tensor:
        """Which blocks a row does not see as a whole, bool [rows, blocks]."""
        seen = (torch.arange(self.first, self.k.shape[2]) + 1) // self.ratio
        return torch.arange(self.blocks) >= seen[:, None]

    def scores(self) -> Tensor:
        """The index's scores of blocks, float32 [batch, rows, blocks]."""
        products = self.queries @ self.keys[:, :, : self.blocks].transpose(-1, -2)
        summed = products.relu().float().sum(1) * self.keys.shape[-1] ** -0.5
        return summed.masked_fill(self.hidden(), HIDDEN)

    def chosen(self, most: int) -> Tensor:
        """The blocks that each row chooses, bool [batch, rows, blocks]."""
        scores = self.scores().detach()
        best = scores.topk(min(most, self.blocks), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & ~self.hidden()

    def shares(self, allowed: Tensor | None = None) -> Tensor:
        """The attention of each head, float32 [batch, heads, rows, tokens]. allowed: the blocks that rows attend to."""
        logits = (self.q @ self.k.transpose(-1, -2)).float() * self.q.shape[-1] ** -0.5
        if allowed is not None:
            tokens = (allowed | self.hidden()).repeat_interleave(self.ratio, -1)
            rest = tokens.new_ones(*tokens.shape[:2], self.k.shape[2] - tokens.shape[2])
            logits = logits.masked_fill(~torch.cat((tokens, rest), -1)[:, None], -torch.inf)
        return hide_future(logits).softmax(-1)

    def mass(self, shares: Tensor) -> Tensor:
        """The mean over heads of what each whole block has of the attention, [batch, rows, blocks]."""
        tokens = shares.detach().mean(1)[..., : self.blocks * self.ratio]
        return tokens.unflatten(-1, (-1, self.ratio)).sum(-1).masked_fill(self.hidden(), 0.0)

    def divergence(self, shares: Tensor) -> Tensor:
        """KL(attention || index) over whole blocks, in nats, summed over all rows."""
        mass = self.mass(shares)
        wanted = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
        return (torch.xlogy(wanted, wanted) - wanted * self.scores().log_softmax(-1)).sum()


def parts(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, ratio: int) -> Iterator[Part]:
    """A batch's rows, an eighth at a time, 128 at least."""
    length = q.shape[2]
    size = max(128, length // 8)
    for first in range(0, length, size):
        rows, seen = slice(first, first + size), slice(0, first + size)
        yield Part(q[:, :, rows], k[:, :, seen], queries[:, :, rows], keys, first, ratio)


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, ratio: int, most: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention [batch, heads, length, dim], and the index's mean divergence. most: the blocks that a row
    attends to; None: all."""
    outputs, lost = [], []
    for part in parts(q, k, queries, keys, ratio):
        shares = part.shares(None if most is None else part.chosen(most))
        outputs.append(shares.to(v.dtype) @ v[:, :, : shares.shape[-1]])
        lost.append(part.divergence(shares))
    return torch.cat(outputs, 2), sum(lost[1:], lost[0]) / (q.shape[0] * q.shape[2])


class IndexedAttention(nn.Module):
    """Attention of groups of heads, with a gate for each number of the output."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__()
        self.dim, self.ratio, self.most = shape.head_dim, shape.ratio, shape.budget // shape.ratio
        self.group = shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, 2 * shape.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = PlusNorm(self.dim), PlusNorm(self.dim)
        self.indexer = Indexer(shape)
        self.divergence: Tensor | None = None  # of the last rows

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [batch, length, hidden] -> q, k and v [batch, heads, length, dim], the index's queries and keys, and the
        gates [batch, length, heads * dim]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.dim)).chunk(2, -1)
        k, v = (each(x).unflatten(-1, (-1, self.dim)) for each in (self.k_proj, self.v_proj))
        q = rotate_first(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate_first(self.k_norm(k).transpose(1, 2), cos, sin)
        k, v = (each.repeat_interleave(self.group, 1) for each in (k, v.transpose(1, 2)))
        return q, k, v, *self.indexer(x, cos, sin), gate.flatten(2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        *rows, gate = self.before(x, cos, sin)
        out, self.divergence = attend(*rows, self.ratio, None if self.training else self.most)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.sigmoid())


def with_index(model: LanguageModel) -> Callable[[Tensor], Tensor]:
    """The loss of a model, of the balance of its mixtures and of its index, of ids int64 [batch, length + 1]."""
    attending = [module for module in model.modules() if isinstance(module, IndexedAttention)]
    of_text = balanced(model)

    def loss(ids: Tensor) -> Tensor:
        nats = of_text(ids)
        return nats + sum(each.divergence for each in attending if each.divergence is not None) / len(attending)

    return loss
