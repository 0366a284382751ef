"""Seconds of passes on a CPU: from measurements, or estimated from its rates (`PassTimes`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from offload.plan.bits import CPU_RESTORED
from offload.plan.passes import DevicePasses, SumCosts
from offload.plan.sizing import timed_layers
from offload.speed.pass_times import PassTimes, estimated

SHARED = SumCosts(2e-5, 1, 4e9)  # two and four ranks on two cores, in shared memory
_REFRESH_SHARE = 0.32  # of the read rate, for choosing and fetching chunks
_REFRESH_LAYER = 1.6e-4  # seconds of the calls for one layer
_UNPACK_SHARE = 0.9  # of the read rate, for reading and writing packed numbers


class CpuPasses(DevicePasses):
    def full(self, rows: int, *, masses: bool) -> float:
        return self._over(self.passes.capacity, rows, masses=masses) + self.full_sums(rows)

    def retrieval(self, rows: int) -> float:
        passes, composition = self.passes, self.passes.composition
        times = self._coded_times if passes.proposes_quantised else self._target_times
        num_tokens, coded = composition.budget or passes.capacity, composition.kv_bits < 16
        layers, sequences = passes.sizing.timed_layers, passes.num_sequences
        seen, beside = passes.sizing.seen_tokens(num_tokens, passes.capacity)
        seconds = times.seconds(layers, seen, rows, coded=coded, sequences=sequences, beside=beside)
        return self.beside_weights(seconds * self._share + self._states + self.sums(sequences * rows), rows)

    def draft(self) -> float:
        passes, sizing = self.passes, self.passes.sizing
        assert sizing.draft is not None
        times = passes.times.draft or estimated(sizing.draft, sizing.itemsize, sizing.hardware.rates)
        held = passes.composition.sinks + passes.composition.window
        layers = timed_layers(sizing.draft, sizing.itemsize)
        return times.seconds(layers, held, 1, sequences=passes.num_sequences)

    def prefill(self, num_tokens: int) -> float:
        sizing = self.passes.sizing
        pairs = sizing.target.seen_pairs(num_tokens)
        return self._share * self._target_times.prefill(sizing.timed_layers, num_tokens, pairs)

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

    def _over(self, num_tokens: int, rows: int, *, masses: bool = False) -> float:
        """Seconds of a pass over `num_tokens` cached tokens, with links that are as fast as memory."""
        layers, sequences = self.passes.sizing.timed_layers, self.passes.num_sequences
        seen, beside = self.passes.sizing.seen_tokens(num_tokens, self.passes.capacity)
        seconds = self._target_times.seconds(layers, seen, rows, masses=masses, sequences=sequences, beside=beside)
        return seconds * self._share + self._states

    @cached_property
    def _target_times(self) -> PassTimes:
        """The pass times of the whole target, measured on a whole host, or estimated from each rank's shard."""
        sizing = self.passes.sizing
        return self.passes.times.target or estimated(sizing.target, sizing.itemsize, sizing.hardware.rates)

    @cached_property
    def _coded_times(self) -> PassTimes:
        """The pass times of the target with quantised weights; if not measured, in proportion to the bits."""
        exact, bits = self._target_times, self.passes.composition.weight_bits
        measured = self.passes.times.coded.get(bits)
        return measured or replace(exact, layer=tuple(each * bits / 16 for each in exact.layer))

    @property
    def _share(self) -> float:
        """Each rank's part of `_target_times`: ranks of one host share the seconds as they share the model."""
        hardware = self.passes.sizing.hardware
        return 1 / (hardware.num_devices if self.passes.times.target is None else hardware.num_hosts)

    @property
    def _states(self) -> float:
        """Seconds of reading and writing states, which measured layers do not have."""
        return self.passes.state_bytes / self.passes.sizing.hardware.rates.device_read

    @property
    def _rate(self) -> float:
        return _UNPACK_SHARE * self.passes.sizing.hardware.rates.device_read
