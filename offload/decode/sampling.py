"""From logits to the distribution that tokens are drawn from, once, and the source of randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.errors import ModelError, UsageError
from offload.seeds import NUM_SEEDS

Warp = Callable[[Tensor], Tensor]  # logits [T, V] -> probabilities [T, V]

_FLOAT = torch.finfo(torch.float32)
_LIKELIEST = 256  # tokens that top-p looks at before it looks at all


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The distribution a request samples from. `temperature` 0 is greedy: one-hot, not a limit of soft distributions.

    Truncations apply in the order top-k, top-p, min-p, each to the renormalised result of the one before, after the
    temperature. `top_k` 0, `top_p` 1 and `min_p` 0 switch them off.
    """

    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature is {self.temperature}, it must be from 0 (greedy) to 100")
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}, it must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p is {self.top_p}, it must be above 0 and at most 1 (off)")
        if not 0.0 <= self.min_p < 1.0:
            raise UsageError(f"min-p is {self.min_p}, it must be from 0 (off) to below 1")
        if self.seed is not None and not 0 <= self.seed < NUM_SEEDS:
            raise UsageError(f"seed is {self.seed}, it must be from 0 to 2^63 - 1")


@dataclass(frozen=True)
class Warping:
    """`warp` by these: equal for equal ones, which graphs of a GPU are told apart by."""

    params: SamplingParams

    def __call__(self, logits: Tensor) -> Tensor:
        return warp(logits, self.params)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of the next token: logits [T, V], any float dtype -> [T, V] fp32, each row summing to 1.

    A logit that overflowed to +inf counts as the largest number. A row with a NaN, or of -inf only, gives NaN.
    """
    logits = logits.float().clamp(max=_FLOAT.max)
    if params.temperature == 0.0:
        best, token = logits.max(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, token, 1.0 + 0.0 * best)
    # A tiny temperature may overflow a large logit: subtract the maximum first, which changes no probability.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(params.temperature, _FLOAT.tiny)
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1.0:
        probs = _keep_top_p(probs, max(params.top_p, _FLOAT.tiny))
    if params.min_p > 0.0:
        probs = _renormalise(probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0))
    return probs


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches `top_p`, renormalised (Holtzman et al., 2020).

    Of equally likely tokens the first ones. Sorting a whole vocabulary takes longer than a pass of a small model, so
    the likeliest few are tried first.
    """
    waits = not probs.is_cuda  # to look at a number: a GPU computes all cases instead
    for count in dict.fromkeys((min(_LIKELIEST, probs.shape[-1]), probs.shape[-1]) if waits else (probs.shape[-1],)):
        likeliest = probs.topk(count, -1).values
        mass_before = likeliest.double().cumsum(-1) - likeliest  # fp64: how a GPU splits the sum decides nothing
        kept = mass_before < top_p
        if waits and not kept[:, -1].any():
            break
    last = likeliest.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))  # 0: a row of NaN
    ties = probs == last
    num_kept = (kept & (likeliest == last)).sum(-1, keepdim=True)
    if not waits or (ties.sum(-1, keepdim=True) > num_kept).any():
        ties &= ties.cumsum(-1) <= num_kept
    return _renormalise(probs.masked_fill(~ties & (probs <= last), 0.0))


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


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
