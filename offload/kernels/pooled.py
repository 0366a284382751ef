"""Index keys of blocks of tokens, by which rows choose what they attend to (`Indexer`), by torch's operators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload.kernels.norms import NormWeights
from offload.kernels.rope import RopeTable, rotate


@dataclass(frozen=True)
class IndexRows:
    """The index queries and keys of new rows in a layer: q [T, H_i, D_i], normed, not rotated; k [T, D_i], as they are
    projected. norm: of blocks' keys."""

    q: Tensor
    k: Tensor
    norm: NormWeights


def pooled_keys(raw: Tensor, norm: NormWeights, rope: RopeTable, first: int) -> Tensor:
    """The keys of whole blocks: raw [N, ratio, D_i], the index keys of their tokens, as projected -> [N, D_i]. rope: a
    table in the dtype of keys. first: the position of the first block's first token. Rounded to that dtype after the
    mean, the norm and the rotation."""
    ratio = raw.shape[1]
    total, *others = raw.float().unbind(1)
    for each in others:
        total = total + each
    normed = norm((total / ratio).to(raw.dtype))
    stop = first + ratio * len(raw)
    cos, sin = rope.cos[first:stop:ratio], rope.sin[first:stop:ratio]
    return rotate(normed[:, None], cos, sin)[:, 0]
