"""Two groups of sequences that take turns: while a full pass of one streams, the other drafts.

The link waits for no draft then. Each group has full passes of its own, so weights are used twice in a round of all,
and cross the link twice where they stream. So turns do not always pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from offload.plan.cost import Cost


@dataclass(frozen=True)
class Turns:
    """The price of turns for `cost`, that of all sequences together."""

    cost: Cost

    @property
    def possible(self) -> bool:
        """Whether tiles stream and something else is computed meanwhile. It is not where the weights with which tokens
        are proposed stream, too: they come in the order of one pass."""
        sizing, composition = self.cost.sizing, self.cost.composition
        several = self.cost.num_sequences > 1 and sizing.num_devices == 1
        in_place = self.cost.placement.resident_layers == sizing.target.num_layers or composition.weight_bits < 16
        drafts = composition.gamma > 0 and (composition.draft if composition.inner is None else in_place)
        return several and drafts and self.cost.tiles_stream

    @property
    def per_token(self) -> float:
        """Seconds per token of each sequence, with the best number of drafted ones, or the user's."""
        most = self.cost.composition.gamma
        lengths = range(1, most + 1) if self.cost.sizing.options.gamma is None else (most,)
        return min(self._per_token(gamma) for gamma in lengths)

    @property
    def staging(self) -> Iterator[int]:
        """Numbers of staged tiles to choose from: as many as keep the link busy in a pass that proposes, and fewer."""
        streamed = self.cost.num_tiles - self.cost.placement.resident_tiles - self.cost.placement.host_tiles
        number = min(1 + ceil(self._proposing_pass / self.cost.tile_link_seconds), streamed)
        fewest = self.cost.sizing.staging_tiles
        while number > fewest:
            yield number
            number //= 2
        yield fewest

    def _per_token(self, gamma: int) -> float:
        """A round is a full pass of each group, in which the other drafts. Copies are fetched between two passes."""
        one, other = self._groups
        seconds = _full_pass(one, other, gamma, self._idle_share) + _full_pass(other, one, gamma, self._idle_share)
        return (seconds + one.refresh + other.refresh) / self.cost.tokens_of(gamma)

    @property
    def _groups(self) -> tuple[Cost, Cost]:
        """A half, rounded up, and the rest."""
        number = self.cost.num_sequences
        return self._of(-(-number // 2)), self._of(number // 2)

    def _of(self, number: int) -> Cost:
        return replace(self.cost, sizing=replace(self.cost.sizing, num_sequences=number))

    @property
    def _proposing_pass(self) -> float:
        """Seconds of the longest pass that proposes: on a GPU each sequence has its own, as a graph."""
        cost = self._groups[0] if self.cost.sizing.hardware.is_cpu else self._of(1)
        rows = 1 + (cost.composition.draft_gamma if cost.composition.draft else 0)
        return max(cost.retrieval_pass(rows), cost.draft_pass)

    @property
    def _idle_share(self) -> float:
        """Of a pass that proposes, the time in which the link rests: all staged tiles have come, but for the one that
        is waited for when such a pass begins."""
        busy = (self.cost.placement.staging_tiles - 1) * self.cost.tile_link_seconds
        return max(1.0 - busy / self._proposing_pass, 0.0)


def _full_pass(cost: Cost, drafting: Cost, gamma: int, idle_share: float) -> float:
    """Seconds of a full pass of one group, in which the other has drafted."""
    drafted = drafting.drafting(gamma)
    computed = cost.full_computed(gamma + 1, masses=cost.composition.budget > 0)
    return max(cost.full_link_seconds + idle_share * drafted, computed + drafted)
