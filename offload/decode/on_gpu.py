"""Draws and verifications on a GPU: the decisions of `SeededSource` and `verify`, made where the distributions are.

A look at a number makes the host wait for all that the GPU has to do before. So the uniforms of several decisions are
drawn beforehand, and the host looks once at what came of them. `Draw` and `Judge` come after a pass, and are a part of
its graph where it runs as one. Nothing here depends on the device: tests run it on a CPU, where `verify` is the
reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.decode.proposal import Proposal, grade, sureness
from offload.decode.sampling import SeededSource, Warp, check_mass
from offload.decode.verify import Verdict
from offload.transfer.memory import sent


class Beforehand:
    """A seed's uniforms, some decisions at a time, on `device`."""

    def __init__(self, source: SeededSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def uniforms(self, count: int) -> Tensor:
        """`count` uniforms in [0, 1), [count] fp64."""
        return sent(self._source.uniforms(count), self._device)


@dataclass(frozen=True)
class Draw:
    """A token of a draft, from the distribution after its pass."""

    warp: Warp

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, ...]:
        """By its inverse transform, as `SeededSource.draw` does. logits [1, V], uniform [1] -> (probs [1, V], the
        token, int64 [1], numbers fp64 [4], which `seen` takes)."""
        probs = self.warp(logits)
        token, mass = _draw(probs[0], uniform)
        return probs, token, torch.cat([token.double(), mass, sureness(logits, probs)[0].double()])


def seen(drawn: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The tokens that were drawn, and their grades, by the numbers of each draw: the host waits once. Raises ModelError
    where there was nothing to draw from."""
    rows = torch.stack(list(drawn)).tolist()
    for _, mass, _, _ in rows:
        check_mass(mass)
    return [int(row[0]) for row in rows], [grade(share, margin) for _, _, share, margin in rows]


@dataclass(frozen=True)
class Judge:
    """What `offload.decode.verify.verify` decides, after the pass of the level that verifies: the same rule."""

    warp: Warp

    def __call__(self, logits: Tensor, uniforms: Tensor, drafted: Tensor, draft_probs: Tensor) -> tuple[Tensor, ...]:
        """n drafted tokens, int64 [n], from draft_probs, see `stacked`, logits [n + 1, V], uniforms [n + 1] -> (probs
        [n + 1, V], numbers fp64 [4 + 3 n], which `judged` takes)."""
        target_probs, n = self.warp(logits), len(drafted)
        tokens = drafted.unsqueeze(-1)
        ratios = target_probs[:n].gather(-1, tokens).double()
        if len(draft_probs):
            ratios = ratios / draft_probs.gather(-1, tokens).double()
        accepted = (uniforms[:n] < ratios.squeeze(-1)).cumprod(0).sum(0, keepdim=True)
        token, mass = _draw(_last_row(drafted, draft_probs, target_probs, accepted), uniforms[n:])
        numbers = accepted, token, mass, ratios, sureness(logits, target_probs)
        return target_probs, torch.cat([each.double().flatten() for each in numbers])


def stacked(proposals: Sequence[Proposal], tokens: Tensor) -> Tensor:
    """What `Judge` is given of the distributions that `tokens` [n] of `proposals` were drawn from: no rows where all
    are point masses, else [n, V], so that there are two graphs at most for each number of tokens."""
    like = next((each.probs for each in proposals if each.probs is not None), None)
    if like is None:
        return tokens.new_empty((0, 1))
    parts = zip(proposals, tokens.split([len(each.tokens) for each in proposals]), strict=True)
    return torch.cat([_point_masses(at, like) if each.probs is None else each.probs for each, at in parts])


def judged(numbers: Tensor, num_drafted: int) -> tuple[Verdict, list[int]]:
    """The verdict, with the grades of the emitted tokens' distributions: the host waits once. Raises ModelError where
    there was nothing to draw from."""
    values = iter(numbers.tolist())
    num_accepted, next_token, total = int(next(values)), int(next(values)), next(values)
    check_mass(total)
    chances = [min(next(values), 1.0) for _ in range(num_drafted)]
    grades = [grade(*pair) for pair in _pairs(values)]
    return Verdict(num_accepted, next_token, chances[: num_accepted + 1]), grades[: num_accepted + 1]


def _last_row(drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, accepted: Tensor) -> Tensor:
    """[V], of the token after the `accepted` ones [1]: the residual at a rejection, the target's own after the last."""
    n = len(drafted)
    target = target_probs.index_select(0, accepted)[0]
    if not n:
        return target
    at = accepted.clamp(max=n - 1)
    draft = draft_probs.index_select(0, at) if len(draft_probs) else _point_masses(drafted.index_select(0, at), target)
    rest = (target - draft[0]).clamp_(min=0.0)
    total = rest.sum()
    return torch.where((accepted < n) & (total > 0), rest / total, target)


def _point_masses(tokens: Tensor, like: Tensor) -> Tensor:
    """At tokens [n] -> [n, V], where `like` is [.., V]."""
    return like.new_zeros(len(tokens), like.shape[-1]).scatter_(1, tokens.unsqueeze(1), 1.0)


def _draw(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(token int64 [1], sum of `probs` fp64 [1]). A token of probability zero is never drawn: only others reach a new
    sum, and however a GPU adds up, sums do not fall."""
    reached = torch.where(probs > 0, probs.double().cumsum(0), -1.0).cummax(0).values
    total = reached[-1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    token = torch.searchsorted(reached, torch.minimum(uniform * total, below), right=True)
    return token.clamp(max=len(probs) - 1), total


def _pairs(values: Iterator[float]) -> Iterator[tuple[float, float]]:
    return zip(values, values, strict=True)
