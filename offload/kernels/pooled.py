"""Index keys of blocks of tokens, by which rows choose what they attend to (`Indexer`), by torch's operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class PooledPlaces:
    """The places of new rows' raw index keys, and of the keys of the blocks that they may make whole, int64 on the
    device. before: [ratio], of the tokens before the first row, in a ring of raw keys. last: [n], of the last rows
    there. members: [count * ratio], the blocks' tokens among those before and the rows; the last row stands for tokens
    after it. blocks: positions of their first tokens; slots: their numbers."""

    before: Tensor
    last: Tensor
    members: Tensor
    blocks: RowPlaces

    @classmethod
    def of(cls, positions: Tensor, ratio: int, count: int, ring: int) -> PooledPlaces:
        """positions: of the rows, int64 [T]. count: of the blocks. ring: places of raw keys."""

        def steps(start: int, stop: int) -> Tensor:
            return torch.arange(start, stop, device=positions.device)

        first = positions[:1]
        numbers = first // ratio + steps(0, count)
        members = steps(ratio, ratio + count * ratio) - first % ratio
        return cls(
            before=(first + steps(-ratio, 0)) % ring,
            last=positions[-ring:] % ring,
            members=members.clamp(max=ratio + len(positions) - 1),
            blocks=RowPlaces(numbers * ratio, numbers),
        )


def pooled_keys(raw: Tensor, norm: NormWeights, rope: RopeTable, places: RowPlaces) -> Tensor:
    """The keys of whole blocks: raw [N, ratio, D_i], the index keys of their tokens, as projected -> [N, D_i]. rope: a
    table in the dtype of keys. places: of the blocks' first tokens. Rounded to that dtype after the mean, the norm and
    the rotation."""
    total, *others = raw.float().unbind(1)
    for each in others:
        total = total + each
    normed = norm((total / raw.shape[1]).to(raw.dtype))
    return places.rotated_by(rope, normed[:, None])[:, 0]
