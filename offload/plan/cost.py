"""Predicted seconds of a request: of prefill, of a round at each level, and per token.

Seconds per token = (tokens drafted * seconds of each + full pass + refresh) / tokens per round (docs/memory.md). The
seconds of a CPU's passes follow from measured curves (`Curves`), a GPU's from its rates; the other constants are fits
and estimates (docs/log.md), the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import hypot, inf, log, sqrt

from offload.fields import LATER
from offload.plan.cost_cpu import CpuPasses
from offload.plan.cost_gpu import GpuPasses
from offload.plan.passes import DevicePasses, Passes
from offload.plan.sizing import NUM_ROW_SLOTS, PREFILL_BLOCK
from offload.speed.routing import BANK, layers_wanted_bytes, over_groups, wants_nearly_all

# A-priori acceptance of proposals: fits to the demo pair, SmolLM2 and Qwen2.5-Coder
# (docs/log.md).
DRAFT_ACCEPTANCE = 0.5  # of a small draft's tokens, by the target or a part of it
HEAD_ACCEPTANCE = 0.7  # of a next-token head's: reported from 0.5 to 0.9, by depth and text
LOOKUP_TOKENS = 1.2  # per round with a looked up token, in texts that repeat little (Qwen2.5-Coder's prose: 1.3)

_WEIGHTS_REFUSED = {16: 0.0, 6: 0.85, 4: 3.0}  # by bits, over the root of the hidden size
_CACHE_REFUSED = {16: 0.0, 4: 0.02}  # by bits
_UNREAD_REFUSED = 0.031  # times log(1 / share of tokens that is read)
_HARDNESS = (0.25, 1.0, 2.0, 3.0)  # times the mean text's share of refused tokens: the spread of texts (docs/log.md)
_CHANGED_CHUNKS = 0.3  # share of held chunks that change in a round, times the share of the cache that is not held


@dataclass(frozen=True)
class Cost(Passes):
    """The predicted seconds of a composition's passes and of a token. If several sequences run at a time, rows and
    cache sizes are those of each sequence, and so are seconds per token."""

    @cached_property
    def device(self) -> DevicePasses:
        return CpuPasses(self) if self.sizing.hardware.is_cpu else GpuPasses(self)

    @cached_property
    def acceptance(self) -> float:
        """The chance that the target accepts a token of the level below it, or of the draft."""
        composition = self.composition
        if composition.inner is None:
            return self.draft_acceptance if composition.draft else 0.0
        hidden_size = self.sizing.target.hidden_size
        return own_acceptance(hidden_size, composition.weight_bits, composition.kv_bits, self._held_share)

    @property
    def draft_acceptance(self) -> float:
        """The chance that the level above the draft accepts its token."""
        draft = self.sizing.draft
        return HEAD_ACCEPTANCE if draft is not None and draft.reads_hidden else DRAFT_ACCEPTANCE

    @cached_property
    def gamma(self) -> int:
        """The best draft length, or the user's."""
        most = self.composition.gamma if self.acceptance else 0
        if self.sizing.options.gamma is not None:
            return most
        return min(range(most + 1), key=self._seconds_per_token)

    @property
    def tokens_per_round(self) -> float:
        return expected_tokens(self.acceptance, self.gamma)

    @cached_property
    def per_token(self) -> float:
        return self._seconds_per_token(self.gamma)

    @property
    def per_looked_up_token(self) -> float:
        """Seconds per token if lookups alone propose, one token in each round; infinite if that is not possible. No
        composition is chosen by it, since all of them have lookups."""
        if not self.composition.lookup or self.sizing.options.gamma is not None:
            return inf
        return self.full_pass(2) / LOOKUP_TOKENS

    @cached_property
    def per_drafted_token(self) -> float:
        """Seconds per token if at least one is drafted in every round, the mean over easy and hard texts: a small
        budget is enough for the easy ones only."""
        lengths = range(1, self.composition.gamma + 1) if self.sizing.options.gamma is None else (self.gamma,)
        refused = 1.0 - self.acceptance
        chances = [max(1.0 - times * refused, 0.0) for times in _HARDNESS]
        return sum(min(self._seconds_per_token(n, chance) for n in lengths) for chance in chances) / len(chances)

    @cached_property
    def retrieval_token(self) -> float:
        """Seconds per token that the target proposes to itself, with the best length of its own rounds."""
        draft_gamma = self.composition.draft_gamma if self.composition.draft else 0
        lengths = range(draft_gamma + 1) if self.sizing.options.draft_gamma is None else (draft_gamma,)
        return min(
            (self.retrieval_pass(length + 1) + length * self.draft_pass)
            / expected_tokens(self.draft_acceptance, length)
            for length in lengths
        )

    def retrieval_pass(self, rows: int) -> float:
        """Seconds of a pass at the level where the target proposes to itself: over all weights, quantised or exact, and
        over the retrieved tokens or all."""
        return 0.0 if self.composition.inner is None else self.device.retrieval(rows)

    @cached_property
    def draft_pass(self) -> float:
        if self.sizing.draft is None or not self.composition.draft:
            return 0.0
        return self.device.draft() + self.draft_fetching

    def full_pass(self, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over the full cache: the longer of computation with its sums, block by block, and the
        link; and the wait for experts."""
        return max(self.full_computed(rows, masses=masses), self.full_link_seconds) + self.awaiting_experts(rows)

    def full_computed(self, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over the full cache without waits for the link."""
        device = self.device
        return device.full(rows, masses=masses) + device.unpacking + device.restoring

    def _seconds_per_token(self, gamma: int, acceptance: float | None = None) -> float:
        """Seconds per token with drafts of `gamma`. acceptance: by default that of the mean text."""
        tokens = expected_tokens(self.acceptance if acceptance is None else acceptance, gamma)
        return self._round_seconds[gamma] / tokens

    @cached_property
    def _round_seconds(self) -> list[float]:
        """The seconds of a round, by the number of drafted tokens."""
        masses, lengths = self.composition.mass_chunk is not None, range(1, self.composition.gamma + 1)
        besides = [self.drafting(gamma) + self.refresh for gamma in lengths]
        passes = [self.full_pass(gamma + 1, masses=masses) for gamma in lengths]
        return [self.full_pass(1), *map(sum, zip(passes, besides, strict=True))]

    def drafting(self, gamma: int) -> float:
        """Seconds in which `gamma` tokens are proposed to the target."""
        return gamma * (self.draft_pass if self.composition.inner is None else self.retrieval_token)

    @cached_property
    def refresh(self) -> float:
        """Seconds of choosing and fetching chunks; chunks on the host cross the link."""
        if not self.composition.budget:
            return 0.0
        changed = _CHANGED_CHUNKS * (1.0 - self._held_share)
        fetched = changed * self.retrieved_bytes * self.share_on_host
        return self.device.refresh() + fetched * self.device.refresh_link_share / self.link_rate

    @property
    def _held_share(self) -> float:
        """The share of the cached tokens that the level below the target attends to."""
        return min(self.composition.budget / self.capacity, 1.0) or 1.0

    def prefill(self, num_tokens: int) -> float:
        """Seconds of a prefill, layer by layer: the longest of computation with its sums and the waits for experts, of
        the transfers in each direction, weights once, experts that no slot has once for the rows that run through them
        at once, rows of the cache back once, hidden rows between two layers, and of reading experts from the disk as
        often."""
        hidden = self._crossing_rows(num_tokens)
        fetched, awaited = self._fetched(num_tokens)
        inward = self.streamed_weights + hidden + fetched
        back = num_tokens * self.sizing.kv_bytes_per_token * self.share_on_host + hidden
        computed = self.device.prefill(num_tokens) + self.device.sums(num_tokens, -(-num_tokens // PREFILL_BLOCK))
        to_host = min(self.sizing.hardware.rates.to_host, self.link_rate)
        computed += self.device.restoring + awaited / self.link_rate
        read = self._for_experts(num_tokens, self.read_bytes) / self.num_sequences
        return max(computed, inward / self.link_rate, back / to_host, read / self.sizing.hardware.disk_read)

    def _fetched(self, num_tokens: int) -> tuple[float, float]:
        """Bytes of experts over each device's link in a prefill that finds none of them on the device, and bytes among
        them that computation waits for: a bank of staging slots, before the first layer or, if experts do not come
        ahead of their router's choice, in each layer. Later rows find experts in slots, staging slots among them."""
        if not (own := self.placement).expert_slots:
            return 0.0, 0.0
        shard, item, at_once = self.sizing.shard, self.sizing.itemsize, own.expert_rows
        rows = min(num_tokens, at_once)
        later = self._for_experts(num_tokens, self._in_no_slot) - self._in_no_slot(rows)
        fetched = layers_wanted_bytes(shard, item, rows) + later
        experts = shard.experts
        assert experts is not None
        if not (own.staged_experts and wants_nearly_all(experts, rows)):
            return fetched, fetched
        banks = 1
        if own.expert_places:  # those in the file do not come ahead
            banks = -(-num_tokens // at_once) * self.sizing.target.num_expert_layers
        return fetched, min(banks * min(own.staged_experts / 2, BANK) * self.sizing.largest_expert_bytes, fetched)

    def _in_no_slot(self, rows: int) -> float:
        """Bytes of experts that `rows` rows of a prefill want and that are in no slot once all slots have some."""
        own, experts = self.placement, max(self.sizing.experts_bytes(1), 1)
        wanted = partial(layers_wanted_bytes, self.sizing.shard, self.sizing.itemsize, rows)
        by_cpu, lent = self.share_on_cpu, -(-own.prefill_bytes // experts)  # slots of each layer, on average
        slots = max(own.expert_slots - lent, 0) + own.staged_experts
        return by_cpu * wanted(own.staged_experts) + (1.0 - by_cpu) * wanted(slots)

    def _for_experts(self, num_tokens: int, of_rows: Callable[[int], float]) -> float:
        """The sum of `of_rows` over the rows of a prefill that run through a layer's experts at once."""
        return over_groups(num_tokens, self.placement.expert_rows, of_rows)

    def _crossing_rows(self, num_tokens: int) -> int:
        """Bytes over each device's link, in either direction, for the hidden rows of a prefill."""
        if "kv" not in self.placement.offload or num_tokens <= NUM_ROW_SLOTS * self.placement.expert_rows:
            return 0
        return (self.sizing.target.num_layers - 1) * self.sizing.hidden_bytes(num_tokens)


def own_acceptance(hidden_size: int, weight_bits: int, kv_bits: int, share: float) -> float:
    """The acceptance of tokens that the target proposes to itself, with fewer bits of its weights and of its cache,
    over `share` of the tokens in the cache. The errors are independent, so their squares add; the share of refused
    tokens is proportional to the size of the error."""
    weights = _WEIGHTS_REFUSED[weight_bits] / sqrt(hidden_size)
    return max(1.0 - hypot(weights, _CACHE_REFUSED[kv_bits], _UNREAD_REFUSED * log(1.0 / share)), 0.0)


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return gamma + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a plan's steps, and of a token at the best draft lengths. plain_seconds_per_token: without
    speculation, with the placement of that case.

    Passes are those of one row; row_seconds is added for each further row. full_block_rows: rows of a block, after
    which a full pass takes the seconds of another block; 0 if it waits for the link. mass_share: the share of a full
    pass's seconds that recording masses for the retrieval level adds. retrieval: the level at which the target proposes
    to itself, over retrieved tokens or all. retrieval_token_seconds: per token proposed there. sum_seconds: of a pass,
    in sums over the ranks. full_link_bytes: over each device's link in a full pass; missed_bytes: those of experts
    among them, with a share of hit_rate of the experts on the device (speed/routing.py). read_bytes: of experts from
    the model's file.
    """

    prefill_seconds: float
    first_token_seconds: float  # from the start of prefill
    full_pass_seconds: float
    full_sum_seconds: float
    full_link_bytes: int
    full_row_seconds: float
    full_block_rows: int
    mass_share: float
    retrieval_pass_seconds: float
    retrieval_sum_seconds: float
    retrieval_row_seconds: float
    retrieval_token_seconds: float
    draft_pass_seconds: float
    refresh_seconds: float
    acceptance: float  # of a drafted token, at the target
    tokens_drafted: int  # for one full pass
    tokens_per_round: float
    seconds_per_token: float
    plain_seconds_per_token: float
    draft_acceptance: float = field(default=DRAFT_ACCEPTANCE, metadata={LATER: True})  # of its token, one level up
    missed_bytes: int = field(default=0, metadata={LATER: True})
    hit_rate: float = field(default=1.0, metadata={LATER: True})
    read_bytes: int = field(default=0, metadata={LATER: True})


def predict(cost: Cost, best: Cost, plain: Cost, num_prompt_tokens: int) -> Prediction:
    """The prediction for the plan of `cost`. best: the part of its levels that is predicted to be the fastest, such as
    the draft and the target alone, or lookups; plain: the same request without speculation."""
    prefill = cost.prefill(num_prompt_tokens)
    by_lookups = best.per_looked_up_token < best.per_token
    far = 8  # rows
    return Prediction(
        prefill_seconds=prefill,
        first_token_seconds=prefill + cost.full_pass(cost.sizing.rows),
        full_pass_seconds=cost.full_pass(1),
        full_sum_seconds=cost.device.full_sums(1),
        full_link_bytes=round(cost.full_link_bytes + cost.missed_bytes(1)),
        full_row_seconds=(cost.full_pass(1 + far) - cost.full_pass(1)) / far,
        full_block_rows=0 if cost.placement.offload else cost.sizing.most_rows,
        mass_share=cost.full_pass(1, masses=cost.composition.mass_chunk is not None) / cost.full_pass(1) - 1.0,
        retrieval_pass_seconds=cost.retrieval_pass(1),
        retrieval_sum_seconds=cost.device.sums(1) if cost.composition.inner else 0.0,
        retrieval_row_seconds=(cost.retrieval_pass(1 + far) - cost.retrieval_pass(1)) / far,
        retrieval_token_seconds=cost.retrieval_token if cost.composition.inner else 0.0,
        draft_pass_seconds=cost.draft_pass,
        refresh_seconds=cost.refresh,
        acceptance=cost.acceptance,
        tokens_drafted=1 if by_lookups else best.gamma,
        tokens_per_round=LOOKUP_TOKENS if by_lookups else best.tokens_per_round,
        seconds_per_token=min(best.per_token, best.per_looked_up_token),
        plain_seconds_per_token=plain.per_token,
        draft_acceptance=cost.draft_acceptance,
        missed_bytes=round(cost.missed_bytes(1)),
        hit_rate=cost.hit_rate,
        read_bytes=round(cost.read_bytes(1)),
    )
