"""Predicted seconds of a request: of prefill, of a round at each level, and per token.

Seconds per token = (tokens drafted * seconds of each + full pass + refresh) / tokens per round (docs/memory.md).
A CPU's passes take what was measured of them (`PassTimes`), a GPU's are computed from its rates; the other constants
are fits and estimates (docs/log.md), the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from offload.plan.acceptance import DRAFT_ACCEPTANCE, LOOKUP_TOKENS, expected_tokens, own_acceptance
from offload.plan.bits import CPU_RESTORED
from offload.plan.composition import Composition
from offload.plan.gpu_costs import CPU_REFRESH, GATHERED_REFRESH, GPU, GPU_REFRESH, RefreshCosts
from offload.plan.pass_times import UNKNOWN, PassTimes, Times, estimated
from offload.plan.placement import Placement
from offload.plan.sizing import CACHED_SHARE, NUM_ROW_SLOTS, PREFILL_BLOCK, Sizing, host_slowdown
from offload.plan.sum_costs import NCCL, NETWORK, SHARED

_HARDNESS = (0.25, 1.0, 2.0, 3.0)  # times the mean text's share of refused tokens: texts differ as much (docs/log.md)
_CHANGED_CHUNKS = 0.3  # of those held, in a round, times the share of the cache that is not held


@dataclass(frozen=True)
class Cost:
    """Seconds of one composition of levels in its placement, over a full cache of `capacity` tokens. times: of
    passes on a CPU, as far as they were measured.

    Where several sequences run at a time, passes are those that they share, each with so many rows and such a cache,
    and seconds per token are those that each of them takes. On a GPU every sequence's rows are blocks of their own,
    which read the weights again: only what crosses the link does so once."""

    sizing: Sizing
    placement: Placement
    capacity: int
    composition: Composition
    times: Times = UNKNOWN

    @cached_property
    def acceptance(self) -> float:
        """The chance that the target accepts a token of the level below it, or of the draft."""
        composition = self.composition
        if composition.inner is None:
            return DRAFT_ACCEPTANCE if composition.draft else 0.0
        hidden_size = self.sizing.target.hidden_size
        return own_acceptance(hidden_size, composition.weight_bits, composition.kv_bits, self._held_share)

    @cached_property
    def gamma(self) -> int:
        """The best length, or the user's."""
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
        """Seconds per token if lookups alone propose, one token in each round; infinite where that cannot be. No
        composition is chosen by it: lookups are part of all."""
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
            (self.retrieval_pass(length + 1) + length * self.draft_pass) / expected_tokens(DRAFT_ACCEPTANCE, length)
            for length in lengths
        )

    def retrieval_pass(self, rows: int) -> float:
        """Seconds of a pass at the level where the target proposes to itself: over all weights, those quantised or
        the exact ones, and the retrieved tokens or all."""
        composition = self.composition
        if composition.inner is None:
            return 0.0
        if self._on_cpu:
            times = self._coded_times if self._proposes_coded else self._target_times
            num_tokens, coded = composition.budget or self.capacity, self._attends_coded
            layers = self.sizing.target.num_layers
            seconds = times.seconds(layers, num_tokens, rows, coded=coded, sequences=self.num_sequences)
            read = seconds * self._cpu_share + self.sums(self.num_sequences * rows)
            return self._beside_weights(read)
        if composition.inner == "self" and not composition.keeps_copies:
            return self._ahead_on_gpu(rows)
        number = self.num_sequences  # whose passes run apart
        read = self._by_rows(number * self._own_weights_seconds + self._kept / self._rate, rows)
        return max(self._calls, self._beside_weights(read + number * self.sums(rows)))

    def _beside_weights(self, seconds: float) -> float:
        """A pass that takes so many seconds to propose, while the weights that it needs cross the link."""
        if self._proposes_coded:
            return seconds
        return max(seconds + self._restoring, self.streamed_weights / self.link_rate)

    @cached_property
    def draft_pass(self) -> float:
        draft, composition = self.sizing.draft, self.composition
        if draft is None or not composition.draft:
            return 0.0
        if self._on_cpu:
            times = self.times.draft or estimated(draft, self.sizing.itemsize, self.sizing.hardware.rates)
            held = composition.sinks + composition.window
            return times.seconds(draft.num_layers, held, 1, sequences=self.num_sequences)
        calls = GPU.pass_seconds + draft.num_layers * GPU.layer_seconds
        return self.num_sequences * max(calls, draft.weight_bytes(self.sizing.itemsize) / self._rate)

    def full_pass(self, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over the full cache: the longest of computation and sums, block by block, of the link, and
        of the tiles that are attended to on the host."""
        return max(self.full_computed(rows, masses=masses), self.full_link_seconds)

    def full_computed(self, rows: int, *, masses: bool = False) -> float:
        """The same where nothing has to be waited for that crosses the link."""
        computed = self._full_on_cpu(rows, masses) if self._on_cpu else self._full_on_gpu(rows, masses)
        return max(computed + self._unpacking + self._restoring, self._host_seconds(rows))

    @cached_property
    def full_link_seconds(self) -> float:
        """Seconds in which what a pass over the full cache needs crosses each device's link."""
        return self.full_link_bytes / self.link_rate

    @property
    def tile_link_seconds(self) -> float:
        """Seconds in which a tile of one sequence crosses it."""
        return self.cache_bytes / self.num_sequences / self.num_tiles * self.link_share / self.link_rate

    @property
    def tiles_stream(self) -> bool:
        """Whether any tile crosses it."""
        return self._share_on_host > self.placement.host_tiles / self.num_tiles

    @cached_property
    def full_link_bytes(self) -> float:
        """Bytes over each device's link in a pass over the full cache."""
        streamed = self._share_on_host - self.placement.host_tiles / self.num_tiles
        return self.streamed_weights + self.cache_bytes * streamed * self.link_share

    @property
    def link_share(self) -> float:
        """Of the bytes of cached numbers, what crosses the link."""
        return CACHED_SHARE[self.placement.link_bits]

    @property
    def full_host_bytes(self) -> float:
        """Bytes that the CPU attends to on the host in a pass over the full cache, for each device."""
        return self.cache_bytes * self.placement.host_tiles / self.num_tiles

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of all layers."""
        return self.sizing.target.num_layers * self.sizing.num_tiles(self.capacity)

    @cached_property
    def cache_bytes(self) -> int:
        """Keys and values of all sequences' full caches."""
        return self.num_sequences * self.capacity * self.sizing.kv_bytes_per_token

    @property
    def num_sequences(self) -> int:
        """That run at a time."""
        return self.sizing.num_sequences

    def full_sums(self, rows: int) -> float:
        """Seconds of the sums over the ranks in a full pass."""
        return self.sums(self._padded(self.num_sequences * rows))

    def sums(self, rows: int, blocks: int = 1) -> float:
        """Seconds of the sums over the ranks in a pass: two a layer and block, of its part of [rows, hidden]."""
        hardware, target = self.sizing.hardware, self.sizing.target
        sums = NETWORK if hardware.num_hosts > 1 else SHARED if self._on_cpu else NCCL
        row_bytes = target.hidden_size * self.sizing.itemsize
        return sums.total(
            2 * target.num_layers * blocks, 2 * target.num_layers * rows * row_bytes, hardware.num_devices - 1
        )

    def _seconds_per_token(self, gamma: int, acceptance: float | None = None) -> float:
        """acceptance: without it, that of the mean text."""
        tokens = expected_tokens(self.acceptance if acceptance is None else acceptance, gamma)
        return self._round_seconds[gamma] / tokens

    @cached_property
    def _round_seconds(self) -> list[float]:
        """By the number of tokens that are drafted."""
        masses, lengths = self.composition.budget > 0, range(1, self.composition.gamma + 1)
        besides = [self.drafting(gamma) + self.refresh for gamma in lengths]
        passes = [self.full_pass(gamma + 1, masses=masses) for gamma in lengths]
        return [self.full_pass(1), *map(sum, zip(passes, besides, strict=True))]

    def drafting(self, gamma: int) -> float:
        """Seconds in which `gamma` tokens are proposed to the target."""
        return gamma * (self.draft_pass if self.composition.inner is None else self.retrieval_token)

    def tokens_of(self, gamma: int) -> float:
        """Per round with `gamma` drafted ones."""
        return expected_tokens(self.acceptance, gamma)

    @cached_property
    def refresh(self) -> float:
        """Seconds of choosing chunks and fetching them; those on the host cross the link."""
        if not self.composition.budget:
            return 0.0
        share = 1.0 if self._on_cpu else self.link_share  # a CPU's host unpacks what it gathers
        held = self.num_sequences * self.composition.budget * self.sizing.kv_bytes_per_token  # in 16 bits
        changed = _CHANGED_CHUNKS * (1.0 - self._held_share)
        crossing = changed * held * self._share_on_host * share / self.link_rate
        costs = CPU_REFRESH if self._on_cpu else self._gpu_refresh
        rate = costs.share * self.sizing.hardware.rates.device_read
        calls = self.num_sequences * self.sizing.target.num_layers * costs.layer_seconds
        return calls + held / rate + crossing

    @property
    def _held_share(self) -> float:
        """Of the tokens, those that the level below the target is over."""
        return min(self.composition.budget / self.capacity, 1.0) or 1.0

    @property
    def _gpu_refresh(self) -> RefreshCosts:
        return GPU_REFRESH if self.sizing.hardware.has_kernels else GATHERED_REFRESH

    def prefill(self, num_tokens: int) -> float:
        """Seconds of a prefill, layer by layer: the longest of computation with its sums, and of what crosses the link
        in each direction: weights once, rows of the cache back once, hidden rows between two layers."""
        sizing, rates = self.sizing, self.sizing.hardware.rates
        hidden = self._crossing_rows(num_tokens)
        there = self.streamed_weights + hidden
        back = num_tokens * sizing.kv_bytes_per_token * self._share_on_host + hidden
        if self._on_cpu:
            computed = self._cpu_share * self._target_times.prefill(sizing.target.num_layers, num_tokens)
        else:
            flops = sizing.target.prefill_flops(num_tokens) / sizing.num_devices
            computed = flops / (GPU.prefill_share * rates.flops)
        summed = self.sums(num_tokens, -(-num_tokens // PREFILL_BLOCK))
        return max(
            computed + summed + self._restoring, there / self.link_rate, back / min(rates.to_host, self.link_rate)
        )

    def _crossing_rows(self, num_tokens: int) -> int:
        """Bytes over each device's link, in either direction, for the hidden rows of a prefill."""
        if "kv" not in self.placement.offload or num_tokens <= NUM_ROW_SLOTS * self.placement.prefill_block:
            return 0
        return (self.sizing.target.num_layers - 1) * self.sizing.hidden_bytes(num_tokens)

    def _blocks(self, rows: int) -> int:
        return -(-rows // self.sizing.most_rows)

    def _padded(self, rows: int) -> int:
        return rows if self.sizing.hardware.is_cpu else self._blocks(rows) * self.sizing.rows

    def _by_rows(self, seconds: float, rows: int, blocks: int = 1) -> float:
        """Seconds of `rows` rows in `blocks` blocks. seconds: of the first row of a block."""
        return seconds * (blocks + GPU.row_share * (rows - blocks))

    @cached_property
    def _unpacking(self) -> float:
        """Seconds of unpacking what streams of the cache: bytes are read once and written once."""
        if self.placement.link_bits == 16:
            return 0.0
        streamed = self._share_on_host - self.placement.host_tiles / self.num_tiles
        if self._on_cpu and self.placement.link_bits == 9:
            return self.cache_bytes * streamed / CPU_RESTORED
        read = self.link_share + (self.sizing.kv_code_share if self.placement.link_bits == 9 else 0.0)
        return self.cache_bytes * streamed * (read + 1) / self._rate

    @cached_property
    def _restoring(self) -> float:
        """Seconds in which weights that crossed the link quantised become what they are: what came is read, and their
        codes where these are needed, and they are written."""
        bits, sizing = self.placement.weight_link_bits, self.sizing
        if bits == 16:
            return 0.0
        if self._on_cpu and bits < 12:
            return self._streamed_layers * sizing.layer_bytes / CPU_RESTORED
        codes = 0.0
        if bits < 12:
            codes = sizing.low_bit_bytes(self.composition.weight_bits, first=False) / sizing.target.num_layers
        return self._streamed_layers * (sizing.home_bytes(bits) + codes + sizing.layer_bytes) / self._rate

    def _full_on_cpu(self, rows: int, masses: bool) -> float:
        return self._on_this_cpu(self.capacity, rows, masses=masses) + self.full_sums(rows)

    def _full_on_gpu(self, rows: int, masses: bool) -> float:
        cache, tiles = self.cache_bytes - self.full_host_bytes, self.num_tiles - self.placement.host_tiles
        seconds = self._over_blocks(rows, self._weights_seconds, cache, tiles)
        return seconds * (1.0 + GPU.mass_share * masses)

    def _ahead_on_gpu(self, rows: int) -> float:
        """Of a pass over quantised weights and the whole exact cache, on the GPU."""
        return self._over_blocks(rows, self._own_weights_seconds, self.cache_bytes, self.num_tiles)

    def _over_blocks(self, rows: int, weights: float, cache_bytes: float, tiles: int) -> float:
        """Of a pass on a GPU in blocks that the sequences share; each one's cache is read by blocks of its own.
        weights: seconds of reading them for a block. tiles: of each sequence that the GPU attends to."""
        number, blocks = self.num_sequences, self._blocks(rows)
        read = self._by_rows(weights, self._padded(number * rows), self._blocks(number * rows))
        read += self._by_rows(cache_bytes / self._rate, self._padded(rows), blocks)
        layers = self.sizing.target.num_layers
        calls = GPU.pass_seconds * number + layers * (GPU.layer_seconds + (number - 1) * GPU.sequence_seconds)
        return max(calls + number * blocks * tiles * GPU.tile_seconds, read + self.full_sums(rows))

    def _on_this_cpu(self, num_tokens: int, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over `num_tokens` cached tokens, with links that are as fast as memory."""
        layers, sequences = self.sizing.target.num_layers, self.num_sequences
        seconds = self._target_times.seconds(layers, num_tokens, rows, masses=masses, sequences=sequences)
        return seconds * self._cpu_share

    @cached_property
    def _target_times(self) -> PassTimes:
        """Of the whole target, measured on a whole host, or estimated from what each rank has of it."""
        sizing = self.sizing
        return self.times.target or estimated(sizing.target, sizing.itemsize, sizing.hardware.rates)

    @property
    def _proposes_coded(self) -> bool:
        return self.composition.weight_bits < 16

    @property
    def _attends_coded(self) -> bool:
        return self.composition.kv_bits < 16

    @cached_property
    def _coded_times(self) -> PassTimes:
        """Of the target with quantised weights; where they were not measured, in proportion to the bits."""
        exact, bits = self._target_times, self.composition.weight_bits
        return self.times.coded.get(bits) or replace(exact, layer=tuple(each * bits / 16 for each in exact.layer))

    @property
    def _cpu_share(self) -> float:
        """Each rank's part of `_target_times`: ranks of one host share it as they share the model."""
        hardware = self.sizing.hardware
        return 1 / (hardware.num_devices if self.times.target is None else hardware.num_hosts)

    @property
    def _on_cpu(self) -> bool:
        return self.sizing.hardware.is_cpu

    @property
    def _calls(self) -> float:
        return self.num_sequences * (GPU.pass_seconds + self.sizing.target.num_layers * GPU.layer_seconds)

    @cached_property
    def _rate(self) -> float:
        """Bytes per second over weights and caches on a GPU."""
        return GPU.read_share * self.sizing.hardware.rates.device_read

    @property
    def link_rate(self) -> float:
        return self.sizing.link_rate

    @cached_property
    def _weights_seconds(self) -> float:
        """Of reading, on a GPU, the exact weights for a block of rows."""
        return (self.sizing.embedding_bytes + self.sizing.target.num_layers * self.sizing.layer_bytes) / self._rate

    @cached_property
    def _own_weights_seconds(self) -> float:
        """Of reading, on a GPU, the weights with which the target proposes to itself."""
        if not self._proposes_coded:
            return self._weights_seconds
        rate = GPU.coded_share * self.sizing.hardware.rates.device_read
        return self.sizing.low_bit_bytes(self.composition.weight_bits) / rate

    @property
    def _kept(self) -> int:
        """Bytes of what the target proposes to itself over in place of its cache, of all sequences."""
        if self._attends_coded:
            return self.num_sequences * self.sizing.quantised_cache_bytes(self.capacity, self.composition)
        return self.num_sequences * self.composition.budget * self.sizing.kv_bytes_per_token

    @cached_property
    def streamed_weights(self) -> int:
        """Bytes over each device's link for the layers that cross it in a pass."""
        return self._streamed_layers * self.sizing.home_bytes(self.placement.weight_link_bits)

    @property
    def _streamed_layers(self) -> int:
        return self.sizing.target.num_layers - self.placement.resident_layers

    @property
    def _share_on_host(self) -> float:
        """Of the tiles, wherever they are attended to."""
        return 1 - self.placement.resident_tiles / self.num_tiles

    def besides_attention(self, rows: int) -> float:
        """Seconds of a pass, with its sums, in which it attends to nothing: then the host has no query. On a GPU also
        those in which what the host has for a layer waits for the tile that is just crossing the link."""
        if self._on_cpu:
            return self._on_this_cpu(0, rows) + self.full_sums(rows)
        work = self._by_rows(self._weights_seconds, self._padded(rows), self._blocks(rows))
        waits = min(self.placement.host_tiles, self.sizing.target.num_layers)
        crossing = waits * self.cache_bytes / self.num_tiles / self.link_rate
        return max(self._calls, work) + self.full_sums(rows) + crossing

    def _host_seconds(self, rows: int) -> float:
        """Of a pass that waits for the tiles attended to on the host."""
        rate = self.placement.host_bytes_per_second
        if not rate:
            return 0.0
        return self.full_host_bytes * host_slowdown(rows, self.sizing.group) / rate + self.besides_attention(rows)
