"""The exact distribution of what the real decoding loop emits: every branch is taken and weighed; nothing is sampled.

A run of the loop is a sequence of decisions. `branches` runs it again and again, each time replaying a prefix of
earlier decisions and taking the next untried one after it, until the tree is exhausted. The models are tables: the next
token's distribution is an fp64 function of the tokens in the level's cache, so a wrong cache gives a wrong one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from kit.sampling_reference import Letters, Rule, probabilities
from offload.decode import (
    distribution,
    generation,
    gpu_draws,
    grammar_proposer,
    grammar_text,
    lookup,
    penalties,
    proposal,
    random_source,
    speculation,
    verify,
)
from offload.decode import warp as warping
from offload.decode.lengths import LOOKUP_CHANCES, Adaptive, Estimate, Fixed, PassSeconds
from offload.decode.proposal import Offer, Proposal
from offload.decode.random_source import RandomSource
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Draft, Lengths
from offload.decode.verify import Verdict
from offload.metrics import LevelStats, Stats
from offload.model.passes import Pass, alone

T = TypeVar("T")
Tokens = tuple[int, ...]
Distribution = Callable[[Tokens], Tensor]  # the sequence so far -> the distribution of the next token, [V] fp64
Warp = Callable[[Tensor], Tensor]


class BookkeepingError(AssertionError):
    """A level was used, or left behind, otherwise than the protocol says."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BookkeepingError(message)


@dataclass(frozen=True)
class Decode:
    """The modules under test: the real ones, or mutants of them. `Any`: a type checker sees through neither."""

    warp: Any
    random_source: Any
    verify: Any
    proposal: Any
    gpu_draws: Any
    lookup: Any
    grammar_text: Any
    grammar_proposer: Any
    penalties: Any
    distribution: Any
    speculation: Any
    generation: Any

    @classmethod
    def of(cls, modules: dict[str, ModuleType]) -> Decode:
        return cls(**modules)


REAL = Decode(
    warp=warping,
    random_source=random_source,
    verify=verify,
    proposal=proposal,
    gpu_draws=gpu_draws,
    lookup=lookup,
    grammar_text=grammar_text,
    grammar_proposer=grammar_proposer,
    penalties=penalties,
    distribution=distribution,
    speculation=speculation,
    generation=generation,
)


# Randomness


class Branching:
    """A `RandomSource` that replays `path` and takes the first branch of positive weight at every later decision."""

    def __init__(self, path: Sequence[int]) -> None:
        self._path = path
        self.weight = 1.0
        self._taken: list[int] = []
        self._open: list[list[int]] = []  # per decision, the branches not yet tried

    def accepts(self, probability: float) -> bool:
        kept = min(1.0, max(0.0, probability))
        require(kept == kept, "a decision by NaN")
        return self.choose([kept, 1.0 - kept]) == 0

    def draw(self, probs: Tensor) -> int:
        weights: list[float] = probs.tolist()
        total = math.fsum(weights)
        is_one = all(weight >= 0.0 for weight in weights) and abs(total - 1.0) < 1e-6
        require(is_one, f"a draw from {weights}, which is no distribution")
        return self.choose([weight / total for weight in weights])

    def choose(self, weights: Sequence[float]) -> int:
        branches = [i for i, weight in enumerate(weights) if weight > 0.0]
        depth = len(self._taken)
        choice = self._path[depth] if depth < len(self._path) else branches[0]
        self._taken.append(choice)
        self._open.append([i for i in branches if i > choice])
        self.weight *= weights[choice]
        return choice

    def next_path(self) -> list[int] | None:
        """The next path, depth first; None when this was the last."""
        for depth in reversed(range(len(self._taken))):
            if self._open[depth]:
                return [*self._taken[:depth], self._open[depth][0]]
        return None


