"""Shards: the part of every layer that one of several ranks holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from offload.config.block import Block
from offload.config.matrices import expert_matrices
from offload.config.mixers import Attention, DeltaRule, Mamba2, Mixer, NoMixer, Recurrence, ShortConvolution
from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.formats.encodings import ENCODINGS
from offload.plan.options import MAX_RANKS

States = TypeVar("States", DeltaRule, Mamba2)
SPLIT_BY_INPUTS = ("o", "down", "states_out")  # operators that are split by inputs


@dataclass(frozen=True)
class Shard:
    """The shard of rank `rank` of `size`: consecutive query heads with their KV heads, consecutive value heads of a
    recurrence with their key heads, consecutive channels of a short convolution, and consecutive rows of the
    feed-forward network and of each expert (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    q, k, v, gate and up are split by outputs; o and down by inputs, so that their outputs have to be summed over the
    ranks. If there are fewer KV heads than ranks, neighbouring ranks hold the same one. Norms and embeddings are whole.
    """

    rank: int = 0
    size: int = 1

    def heads(self, whole: ModelConfig) -> range:
        return self._part(whole.num_heads)

    def kv_heads(self, whole: ModelConfig) -> range:
        if whole.num_kv_heads >= self.size:
            return self._part(whole.num_kv_heads)
        first = self.rank * whole.num_kv_heads // self.size
        return range(first, first + 1)

    def value_heads(self, whole: ModelConfig) -> range:
        """The rank's value heads in a layer with a state, or its channels of a convolution."""
        return self._part(whole.block.recurrence.num_heads)

    def key_heads(self, whole: ModelConfig) -> range:
        """The key heads that serve them: all where neighbours serve neighbouring value heads."""
        states = whole.block.recurrence
        assert not isinstance(states, ShortConvolution)
        return range(states.num_key_heads) if _is_tiled(states) else self._part(states.num_key_heads)

    def inner(self, whole: ModelConfig) -> range:
        """The rank's rows of the feed-forward network."""
        return self._part(whole.intermediate_size)

    def inner_of_experts(self, whole: ModelConfig) -> range:
        """The rank's rows of each expert."""
        return self._part(whole.block.experts.network.size if whole.block.experts else 0)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The config of the model that this rank runs: `whole` without the heads and rows of other ranks."""
        if self.size == 1:
            return whole
        own = {kind.block: self._block(kind) for kind, _ in whole.kinds}
        return replace(whole, blocks=tuple(own[block] for block in whole.blocks))

    def _block(self, whole: ModelConfig) -> Block:
        """The rank's part of one layer, which is all of `whole`."""
        inner = replace(whole.block.feed_forward, size=len(self.inner(whole)))
        experts = whole.block.experts
        if experts is not None:
            experts = replace(experts, network=replace(experts.network, size=len(self.inner_of_experts(whole))))
        beside = whole.block.beside and self._states(whole, whole.block.beside)
        return replace(whole.block, mixer=self._mixer(whole), feed_forward=inner, experts=experts, beside=beside)

    def _mixer(self, whole: ModelConfig) -> Mixer:
        mixer = whole.block.mixer
        if isinstance(mixer, Attention):
            return replace(mixer, num_heads=len(self.heads(whole)), num_kv_heads=len(self.kv_heads(whole)))
        if isinstance(mixer, NoMixer):
            return mixer
        if isinstance(mixer, ShortConvolution):
            return replace(mixer, size=len(self.value_heads(whole)))
        if isinstance(mixer, Mamba2):
            return self._states(whole, mixer)
        own = self._states(whole, mixer)
        if own.tiled is None:
            return own
        return replace(own, tiled=(own.tiled + self.value_heads(whole).start) % own.num_key_heads)

    def _states(self, whole: ModelConfig, states: States) -> States:
        heads, key_heads = self.value_heads(whole), self.key_heads(whole)
        return replace(states, num_key_heads=len(key_heads), num_heads=len(heads))

    def _part(self, count: int) -> range:
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


ALONE = Shard()


def check_divides(config: ModelConfig, num_ranks: int) -> None:
    """Raises UsageError, with the possible numbers, unless `num_ranks` ranks can share the model."""
    kinds = [kind for kind, _ in config.kinds]
    if not all(_divides(kind, num_ranks) for kind in kinds):
        usable = [number for number in range(1, MAX_RANKS + 1) if all(_divides(kind, number) for kind in kinds)]
        heads = " and ".join(map(str, config.head_counts))
        kv_heads = " and ".join(map(str, dict.fromkeys(kind.num_kv_heads for kind in kinds if kind.block.attends)))
        states = f", {' '.join(map(str, _units(config.recurrence)))}" if config.recurrence is not None else ""
        raise UsageError(
            f"gpus is {num_ranks}, and {heads} heads, {kv_heads} KV heads{states} and "
            f"{_rows(config)} feed-forward rows of the model{_in_blocks(config)} do not divide so; "
            f"--gpus may be {', '.join(map(str, usable))}"
        )


def _divides(config: ModelConfig, num_ranks: int) -> bool:
    mixer = config.block.mixer
    if isinstance(mixer, Attention):
        kv_heads = mixer.num_kv_heads
        shared = mixer.num_heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)
    else:
        shared = isinstance(mixer, NoMixer) or _units(mixer)[0] % num_ranks == 0
    beside = config.block.beside
    shared = shared and (beside is None or _units(beside)[0] % num_ranks == 0)
    experts = config.block.experts
    if not shared or any(
        size % num_ranks for size in (config.intermediate_size, experts.network.size if experts else 0)
    ):
        return False
    matrices = config.layer_matrices()
    split = [part for operator in SPLIT_BY_INPUTS for part in matrices.get(operator, ())]
    split += [expert_matrices(config.block, config.hidden_size)["down"]] if experts else []
    split = [part for part in split if part.encoding]
    return all(part.inputs // num_ranks % ENCODINGS[part.encoding].numbers == 0 for part in split)


def _units(mixer: Recurrence) -> tuple[int, str]:
    """The units that ranks can divide: heads, with those that they share, or channels; and their name in messages."""
    if isinstance(mixer, ShortConvolution):
        return mixer.size, "channels of a convolution"
    return mixer.num_heads if _is_tiled(mixer) else mixer.num_key_heads, "heads with a state"


def _is_tiled(states: Recurrence) -> bool:
    return isinstance(states, DeltaRule) and states.tiled is not None


def _rows(config: ModelConfig) -> str:
    """The numbers of rows of all feed-forward networks, for a message: "128 and 768"."""
    blocks = [kind.block for kind, _ in config.kinds]
    sizes = [each.feed_forward.size for each in blocks] + [each.experts.network.size for each in blocks if each.experts]
    return " and ".join(map(str, dict.fromkeys(filter(None, sizes))))


def _in_blocks(config: ModelConfig) -> str:
    """The text ", in blocks of 256" for a message if matrices are stored in blocks, else ""."""
    sizes = {ENCODINGS[name].numbers for name in config.stored_in}
    return f", in blocks of {max(sizes)}" if sizes else ""
