"""Which chunk of the full cache each slot of the retrieval cache holds, from one refresh to the next.

Computed where the numbers are, by operators of fixed shapes: on a GPU the host does not look at them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


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
