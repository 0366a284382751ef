"""The promise: whatever is proposed, by whomever, the emitted text follows the target's own distribution, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kit.enumeration import (
    REAL,
    Branching,
    Case,
    ConfidentLengths,
    Distribution,
    MixedLengths,
    ShortLengths,
    Tokens,
    TurnLengths,
    autoregressive_distribution,
    branches,
    build,
    check_caches,
    distance,
    distribution_of,
    emission_error,
    emitted_distribution,
    fixed,
    generation_error,
    identity,
    only,
    proposal_error,
    sharpen,
    soft,
    sparse,
    stopped_distribution,
)
from offload.decode.sampling import SamplingParams
from offload.decode.verify import verify

EXACT = 1e-12
GREEDY = SamplingParams(temperature=0.0)


def one_level(vocabulary: int, gamma: int, num_tokens: int = 3, **changes: Any) -> Case:
    case = Case(
        vocabulary=vocabulary,
        target=soft(vocabulary, "target"),
        draft=soft(vocabulary, "draft"),
        gamma=gamma,
        num_tokens=num_tokens,
    )
    return replace(case, **changes)


def two_levels(vocabulary: int, gamma: int, draft_gamma: int, num_tokens: int = 3, **changes: Any) -> Case:
    case = one_level(vocabulary, gamma, num_tokens, retrieval=soft(vocabulary, "retrieval"), draft_gamma=draft_gamma)
    return replace(case, **changes)


def all_distributions(make: Callable[[str], Distribution]) -> dict[str, Any]:
    return {name: make(name) for name in ("target", "retrieval", "draft")}


def by_turns(sequence: Tokens) -> torch.Tensor:
    """Other residuals at every second place."""
    return (fixed(1 / 2, 0, 1 / 2) if len(sequence) % 2 else fixed(1 / 2, 1 / 4, 1 / 4))(sequence)


GAMMAS = [(gamma, draft_gamma) for gamma in (1, 2, 3) for draft_gamma in range(1, max(gamma, 2))]
SAME = soft(3, "same")
DISJOINT: dict[str, Any] = {"target": only(4, "target", (0, 1)), "retrieval": only(4, "retrieval", (2, 3))}

CASES: dict[str, Case] = {
    "plain": Case(vocabulary=4, target=soft(4, "target"), num_tokens=4),
    "gamma 0 with a proposer": one_level(3, 0),
    **{f"one level, V 3, gamma {gamma}": one_level(3, gamma, 4) for gamma in (1, 2, 3)},
    **{f"one level, V {size}, gamma {gamma}": one_level(size, gamma) for size, gamma in [(4, 2), (5, 2), (6, 1)]},
    **{f"two levels, V 3, gamma {g}, draft_gamma {d}": two_levels(3, g, d) for g, d in GAMMAS},
    "two levels, V 3, 4 tokens": two_levels(3, 2, 1, 4),
    "two levels, V 4": two_levels(4, 2, 1),
    "two levels, V 5": two_levels(5, 2, 1, 2),
    "two levels, V 6": two_levels(6, 1, 1, 2),
    "two levels, draft_gamma above gamma": two_levels(3, 2, 3),
    "two levels, draft_gamma 0": two_levels(3, 2, 0),
    "one level, warped": one_level(3, 2, warp=sharpen),
    "two levels, warped": two_levels(3, 2, 2, warp=sharpen),
    "one level, zeros": one_level(6, 3, **all_distributions(partial(sparse, 6))),
    "two levels, zeros": two_levels(5, 3, 2, 4, **all_distributions(partial(sparse, 5))),
    "two levels, zeros in the target only": two_levels(4, 2, 2, target=sparse(4, "target")),
    "two levels, zeros in the proposers only": two_levels(
        4, 2, 2, retrieval=sparse(4, "retrieval"), draft=sparse(4, "draft")
    ),
    "one-hot distributions": two_levels(5, 3, 2, 4, **all_distributions(partial(sparse, 5, num_kept=1))),
    "one-hot proposals, soft target": two_levels(
        4, 3, 2, retrieval=sparse(4, "retrieval", 1), draft=sparse(4, "draft", 1)
    ),
    "soft proposals, one-hot target": two_levels(4, 2, 2, target=sparse(4, "target", 1)),
    "one level, greedy": one_level(5, 3, 4, params=GREEDY),
    "one level, greedy, V 3": one_level(3, 2, params=GREEDY),
    "two levels, greedy": two_levels(4, 3, 2, 4, params=GREEDY),
    "one level, identical distributions": one_level(3, 3, target=SAME, draft=SAME),
    "two levels, identical distributions": two_levels(3, 3, 2, target=SAME, retrieval=SAME, draft=SAME),
    "two levels, target and retrieval identical": two_levels(3, 2, 2, target=SAME, retrieval=SAME),
    "two levels, retrieval and draft identical": two_levels(3, 2, 2, retrieval=SAME, draft=SAME),
    "one level, disjoint supports": one_level(4, 2, target=DISJOINT["target"], draft=DISJOINT["retrieval"]),
    "two levels, disjoint supports": two_levels(4, 3, 2, **DISJOINT, draft=DISJOINT["target"]),
    "n-gram proposals": one_level(4, 3, 4, draft=None, ngram=True),
    "n-gram proposals, zeros in the target": one_level(4, 3, 4, target=sparse(4, "target"), draft=None, ngram=True),
    "n-gram proposals below retrieval": two_levels(3, 3, 2, draft=None, ngram=True),
    "one level, length by the sequence": one_level(3, 3, 4, adapt=ShortLengths),
    "two levels, lengths by the sequence": two_levels(3, 3, 2, adapt=ShortLengths),
    "one level, length by the distribution": one_level(3, 3, 4, adapt=ConfidentLengths),
    "two levels, lengths by the distribution": two_levels(3, 3, 2, adapt=ConfidentLengths),
    "two levels, greedy, lengths by the margins": two_levels(4, 3, 2, 5, adapt=ConfidentLengths, params=GREEDY),
    "n-gram proposals, length by the sequence": one_level(3, 3, 4, draft=None, ngram=True, adapt=ShortLengths),
    "lookups": one_level(4, 3, 4, draft=None, lookup=True),
    "lookups, zeros in the target": one_level(4, 3, 4, target=sparse(4, "target"), draft=None, lookup=True),
    "lookups beside a draft": one_level(3, 3, 4, lookup=True, prompt=(0, 1, 2, 0, 1)),
    "lookups among drafted tokens": one_level(3, 3, 3, lookup=True, adapt=MixedLengths, prompt=(0, 1, 0)),
    "lookups among drafted tokens, two levels": two_levels(3, 3, 3, lookup=True, adapt=MixedLengths, prompt=(0, 1, 0)),
    "lookups at two levels": two_levels(3, 3, 2, lookup=True, prompt=(0, 1, 2, 0, 1)),
    "lookups at two levels, greedy": two_levels(4, 3, 2, 4, lookup=True, params=GREEDY, prompt=(0, 1, 2, 3, 0, 1)),
    **{
        f"a draft of two levels, {name}": two_levels(3, 3, 2, straight=True, **changes)
        for name, changes in {
            "in turns": {"adapt": TurnLengths},
            "in turns, lookups": {"adapt": TurnLengths, "lookup": True, "prompt": (0, 1, 2, 0, 1)},
            "adaptive": {"adapt": "adaptive"},
            "adaptive, dear, lookups": {"adapt": "adaptive, dear", "lookup": True},
        }.items()
    },
    "a draft of two levels, greedy": two_levels(4, 3, 2, 4, straight=True, adapt=TurnLengths, params=GREEDY),
    **{
        f"{levels}, {adapt}{', lookups' if lookup else ''}": make(lookup=lookup, adapt=adapt)
        for levels, make in (("one level", partial(one_level, 3, 3, 4)), ("two levels", partial(two_levels, 3, 3, 2)))
        for adapt in ("adaptive", "adaptive, dear")
        for lookup in (False, True)
    },
    # All thresholds are multiples of 1/4: the real SeededSource runs on a grid of uniforms.
    "seeded source": one_level(
        4, 1, 2, target=fixed(1 / 4, 0, 1 / 4, 1 / 2), draft=fixed(1 / 2, 1 / 4, 0, 1 / 4), cells=4
    ),
    # The same of a GPU's decisions, whose uniforms are drawn beforehand.
    "on a GPU, plain": Case(vocabulary=4, target=fixed(1 / 4, 0, 1 / 4, 1 / 2), cells=4, on_gpu=True),
    "on a GPU, gamma 1": one_level(
        4, 1, 2, target=fixed(1 / 4, 0, 1 / 4, 1 / 2), draft=fixed(1 / 2, 1 / 4, 0, 1 / 4), cells=4, on_gpu=True
    ),
    "on a GPU, gamma 2": one_level(3, 2, 2, target=fixed(1 / 4, 1 / 4, 1 / 2), draft=by_turns, cells=4, on_gpu=True),
    "on a GPU, lookups": one_level(
        3, 2, 2, target=fixed(1 / 4, 0, 3 / 4), draft=None, lookup=True, prompt=(0, 2, 0), cells=4, on_gpu=True
    ),
    "on a GPU, lookups among drafted tokens": replace(
        one_level(3, 3, 2, target=fixed(1 / 2, 0, 1 / 2), draft=fixed(1 / 2, 1 / 2, 0), cells=2, on_gpu=True),
        lookup=True,
        adapt=MixedLengths,
        prompt=(0, 2, 0),
    ),
}

END = {"nothing": (), "token 2": (2,), "tokens 0 and 2": (0, 2)}
GENERATIONS: dict[str, Callable[..., float]] = {
    f"{name}, ends at {ends}, {num_pending} pending": partial(generation_error, case, END[ends], num_pending)
    for name, case, ends, num_pending in [
        ("plain", Case(vocabulary=3, target=soft(3, "target"), num_tokens=4), "token 2", 1),
        ("one level", one_level(3, 3, 4), "token 2", 1),
        ("one level", one_level(3, 2, 4), "nothing", 2),
        ("one level", one_level(4, 3, 3), "tokens 0 and 2", 5),
        ("one level, a round of 1", one_level(3, 3, 1), "token 2", 1),
        ("one level, greedy", one_level(5, 3, 6, params=GREEDY), "token 2", 1),
        ("one level, zeros", one_level(4, 3, 5, **all_distributions(partial(sparse, 4))), "token 2", 1),
        ("two levels", two_levels(3, 2, 1), "token 2", 1),
        ("two levels", two_levels(3, 2, 1), "nothing", 3),
        ("two levels, zeros", two_levels(4, 3, 2, 4, **all_distributions(partial(sparse, 4))), "token 2", 1),
        ("two levels, adaptive", two_levels(3, 3, 2, adapt=ShortLengths), "token 2", 1),
        ("n-grams", one_level(3, 3, 5, draft=None, ngram=True), "token 2", 1),
        ("lookups", one_level(3, 3, 5, draft=None, lookup=True), "token 2", 1),
        ("one level, adaptive with state", one_level(3, 3, 4, adapt="adaptive, dear", lookup=True), "token 2", 1),
        ("two levels, adaptive with state", two_levels(3, 2, 1, adapt="adaptive, dear"), "nothing", 1),
        ("a draft of two levels", two_levels(3, 3, 2, straight=True, adapt=TurnLengths), "token 2", 1),
        ("two levels, adaptive, lookups", two_levels(3, 2, 2, adapt="adaptive", lookup=True), "token 2", 1),
    ]
}

PROPOSERS: dict[str, Case] = {
    "draft": one_level(4, 3),
    "draft, warped": one_level(4, 3, warp=sharpen),
    "draft, zeros": one_level(5, 3, draft=sparse(5, "draft", 3)),
    **{f"retrieval, {n} tokens, draft_gamma {d}": two_levels(3, n, d) for n in (1, 2, 3) for d in (0, 1, 2, 3)},
    "retrieval, 4 tokens": two_levels(3, 4, 2),
    "retrieval, warped": two_levels(3, 3, 2, warp=sharpen),
    "retrieval, zeros": two_levels(5, 3, 2, **all_distributions(partial(sparse, 5))),
    "retrieval, one-hot drafts": two_levels(4, 3, 2, draft=sparse(4, "draft", 1)),
    "retrieval, n-grams": two_levels(4, 3, 2, draft=None, ngram=True),
    "retrieval, lookups": two_levels(4, 3, 2, draft=None, lookup=True, prompt=(0, 1, 2, 0, 1)),
}

CHECKS: dict[str, Callable[..., float]] = {  # to be called with `decode`
    **{f"emits: {name}": partial(emission_error, case) for name, case in CASES.items()},
    **{f"proposes: {name}": partial(proposal_error, case) for name, case in PROPOSERS.items()},
    **{f"generates: {name}": check for name, check in GENERATIONS.items()},
}


DEEP = {  # one is as large and has more in it, or is smaller and alike
    "one level, V 3, gamma 3",
    "one level, V 5, gamma 2",
    "one level, V 6, gamma 1",
    "two levels, V 3, gamma 3, draft_gamma 1",
    "two levels, V 3, 4 tokens",
    "two levels, V 5",
    "one level, adaptive",
    "one level, adaptive, lookups",
    "two levels, adaptive",
    "two levels, adaptive, lookups",
    "two levels, V 3, gamma 3, draft_gamma 2",
    "one level, V 4, gamma 2",
    "two levels, V 4",
    "lookups at two levels",
    "one level, adaptive, dear",
    "two levels, adaptive, dear",
    "a draft of two levels, in turns",
    "a draft of two levels, adaptive",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.deep] * (name in DEEP), id=name) for name, case in CASES.items()]
)
def test_every_emitted_prefix_follows_the_targets_distribution(case: Case) -> None:
    assert emission_error(case) < EXACT


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.deep] * (name == "retrieval, 4 tokens"), id=name)
        for name, case in PROPOSERS.items()
    ],
)
def test_proposed_tokens_follow_the_rows_handed_up_with_them(case: Case) -> None:
    assert proposal_error(case) < EXACT


@pytest.mark.parametrize("warp", [sharpen, identity], ids=["warped", "not warped"])
def test_the_middle_level_hands_up_its_own_distribution(warp: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = two_levels(3, 3, 2, warp=warp)
    assert case.retrieval is not None
    own = replace(case, target=case.retrieval)
    for proposal, _ in branches(lambda source: build(case, REAL, source).proposer.propose(case.prompt, 3)):
        for i, row in enumerate(proposal.probs):
            assert row.equal(own.target_distribution(case.prompt + tuple(proposal.tokens[:i])))


@pytest.mark.parametrize("check", GENERATIONS.values(), ids=GENERATIONS)
def test_generated_text_follows_the_targets_distribution_stopped_where_it_stops(check: Callable[..., float]) -> None:
    assert check() < EXACT


def test_generation_that_stops_in_an_accepted_run_is_among_the_cases() -> None:
    """Else the claim above would be about rounds of one token."""
    case = one_level(3, 3, 4)

    def stops_inside(source: Branching) -> bool:
        stack = build(case, REAL, source)
        stack.levels[0].tokens = [*case.prompt]
        tokens = stack.speculator.round([*case.prompt, 0], 3).tokens
        return len(tokens) == 3 and tokens[0] == 2

    assert distribution_of(stops_inside)[True] > 0.01


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=3, top_p=1.0, min_p=0.2),
    ],
    ids=["temperature and top-p", "temperature, top-k and min-p"],
)
@pytest.mark.parametrize("make", [partial(one_level, 5, 2), partial(two_levels, 4, 2, 1)], ids=["one level", "two"])
def test_the_real_warp_in_fp32_is_exact_within_its_rounding(make: Callable[..., Case], params: SamplingParams) -> None:
    assert emission_error(make(params=params)) < 1e-6


@pytest.mark.parametrize("name", ["plain", "gamma 0 with a proposer"])
def test_gamma_0_is_plain_decoding(name: str) -> None:
    """One token a round, from one row of the target, and the proposer is never asked."""
    case = CASES[name]

    def run(source: Branching) -> tuple[int, ...]:
        stack = build(case, REAL, source)
        tokens: list[int] = []
        for _ in range(3):
            step = stack.speculator.round([*case.prompt, *tokens], 10)
            tokens += step.tokens
            assert (len(step.tokens), step.num_drafted, len(step.probs)) == (1, 0, 1)
        assert [level.length for level in stack.levels[1:]] == [0] * (len(stack.levels) - 1)
        return tuple(tokens)

    plain = {
        key: value for key, value in autoregressive_distribution(replace(case, num_tokens=3)).items() if len(key) == 3
    }
    assert distance(distribution_of(run), plain) < EXACT


class Keeping:
    """A source that keeps all and remembers by which chances."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def accepts(self, probability: float) -> bool:
        self.asked.append(probability)
        return True

    def draw(self, probs: torch.Tensor) -> int:
        return 0


