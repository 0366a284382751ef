"""The ids of a sequence's tokens, which n-grams of later tokens are made of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kv.parts import PlacedPart, Shapes, Split, Unit
from offload.plan.shards import Shard

CONVOLVED = "ngrams"  # the name of the part with the rows that convolutions of n-grams read
_UNKNOWN = -1


class RecentIds(PlacedPart):
    """The ids of one sequence. A pass notes its tokens' and gets them after the `context` ids before them; before the
    text all ids are `eos`. A session has the ids before each place where `states` has a checkpoint, and a sequence
    that was restored knows no others: it can be truncated to those places, and to later ones."""

    name = "ids"
    what = "file of token ids"

    def __init__(self, context: int, eos: int, states: PlacedPart) -> None:
        self._context, self._eos, self._states = context, eos, states
        self._ids, self._noted = array("q"), array("q")

    @property
    def length(self) -> int:  # type: ignore[override]
        """The number of tokens."""
        return len(self._ids)

    def note(self, ids: Sequence[int] | Tensor) -> Tensor:
        """A forward of these tokens begins: int64 [T] -> int64 [context + T] on the CPU, with the ids before them."""
        self._noted = array("q", ids.tolist() if isinstance(ids, Tensor) else ids)
        return torch.tensor([*self.before(self.length), *self._noted])

    def advance(self, num_tokens: int) -> None:
        """The forward is over and its first `num_tokens` tokens count."""
        self._ids += self._noted[:num_tokens]
        self._noted = array("q")

    def reachable(self, length: int, stop: int | None = None) -> int:
        wanted = min(length, self.length)
        while _UNKNOWN in self._ids[max(wanted - self._context, 0) : wanted]:
            wanted -= 1
        return wanted

    def truncate(self, length: int) -> None:
        """Keep the first `reachable(length)` tokens."""
        del self._ids[self.reachable(length) :]
        self._noted = array("q")

    def copy_from(self, other: RecentIds, length: int | None = None) -> None:
        self._ids, self._noted = other._ids[:length], array("q")

    def before(self, place: int) -> list[int]:
        """The last `context` ids before a place."""
        known = self._ids[max(place - self._context, 0) : place].tolist()
        assert _UNKNOWN not in known, f"the ids before place {place} are not known"
        return [self._eos] * (self._context - len(known)) + known

    def shapes(self, unit: Unit) -> Shapes:
        return {"ids": ((self._context,), torch.int64)}

    @property
    def places(self) -> Sequence[int]:
        return self._states.places

    @property
    def most(self) -> int:
        return self._states.most

    def tensors(self, unit: Unit) -> list[Tensor]:
        return [torch.tensor(self.before(*unit))]

    def filled(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        (place,), [ids] = unit, tensors
        self._extend(place)
        first = max(place - self._context, 0)
        self._ids[first:place] = array("q", ids[self._context - place + first :].tolist())

    def restored(self, length: int) -> None:
        self._extend(length)
        del self._ids[length:]
        self._noted = array("q")

    def splits(self, whole: ModelConfig, shards: Sequence[Shard]) -> Sequence[Split]:
        return [Split.of_all(0, self._context, len(shards))]

    def _extend(self, length: int) -> None:
        self._ids.extend([_UNKNOWN] * (length - self.length))
