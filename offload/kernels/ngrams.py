"""The n-gram embedding of a layer by torch's operators (config/ngrams.py): which rows of its table tokens choose, and
what their embeddings add to the layer's streams. A row's bits do not depend on the rows beside it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from offload.config.ngrams import NGrams
from offload.kernels.exponentials import sigmoid
from offload.kernels.norms import NormWeights, normed_heads

_LEAST = 1e-6  # of a score's size, before its root


@dataclass(frozen=True)
class NGramNorms:
    """The norms of keys, of the layer's streams and of gated values, each over every stream by itself; their weights
    [streams * hidden]."""

    keys: NormWeights
    queries: NormWeights
    values: NormWeights


def chosen_rows(own: NGrams, ids: Tensor) -> Tensor:
    """The rows of the table that tokens choose: ids int64 [context + T], those before the text being eos -> int64 [T,
    num_heads]. The first heads are those of pairs."""
    count = len(ids) - own.context
    previous, found = ids[own.context :], list[Tensor]()
    mixed = previous * own.multipliers[0]
    sizes, offsets = (torch.tensor(each, device=ids.device) for each in (own.head_sizes, own.offsets))
    for distance, factor in enumerate(own.multipliers[1:], 1):
        earlier = ids[own.context - distance :][:count]
        # An eos cuts off what is before it: not its own n-grams, but those of the tokens after it.
        previous = earlier if distance == 1 else torch.where(previous == own.eos, own.eos, earlier)
        mixed = mixed ^ (previous * factor)
        heads = slice((distance - 1) * own.heads, distance * own.heads)
        found.append(torch.remainder(mixed[:, None], sizes[heads]) + offsets[heads])
    return torch.cat(found, 1)


def gated_values(
    own: NGrams, norms: NGramNorms, keys: Tensor, values: Tensor, streams: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated values of each stream, and the same normed, for the convolution: [T, streams * hidden] both. keys
    [T, streams * hidden], values [T, hidden]: products with embeddings. streams: the layer's rows. Each step rounds to
    their dtype. The gate of a score a, of a key and its stream, is sigmoid(sign(a) sqrt(|a|))."""
    size = own.hidden_size
    normed_keys, queries = normed_heads(keys, norms.keys, size), normed_heads(streams, norms.queries, size)
    products = (normed_keys * queries).unflatten(1, (own.streams, size))
    scores = _summed_while_even(products.float()).to(keys.dtype) / sqrt(size)
    roots = scores.abs().clamp_min(_LEAST).sqrt() * scores.sign()
    gates = sigmoid(roots.float()).to(keys.dtype)
    gated = (gates[:, :, None] * values[:, None]).flatten(1)
    return gated, normed_heads(gated, norms.values, size)


def _summed_while_even(x: Tensor) -> Tensor:
    """Sums over the last dimension, halves by halves while there are two, then one by one: a device's own order may
    depend on the number of sums."""
    while (half := x.shape[-1] // 2) and x.shape[-1] % 2 == 0:
        x = x[..., :half] + x[..., half:]
    found = x[..., 0]
    for at in range(1, x.shape[-1]):
        found = found + x[..., at]
    return found
