"""A composition of levels that speculate for a request, and the candidates that the planner weighs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offload.plan.options import Options

LevelName = Literal["draft", "self", "retrieval", "target"]
Bits = tuple[int, int]  # (of weights, of keys and values)

LONGEST = (63, 31, 15)  # most tokens drafted for one full pass: longer drafts need more memory for masses
DRAFT_LONGEST = 15  # most tokens drafted for one pass of the retrieval level
LEAST_BUDGET = 512
_SHARES = (32, 16, 8, 4, 2)  # budgets are these parts of the capacity
_CHUNKS = (16, 32)
CODED_CHUNK = 32  # tokens of a chunk in 4 bits, which share a step and a least value
_STEPS = 8  # budgets per octave that are weighed near a candidate's


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composition of speculating levels, with draft lengths and cache sizes in tokens. The defaults are plain
    decoding.

    gamma, draft_gamma: the most tokens drafted for one verification at the target, and at the retrieval level.
    adaptive: the levels for which fewer tokens are drafted if that pays; the others have a fixed length. budget:
    retrieved tokens of each layer, in chunks of `chunk`; 0 without a retrieval level. draft: a draft model proposes, to
    the retrieval level or, without one, to the target; its cache keeps `sinks` first tokens and `window` last ones.
    lookup: repeated parts of the text are proposed, too. weight_bits, kv_bits: of the weights and of the keys and
    values with which the target proposes to itself; 16 means the exact ones. It proposes over the retrieved tokens or,
    without a budget, over its whole cache, but then not with 16 bits of both. masses: each pass records its attention
    to each chunk, even if no chunks are retrieved.
    """

    gamma: int = 0
    draft_gamma: int = 0
    adaptive: tuple[LevelName, ...] = ()
    budget: int = 0
    chunk: int = 16
    draft: bool = False
    sinks: int = 16
    window: int = 240
    lookup: bool = False
    weight_bits: int = 16
    kv_bits: int = 16
    masses: bool = False

    @property
    def mass_chunk(self) -> int | None:
        """The number of tokens per softmax mass that the target's passes record; None if they record none."""
        return self.chunk if self.budget or self.masses else None

    @property
    def inner(self) -> Literal["self", "retrieval"] | None:
        """The level at which the target proposes to itself, if there is one."""
        if self.budget:
            return "retrieval"
        return "self" if min(self.weight_bits, self.kv_bits) < 16 else None

    @property
    def keeps_copies(self) -> bool:
        """Whether the target proposes to itself over copies of its cached tokens, which have to be kept up to date."""
        return self.budget > 0 or self.keeps_all_codes

    @property
    def keeps_all_codes(self) -> bool:
        """Whether the copies are codes of the target's whole cache."""
        return self.kv_bits < 16 and not self.budget

    @property
    def levels(self) -> tuple[LevelName, ...]:
        """The levels that run, each with its cache, from the bottom to the top."""
        below: tuple[LevelName | None, ...] = ("draft" if self.draft else None, self.inner)
        return (*(name for name in below if name), "target")

    @property
    def drafted(self) -> int:
        """The most tokens after the verified ones that run at the level where the target proposes to itself."""
        return self.gamma + self.draft_gamma + 1


PLAIN = Composition()


def compositions(
    options: Options,
    capacity: int,
    *,
    with_draft: bool,
    weight_bits: Sequence[int] = (16,),
    kv_bits: Sequence[int] = (16,),
    coded_chunks: bool = False,
    retrieves: bool = True,
) -> Iterator[Composition]:
    """All compositions that `options` allow. Plain decoding is one of them unless a length, a budget or bits are given.
    with_draft: there is a draft model. weight_bits, kv_bits: the choices if the user gives none. coded_chunks: a part
    of the cache may be retrieved in 4 bits. retrieves: a part of the cache may be retrieved at all."""
    bits = [
        (weights, kv)
        for weights in (weight_bits if options.weight_bits is None else (options.weight_bits,))
        for kv in (kv_bits if options.kv_bits is None else (options.kv_bits,))
    ]
    coded_chunks = coded_chunks and takes_coded_chunks(options)
    inner = list(_inner(options, capacity, bits, coded_chunks=coded_chunks, retrieves=retrieves))
    for found in _candidates(options, with_draft, inner):
        yield replace(
            found,
            adaptive=_adaptive(found, options),
            sinks=options.sinks,
            window=options.window,
            masses=options.masses,
        )


