"""Selection of the chunks that the retrieval cache fetches, by scores that the full cache's last pass gave, and the
slots that they get.

Computed where the numbers are, by operators of fixed shapes: on a GPU the host does not look at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

DILATION, DECAY = 0.5, 0.5


class Seen(Protocol):
    """The full cache as selectors see it: scores from its last decode forward."""

    def mass(self, num_rows: int) -> Tensor:
        """Softmax mass per chunk, summed over the forward's first `num_rows` rows: [L, H_kv, C or more] fp32."""
        ...


class Selector(Protocol):
    """Scores chunks; the best are fetched. Proposals of the retrieval level depend on it, the output's distribution
    never does."""

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        """Scores of the first `num_chunks` chunks of `chunk` tokens, [L, H_kv, num_chunks] fp32, finite. The
        full cache's last decode forward was a verification whose first `num_rows` rows stayed."""
        ...

    def forget(self) -> None:
        """The sequence did not go on from the last refresh: what was kept from one to the next counts no more."""
        ...


class ByMass:
    """Chunks that the rows of the last verification looked at, and what lies after them. Each cache has its own.

    dilation, reach: a chunk also gets `dilation` times the best score among the chunks that cover the `reach` tokens
    before it: where the model copies, attention moves forward through its source while a block is drafted.
    decay: of the mass of earlier verifications, the share that still counts one refresh later.
    """

    def __init__(self, *, reach: int, dilation: float = DILATION, decay: float = DECAY) -> None:
        self.dilation, self.reach, self.decay = dilation, reach, decay
        self._earlier: Tensor | None = None

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        mass = full.mass(num_rows)[..., :num_chunks]
        if self.decay:
            mass = self._with_earlier(mass)
        return dilate(mass, weight=self.dilation, num_chunks=min(-(-self.reach // chunk), num_chunks))

    def forget(self) -> None:
        self._earlier = None

    def _with_earlier(self, mass: Tensor) -> Tensor:
        if self._earlier is not None:
            earlier = self._earlier[..., : mass.shape[-1]]
            mass = mass + self.decay * pad(earlier, (0, mass.shape[-1] - earlier.shape[-1]))
        self._earlier = mass
        return mass


def dilate(scores: Tensor, *, weight: float, num_chunks: int) -> Tensor:
    """scores [..., C] -> [..., C]: the larger of a chunk's own and `weight` times the best of `num_chunks` before."""
    if weight == 0.0 or num_chunks == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    padded = pad(flat, (num_chunks, -1))
    return torch.maximum(scores, weight * max_pool1d(padded, num_chunks, stride=1).reshape(scores.shape))


def choose(scores: Tensor, num_chosen: int, *, leading: int = 0) -> Tensor:
    """scores [L, H_kv, C] -> int64 [L, H_kv, n], rising: in each row the best chunks, num_chosen or all, if those are
    less. Chunk 0 (the sinks) is always among them or, where the first `leading` are held otherwise, none of these."""
    scores = scores[..., leading:]
    if num_chosen >= scores.shape[-1]:
        return torch.arange(leading, leading + scores.shape[-1], device=scores.device).expand(scores.shape).contiguous()
    if not leading:
        scores = scores.clone()
        scores[..., 0] = torch.inf
    chosen = scores.topk(num_chosen, -1, sorted=False).indices.sort(-1).values
    return chosen + leading if leading else chosen


@dataclass(frozen=True)
class Assignment:
    """held: the chunk of each slot, int64 [L, H_kv, n]. wanted: the same where it has to be fetched, -1 elsewhere."""

    held: Tensor
    wanted: Tensor


def assign(chosen: Tensor, before: Tensor | None = None) -> Assignment:
    """Each of the chosen chunks gets one slot, int64 [L, H_kv, n], rising in each row. before: the chunks of the first
    slots so far, [L, H_kv, n or fewer], each once in a row; None: the slots are empty.

    A chunk that is chosen again stays where it is. The others, in rising order, go to the free slots, in theirs.
    """
    if before is None:
        return Assignment(chosen, chosen)
    num_slots = chosen.shape[-1]
    before = pad(before, (0, num_slots - before.shape[-1]), value=-1)
    at = torch.searchsorted(chosen, before).clamp_(max=num_slots - 1)
    stays = chosen.gather(-1, at) == before
    # One entry more takes what is to be found nowhere.
    room = (*chosen.shape[:-1], num_slots + 1)
    is_new = chosen.new_ones(room, dtype=torch.bool).scatter_(-1, at.where(stays, num_slots), False)[..., :num_slots]
    rank = (is_new.cumsum(-1) - 1).where(is_new, num_slots)
    new = chosen.new_empty(room).scatter_(-1, rank, chosen)
    # There are as many free slots as new chunks.
    next_new = new.gather(-1, (~stays).cumsum(-1).sub_(1).clamp_(min=0))
    return Assignment(torch.where(stays, before, next_new), next_new.masked_fill(stays, -1))