def test_a_token_is_kept_by_the_ratio_of_fp32_probabilities_in_fp64() -> None:
    source = Keeping()
    target, draft = torch.tensor([[0.1, 0.9], [0.7, 0.3], [0.5, 0.5]]), torch.tensor([[0.3, 0.7], [0.9, 0.1]])
    verify([0, 1], draft, target, source)
    assert source.asked == [float(target[0, 0]) / float(draft[0, 0]), float(target[1, 1]) / float(draft[1, 1])]


def test_the_retrieval_distribution_may_change_after_every_round() -> None:
    """After a refresh the middle level's distribution depends on how earlier rounds went, not on text alone."""
    history: list[int] = []
    case = two_levels(3, 2, 1, retrieval=lambda sequence: soft(3, f"after {history}")(sequence))

    def run(source: Branching) -> Tokens:
        history.clear()
        stack = build(case, REAL, source, on_prepare=history.append)
        tokens: Tokens = ()
        while len(tokens) < case.num_tokens:
            tokens += tuple(stack.speculator.round(case.prompt + tokens, case.num_tokens - len(tokens)).tokens)
            check_caches(case, stack.levels, case.prompt + tokens)
        return tokens

    whole = {key: value for key, value in autoregressive_distribution(case).items() if len(key) == case.num_tokens}
    assert distance(distribution_of(run), whole) < EXACT