def branches(run: Callable[[Branching], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of `run` with its probability. `run` must depend on nothing but its source's answers."""
    path: list[int] | None = []
    total = 0.0
    while path is not None:
        source = Branching(path)
        yield run(source), source.weight
        total += source.weight
        path = source.next_path()
    assert abs(total - 1.0) < 1e-6, f"the branches weigh {total} together"


def distribution_of(run: Callable[[Branching], T]) -> dict[T, float]:
    distribution: dict[T, float] = defaultdict(float)
    for outcome, weight in branches(run):
        distribution[outcome] += weight
    return dict(distribution)


def on_grid(source: Branching, decode: Decode, num_cells: int) -> RandomSource:
    """The real `SeededSource` with each uniform branching over the left ends of `num_cells` equal cells of [0, 1).

    Exact where every threshold is a multiple of 1 / num_cells: a cell then lies wholly on one side, with its left end.
    """

    def uniform() -> float:
        return source.choose([1.0 / num_cells] * num_cells) / num_cells

    seeded: Any = decode.random_source.SeededSource(0)
    seeded._uniform = uniform
    return cast(RandomSource, seeded)


def beforehand_on_grid(source: Branching, decode: Decode, num_cells: int) -> RandomSource:
    """The same of a GPU's source, whose uniforms are drawn before they are wanted."""
    one_by_one: Any = on_grid(source, decode, num_cells)
    one_by_one.uniforms = lambda count: torch.tensor([one_by_one._uniform() for _ in range(count)], dtype=torch.float64)
    return cast(RandomSource, decode.gpu_draws.Beforehand(one_by_one, torch.device("cpu")))


# Table language models


def table(vocabulary: int, name: str, weigh: Callable[[random.Random], list[float]]) -> Distribution:
    """A distribution that is another one after every sequence, and the same one each time."""

    @cache
    def distribution(sequence: Tokens) -> Tensor:
        weights = torch.tensor(weigh(random.Random(f"{name} {sequence}")), dtype=torch.float64)
        assert len(weights) == vocabulary
        return weights / weights.sum()

    return distribution


def soft(vocabulary: int, name: str) -> Distribution:
    """Uniform on the simplex."""
    return table(vocabulary, name, lambda rng: [rng.expovariate(1.0) for _ in range(vocabulary)])


def sparse(vocabulary: int, name: str, num_kept: int = 2) -> Distribution:
    """All but `num_kept` tokens, others each time, have probability zero."""

    def weigh(rng: random.Random) -> list[float]:
        kept = rng.sample(range(vocabulary), num_kept)
        return [rng.expovariate(1.0) if token in kept else 0.0 for token in range(vocabulary)]

    return table(vocabulary, name, weigh)


def only(vocabulary: int, name: str, tokens: Sequence[int]) -> Distribution:
    """Soft on `tokens`, zero elsewhere."""
    return table(
        vocabulary, name, lambda rng: [rng.expovariate(1.0) if token in tokens else 0.0 for token in range(vocabulary)]
    )


def fixed(*probs: float) -> Distribution:
    """The same distribution after every sequence."""
    row = torch.tensor(probs, dtype=torch.float64)
    return lambda sequence: row


class TableLevel:
    """A `Level` whose cache is the tokens themselves and whose logits are its distribution (or the logarithm of it)."""

    def __init__(self, distribution: Distribution, *, logarithm: bool = False, capacity: int = 10_000) -> None:
        self._distribution, self._logarithm, self._capacity = distribution, logarithm, capacity
        self.stats = LevelStats("table")
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def run(self, passes: Sequence[Pass]) -> None:
        [asked] = passes
        asked.made = asked.compute(self._logits(asked.tokens, asked.num_logits), *asked.given)

    def _logits(self, tokens: Sequence[int] | Tensor, num_logits: int) -> Tensor:
        require(1 <= num_logits <= len(tokens), f"{num_logits} rows of logits asked of {len(tokens)} tokens")
        require(self.length + len(tokens) <= self._capacity, f"more than {self._capacity} tokens in the cache")
        self.tokens += tokens.tolist() if isinstance(tokens, Tensor) else tokens
        ends = range(self.length - num_logits + 1, self.length + 1)
        rows = torch.stack([self._distribution(tuple(self.tokens[:end])) for end in ends])
        return rows.log() if self._logarithm else rows

    def truncate(self, length: int) -> None:
        require(length >= 0, f"truncated to {length} tokens")
        del self.tokens[length:]


# Proposers other than the real one


class NgramProposer:
    """Point masses: after token t comes t + 1."""

    name = "n-grams"

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def offer(self, sequence: Sequence[int]) -> Offer:
        return Offer()

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        tokens = [(sequence[-1] + 1 + i) % self._vocabulary for i in range(num_tokens)]
        return Proposal(tokens, torch.eye(self._vocabulary, dtype=torch.float64)[tokens], [10] * num_tokens, 0.0)

    def truncate(self, length: int) -> None:
        require(length >= 0, f"truncated to {length} tokens")

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0


# Lengths other than the real ones


class ShortLengths(Fixed):
    """Drafts fewer tokens than it may, often none, by how many rounds there were: by anything but the next token."""

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self._rounds = 0

    def start(self, limit: int) -> None:
        self._rounds += 1
        super().start(min(limit, (self._rounds + 3 * limit) % (self.gamma + 1)))


class ConfidentLengths(Fixed):
    """Drafts on while the last drafted tokens were sure enough: by tokens that are drawn, all of which are verified.

    One token less where the chance of the last verified token was low.
    """

    _was_sure = True

    def start(self, limit: int) -> None:
        super().start(limit)
        self._left -= self._left > 0 and not self._was_sure

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        super().drafted(index, grades, seconds)
        if any(map(_is_unsure, grades)):
            self._left = 0

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        self._was_sure = not verdict.chances or verdict.chances[-1] > 0.5


def _is_unsure(grade: int) -> bool:
    return grade < 6 or 10 <= grade < 13


class TurnLengths(Fixed):
    """Asks the proposers that always can in turns, a token or two at a time: draft and retrieval level in one round."""

    def next(self, offers: Sequence[Offer]) -> Draft | None:
        models = [index for index, offer in enumerate(offers) if offer.num_tokens is None]
        if self._left <= 0 or not models:
            return super().next(offers)
        return Draft(models[self._left % len(models)], min(self._left, 2))


class MixedLengths(Fixed):
    """Asks all proposers in turns, a token at a time: in one round lookups come before and after drafted tokens."""

    def next(self, offers: Sequence[Offer]) -> Draft | None:
        able = [index for index, offer in enumerate(offers) if offer.num_tokens != 0]
        return Draft(able[self._left % len(able)], 1) if able and self._left > 0 else None


CHEAP, DEAR = 0.01, 0.45  # a drafted token; a verification takes 1


def adaptive(num_proposers: int, gamma: int, *, lookup: bool, dear: bool) -> Adaptive:
    """The real one. `dear` tokens are drafted only where they are likely to be kept."""
    cost = DEAR if dear else CHEAP
    estimates = [Estimate(0.7, cost, prepare_seconds=0.1) for _ in range(num_proposers - lookup)]
    lookups = [Estimate(0.5, 0.0, chances=LOOKUP_CHANCES)] if lookup else []
    return Adaptive(gamma, PassSeconds(1.0, 0.02), [*lookups, *estimates])


# Warps in fp64, and the real one


def identity(logits: Tensor) -> Tensor:
    return logits


def sharpen(logits: Tensor) -> Tensor:
    """Temperature 1/2 on probabilities: applied twice, or not at all, it gives another distribution."""
    return logits.square() / logits.square().sum(-1, keepdim=True)


# Cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stack of levels and how far to look at what it emits.

    `draft` alone is one level; with `retrieval` it is two; with neither it is plain decoding. `params` makes the real
    distribution (fp32, of logarithms) of what a level says, with `rule` as its constraint, instead of `warp`. `cells`
    drives the real `SeededSource` on a grid of uniforms, with `on_gpu` a GPU's source.
    """

    vocabulary: int
    target: Distribution
    retrieval: Distribution | None = None
    draft: Distribution | None = None
    gamma: int = 0
    draft_gamma: int = 0
    ngram: bool = False
    lookup: bool = False  # beside the other proposers, at every level
    straight: bool = False  # the draft proposes to the target too, beside the retrieval level
    adapt: Callable[[int], Lengths] | Literal["adaptive", "adaptive, dear"] = Fixed
    warp: Warp = identity
    params: SamplingParams | None = None
    suppressed: Tokens = ()  # tokens that are never drawn
    rule: Rule | None = None
    cells: int | None = None
    on_gpu: bool = False
    prompt: Tokens = (0, 1)
    num_tokens: int = 3

    def distribution(self, decode: Decode) -> Any:
        """A `Distribution` of one sequence."""
        made = decode.distribution
        if self.params is None:
            return made.Distribution(None, self.warp)
        letters, ends = Letters(self.vocabulary), (self.vocabulary - 1,)
        biases = made._biases(self.params, letters, self.vocabulary, ends, self.suppressed)
        penalties = decode.penalties.penalties_of(self.params, letters, ends)
        text = None
        if self.rule is not None:
            text = decode.grammar_text.GrammarText(self.rule.state(), len(self.prompt), self.vocabulary)
        rows = decode.warp.BiasRows(biases, self.vocabulary, torch.device("cpu")) if biases else None
        if text is None and not penalties:
            return made.Distribution(None, decode.warp.Warping(self.params, biases, rows))
        adjust = made.Adjustment(len(self.prompt), text, rows, penalties)
        return made.Distribution(adjust, decode.warp.Warping(self.params))

    def target_distribution(self, sequence: Tokens) -> Tensor:
        """The distribution that the target alone gives, [V], of `params` by its definition."""
        row = self.target(sequence)
        if self.params is None:
            return self.warp(row[None])[0].double()
        ends = (self.vocabulary - 1,)
        logits = [-math.inf if token in self.suppressed else x for token, x in enumerate(row.log().tolist())]
        return torch.tensor(
            probabilities(logits, sequence, len(self.prompt), self.params, end_tokens=ends, rule=self.rule),
            dtype=torch.float64,
        )


@dataclass(frozen=True)
class Stack:
    """The real speculator over table levels (the target's first) and the proposer that it verifies."""

    speculator: Any
    proposer: Any
    levels: list[TableLevel]


def build(
    case: Case,
    decode: Decode,
    source: Branching,
    *,
    capacity: int = 10_000,
    on_prepare: Callable[[int], None] = lambda num_rows: None,
) -> Stack:
    grid = beforehand_on_grid if case.on_gpu else on_grid
    rng = source if case.cells is None else grid(source, decode, case.cells)
    spec, distribution = decode.speculation, case.distribution(decode)
    warp, adjust = distribution.warp, distribution.adjust
    levels: list[TableLevel] = []
    drafting = DEAR if "dear" in str(case.adapt) else CHEAP

    def level(distribution: Distribution) -> TableLevel:
        levels.append(TableLevel(distribution, logarithm=case.params is not None, capacity=capacity))
        return levels[-1]

    def lengths(gamma: int, proposers: Sequence[Any]) -> Any:
        if not isinstance(case.adapt, str):
            return case.adapt(gamma)
        return adaptive(len(proposers), gamma, lookup=case.lookup, dear="dear" in case.adapt)

    def lookups() -> list[Any]:
        if case.rule is None:
            return [decode.lookup.LookupProposer(least=1)] if case.lookup else []
        made, text = decode.grammar_proposer, adjust.grammar
        found = [made.AllowedLookupProposer(text, least=1)] if case.lookup else []
        return [made.GrammarProposer(text), *found]

    def speculator(over: TableLevel, gamma: int, proposers: Sequence[Any], seconds: float, prepare: Any = None) -> Any:
        return spec.Speculator(
            over, proposers, lengths=lengths(gamma, proposers), warp=warp, random=rng, adjust=adjust,
            charge=lambda num_rows, _, is_first: seconds, prepare=prepare,
        )  # fmt: skip

    def prepare(num_rows: int, wanted: bool) -> float | None:
        on_prepare(num_rows)
        return 0.05 if wanted else None

    target = level(case.target)
    retrieval = None if case.retrieval is None else level(case.retrieval)
    below: list[Any] = [NgramProposer(case.vocabulary)] if case.ngram else []
    if case.draft is not None:
        below = [
            spec.ModelProposer(
                level(case.draft), warp, rng, charge=lambda num_rows, _, is_first: drafting, adjust=adjust
            )
        ]
    if retrieval is not None:
        middle = speculator(retrieval, case.draft_gamma, [*lookups(), *below], drafting, prepare)
        below = [*(below if case.straight else []), middle]
    proposers = [*lookups(), *below]
    return Stack(speculator(target, case.gamma, proposers, 1.0), proposers[-1] if proposers else None, levels)


def check_caches(case: Case, levels: Sequence[TableLevel], sequence: Tokens) -> None:
    """After a round all levels hold a prefix of the sequence; the target all of it but the pending last token.

    A level that proposes for the target may also lack the token before: the last it drew was in no forward yet.
    """
    for level in levels:
        require(level.tokens == list(sequence[: level.length]), f"{level.tokens} in the cache after {sequence}")
        require(level.length < len(sequence), "nothing is pending")
    require(levels[0].length == len(sequence) - 1, "the target holds less than was verified")
    if case.adapt is Fixed and not case.lookup and case.rule is None and case.gamma > 0 and len(levels) > 1:
        require(levels[1].length >= len(sequence) - 2, "the proposer forgot tokens that were kept")


def emitted_distribution(case: Case, decode: Decode = REAL) -> dict[Tokens, float]:
    """The probability of every emitted prefix of 1 to `case.num_tokens` tokens, over as many rounds as it takes.

    What a round does depends on the sequence and on what the caches hold, nothing else: equal states are merged, so
    each is expanded once. No round goes further than one token past what is looked at.
    """
    distribution: dict[Tokens, float] = defaultdict(float)
    Caches = tuple[Tokens, ...]
    waiting: list[dict[tuple[Tokens, Caches], float]] = [defaultdict(float) for _ in range(case.num_tokens)]
    num_levels = len(build(case, decode, Branching([])).levels)
    waiting[0][(), ((),) * num_levels] = 1.0
    for states in waiting:
        for (emitted, caches), probability in states.items():
            run = partial(_one_round, case, decode, case.prompt + emitted, caches)
            for (tokens, left), weight in branches(run):
                for count in range(1, len(tokens) + 1):
                    if len(emitted) + count <= case.num_tokens:
                        distribution[emitted + tokens[:count]] += probability * weight
                if len(emitted) + len(tokens) < case.num_tokens:
                    waiting[len(emitted) + len(tokens)][emitted + tokens, left] += probability * weight
    return dict(distribution)


def _one_round(
    case: Case, decode: Decode, sequence: Tokens, caches: tuple[Tokens, ...], source: Branching
) -> tuple[Tokens, tuple[Tokens, ...]]:
    stack = build(case, decode, source)
    for level, tokens in zip(stack.levels, caches, strict=True):
        level.tokens = list(tokens)
    num_wanted = len(case.prompt) + case.num_tokens - len(sequence)
    limit = min(num_wanted, case.gamma) + 1  # one more than is looked at: drafted tokens that come after those
    emitted = tuple(stack.speculator.round(sequence, limit).tokens)
    require(1 <= len(emitted) <= limit, f"a round emitted {len(emitted)} tokens")
    check_caches(case, stack.levels, sequence + emitted)
    return emitted, tuple(tuple(level.tokens) for level in stack.levels)


def autoregressive_distribution(case: Case) -> dict[Tokens, float]:
    """The probability of every prefix when the target alone draws token after token."""
    distribution: dict[Tokens, float] = {(): 1.0}
    for count in range(case.num_tokens):
        for prefix in [prefix for prefix in distribution if len(prefix) == count]:
            row = case.target_distribution(case.prompt + prefix).tolist()
            distribution |= {
                (*prefix, token): distribution[prefix] * probability
                for token, probability in enumerate(row)
                if probability
            }
    return {prefix: probability for prefix, probability in distribution.items() if prefix}


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """The largest difference in the probability of one outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


# The checks of a whole case: numbers that are zero but for rounding


def emission_error(case: Case, decode: Decode = REAL) -> float:
    return distance(emitted_distribution(case, decode), autoregressive_distribution(case))


Outcome = tuple[Tokens, str | None]  # the text, and why it ended


def generated_distribution(
    case: Case, end_tokens: Sequence[int], num_pending: int = 1, decode: Decode = REAL
) -> dict[Outcome, float]:
    """The distribution of what `generate` yields, up to `case.num_tokens` tokens, from whole runs."""

    def run(source: Branching) -> Outcome:
        # The last emitted token enters no cache, and no round may draft past the end.
        stack = build(case, decode, source, capacity=len(case.prompt) + case.num_tokens - 1)
        target = stack.levels[0]
        runs = list(
            alone(
                decode.generation.in_passes(
                    case.prompt,
                    stack.speculator,
                    prefill=lambda tokens: target.tokens.extend(tokens),
                    num_pending=num_pending,
                    max_tokens=case.num_tokens,
                    end_tokens=end_tokens,
                    stats=Stats(),
                )
            )
        )
        require(all(step.finish is None for step in runs[:-1]), "a run came after the last")
        return tuple(itertools.chain.from_iterable(step.tokens for step in runs)), runs[-1].finish

    return distribution_of(run)


def stopped_distribution(case: Case, end_tokens: Sequence[int]) -> dict[Outcome, float]:
    """The distribution of the target's own text, stopped after an end token or at `case.num_tokens` tokens."""
    distribution: dict[Outcome, float] = {}
    for prefix, probability in autoregressive_distribution(case).items():
        if any(token in end_tokens for token in prefix[:-1]):
            continue
        if prefix[-1] in end_tokens:
            distribution[prefix, "stop"] = probability
        elif len(prefix) == case.num_tokens:
            distribution[prefix, "length"] = probability
    return distribution


def generation_error(case: Case, end_tokens: Sequence[int], num_pending: int = 1, decode: Decode = REAL) -> float:
    return distance(
        generated_distribution(case, end_tokens, num_pending, decode), stopped_distribution(case, end_tokens)
    )


def proposal_error(case: Case, decode: Decode = REAL) -> float:
    """Distance of the distribution of the proposer's tokens from the stated one, the product of the rows it returns."""
    distribution: dict[Tokens, float] = defaultdict(float)
    stated: dict[Tokens, float] = {}
    for (tokens, rows), weight in branches(lambda source: _one_proposal(case, decode, source)):
        distribution[tokens] += weight
        probability = math.prod(row[token] for token, row in zip(tokens, rows, strict=True))
        require(stated.setdefault(tokens, probability) == probability, "other rows for the same tokens")
    return distance(distribution, stated)


def _one_proposal(case: Case, decode: Decode, source: Branching) -> tuple[Tokens, list[list[float]]]:
    """Steps of the proposer until there are `case.gamma` tokens."""
    proposer = build(case, decode, source).proposer
    tokens: Tokens = ()
    rows: list[list[float]] = []
    while len(tokens) < case.gamma:
        step = proposer.propose(case.prompt + tokens, case.gamma - len(tokens))
        require(1 <= len(step.tokens) <= case.gamma - len(tokens), f"{len(step.tokens)} tokens in one step")
        require(len(step.tokens) == len(step.rows) == len(step.grades), "tokens, rows and grades do not match")
        tokens += tuple(step.tokens)
        rows += [row.tolist() for row in step.rows]
    return tokens, rows
