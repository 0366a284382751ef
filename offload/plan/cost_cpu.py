"""Seconds of passes on a CPU: from the curves of its kernels."""

from __future__ import annotations

from functools import cached_property

from offload.plan.bits import CPU_RESTORED
from offload.plan.passes import DevicePasses, SumCosts
from offload.speed.cpu_pass import CpuPass

SHARED = SumCosts(2e-5, 1, 4e9)  # two and four ranks on two cores, in shared memory
_REFRESH_SHARE = 0.32  # of the read rate, for choosing and fetching chunks
_REFRESH_LAYER = 1.6e-4  # seconds of the calls for one layer
_UNPACK_SHARE = 0.9  # of the read rate, for reading and writing packed numbers


class CpuPasses(DevicePasses):
    def full(self, rows: int, *, masses: bool) -> float:
        passes = self.passes
        growing, windows = self._cached(passes.capacity)
        seconds = self._exact.seconds(rows, growing, windows, masses=masses, sequences=passes.num_sequences)
        return seconds / self._hosts + self._states + self.full_sums(rows)

    def retrieval(self, rows: int) -> float:
        passes, composition = self.passes, self.passes.composition
        model = passes.sizing.target_passes[composition.weight_bits]
        growing, windows = self._cached(composition.budget or passes.capacity)
        coded, sequences = composition.kv_bits < 16, passes.num_sequences
        seconds = model.seconds(rows, growing, windows, coded=coded, sequences=sequences)
        return self.beside_weights(seconds / self._hosts + self._states + self.sums(sequences * rows), rows)

    def draft(self) -> float:
        passes, sizing = self.passes, self.passes.sizing
        assert sizing.draft is not None
        held = passes.composition.sinks + passes.composition.window
        cached = held * sizing.draft.read_kv_bytes(sizing.itemsize)
        if sizing.draft.assistant:
            cached = sizing.assistant_reads(passes.capacity)
        seconds = sizing.draft_pass.seconds(1, cached, sequences=passes.num_sequences)
        return seconds * sizing.hardware.ranks_per_host  # by the threads of one rank

    def prefill(self, num_tokens: int) -> float:
        return self._exact.prefill(num_tokens, self.passes.placement.expert_rows) / self._hosts

    def refresh(self) -> float:
        passes, sizing = self.passes, self.passes.sizing
        calls = passes.num_sequences * sizing.target.num_layers * _REFRESH_LAYER
        return calls + passes.retrieved_bytes / (_REFRESH_SHARE * sizing.hardware.rates.device_read)

    @property
    def refresh_link_share(self) -> float:
        return 1.0  # the host unpacks chunks as it gathers them

    @cached_property
    def unpacking(self) -> float:
        passes, bits = self.passes, self.passes.placement.link_bits
        if bits == 16:
            return 0.0
        if bits == 9:
            return passes.streamed_cache_bytes / CPU_RESTORED
        return passes.streamed_cache_bytes * (passes.link_share + 1) / self._rate

    @cached_property
    def restoring(self) -> float:
        passes, bits = self.passes, self.passes.placement.weight_link_bits
        if bits == 16:
            return 0.0
        if bits < 12:
            return passes.opened_weights / CPU_RESTORED
        return (passes.streamed_weights + passes.opened_weights) / self._rate

    @property
    def rank_sums(self) -> SumCosts:
        return SHARED

    def padded(self, rows: int) -> int:
        return rows

    def _cached(self, num_tokens: int) -> tuple[float, float]:
        """Bytes of the whole target's keys and values that a row of a sequence attends to: of `num_tokens` in each
        growing layer, with the keys by which it chooses them, and those of its windows."""
        sizing = self.passes.sizing
        shares = sizing.num_devices  # each has a part of every token
        attended = sizing.attended(num_tokens) * sizing.target.read_kv_bytes(sizing.itemsize)
        return (
            attended + sizing.index_keys_bytes(num_tokens),
            shares * sizing.seen_window_bytes(self.passes.capacity),
        )

    @property
    def _exact(self) -> CpuPass:
        return self.passes.sizing.target_passes[16]

    @property
    def _hosts(self) -> int:
        """The machines that share the target: the ranks of one share its seconds."""
        return self.passes.sizing.hardware.num_hosts

    @property
    def _states(self) -> float:
        """Seconds of reading and writing states, which curves do not have."""
        return self.passes.state_bytes / self.passes.sizing.hardware.rates.device_read

    @property
    def _rate(self) -> float:
        return _UNPACK_SHARE * self.passes.sizing.hardware.rates.device_read
