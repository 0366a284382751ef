"""Seconds of passes on a GPU: from its rates and the number of calls.

Every sequence's rows are blocks of their own, which read the weights again; bytes cross the link only once for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offload.config.model import ModelConfig
from offload.config.next_token import rest_bytes
from offload.formats.layout import WIDEST_GPU_HEAD
from offload.plan.kernel_counts import block_kernels, layer_kernels
from offload.plan.passes import DevicePasses, SumCosts
from offload.speed.routing import layers_read_bytes, layers_wanted_bytes

NCCL = SumCosts(4e-5, 0, 3e9)  # published, for GPUs connected through host memory only (docs/memory.md)
_KERNEL_REFRESH = 0.5  # of the read rate, for a kernel that chooses and fetches the retrieval cache's chunks
_GATHERED_REFRESH = 0.02  # of the read rate, for a host that gathers chunks for a GPU without kernels


@dataclass(frozen=True)
class GpuCosts:
    """Constants of GPUs, besides their rates: estimated from the number of kernels. Calls return before the device is
    done, so the longer of calls and work counts; a pass that is a graph has few calls, and the gaps between its kernels
    add to its work."""

    graph_seconds: float = 1.2e-4  # of a pass as a graph: its launch, its inputs and results, the head and the draw
    graph_kernel_seconds: float = 2e-6  # gap and ramp of a kernel within a graph; a layer of Llama's form has twelve
    piece_seconds: float = 1.2e-4  # of the host in the middle of a layer whose experts it brings: a wait, some calls
    pass_seconds: float = 5e-4  # calls of one pass outside its layers, the draw
    layer_seconds: float = 5.5e-4  # calls of one layer; with four tiles of its own .8 ms on an H200's host
    sequence_seconds: float = 1e-4  # of one layer, for each further sequence: appending rows and attention
    tile_seconds: float = 2.3e-4  # calls of one block over one tile that crosses the link
    resident_tile_seconds: float = 6e-5  # the same over one that is there, a launch
    read_share: float = 0.9  # of the read rate, for one row over weights and cache
    coded_share: float = 0.75  # of the read rate, for quantised weights: two short launches for each product
    row_share: float = 0.01  # of the seconds of one row, for each further row of a block
    mass_share: float = 0.05  # of the seconds of a pass, for recording masses
    prefill_share: float = 0.5  # of the rate of large products


GPU = GpuCosts()


class GpuPasses(DevicePasses):
    def full(self, rows: int, *, masses: bool) -> float:
        return self._over_blocks("target", rows, self._weights(rows), self._cache) * (1.0 + GPU.mass_share * masses)

    def retrieval(self, rows: int) -> float:
        passes, composition = self.passes, self.passes.composition
        if composition.inner == "self" and not composition.keeps_copies:  # attends to the whole exact cache
            return self._over_blocks("self", rows, self._own_weights(rows), self._cache)
        number = passes.num_sequences  # of sequences, whose passes run apart
        kept = self._kept + passes.window_bytes + passes.state_bytes
        read = self._by_rows(number * self._own_weights(rows) + kept / self._rate, rows)
        read += number * self.sums(rows)
        if composition.inner in passes.graphs:
            return number * self._target_calls + read + passes.awaiting_experts(rows)
        return max(self._calls, self.beside_weights(read, rows))

    def draft(self) -> float:
        draft, sizing = self.passes.sizing.draft, self.passes.sizing
        assert draft is not None
        of_model = draft.head.nbytes(sizing.itemsize) if draft.is_head else 0  # rows of the head that it shares
        of_model += sizing.assistant_reads(self.passes.capacity) if draft.assistant else 0
        num_bytes = layers_read_bytes(draft, sizing.itemsize, 1) + rest_bytes(draft, sizing.itemsize) + of_model
        if draft.experts is not None and "draft" not in self.passes.graphs:
            calls = GPU.pass_seconds + draft.num_layers * GPU.layer_seconds
        else:
            calls = self._graph_calls(draft, brings=draft.is_head and self.passes.placement.expert_slots > 0)
        return self.passes.num_sequences * (calls + num_bytes / self._rate)

    def prefill(self, num_tokens: int) -> float:
        sizing = self.passes.sizing
        flops = sizing.target.prefill_flops(num_tokens) / sizing.num_devices
        return flops / (GPU.prefill_share * sizing.hardware.rates.flops)

    def refresh(self) -> float:
        hardware, head_dim = self.passes.sizing.hardware, self.passes.sizing.target.head_dim
        by_kernel = hardware.has_kernels and head_dim <= WIDEST_GPU_HEAD
        share = _KERNEL_REFRESH if by_kernel else _GATHERED_REFRESH
        return self.passes.retrieved_bytes / (share * hardware.rates.device_read)

    @property
    def refresh_link_share(self) -> float:
        return self.passes.link_share

    @cached_property
    def unpacking(self) -> float:
        """Seconds of unpacking the streamed cache: packed bytes (and codes) are read once, and the exact bytes written
        once."""
        passes, bits = self.passes, self.passes.placement.link_bits
        if bits == 16:
            return 0.0
        read = passes.link_share + (passes.sizing.kv_code_share if bits == 9 else 0.0)
        return passes.streamed_cache_bytes * (read + 1) / self._rate

    @cached_property
    def restoring(self) -> float:
        """Seconds of restoring the streamed weights: transferred bytes (and codes, if needed) are read, and the weights
        written."""
        passes, sizing, bits = self.passes, self.passes.sizing, self.passes.placement.weight_link_bits
        if bits == 16:
            return 0.0
        codes = 0.0
        if bits < 12:
            codes = sizing.low_bit_bytes(passes.composition.weight_bits, first=False) / sizing.target.num_layers
        crossed = passes.streamed_weights + passes.streamed_layers * codes
        return (crossed + passes.opened_weights) / self._rate

    @property
    def rank_sums(self) -> SumCosts:
        return NCCL

    def padded(self, rows: int) -> int:
        return self._blocks(rows) * self.passes.sizing.rows

    @property
    def _cache(self) -> int:
        """Bytes of the keys and values, and of the states, of all sequences that a pass reads."""
        return self.passes.read_cache_bytes + self.passes.window_bytes + self.passes.state_bytes

    @property
    def _tiles_calls(self) -> float:
        """Seconds of the calls of a block over all tiles of a sequence, one by one; a window counts as a tile."""
        resident = self.passes.placement.resident_tiles
        windows = len(self.passes.sizing.target.windowed)
        streamed = self.passes.num_tiles - resident
        return (resident + windows) * GPU.resident_tile_seconds + streamed * GPU.tile_seconds

    def _over_blocks(self, level: str, rows: int, weights: float, cache_bytes: float) -> float:
        """Seconds of a pass in blocks that the sequences share; each sequence's cache is read by blocks of its own.
        weights: seconds of reading the weights for a block."""
        number, blocks = self.passes.num_sequences, self._blocks(rows)
        read = self._by_rows(weights, self.padded(number * rows), self._blocks(number * rows))
        read += self._by_rows(cache_bytes / self._rate, self.padded(rows), blocks)
        layers = self.passes.sizing.target.num_layers
        if level in self.passes.graphs and number == 1:  # rows of several seldom come in the same numbers again
            return self._target_calls + read
        calls = GPU.pass_seconds * number + layers * (GPU.layer_seconds + (number - 1) * GPU.sequence_seconds)
        return max(calls + number * blocks * self._tiles_calls, read + self.full_sums(rows))

    def _blocks(self, rows: int) -> int:
        return -(-rows // self.passes.sizing.most_rows)

    def _by_rows(self, seconds: float, rows: int, blocks: int = 1) -> float:
        """Seconds of `rows` rows in `blocks` blocks. seconds: of the first row of a block."""
        return seconds * (blocks + GPU.row_share * (rows - blocks))

    @property
    def _target_calls(self) -> float:
        """Seconds that a pass of the target as graphs takes beside its bytes, with the host's work in the middle."""
        sizing, placement = self.passes.sizing, self.passes.placement
        kernels = block_kernels(sizing.target, sizing.most_rows, placement.block_slots)
        return self._graph_calls(sizing.target, brings=placement.expert_slots > 0) + kernels * GPU.graph_kernel_seconds

    def _graph_calls(self, model: ModelConfig, *, brings: bool) -> float:
        """Seconds that a pass of a model as graphs takes beside its bytes. brings: whether the host works in the middle
        of each layer with experts."""
        pieces = model.num_expert_layers if brings else 0
        kernels = model.all_layers(lambda layer: layer_kernels(layer.block))
        return GPU.graph_seconds + kernels * GPU.graph_kernel_seconds + pieces * GPU.piece_seconds

    @property
    def _calls(self) -> float:
        layers = self.passes.sizing.target.num_layers
        return self.passes.num_sequences * (GPU.pass_seconds + layers * GPU.layer_seconds)

    @cached_property
    def _rate(self) -> float:
        """Bytes per second over weights and caches."""
        return GPU.read_share * self.passes.sizing.hardware.rates.device_read

    def _weights(self, rows: int) -> float:
        """Seconds of reading the exact weights for a block of a pass of `rows` rows."""
        sizing = self.passes.sizing
        of_block = min(rows, sizing.most_rows)
        read = layers_read_bytes(sizing.shard, sizing.itemsize, of_block)
        by_cpu = self.passes.share_on_cpu * layers_wanted_bytes(sizing.shard, sizing.itemsize, of_block)
        return (sizing.embedding_bytes + read - by_cpu) / self._rate

    def _own_weights(self, rows: int) -> float:
        """Seconds of reading the weights with which the target proposes to itself, for `rows` rows."""
        if not self.passes.proposes_quantised:
            return self._weights(rows)
        sizing = self.passes.sizing
        rate = GPU.coded_share * sizing.hardware.rates.device_read
        head = sizing.target.head.nbytes(sizing.itemsize) if sizing.target.head_encoding else 0  # stays as it is stored
        return sizing.low_bit_bytes(self.passes.composition.weight_bits) / rate + head / self._rate

    @property
    def _kept(self) -> int:
        """Bytes of the copies over which the target proposes to itself, of all sequences."""
        passes, composition = self.passes, self.passes.composition
        if composition.kv_bits < 16:
            return passes.num_sequences * passes.sizing.quantised_cache_bytes(passes.capacity, composition)
        return passes.retrieved_bytes
