"""What a request takes: seconds of prefill, of a round at each level, and per token.

Seconds per token = (inner passes * (retrieval + drafts) + full pass + refresh) / tokens per round (docs/memory.md).
Rates are the machine's; the other constants are fits and estimates (docs/log.md), the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offload.plan.placement import Placement
from offload.plan.sizing import Sizing

_TARGET_ACCEPTANCE, _RETRIEVAL_ACCEPTANCE = 0.9, 0.5
_CHANGED_CHUNKS = 0.5  # of those held, in a round


@dataclass(frozen=True)
class Costs:
    """Of one kind of processor, besides its rates."""

    pass_seconds: float  # calls of one pass outside its layers, the draw, waiting for both
    layer_seconds: float  # calls of one layer, besides what its bytes cost
    streaming_layer_seconds: float  # the same over a streaming cache, which attends twice
    tile_seconds: float  # calls of one block over one tile
    asynchronous: bool  # calls return before the device is done: the longer of calls and work counts, not both
    read_share: float  # of the rate of reading, at which one or two rows run over weights and cache
    block_share: float  # the same of a block of rows
    refresh_share: float  # the same of choosing and fetching what the retrieval cache holds
    prefill_share: float  # of the rate of large products


CPU = Costs(0.0, 2.5e-4, 5e-4, 0.0, False, 0.64, 0.37, 0.096, 0.2)  # fitted on two cores
GPU = Costs(5e-4, 3e-4, 3e-4, 2.3e-4, True, 0.9, 0.8, 0.02, 0.5)  # estimated from the number of kernels


@dataclass(frozen=True)
class Prediction:
    """Seconds, predicted. plain_seconds_per_token: without speculation, placed as it would be then."""

    prefill_seconds: float
    first_token_seconds: float  # from the start of prefill
    full_pass_seconds: float
    retrieval_pass_seconds: float
    draft_pass_seconds: float
    tokens_per_round: float
    seconds_per_token: float
    plain_seconds_per_token: float


@dataclass(frozen=True)
class Cost:
    """Seconds of one composition of levels in its placement, over a full cache of `capacity` tokens."""

    sizing: Sizing
    placement: Placement
    capacity: int
    gamma: int
    draft_gamma: int

    @property
    def tokens_per_round(self) -> float:
        return _expected(_TARGET_ACCEPTANCE, self.gamma)

    @cached_property
    def per_token(self) -> float:
        if not self.gamma:
            return self.full_pass
        inner_passes = self.gamma / _expected(_RETRIEVAL_ACCEPTANCE, self.draft_gamma)
        inner = self.retrieval_pass + self.draft_gamma * self.draft_pass
        return (self.full_pass + inner_passes * inner + self.refresh) / self.tokens_per_round

    @cached_property
    def full_pass(self) -> float:
        """Computation block by block, and behind it all that crosses the link."""
        return self._full_pass(-(-(self.gamma + 1) // self.sizing.rows))

    @property
    def first_pass(self) -> float:
        """The one that gives the first token: the prompt's last block."""
        return self._full_pass(1)

    @cached_property
    def retrieval_pass(self) -> float:
        """A row or two over all weights and the retrieved part."""
        if not self.gamma:
            return 0.0
        read = (self._weights + self._kept) / self._rate(self._costs.read_share)
        return self._both(self._calls, max(read, self._streamed_weights / self._link_rate))

    @cached_property
    def draft_pass(self) -> float:
        draft = self.sizing.draft
        if draft is None or not self.draft_gamma:
            return 0.0
        calls = self._costs.pass_seconds + draft.num_layers * self._costs.streaming_layer_seconds
        return self._both(calls, draft.weight_bytes(self.sizing.itemsize) / self._rate(self._costs.read_share))

    @property
    def refresh(self) -> float:
        """Choosing and fetching; chunks on the host cross the link."""
        crossing = _CHANGED_CHUNKS * self._kept * self._streamed_share / self._link_rate
        return self._kept / self._rate(self._costs.refresh_share) + crossing

    def prefill(self, num_tokens: int) -> float:
        """Layer-major: computation, and behind it weights crossing once and rows going home once."""
        sizing, rates = self.sizing, self.sizing.hardware.rates
        flops = sizing.target.prefill_flops(num_tokens) / sizing.num_devices
        home = num_tokens * sizing.kv_bytes_per_token * self._streamed_share
        moved = self._streamed_weights / self._link_rate
        return max(flops / (self._costs.prefill_share * rates.flops), moved, home / min(rates.to_host, self._link_rate))

    def _full_pass(self, blocks: int) -> float:
        sizing = self.sizing
        tiles = sizing.target.num_layers * sizing.num_tiles(self.capacity)
        calls = self._calls + blocks * tiles * self._costs.tile_seconds
        read = self._weights + self.capacity * sizing.kv_bytes_per_token
        seconds = self._both(calls, blocks * read / self._rate(self._costs.block_share))
        return max(seconds, (self._streamed_weights + self._streamed_cache) / self._link_rate)

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
        return self.sizing.hardware.rates.to_device if paced is None else paced * 1e9

    @property
    def _weights(self) -> int:
        return self.sizing.embedding_bytes + self.sizing.target.num_layers * self.sizing.layer_bytes

    @property
    def _kept(self) -> int:
        return self.sizing.budget(self.capacity) * self.sizing.kv_bytes_per_token

    @property
    def _streamed_weights(self) -> int:
        return (self.sizing.target.num_layers - self.placement.resident_layers) * self.sizing.layer_bytes

    @property
    def _streamed_share(self) -> float:
        """Of the tiles."""
        count = self.sizing.target.num_layers * self.sizing.num_tiles(self.capacity)
        return 1 - self.placement.resident_tiles / count

    @property
    def _streamed_cache(self) -> float:
        return self.capacity * self.sizing.kv_bytes_per_token * self._streamed_share


def predict(cost: Cost, plain: Cost, num_prompt_tokens: int) -> Prediction:
    """`plain`: the same request without speculation."""
    prefill = cost.prefill(num_prompt_tokens)
    return Prediction(
        prefill_seconds=prefill,
        first_token_seconds=prefill + cost.first_pass,
        full_pass_seconds=cost.full_pass,
        retrieval_pass_seconds=cost.retrieval_pass,
        draft_pass_seconds=cost.draft_pass,
        tokens_per_round=cost.tokens_per_round,
        seconds_per_token=cost.per_token,
        plain_seconds_per_token=plain.per_token,
    )


def _expected(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
