"""Residual streams, as they follow from a config: several rows of a token in place of one residual row
(hyper-connections, Zhu et al. 2024, arXiv 2409.19606, with mixes of low rank as Qwen3.8-Flash-Next has them)."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.norm import Norm


@dataclass(frozen=True)
class Streams:
    """The residual streams of a model: `count` rows s_j of a token, at first copies of its embedding.

    A part of a layer, mixer or network, reads the mean over the streams of m_j * n_j, where n = norm of each stream
    and m = sigmoid(up(silu(down(n) / count))) are over all streams joined, `down` having `rank` outputs. Its output is
    added to each stream, times 2 sigmoid(inject(n) / count), a number for each stream. Behind the last layer such a
    mean without additions is in place of the final norm.
    """

    count: int
    rank: int
    norm: Norm

    @property
    def low_parts(self) -> tuple[int, int]:
        """Outputs of the matrices that read the normed streams: of `down`, and of `inject`."""
        return self.rank, self.count
