"""The random source of decoding."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.errors import ModelError


class RandomSource(Protocol):
    """The source of all randomness in decoding. Tests inject one that takes every branch with its probability."""

    def accepts(self, probability: float) -> bool:
        """True with `probability` (values of 1 and more: always; 0: never)."""
        ...

    def draw(self, probs: Tensor) -> int:
        """One index from `probs` [V], which sums to 1 within rounding."""
        ...


class SeededSource:
    """A random source over a `torch.Generator` on the CPU: one uniform for each decision and one for each draw.

    torch seeds its CPU generator with the lowest 32 bits of a seed: seeds that differ by 2^32 give the same draws.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def accepts(self, probability: float) -> bool:
        return self._uniform() < probability

    def draw(self, probs: Tensor) -> int:
        """Inverse transform in fp64 over the support, so a token of probability zero is never drawn."""
        support = probs.nonzero().squeeze(-1)
        if len(support) == 1:  # as in greedy decoding; the uniform is drawn all the same, for the draws after it
            check_mass(probs[support].item())
            self._uniform()
            return int(support)
        mass = probs[support].double().cumsum(0)
        total = mass[-1].item() if len(mass) else 0.0
        check_mass(total)
        index = int(torch.searchsorted(mass, self._uniform() * total, right=True))
        return int(support[min(index, support.numel() - 1)])

    def uniforms(self, count: int) -> Tensor:
        """`count` uniforms in [0, 1), [count] fp64, on the CPU."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def _uniform(self) -> float:
        """A uniform in [0, 1), fp64."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def check_mass(total: float) -> None:
    """Raise ModelError where the sum of a distribution is zero or not a number."""
    if not total > 0.0:
        raise ModelError(
            f"the probabilities of the next token sum to {total}: the logits overflowed, or the weights are "
            "damaged; try --dtype fp32, or download the model again"
        )
