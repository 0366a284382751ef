"""Where a text comes from: the parts of its prompt that the passes which verified it attended to most.

Masses are recorded for the chunks of the retrieval cache anyway. Their sum over layers and heads is enough to find what
an answer quotes (docs/measured.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BESIDE = 1  # chunks on either side of the one with the most mass, which belong to a passage


@dataclass(frozen=True)
class Passage:
    """Tokens from `start` until `end` of the prompt. share: of its chunk with the most mass, in what all of the prompt
    got but for its first chunk: that one gets what has nowhere else to go (Xiao et al., 2023, arXiv 2309.17453)."""

    start: int
    end: int
    share: float


class Attended:
    """Masses of a text's tokens, summed. chunk: tokens. num_prompt: of the prompt."""

    def __init__(self, chunk: int, num_prompt: int) -> None:
        self._chunk, self._num_chunks = chunk, num_prompt // chunk
        self._total: Tensor | None = None  # [chunks of the prompt] fp32, on the device
        self._of_prompt = False  # that total

    def add(self, mass: Tensor, *, of_prompt: bool = False) -> None:
        """mass [L, H_kv, C]: of one pass's rows that gave tokens of the text, see `FullCache.mass`. of_prompt: of the
        prompt's last row, which counts where the text has no rows of its own: where it is one token."""
        own = mass[..., : self._num_chunks].sum((0, 1))
        self._total = own if self._total is None or self._of_prompt else self._total + own
        self._of_prompt = of_prompt

    def passages(self, count: int) -> list[Passage]:
        """At most so many, the most attended first; none overlaps another."""
        if self._total is None or self._num_chunks < 2:
            return []
        left = self._total.cpu().clone()
        left[0] = 0.0
        whole, found = float(left.sum()), list[Passage]()
        while len(found) < count and float(left.max()) > 0:
            best = int(left.argmax())
            chunks = slice(max(best - BESIDE, 1), best + BESIDE + 1)
            share = float(left[best]) / whole
            end = min(chunks.stop, self._num_chunks)
            found.append(Passage(chunks.start * self._chunk, end * self._chunk, share))
            left[chunks] = 0.0
        return found
