"""Draws and verifications on a GPU: the decisions of `SeededSource` and `verify`, on the distributions' device.

Reading a number makes the host wait for all earlier work of the GPU. So the uniforms of several decisions are drawn
beforehand, and the host reads all results at once. `Draw` and `Judge` follow a pass, and are part of its graph where it
runs as one. The code does not depend on the device: tests run it on a CPU, where `verify` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.decode.proposal import Proposal, grade, sureness
from offload.decode.random_source import SeededSource, check_mass
from offload.decode.verify import Verdict
from offload.decode.warp import Warp
from offload.kernels.rows import power_of_two
from offload.transfer.memory import sent


class Beforehand:
    """A seed's uniforms on `device`, drawn for several decisions at a time."""

    def __init__(self, source: SeededSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def uniforms(self, count: int, room: int = 0) -> Tensor:
        """`count` uniforms in [0, 1), and zeros up to `room`, [max(count, room)] fp64."""
        return sent(pad(self._source.uniforms(count), (0, max(room - count, 0))), self._device)


@dataclass(frozen=True)
class Draw:
    """The draw of a drafted token from the distribution after its pass."""

    warp: Warp

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, ...]:
        """Draw by the inverse transform, as `SeededSource.draw`. logits [1, V], uniform [1] -> (probs [1, V], the
        token, int64 [1], numbers fp64 [4] for `seen`)."""
        probs = self.warp(logits)
        token, mass = _draw(probs[0], uniform)
        return probs, token, torch.cat([token.double(), mass, sureness(logits, probs)[0].double()])


def seen(drawn: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The drawn tokens and their grades, from the numbers of each draw; the host waits once. Raises ModelError where a
    distribution had no mass."""
    rows = torch.stack(list(drawn)).tolist()
    for _, mass, _, _ in rows:
        check_mass(mass)
    return [int(row[0]) for row in rows], [grade(share, margin) for _, _, share, margin in rows]


@dataclass(frozen=True)
class Judge:
    """The acceptance rule of `offload.decode.verify.verify`, after the pass of the verifying level. keeps_logits: also
    return the logits."""

    warp: Warp
    keeps_logits: bool = False

    def __call__(self, logits: Tensor, uniforms: Tensor, counted: Tensor, draft_probs: Tensor) -> tuple[Tensor, ...]:
        """logits [m, V] at m places, of which the first n + 1 count, and the tensors of `to_judge` for m places or more
        -> (probs [m, V], numbers fp64 [2 + 3 m] for `judged`, and the logits where they are kept)."""
        target_probs, places = self.warp(logits), len(logits)
        n, drafted, draft_probs = counted[:1], counted[1:places], draft_probs[: places - 1]
        tokens = drafted.unsqueeze(-1)
        ratios = target_probs[:-1].gather(-1, tokens).double()
        if len(draft_probs):
            ratios = ratios / draft_probs.gather(-1, tokens).double()
        decided = uniforms[: places - 1]
        kept = (decided < ratios.squeeze(-1)) & (torch.arange(places - 1, device=n.device) < n)
        accepted = kept.cumprod(0).sum(0, keepdim=True)
        last = _last_row(n, drafted, draft_probs, target_probs, accepted)
        token, mass = _draw(last, uniforms.index_select(0, n))
        numbers = accepted, token, mass, ratios, sureness(logits, target_probs)
        made = target_probs, torch.cat([each.double().flatten() for each in numbers])
        return (*made, logits) if self.keeps_logits else made


def to_judge(drafted: Sequence[int], proposals: Sequence[Proposal], random: Beforehand) -> tuple[Tensor, ...]:
    """The inputs of `Judge` besides logits, for n drafted tokens: (n + 1 uniforms [m], n and the tokens int64 [m], the
    draft distributions [m - 1, V], or no rows where all are point masses). m is a power of two where possible, so that
    there are few graphs."""
    n, places = len(drafted), power_of_two(len(drafted) + 1)
    uniforms = random.uniforms(n + 1, places)
    counted = sent(torch.tensor([n, *drafted, *[0] * (places - n - 1)], dtype=torch.long), uniforms.device)
    return uniforms, counted, _stacked(proposals, counted[1:], places - n - 1)


def _stacked(proposals: Sequence[Proposal], tokens: Tensor, more: int) -> Tensor:
    """The proposals' distributions as rows. tokens: of the proposals, then `more` padding tokens."""
    like = next((each.probs for each in proposals if each.probs is not None), None)
    if like is None:
        return tokens.new_empty((0, 1))
    parts = zip(proposals, tokens.split([*(len(each.tokens) for each in proposals), more]), strict=False)
    rows = [_point_masses(at, like) if each.probs is None else each.probs for each, at in parts]
    return torch.cat([*rows, like[:1].expand(more, -1)])


def judged(numbers: Tensor, num_drafted: int) -> tuple[Verdict, list[int]]:
    """The verdict, and the grades of the emitted tokens' distributions; the host waits once. Raises ModelError where a
    distribution had no mass."""
    accepted, next_token, total, *values = numbers.tolist()
    check_mass(total)
    places, num_accepted = (len(numbers) - 2) // 3, int(accepted)
    shown = min(num_accepted + 1, num_drafted)
    grades = [grade(*values[at : at + 2]) for at in range(places - 1, places + 1 + 2 * num_accepted, 2)]
    return Verdict(num_accepted, int(next_token), [min(ratio, 1.0) for ratio in values[:shown]]), grades


def _last_row(n: Tensor, drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, accepted: Tensor) -> Tensor:
    """The distribution [V] of the token after the `accepted` ones [1] of n [1]: the residual at a rejection, the
    target's own after the last."""
    target = target_probs.index_select(0, accepted)[0]
    if not len(drafted):
        return target
    at = accepted.clamp(max=len(drafted) - 1)
    draft = draft_probs.index_select(0, at) if len(draft_probs) else _point_masses(drafted.index_select(0, at), target)
    rest = (target - draft[0]).clamp_(min=0.0)
    total = rest.sum()
    return torch.where((accepted < n) & (total > 0), rest / total, target)


def _point_masses(tokens: Tensor, like: Tensor) -> Tensor:
    """Point masses at tokens [n] -> [n, V], where `like` is [.., V]."""
    return like.new_zeros(len(tokens), like.shape[-1]).scatter_(1, tokens.unsqueeze(1), 1.0)


def _draw(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from `probs` -> (token int64 [1], sum of `probs` fp64 [1]). A token of probability zero is never drawn:
    its cumulative sum equals the one before, since sums never fall in any order of a GPU's additions."""
    reached = torch.where(probs > 0, probs.double().cumsum(0), -1.0).cummax(0).values
    total = reached[-1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    token = torch.searchsorted(reached, torch.minimum(uniform * total, below), right=True)
    return token.clamp(max=len(probs) - 1), total
