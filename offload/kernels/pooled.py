"""Index keys of blocks of tokens, by which rows choose what they attend to (`Indexer`), by torch's operators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload.kernels.norms import NormWeights
from offload.kernels.places import RowPlaces
from offload.kernels.rope import RopeTable


@dataclass(frozen=True)
class IndexRows:
    """The index queries and keys of new rows in a layer: q [T, H_i, D_i], normed, not rotated; k [T, D_i], as they are
    projected. norm: of blocks' keys. real: bool [T], which rows are no padding and so choose; None: all."""

    q: Tensor
    k: Tensor
    norm: NormWeights
    real: Tensor | None = None


def pooled_keys(raw: Tensor, norm: NormWeights, rope: RopeTable, places: RowPlaces) -> Tensor:
    """The keys of whole blocks: raw [N, ratio, D_i], the index keys of their tokens, as projected -> [N, D_i]. rope: a
    table in the dtype of keys. places: of the blocks' first tokens. Rounded to that dtype after the mean, the norm and
    the rotation."""
    total, *others = raw.float().unbind(1)
    for each in others:
        total = total + each
    normed = norm((total / raw.shape[1]).to(raw.dtype))
    return places.rotated_by(rope, normed[:, None])[:, 0]
