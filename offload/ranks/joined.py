"""The parts of all ranks joined as one rank has them: sessions and the prefix store see whole heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from offload.kv.kept import Call, Kept
from offload.kv.parts import Part, Shapes, Split, Unit
from offload.ranks.record import TokenRecord
from offload.ranks.sums import Sums


class JoinedKept(Kept):
    """`Kept` on rank 0 over the parts of every rank. A unit is gathered when it is read, and scattered once it is
    filled. Peak host memory: two units.

    splits: of each part over the ranks, by its name; of one that rank 0 alone has, none. tell: sends a command to the
    other ranks. record: rank 0's token record.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        splits: Mapping[str, Sequence[Split]],
        sums: Sums,
        tell: Callable[..., int],
        record: TokenRecord,
    ) -> None:
        super().__init__(*parts)
        self._splits, self._sums, self._tell, self._record = splits, sums, tell, record

    def each(self, call: Call, *numbers: int) -> None:
        self._tell("each", call=call, numbers=numbers)
        super().each(call, *numbers)
        if call == "restored":
            self._record.forget(*numbers)

    def shapes(self, part: Part, unit: Unit) -> Shapes:
        own, splits = part.shapes(unit), self._splits[part.name]
        if not splits:
            return own
        named = zip(own.items(), splits, strict=True)
        return {name: (split.whole(shape), dtype) for (name, (shape, dtype)), split in named}

    def tensors(self, part: Part, unit: Unit) -> list[Tensor]:
        if not (splits := self._splits[part.name]):
            return part.tensors(unit)
        self._tell("gather", part=part.name, unit=unit)
        found = self.to_fill(part, unit)
        for tensor, split, of_ranks in zip(found, splits, gathered(part, unit, self._sums), strict=True):
            for rank, own in enumerate(of_ranks):
                tensor[split.of_rank(rank)] = own
        return found

    def to_fill(self, part: Part, unit: Unit) -> list[Tensor]:
        if not self._splits[part.name]:
            return part.to_fill(unit)
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.shapes(part, unit).values()]

    def filled(self, part: Part, unit: Unit, tensors: Sequence[Tensor]) -> None:
        if not (splits := self._splits[part.name]):
            part.filled(unit, tensors)
            return
        self._tell("fill", part=part.name, unit=unit)
        scattered(part, unit, list(zip(tensors, splits, strict=True)), self._sums)


def gathered(part: Part, unit: Unit, sums: Sums) -> list[list[Tensor]]:
    """All ranks' parts of each tensor of a unit on rank 0, empty lists on the others."""
    return [sums.gather(tensor.cpu().contiguous()) for tensor in part.tensors(unit)]


def scattered(part: Part, unit: Unit, whole: Sequence[tuple[Tensor, Split]], sums: Sums) -> None:
    """Fill a unit of every rank's part with its numbers of `whole`, rank 0's: each tensor and its split."""
    held = part.to_fill(unit)
    for place, tensor in enumerate(held):
        of_ranks = list[Tensor]()
        if whole:
            given, split = whole[place]
            of_ranks = [given[split.of_rank(rank)].contiguous() for rank in range(sums.size)]
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        sums.scatter(of_ranks, own)
        tensor.copy_(own)
    part.filled(unit, held)