def finer(found: Composition, options: Options, capacity: int) -> Iterator[Composition]:
    """`found` with budgets up to an octave below and above, and with all draft lengths that `options` allow."""
    if not found.budget or options.budget is not None:
        return
    for gamma in _lengths(options):
        for step in range(1 - _STEPS, _STEPS):
            budget = min(round(found.budget * 2 ** (step / _STEPS)), capacity) // found.chunk * found.chunk
            if budget >= min(LEAST_BUDGET, found.budget) and (gamma, budget) != (found.gamma, found.budget):
                yield replace(found, gamma=gamma, budget=budget)


def _lengths(options: Options) -> tuple[int, ...]:
    return LONGEST if options.gamma is None else (options.gamma,)


def _candidates(options: Options, with_draft: bool, inner: Sequence[Composition]) -> Iterator[Composition]:
    """The candidates. inner: the ways in which the target may propose to itself."""
    if not options.speculation or options.gamma == 0:
        yield PLAIN
        return
    drafts = [False]
    if with_draft and options.draft_gamma != 0:
        drafts = [True] if options.draft_gamma else [True, False]
    draft_gamma = DRAFT_LONGEST if options.draft_gamma is None else options.draft_gamma
    given = {options.weight_bits, options.kv_bits} - {None, 16}
    may_do_without = options.budget is None and not given  # without the inner level
    for gamma in _lengths(options):
        for draft in drafts:
            base = Composition(gamma=gamma, draft=draft, lookup=options.lookup)
            below = draft_gamma if draft or options.lookup else 0
            for each in inner:
                yield replace(each, gamma=gamma, draft=draft, lookup=options.lookup, draft_gamma=below)
            if draft and may_do_without:
                yield base
        if options.lookup and may_do_without and (options.gamma is None or not (inner or all(drafts))):
            yield Composition(gamma=gamma, lookup=True)
    if may_do_without and (options.gamma is None or not (inner or any(drafts) or options.lookup)):
        yield PLAIN


def _inner(
    options: Options, capacity: int, bits: Sequence[Bits], *, coded_chunks: bool, retrieves: bool
) -> Iterator[Composition]:
    """The ways in which the target may propose to itself."""
    for weight_bits, kv_bits in bits:
        few = min(weight_bits, kv_bits) < 16
        if few and (options.budget is None or (kv_bits < 16 and options.budget >= capacity)):
            yield Composition(weight_bits=weight_bits, kv_bits=kv_bits)
        if not retrieves or (kv_bits < 16 and not coded_chunks):
            continue
        chunks = _CHUNKS if kv_bits == 16 else (CODED_CHUNK,)
        for budget in _budgets(options, capacity):
            if kv_bits < 16 and budget >= capacity:
                continue  # that is the whole cache
            for chunk in chunks if options.chunk is None else (options.chunk,):
                kept = max(budget // chunk, 1) * chunk
                yield Composition(budget=kept, chunk=chunk, weight_bits=weight_bits, kv_bits=kv_bits)


def takes_coded_chunks(options: Options) -> bool:
    """Whether chunks may be retrieved in 4 bits: their tokens share a step, so the size is fixed."""
    return options.chunk in (None, CODED_CHUNK)


def _adaptive(composition: Composition, options: Options) -> tuple[LevelName, ...]:
    """The levels that receive drafts, except levels for which the user gives a length."""
    lengths: tuple[tuple[LevelName, int, int | None], ...] = (
        (composition.inner or "retrieval", composition.draft_gamma, options.draft_gamma),
        ("target", composition.gamma, options.gamma),
    )
    drafting = ("target", composition.inner)
    return tuple(name for name, drafts, given in lengths if drafts and given is None and name in drafting)


def _budgets(options: Options, capacity: int) -> list[int]:
    """The candidate budgets in tokens, ascending."""
    if options.budget is not None:
        return [min(options.budget, capacity)]
    wanted = {max(capacity // share, LEAST_BUDGET) for share in _SHARES}
    return sorted({min(budget, capacity) for budget in wanted})
