"""Passages of a prompt that a text draws on: the ones that its verification passes attended to most.

Attention masses are recorded for the chunks of the retrieval cache anyway. Their sum over layers and heads is enough to
find the passages that an answer quotes (docs/measured.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BESIDE = 1  # chunks of a passage on either side of the chunk with the most mass


@dataclass(frozen=True)
class Passage:
    """Tokens `start` to `end` of the prompt. share: the mass of its most attended chunk, as a share of the whole
    prompt's mass without the first chunk, which is an attention sink (Xiao et al., 2023, arXiv 2309.17453)."""

    start: int
    end: int
    share: float


class Attended:
    """The summed attention masses of a text's tokens. chunk: tokens of a chunk. num_prompt: tokens of the prompt."""

    def __init__(self, chunk: int, num_prompt: int) -> None:
        self._chunk, self._num_chunks = chunk, num_prompt // chunk
        self._total: Tensor | None = None  # [chunks of the prompt] fp32, on the device
        self._of_prompt = False  # whether the total is of the prompt's last row alone

    def add(self, mass: Tensor, *, of_prompt: bool = False) -> None:
        """Add mass [L, H_kv, C] of one pass's rows that gave tokens of the text, see `FullCache.mass`. of_prompt: the
        row is the prompt's last, which counts only until the text has rows of its own."""
        own = mass[..., : self._num_chunks].sum((0, 1))
        self._total = own if self._total is None or self._of_prompt else self._total + own
        self._of_prompt = of_prompt

    def passages(self, count: int) -> list[Passage]:
        """At most `count` passages, the most attended first, without overlaps."""
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
