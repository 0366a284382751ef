"""The choice of blocks of tokens by a layer's index (Qwen's QSA): each row's blocks with the highest scores.

Letters: T rows, H_i heads of the index, D_i their dimension, N whole blocks, each with one pooled key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_NUMBERS = 1 << 22  # of products that are held at a time


def choose(q: Tensor, pooled: Tensor, visible: Tensor, most: int) -> Tensor:
    """The numbers of each row's blocks with the highest scores, int32 [T, min(most, N)]: ascending, and -1 at the end
    where fewer are visible. Of equal scores the lower block's counts as higher.

    q [T, H_i, D_i], pooled [N, D_i], of one dtype, contiguous. visible: integers [T], the number of blocks that each
    row may choose among, its first ones, at most N. The score of a block is fp32, the sum over the heads of max(q_i ·
    K_b, 0), in which what is not a number counts as 0. The model divides it by sqrt(D_i); that is left out, as it
    changes no order: rounded, it could only make unequal scores equal.

    A row's choice depends neither on the rows beside it nor on N, by torch's operators as written here: sums of halves,
    element by element. Memory: some copies of the scores [T, N], and 48 MiB.
    """
    scores, number = scores_of(q, pooled), torch.arange(len(pooled), device=q.device)
    hidden = number >= visible[:, None]
    ranked = scores.masked_fill_(hidden, -1.0).sort(dim=1, descending=True, stable=True).indices[:, :most]
    chosen = ranked.masked_fill(ranked >= visible[:, None], len(pooled)).sort(dim=1).values
    return chosen.masked_fill(chosen == len(pooled), -1).int()


def scores_of(q: Tensor, pooled: Tensor) -> Tensor:
    """The scores fp32 [T, N] of all blocks, see `choose`."""
    scores = torch.zeros(len(q), len(pooled), device=q.device)
    step = max(_NUMBERS // pooled.shape[1], 1)
    for row in range(len(q)):
        for first in range(0, len(pooled), step):
            keys = pooled[first : first + step].float()
            for query in q[row].float():
                product = _summed_padded(keys * query)
                scores[row, first : first + step] += torch.where(product > 0, product, 0.0)
    return scores


def _summed_padded(products: Tensor) -> Tensor:
    """The sums [n] of products [n, D], padded with zeros to a power of two: halves are added until one number is
    left."""
    count = 1 << (products.shape[1] - 1).bit_length()
    products = pad(products, (0, count - products.shape[1]))
    while (count := products.shape[1] // 2) > 0:
        products = products[:, :count] + products[:, count:]
    return products[:, 0]