def test_a_text_cut_back_by_the_caller_goes_on_by_the_targets_distribution() -> None:
    """The engine truncates to what it kept (a stop string inside an accepted run) and may generate again from there."""
    case = two_levels(3, 2, 1, 2)

    def run(source: Branching) -> tuple[Tokens, Tokens]:
        stack = build(case, REAL, source)
        kept = tuple(stack.speculator.round(case.prompt, 3).tokens[:1])
        stack.speculator.truncate(len(case.prompt + kept) - 1)
        return kept, tuple(stack.speculator.round(case.prompt + kept, 2).tokens[:1])

    pairs = {(key[:1], key[1:]): value for key, value in autoregressive_distribution(case).items() if len(key) == 2}
    assert distance(distribution_of(run), pairs) < EXACT


def test_merging_equal_states_changes_no_distribution() -> None:
    """`emitted_distribution` expands each state once; the replay of whole generations, which merges nothing, agrees."""
    case = one_level(3, 2, 3)
    full = {prefix: weight for prefix, weight in emitted_distribution(case).items() if len(prefix) == 3}
    replayed = {prefix: weight for (prefix, _), weight in stopped_distribution(case, ()).items()}
    assert distance(full, replayed) < EXACT


class Long(list[int]):
    """A prompt that nobody may go through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole prompt was copied")

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        found = super().__getitem__(index)  # type: ignore[index]
        assert not isinstance(found, list) or len(found) < 50, "most of the prompt was copied"
        return found


def test_no_round_copies_the_prompt() -> None:
    """Two levels, each of which drafts."""
    case = two_levels(3, 2, 1)

    def run(source: Branching) -> int:
        stack = build(case, REAL, source)
        prompt = Long([0] * 200)
        for level in stack.levels:
            level.tokens = [0] * 199
        return len(stack.speculator.round(prompt, 10).tokens)

    assert max(distribution_of(run)) > 2
