"""The warp from logits to the sampling distribution, by the samplers that do not depend on earlier tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.decode.sampling import SamplingParams
from offload.transfer.memory import sent

Warp = Callable[[Tensor], Tensor]  # logits [T, V] -> probabilities [T, V]
Biases = tuple[tuple[int, float], ...]  # (token, number added to its logit)

_FLOAT = torch.finfo(torch.float32)
_LIKELIEST = 256  # most likely tokens that top-p tries before it sorts all


class BiasRows:
    """Biases as rows on a device: the numbers added to logits, fp32, and the banned tokens, both [1, size]."""

    def __init__(self, biases: Biases, size: int, device: torch.device) -> None:
        added, banned = torch.zeros(1, size), torch.zeros(1, size, dtype=torch.bool)
        for token, bias in biases:
            if bias == -torch.inf:
                banned[0, token] = True
            else:
                added[0, token] += bias
        self._added, self._banned = sent(added, device), sent(banned, device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Add the biases to logits [T, V] fp32, on their device."""
        device = logits.device
        return without(logits + self._added.to(device), self._banned.to(device))


@dataclass(frozen=True)
class Warping:
    """`warp` with fixed parameters, after `biases`. Equal parameters make equal objects, by which GPU graphs are keyed.
    rows: of the biases, made before any graph is captured."""

    params: SamplingParams
    biases: Biases = ()
    rows: BiasRows | None = field(default=None, compare=False)

    def __call__(self, logits: Tensor) -> Tensor:
        return warp(logits if self.rows is None else self.rows(finite(logits)), self.params)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities of the next token: logits [T, V], any float dtype -> [T, V] fp32, each row summing to 1.

    A logit that overflowed to +inf counts as the largest number. A row with a NaN, or of -inf only, gives NaN.
    """
    logits = finite(logits)
    if params.greedy:
        best, token = logits.max(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, token, 1.0 + 0.0 * best)
    # A tiny temperature may overflow a large logit: subtract the maximum first, which changes no probability.
    logits = logits - logits.amax(-1, keepdim=True)
    if params.top_n_sigma > 0.0:
        logits = _keep_top_n_sigma(logits, params.top_n_sigma)
    logits = logits / max(params.temperature, _FLOAT.tiny)
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1.0:
        probs = _keep_top_p(probs, max(params.top_p, _FLOAT.tiny))
    if params.min_p > 0.0:
        probs = _renormalise(probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0))
    if params.typical_p < 1.0:
        probs = _keep_typical(probs, params.typical_p)
    if params.xtc_probability > 0.0:
        probs = _without_top_choices(probs, params.xtc_threshold, params.xtc_probability)
    return probs


def finite(logits: Tensor) -> Tensor:
    """The logits in fp32; a logit that overflowed to +inf becomes the largest number."""
    return logits.float().clamp(max=_FLOAT.max)


def without(logits: Tensor, banned: Tensor) -> Tensor:
    """logits [T, V] with the `banned` tokens, bool [T or 1, V], at -inf. A row in which all tokens would be banned is
    left unchanged, since some token has to follow."""
    left = logits.masked_fill(banned, -torch.inf)
    return torch.where((left == -torch.inf).all(-1, keepdim=True), logits, left)


def _keep_top_n_sigma(logits: Tensor, count: float) -> Tensor:
    """Top-n-sigma: keep logits within `count` standard deviations of the largest, which is 0 here (Tang et al., 2024,
    arXiv 2411.07641). Banned tokens do not count."""
    allowed = logits > -torch.inf
    numbers, total = logits.double(), allowed.sum(-1, keepdim=True)
    mean = torch.where(allowed, numbers, 0.0).sum(-1, keepdim=True) / total
    variance = torch.where(allowed, (numbers - mean).square(), 0.0).sum(-1, keepdim=True) / total
    return logits.masked_fill(numbers < -count * variance.sqrt(), -torch.inf)


def _keep_typical(probs: Tensor, mass: float) -> Tensor:
    """Locally typical sampling: the tokens whose surprisal is nearest to the entropy, up to `mass`, renormalised
    (Meister et al., 2022, arXiv 2202.00666)."""
    surprise = -probs.log()
    expected = torch.where(probs > 0, probs * surprise, 0.0).sum(-1, keepdim=True)
    distance = (surprise - expected).abs()
    nearest, order = distance.sort(-1)
    reached = probs.gather(-1, order).double().cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=probs.shape[-1] - 1)
    return _renormalise(probs.masked_fill(distance > nearest.gather(-1, last), 0.0))


def _without_top_choices(probs: Tensor, threshold: float, probability: float) -> Tensor:
    """XTC (Exclude Top Choices, Weidmann 2024): with `probability`, all tokens of at least `threshold` except the least
    likely of them are excluded. The draw does not depend on that choice, so this is the mixture of both cases."""
    likely = probs >= threshold
    least = torch.where(likely, probs, torch.inf).amin(-1, keepdim=True)
    rest = _renormalise(probs.masked_fill(likely & (probs > least), 0.0))
    return torch.lerp(probs, rest, probability)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Top-p: the smallest set of most likely tokens whose mass reaches `top_p`, renormalised (Holtzman et al., 2020).

    Of equally likely tokens the first ones are kept. Sorting a whole vocabulary takes longer than a pass of a small
    model, so the likeliest few are tried first.
    """
    waits = not probs.is_cuda  # reading a number makes the host wait: a GPU computes all cases instead
    for count in dict.fromkeys((min(_LIKELIEST, probs.shape[-1]), probs.shape[-1]) if waits else (probs.shape[-1],)):
        likeliest = probs.topk(count, -1).values
        mass_before = likeliest.double().cumsum(-1) - likeliest  # fp64: how a GPU splits the sum has no effect
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
