"""Where the randomness of decoding comes from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.errors import ModelError


class RandomSource(Protocol):
    """All randomness of decoding. Tests inject one that takes every branch and weighs it."""

    def accepts(self, probability: float) -> bool:
        """True with `probability` (values of 1 and more: always; 0: never)."""
        ...

    def draw(self, probs: Tensor) -> int:
        """One index from `probs` [V], which sums to 1 within rounding."""
        ...


class SeededSource:
    """A `torch.Generator` on the CPU: a fresh uniform for each decision and another for each draw.

    torch makes its CPU generator of the lowest 32 bits of a seed: seeds that differ by 2^32 draw alike.
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
        if len(support) == 1:  # as of greedy decoding: the uniform is drawn all the same, for those after it
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
    """Raise ModelError where probabilities that a token is drawn from sum to nothing, or to no number."""
    if not total > 0.0:
        raise ModelError(
            f"the probabilities of the next token sum to {total}: the logits overflowed, or the weights are "
            "damaged; try --dtype fp32, or download the model again"
        )
