"""Predicted seconds of a request: of prefill, of a round at each level, and per token.

Seconds per token = (tokens drafted * seconds of each + full pass + refresh) / tokens per round (docs/memory.md).
Rates are the machine's; the other constants are fits and estimates (docs/log.md), the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offload.plan.composition import Composition
from offload.plan.placement import Placement
from offload.plan.sizing import PREFILL_BLOCK, Sizing
from offload.plan.sum_costs import GLOO, NCCL, NETWORK, SumCosts

DRAFT_ACCEPTANCE = 0.5  # of a small draft's tokens, by the target or a part of it
_HARDNESS = (0.25, 1.0, 2.0, 3.0)  # times the mean text's share of refused tokens: texts differ as much (docs/log.md)
_CHANGED_CHUNKS = 0.3  # of those held, in a round


@dataclass(frozen=True)
class Costs:
    """Constants of one kind of processor, besides its rates."""

    pass_seconds: float  # calls of one pass outside its layers, the draw, waiting for both
    layer_seconds: float  # calls of one layer, besides what its bytes cost
    streaming_layer_seconds: float  # the same over a streaming cache, which attends twice
    tile_seconds: float  # calls of one block over one tile
    asynchronous: bool  # calls return before the device is done: the longer of calls and work counts, not both
    read_share: float  # of the rate of reading, at which one row runs over weights and cache
    row_share: float  # of the seconds of one row, what each further row of a block adds
    mass_share: float  # of the seconds of a pass, what keeping its masses adds
    refresh_share: float  # of the rate of reading, at which what the retrieval cache holds is chosen and fetched
    refresh_layer_seconds: float  # calls of that, for one layer
    prefill_share: float  # of the rate of large products
    sums: SumCosts


CPU = Costs(0.0, 2.5e-4, 5e-4, 0.0, False, 0.64, 0.06, 0.12, 0.5, 6e-5, 0.2, GLOO)  # fitted on two cores
GPU = Costs(5e-4, 3e-4, 3e-4, 2.3e-4, True, 0.9, 0.01, 0.05, 0.02, 0.0, 0.5, NCCL)  # estimated: number of kernels


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a plan's steps, and of a token at the best draft lengths. plain_seconds_per_token: the same
    without speculation, with the placement that it then has.

    Passes are those of one row; row_seconds is added for each further row. full_block_rows: rows after which a full
    pass takes all but a row's seconds again, 0 where it waits for the link. mass_share: the share of a full pass's
    seconds that recording masses for the retrieval level adds. retrieval_token_seconds: for a token that it proposes.
    sum_seconds: of a pass, in sums over the ranks; full_link_bytes: over each device's link in a full pass;
    full_host_bytes: that the processor attends to on the host meanwhile, for each device.
    """

    prefill_seconds: float
    first_token_seconds: float  # from the start of prefill
    full_pass_seconds: float
    full_sum_seconds: float
    full_link_bytes: int
    full_host_bytes: int
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


