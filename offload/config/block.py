"""The description of a transformer layer, as it follows from a config: its mixer, its networks and their norms."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.config.mixers import Attention, Mamba2, Mixer, NoMixer, Recurrence
from offload.config.networks import Experts, FeedForward
from offload.config.ngrams import NGrams
from offload.config.norm import Norm
from offload.config.streams import Streams

FACTOR_BYTES = 64  # of memory for the factor on a layer's rows
BLOCK_NORMS = (
    *("before_attention", "after_attention", "before_feed_forward", "after_feed_forward"),
    *("before_router", "before_experts", "after_experts", "after_network", "after_input"),
)


@dataclass(frozen=True)
class Encodings:
    """The encodings of a layer's matrices in a quantised checkpoint, by name (formats/encodings.py); "" for plain
    numbers. qkv: one per part of the mixer; gate_up: of both, or of up alone. experts: of their gates, if they have
    any, ups and downs; all experts of a layer have the same. around_experts: of the matrices before and behind experts
    that read latents. inputs: of the gate of the layer's input and of the matrix behind it. of_mixer: of the matrices
    of the mixer beside qkv and o, ordered as in `matrices.mixer_shapes`. beside: of the recurrence beside
    attention, the parts of its projection and its output. streams: as of `matrices.STREAMS`, of both parts of each of
    the first. () if all are plain."""

    qkv: tuple[str, ...] = ()
    o: str = ""
    gate_up: tuple[str, ...] = ()
    down: str = ""
    experts: tuple[str, ...] = ()
    around_experts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    of_mixer: tuple[str, ...] = field(default=(), metadata={"digested_as": "latent"})  # as for `Block.mixer`
    beside: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        """All of them."""
        mixer, network = (*self.qkv, self.o, *self.of_mixer, *self.beside), (*self.gate_up, self.down, *self.experts)
        return (*mixer, *network, *self.around_experts, *self.inputs, *self.streams)


@dataclass(frozen=True)
class Block:
    """One layer: x += scale * after(mixer(before(x))), and the same with the feed-forward network, the mixture of
    experts, or the sum of both. A layer may lack either. A norm of None is left out. side_by_side: both parts read the
    same norm of the same x, `before_attention`. multiplied: x is multiplied by a factor from the checkpoint at the end.
    encodings: of its matrices. digested_as: the name in digests of sessions, which older programs wrote. beside: a
    recurrence that reads the same norm of the same x as the attention, and whose output is added, too. factors: by
    operator those that the parts of its matrix are multiplied by as they are read.

    Experts and their router read the rows that the network reads, unless they have norms of their own, before_experts
    and before_router. after_experts, after_network: norms of both outputs before their sum, in a layer that has both.

    input_size: numbers of the layer's own input of each token (config/layer_table.py); 0: it has none. With one,
    x += after_input(out(activation(gate(x)) * input)) comes last, with the activation of the feed-forward network.

    streams: x is several residual streams. Mixer and network read a mean of them in place of norms of x, and their
    outputs are added to each stream. ngrams: the n-gram embedding that is added to them before the mixer.
    """

    mixer: Mixer = field(metadata={"digested_as": "attention"})
    feed_forward: FeedForward
    before_attention: Norm | None = field(default_factory=Norm)
    after_attention: Norm | None = None
    before_feed_forward: Norm | None = field(default_factory=Norm)
    after_feed_forward: Norm | None = None
    side_by_side: bool = False
    scale: float = 1.0
    multiplied: bool = False
    encodings: Encodings = Encodings()
    experts: Experts | None = None
    before_router: Norm | None = None
    before_experts: Norm | None = None
    after_experts: Norm | None = None
    after_network: Norm | None = None
    input_size: int = 0
    after_input: Norm | None = None
    beside: Mamba2 | None = None
    factors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    streams: Streams | None = None
    ngrams: NGrams | None = None

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention), "a layer with a state has no attention"
        return self.mixer

    @property
    def recurrence(self) -> Recurrence:
        """The mixer of a layer with a state, or what is beside it."""
        found = self.mixer if self.beside is None else self.beside
        assert isinstance(found, Recurrence), "a layer without a recurrence has no state"
        return found

    @property
    def attends(self) -> bool:
        return isinstance(self.mixer, Attention)

    @property
    def recurs(self) -> bool:
        return isinstance(self.mixer, Recurrence) or self.beside is not None

    @property
    def has_mixer(self) -> bool:
        return not isinstance(self.mixer, NoMixer)

    @property
    def num_parts(self) -> int:
        """The parts that are added to the rows: mixers and networks."""
        return self.has_mixer + (self.beside is not None) + self.has_network

    @property
    def has_network(self) -> bool:
        """Whether there are a feed-forward network or experts."""
        return self.feed_forward.size > 0 or self.experts is not None

    @property
    def joins_normed(self) -> bool:
        """Whether the outputs of network and experts are normed before their sum."""
        return self.after_network is not None or self.after_experts is not None

    @property
    def has_latents(self) -> bool:
        return self.experts is not None and self.experts.latent > 0

    @property
    def joins(self) -> bool:
        """Whether the outputs of network and experts are summed by a step of its own, over the ranks first."""
        return self.joins_normed or (self.has_latents and self.feed_forward.size > 0)
