"""Passages of a prompt that a text draws on: those that its rows attend to more than other rows do.

Every row attends to some places of a prompt: to its beginning, an attention sink (Xiao et al., 2023, arXiv 2309.17453),
and to others for their looks, such as headings and cells of tables. The baseline is the attention of the prompt's last
rows, most of which are a chat template's and ask nothing. A chunk's lift is the text's mass over the baseline's.
Attention masses are recorded for the chunks of the retrieval cache anyway (docs/measured.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BESIDE = 1  # chunks of a passage on either side of its best chunk
NUM_ROWS = 8  # last rows of the prompt: the text's first row, and those of the baseline before it
_FLOOR = 0.3  # of a chunk's mean mass, added to both masses, since the quotient of very small ones is noise


@dataclass(frozen=True)
class Passage:
    """Tokens `start` to `end` of the prompt. share: the part that these tokens have in the attention that the text's
    rows give to the prompt beyond the baseline, from 0 to 1."""

    start: int
    end: int
    share: float


@dataclass(frozen=True)
class Masses:
    """The mass of each of the prompt's chunks by a mean row of the text and by the baseline, [C] fp32 on the host. The
    baseline is None if the text's first pass had but one row of the prompt: then the sink, the first chunk, is left
    out, and the others count by their mass."""

    text: Tensor
    base: Tensor | None

    @property
    def lifts(self) -> Tensor:
        """The text's mass over the baseline's, by chunk, or over the mean mass."""
        if self.base is None:
            return self._without_sink / self.text.mean()
        floor = _FLOOR * self.text.mean()
        return (self.text + floor) / (self.base + floor)

    @property
    def shares(self) -> Tensor:
        """The part of each chunk in the mass beyond the baseline; they sum to 1, or to 0 where there is none."""
        beyond = self._without_sink if self.base is None else (self.text - self.base).clamp(min=0.0)
        return beyond / beyond.sum().clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def _without_sink(self) -> Tensor:
        return torch.cat([torch.zeros(1), self.text[1:]])


class Attended:
    """The attention masses of a text's rows and of the baseline. chunk: tokens of a chunk. num_prompt: tokens of the
    prompt."""

    def __init__(self, chunk: int, num_prompt: int) -> None:
        self.chunk, self._num_chunks = chunk, num_prompt // chunk
        self._prompt: list[Tensor] = []  # [C] fp32 on the device, of each of the prompt's last rows
        self._text: Tensor | None = None  # [C] fp32 on the device, the sum of the text's rows
        self._num_rows = 0

    def begin(self, rows: Sequence[Tensor]) -> None:
        """Add mass [L, H_kv, C] of each of the prompt's last rows, see `FullCache.mass`. The last of them gave the
        text's first token and counts as the text's until it has rows of its own."""
        self._prompt = [self._summed(row) for row in rows]

    def add(self, mass: Tensor, num_rows: int) -> None:
        """Add mass [L, H_kv, C] of the `num_rows` rows of a pass that gave tokens of the text."""
        own = self._summed(mass)
        self._text = own if self._text is None else self._text + own
        self._num_rows += num_rows

    def masses(self) -> Masses | None:
        """The masses so far; None before the first token, and of a prompt of less than two chunks."""
        if not self._prompt or self._num_chunks < 2:
            return None
        *before, last = (row.cpu() for row in self._prompt)
        text = last if self._text is None else self._text.cpu() / self._num_rows
        return Masses(text, torch.stack(before).median(0).values if before else None)

    def passages(self, count: int) -> list[Passage]:
        """At most `count` passages, the greatest lift first. None is attended to less than the baseline."""
        if (masses := self.masses()) is None:
            return []
        return ranked(masses.lifts, masses.shares, count, chunk=self.chunk, above=1.0)

    def _summed(self, mass: Tensor) -> Tensor:
        """The mass of the prompt's chunks over all layers and heads, [C] fp32."""
        return mass[..., : self._num_chunks].sum((0, 1))


def ranked(scores: Tensor, shares: Tensor, count: int, *, chunk: int, above: float) -> list[Passage]:
    """At most `count` passages around the chunks with the highest scores, without overlaps, as long as these are above
    `above`. scores, shares: [C] fp32 on the host."""
    left, found = scores.clone(), list[Passage]()
    while len(found) < count and float(left.max()) > above:
        best = int(left.argmax())
        chunks = slice(max(best - BESIDE, 0), min(best + BESIDE + 1, len(left)))
        found.append(Passage(chunks.start * chunk, chunks.stop * chunk, float(shares[chunks].sum())))
        left[max(best - 2 * BESIDE, 0) : best + 2 * BESIDE + 1] = above
    return found
