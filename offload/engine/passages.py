"""Passages of a prompt that a text draws on: those that its rows attend to more than other rows do.

Every row attends to some places of a prompt: to its beginning, an attention sink (Xiao et al., 2023, arXiv 2309.17453),
to others for their looks, such as headings and cells of tables, and to what stands directly before it. The baseline is
the attention of the prompt's last rows, most of which are a chat template's and ask nothing. They are nearer to the
prompt's end than the text's rows, so the baseline is what they would give from there: mass falls with the distance. A
chunk's excess is the text's mass beyond the baseline's, relative to it. Attention masses are recorded for the chunks
of the retrieval cache anyway (docs/measured.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BESIDE = 1  # chunks of a passage on either side of its best chunk
NUM_ROWS = 8  # last rows of the prompt: the text's first row, and those of the baseline before it
_FLOOR = 0.3  # of a chunk's mean mass, added to the baseline, since the quotient of very small ones is noise

_CHANCE = 0.1  # of the baseline, beyond which a mass is an excess


@dataclass(frozen=True)
class Passage:
    """Tokens `start` to `end` of the prompt. shares: of each of its chunks, the part in the excess of all chunks, from
    0 to 1."""

    start: int
    end: int
    shares: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(self.shares)


@dataclass(frozen=True)
class Masses:
    """The mass of each of the prompt's chunks by a mean row of the text and by the baseline, as seen from the text's
    rows, [C] fp32 on the host. The baseline is None if the text's first pass had but one row of the prompt: then it is
    the mean mass, and the sink, the first chunk, is left out."""

    text: Tensor
    base: Tensor | None

    @property
    def shares(self) -> Tensor:
        """The part of each chunk in the excess of all; they sum to 1, or to 0 where there is none."""
        mean = self.text.mean()
        base = mean if self.base is None else self.base
        excess = ((self.text - (1.0 + _CHANCE) * base) / (base + _FLOOR * mean)).clamp(min=0.0)
        if self.base is None:
            excess[0] = 0.0
        return excess / excess.sum().clamp(min=torch.finfo(torch.float32).tiny)


class Attended:
    """The attention masses of a text's rows and of the baseline. chunk: tokens of a chunk. num_prompt: tokens of the
    prompt."""

    def __init__(self, chunk: int, num_prompt: int) -> None:
        self.chunk, self._num_chunks, self._num_prompt = chunk, num_prompt // chunk, num_prompt
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
        if not before:
            return Masses(text, None)
        middle = self._num_prompt - 1 - (len(before) + 1) / 2  # of the baseline's rows, and of the text's
        later = self._num_prompt - 1 + (self._num_rows + 1) / 2 if self._num_rows else self._num_prompt - 1
        return Masses(text, torch.stack(before).median(0).values * self._distances(middle) / self._distances(later))

    def passages(self, count: int) -> list[Passage]:
        """At most `count` passages that the text's rows attend to more than the baseline."""
        if (masses := self.masses()) is None:
            return []
        shares = masses.shares
        return ranked(in_windows(shares), shares, count, chunk=self.chunk, above=0.0)

    def _distances(self, row: float) -> Tensor:
        """The tokens from the middle of each chunk to a row, [C] fp32; at least half a chunk."""
        middles = torch.arange(self._num_chunks) * self.chunk + self.chunk / 2
        return (row - middles).clamp(min=self.chunk / 2)

    def _summed(self, mass: Tensor) -> Tensor:
        """The mass of the prompt's chunks over all layers and heads, [C] fp32."""
        return mass[..., : self._num_chunks].sum((0, 1))


def in_windows(scores: Tensor) -> Tensor:
    """The score of a passage around each chunk, [C]: the sum of its chunks' scores, in which its middle counts twice,
    so that a passage is around its best chunk."""
    return torch.nn.functional.pad(scores, (BESIDE, BESIDE)).unfold(0, 2 * BESIDE + 1, 1).sum(-1) + scores


def ranked(scores: Tensor, shares: Tensor, count: int, *, chunk: int, above: float) -> list[Passage]:
    """At most `count` passages around the chunks with the highest scores, without overlaps, as long as these are above
    `above`. scores, shares: [C] fp32 on the host."""
    left, found = scores.clone(), list[Passage]()
    while len(found) < count and float(left.max()) > above:
        best = int(left.argmax())
        chunks = slice(max(best - BESIDE, 0), min(best + BESIDE + 1, len(left)))
        found.append(Passage(chunks.start * chunk, chunks.stop * chunk, tuple(shares[chunks].tolist())))
        left[max(best - 2 * BESIDE, 0) : best + 2 * BESIDE + 1] = above
    return found
