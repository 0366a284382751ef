"""A GPU's draws and verifications against the host's, decision by decision, and what they do with nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.decode.gpu_draws import Beforehand, Draw, Judge, judged, seen, to_judge
from offload.decode.proposal import Proposal, grades_of
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.verify import residual, verify
from offload.decode.warp import Warping, warp
from offload.errors import ModelError
from offload.kernels.rows import power_of_two

CPU = torch.device("cpu")
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(temperature=1.0, top_p=1.0, top_k=3)]


class Listed(SeededSource):
    """Uniforms that are given: `decisions` one by one, and the last one for the draw."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        super().__init__(0)
        self._decisions, self._last = list(uniforms[:-1]), uniforms[-1]

    def uniforms(self, count: int) -> Tensor:
        assert count == len(self._decisions) + 1
        return torch.tensor([*self._decisions, self._last], dtype=torch.float64)

    def accepts(self, probability: float) -> bool:
        return self._decisions.pop(0) < probability

    def draw(self, probs: Tensor) -> int:
        self._uniform = lambda: self._last  # type: ignore[method-assign]
        return super().draw(probs)


def themselves(probs: Tensor) -> Tensor:
    return probs


def one_hot(token: int, row: Tensor | None, vocab_size: int) -> Tensor:
    return torch.eye(vocab_size)[token] if row is None else row


def logits(seed: int, rows: int, vocab_size: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=random).mul_(3).bfloat16()


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(0, 5),
    vocab_size=st.integers(2, 300),
    params=st.sampled_from(PARAMS),
    data=st.data(),
)
def test_the_verdict_is_the_hosts(
    seed: int, n: int, vocab_size: int, params: SamplingParams, data: st.DataObject
) -> None:
    """Bit for bit: the tokens, the chances and the grades; also of point masses, written out as rows or not, and where
    logits of rows that do not count follow."""
    ours, theirs = logits(seed, n + 1, vocab_size), logits(seed + 1, n, vocab_size)
    target, draft = warp(ours, params), warp(theirs, params)
    proposals = []
    for row, is_point in zip(draft, data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), strict=True):
        tokens = range(vocab_size) if is_point else row.nonzero().flatten().tolist()
        proposals.append(Proposal([data.draw(st.sampled_from(tokens))], None if is_point else row[None], [0], 0.0))
    drafted, rows = [each.tokens[0] for each in proposals], [row for each in proposals for row in each.rows]
    dense = torch.stack([*(one_hot(*each, vocab_size) for each in zip(drafted, rows, strict=True)), target[n]])[:n]
    uniforms = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=n + 1, max_size=n + 1))
    expected = verify(drafted, rows, target, Listed(uniforms))
    num_emitted = expected.num_accepted + 1
    assert verify(drafted, list(dense), target, Listed(uniforms)) == expected
    for i, token in enumerate(drafted):
        assert residual(target[i], rows[i], token).equal(residual(target[i], dense[i], token))
    written_out = [replace(each, probs=row[None]) for each, row in zip(proposals, dense, strict=True)]
    more = logits(seed + 2, power_of_two(n + 1) - n - 1, vocab_size)
    for proposed, rows_after in product((proposals, written_out), (more, more[:0])):
        given = to_judge(drafted, proposed, Beforehand(Listed(uniforms), CPU))
        probs, numbers = Judge(Warping(params))(torch.cat([ours, rows_after]), *given)
        assert probs[: n + 1].equal(target)
        assert judged(numbers, n) == (expected, grades_of(ours[:num_emitted], target[:num_emitted]))


@given(seed=st.integers(0, 10**6), vocab_size=st.integers(1, 2000), uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_hosts(seed: int, vocab_size: int, uniform: float) -> None:
    row = logits(seed, 1, vocab_size)
    for params in PARAMS:
        probs = warp(row, params)
        drawn_from, token, numbers = Draw(Warping(params))(row, torch.tensor([uniform], dtype=torch.float64))
        expected = Listed([uniform]).draw(probs[0])
        assert seen([numbers]) == ([expected], grades_of(row, probs))
        assert token.tolist() == [expected]
        assert drawn_from.equal(probs)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("probs", [[0.0, 1.0, 0.0], [0.0, 1e-30, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1e-38]])
def test_a_token_of_probability_zero_is_never_drawn(probs: list[float], uniform: float) -> None:
    row = torch.tensor(probs)
    _, token, _ = Draw(themselves)(row[None], torch.tensor([uniform], dtype=torch.float64))
    assert row[token] > 0


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_nothing_to_draw_from_is_an_error(value: float) -> None:
    rows = torch.full((2, 4), value)
    zeros = torch.zeros(2, dtype=torch.float64)
    _, _, drawn = Draw(themselves)(rows[:1], zeros[:1])
    with pytest.raises(ModelError, match="sum to"):
        seen([drawn])
    proposal = Proposal([1], torch.full((1, 4), 0.25), [0], 0.0)
    _, numbers = Judge(themselves)(rows, *to_judge([1], [proposal], Beforehand(SeededSource(0), CPU)))
    with pytest.raises(ModelError, match="sum to"):
        judged(numbers, 1)


def test_uniforms_are_the_seeds() -> None:
    one, other = (Beforehand(SeededSource(5), CPU) for _ in range(2))
    assert torch.equal(one.uniforms(4), other.uniforms(4))
    assert not torch.equal(one.uniforms(4), one.uniforms(4))