@dataclass(frozen=True)
class Cost:
    """Seconds of one composition of levels in its placement, over a full cache of `capacity` tokens."""

    sizing: Sizing
    placement: Placement
    capacity: int
    composition: Composition

    @property
    def acceptance(self) -> float:
        """The chance that the target accepts a drafted token."""
        if self.composition.budget:
            return retrieval_acceptance(self.composition.budget / self.capacity)
        return DRAFT_ACCEPTANCE if self.composition.draft else 0.0

    @cached_property
    def gamma(self) -> int:
        """The best length, or the user's."""
        most = self.composition.gamma if self.acceptance else 0
        if self.sizing.options.gamma is not None:
            return most
        return min(range(most + 1), key=self._seconds_per_token)

    @property
    def tokens_per_round(self) -> float:
        return _expected(self.acceptance, self.gamma)

    @cached_property
    def per_token(self) -> float:
        return self._seconds_per_token(self.gamma)

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
        """Seconds per token that the retrieval level emits, with the best length of its own rounds."""
        draft_gamma = self.composition.draft_gamma if self.composition.draft else 0
        lengths = range(draft_gamma + 1) if self.sizing.options.draft_gamma is None else (draft_gamma,)
        return min(
            (self.retrieval_pass(length + 1) + length * self.draft_pass) / _expected(DRAFT_ACCEPTANCE, length)
            for length in lengths
        )

    def retrieval_pass(self, rows: int) -> float:
        """Seconds of a pass over all weights and the retrieved tokens."""
        if not self.composition.budget:
            return 0.0
        read = self._by_rows((self._weights + self._kept) / self._rate(self._costs.read_share), rows)
        return self._both(self._calls, max(read + self.sums(rows), self.streamed_weights / self._link_rate))

    @cached_property
    def draft_pass(self) -> float:
        draft = self.sizing.draft
        if draft is None or not self.composition.draft:
            return 0.0
        calls = self._costs.pass_seconds + draft.num_layers * self._costs.streaming_layer_seconds
        return self._both(calls, draft.weight_bytes(self.sizing.itemsize) / self._rate(self._costs.read_share))

    def full_pass(self, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over the full cache: the longest of computation and sums, block by block, of the link, and
        of the tiles that are attended to on the host."""
        blocks = self._blocks(rows)
        read = (self._weights + self.cache_bytes) / self._rate(self._costs.read_share)
        work = self._by_rows(read, self._padded(rows), blocks) + self.full_sums(rows)
        seconds = self._both(self._calls + blocks * self.num_tiles * self._costs.tile_seconds, work)
        seconds *= 1.0 + self._costs.mass_share * masses
        return max(seconds, self.full_link_bytes / self._link_rate, self._host_seconds)

    @property
    def full_link_bytes(self) -> float:
        """Bytes over each device's link in a pass over the full cache."""
        streamed = self._share_on_host - self.placement.host_tiles / self.num_tiles
        return self.streamed_weights + self.cache_bytes * streamed

    @property
    def full_host_bytes(self) -> float:
        """Bytes that the processor attends to on the host in a pass over the full cache, for each device."""
        return self.cache_bytes * self.placement.host_tiles / self.num_tiles

    @property
    def num_tiles(self) -> int:
        """Tiles of all layers."""
        return self.sizing.target.num_layers * self.sizing.num_tiles(self.capacity)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the full cache."""
        return self.capacity * self.sizing.kv_bytes_per_token

    def full_sums(self, rows: int) -> float:
        """Seconds of the sums over the ranks in a full pass."""
        return self.sums(self._padded(rows), self._blocks(rows))

    def sums(self, rows: int, blocks: int = 1) -> float:
        """Seconds of the sums over the ranks in a pass: two a layer and block, of its rows [rows, hidden]."""
        hardware, target = self.sizing.hardware, self.sizing.target
        sums = NETWORK if hardware.num_hosts > 1 else self._costs.sums
        row_bytes = target.hidden_size * self.sizing.itemsize
        return sums.total(
            2 * target.num_layers * blocks, 2 * target.num_layers * rows * row_bytes, hardware.num_devices - 1
        )

    def _seconds_per_token(self, gamma: int, acceptance: float | None = None) -> float:
        """acceptance: without it, that of the mean text."""
        if not gamma:
            return self.full_pass(1)
        retrieves = self.composition.budget > 0
        drafting = gamma * (self.retrieval_token if retrieves else self.draft_pass)
        seconds = self.full_pass(gamma + 1, masses=retrieves) + drafting + self.refresh
        return seconds / _expected(self.acceptance if acceptance is None else acceptance, gamma)

    @property
    def refresh(self) -> float:
        """Seconds of choosing chunks and fetching them; those on the host cross the link."""
        if not self.composition.budget:
            return 0.0
        crossing = _CHANGED_CHUNKS * self._kept * self._share_on_host / self._link_rate
        calls = self.sizing.target.num_layers * self._costs.refresh_layer_seconds
        return calls + self._kept / self._rate(self._costs.refresh_share) + crossing

    def prefill(self, num_tokens: int) -> float:
        """Seconds of a prefill, layer by layer: the longest of computation with its sums, weights that cross the link
        once and rows that are written back once."""
        sizing, rates = self.sizing, self.sizing.hardware.rates
        flops = sizing.target.prefill_flops(num_tokens) / sizing.num_devices
        home = num_tokens * sizing.kv_bytes_per_token * self._share_on_host
        moved = self.streamed_weights / self._link_rate
        computed = flops / (self._costs.prefill_share * rates.flops)
        summed = self.sums(num_tokens, -(-num_tokens // PREFILL_BLOCK))
        return max(computed + summed, moved, home / min(rates.to_host, self._link_rate))

    def _blocks(self, rows: int) -> int:
        return -(-rows // self.sizing.most_rows)

    def _padded(self, rows: int) -> int:
        return rows if self.sizing.hardware.is_cpu else self._blocks(rows) * self.sizing.rows

    def _by_rows(self, seconds: float, rows: int, blocks: int = 1) -> float:
        """Seconds of `rows` rows in `blocks` blocks. seconds: of the first row of a block."""
        return seconds * (blocks + self._costs.row_share * (rows - blocks))

    def _both(self, calls: float, work: float) -> float:
        return max(calls, work) if self._costs.asynchronous else calls + work

    @property
    def _costs(self) -> Costs:
        return CPU if self.sizing.hardware.is_cpu else GPU

    @property
    def _calls(self) -> float:
        return self._costs.pass_seconds + self.sizing.target.num_layers * self._costs.layer_seconds

    def _rate(self, share: float) -> float:
        """Bytes per second over weights and caches on the device."""
        return share * self.sizing.hardware.rates.device_read

    @property
    def _link_rate(self) -> float:
        paced = self.sizing.options.link_gbps
        return self.sizing.hardware.link_rate if paced is None else paced * 1e9

    @property
    def _weights(self) -> int:
        return self.sizing.embedding_bytes + self.sizing.target.num_layers * self.sizing.layer_bytes

    @property
    def _kept(self) -> int:
        return self.composition.budget * self.sizing.kv_bytes_per_token

    @property
    def streamed_weights(self) -> int:
        """Bytes of layers that cross the link in a pass."""
        return (self.sizing.target.num_layers - self.placement.resident_layers) * self.sizing.layer_bytes

    @property
    def _share_on_host(self) -> float:
        """Of the tiles, wherever they are attended to."""
        return 1 - self.placement.resident_tiles / self.num_tiles

    @property
    def _host_seconds(self) -> float:
        """Of the tiles that are attended to on the host, at the set rate; the computation counts them, too."""
        rate = self.placement.host_bytes_per_second
        return self.full_host_bytes / rate if rate else 0.0


def predict(cost: Cost, best: Cost, plain: Cost, num_prompt_tokens: int) -> Prediction:
    """The prediction for the plan of `cost`. best: the part of its levels that is predicted to be the fastest, such as
    the draft and the target alone; plain: the same request without speculation."""
    prefill = cost.prefill(num_prompt_tokens)
    far = 8  # rows
    return Prediction(
        prefill_seconds=prefill,
        first_token_seconds=prefill + cost.full_pass(cost.sizing.rows),
        full_pass_seconds=cost.full_pass(1),
        full_sum_seconds=cost.full_sums(1),
        full_link_bytes=round(cost.full_link_bytes),
        full_host_bytes=round(cost.full_host_bytes),
        full_row_seconds=(cost.full_pass(1 + far) - cost.full_pass(1)) / far,
        full_block_rows=0 if cost.placement.offload else cost.sizing.most_rows,
        mass_share=cost.full_pass(1, masses=True) / cost.full_pass(1) - 1.0,
        retrieval_pass_seconds=cost.retrieval_pass(1),
        retrieval_sum_seconds=cost.sums(1) if cost.composition.budget else 0.0,
        retrieval_row_seconds=(cost.retrieval_pass(1 + far) - cost.retrieval_pass(1)) / far,
        retrieval_token_seconds=cost.retrieval_token if cost.composition.budget else 0.0,
        draft_pass_seconds=cost.draft_pass,
        refresh_seconds=cost.refresh,
        acceptance=cost.acceptance,
        tokens_drafted=best.gamma,
        tokens_per_round=best.tokens_per_round,
        seconds_per_token=best.per_token,
        plain_seconds_per_token=plain.per_token,
    )


def retrieval_acceptance(share: float) -> float:
    """The acceptance of tokens that the target proposes over `share` of its KV cache: the demo pair, SmolLM2 and
    Qwen2.5-Coder reach it on the mean of four tasks, within 0.02 (docs/log.md)."""
    return 1.0 if share >= 1.0 else max(1.0 - 0.0225 * share**-0.5, 0.0)


def _expected(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return gamma + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance)
