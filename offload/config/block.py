"""Descriptions of a transformer layer, its parts and its tensor names, as they follow from a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from offload.config.rope import Rope

FACTOR_BYTES = 64  # of memory for the factor on a layer's rows
BLOCK_NORMS = (
    *("before_attention", "after_attention", "before_feed_forward", "after_feed_forward"),
    *("before_router", "before_experts", "after_experts", "after_network", "after_input"),
)
# gelu_tanh: GELU by its approximation with tanh. clamped_silu: gpt-oss's, of a gate alone (kernels/activation.py).
Activation = Literal["silu", "gelu_tanh", "relu_squared", "clamped_silu"]
GateFunction = Literal["sigmoid", "softplus"]
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0  # of clamped_silu
Scoring = Literal["softmax", "sigmoid"]
RouterBias = Literal["none", "scores", "ranks"]
Rounded = Literal["none", "scores", "shares"]
MOST_GROUPS = 64  # of experts
_GATE = 3  # of `HeadStates.parts`


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows. centred: LayerNorm, which subtracts the mean, else RMS norm. plus_one: it multiplies by
    1 + its weight. bias: it adds a bias. fp32: its vectors are fp32 in any dtype of the model, so that the added 1
    loses no bit of them. weightless: its weight is 1 and not in the checkpoint; never so for a model's last norm."""

    eps: float = 1e-6
    centred: bool = False
    plus_one: bool = False
    bias: bool = False
    fp32: bool = False
    weightless: bool = False

    def itemsize(self, dtype_bytes: int) -> int:
        """Bytes per element of the norm's vectors in a model of `dtype_bytes` per element."""
        return 4 if self.fp32 else dtype_bytes


@dataclass(frozen=True)
class Latent:
    """The low-rank projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A token has
    a row of `rank` normed numbers, of which each head's key and value are products with matrices of its own, and of
    `rotated` numbers, a key with positions that all heads share. A head's query has `plain` numbers without positions
    and `rotated` ones with. query_rank: numbers of the normed rows that queries are products with; 0: of hidden rows.
    value_dim: of a head's value."""

    rank: int
    plain: int
    rotated: int
    value_dim: int
    query_rank: int = 0

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.plain + self.rotated


@dataclass(frozen=True)
class Attention:
    """The attention of one layer. bias, out_bias: of q, k and v, and of the output. qk_norm: the norm of queries and
    keys before they are rotated, over each head or, if `norms_whole`, over all heads together. weighs_heads: each head
    has a weight of its own. weighs_rotated: the weight multiplies queries and keys after the rotation.

    v_norm: the norm of each head's values. values_are_keys: values are the keys before their norm, without a projection
    of their own. rope: None if queries and keys have no positions. scale: of the scores; None: head_dim^-0.5. window:
    tokens that a row sees, itself and the last ones before it; None: all. A layer without a window is called growing.
    cap: c, of scores: c tanh(score / c) replaces a score. gate: the heads' output is multiplied by the gate_function of
    another projection of the rows, which has a number for each of the output or, if `gates_heads`, for each head.
    sink_logits: each head has a logit of its own in its rows' softmax, beside the scores and without a value (the
    attention sinks of gpt-oss). shares: the layer has no keys and values of its own; it attends to those of the last
    layer before it that has some and sees as much (`ModelConfig.sources`).

    latent: heads' keys and values are products with a token's row. Each head's query is multiplied by its matrix of
    keys first, and what it attends to by its matrix of values after that, so all heads attend to one row of `head_dim`
    numbers, `num_kv_heads` being 1, which is both their key and their value. A cache has the row's first half in place
    of a key and the other half in place of a value. qk_norm: of the low-rank rows. No other field but `bias`,
    `out_bias`, `rope` and `scale` applies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = field(default_factory=Rope)
    bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    v_norm: Norm | None = None
    values_are_keys: bool = False
    norms_whole: bool = False
    weighs_heads: bool = False
    weighs_rotated: bool = False
    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    gate: bool = False
    gate_function: GateFunction = "sigmoid"
    gates_heads: bool = False
    sink_logits: bool = False
    shares: bool = False
    latent: Latent | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def out_size(self) -> int:
        """Numbers of a row of the output, before the output projection."""
        return self.q_size if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def kv_dim(self) -> int:
        """Numbers of a head's key, and of its value, in a cache."""
        return self.head_dim if self.latent is None else self.head_dim // 2

    @property
    def table_dim(self) -> int:
        """Numbers of a position in the table of rotations; of latent attention, of those with positions alone."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.kv_dim

    @property
    def has_long_weights(self) -> bool:
        """Whether the norm weights of queries and keys are as long as all heads together."""
        return self.norms_whole or self.weighs_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """Output sizes of the fused projection: q, k, v (unless values are keys), and the gate if there is one; of k
        and v nothing in a layer that shares those of another. Of latent attention: of the queries, or of the rows that
        they are products with, and of a token's row."""
        if self.latent is not None:
            return (self.latent.query_rank or self.num_heads * self.latent.query_dim, self.head_dim)
        own = 0 if self.shares else 1 if self.values_are_keys else 2
        return (self.q_size, *[self.kv_size] * own, *([self.gate_size] if self.gate else []))

    @property
    def gate_size(self) -> int:
        """Numbers of a row of the gate."""
        return self.num_heads if self.gates_heads else self.q_size

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class HeadStates:
    """The sizes of a mixer with a recurrent state [key_dim, value_dim] in each of `num_heads` value heads, instead of
    keys and values of all tokens. Each of `num_key_heads` key heads serves neighbouring value heads. width: taps of the
    causal convolution over queries, keys and values."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def key_heads(self) -> tuple[int, ...]:
        """The key head of each value head."""
        return tuple(head * self.num_key_heads // self.num_heads for head in range(self.num_heads))

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def out_size(self) -> int:
        """Numbers of a row of the output, before the output projection."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a row of queries, keys and values, which the convolution runs over."""
        return 2 * self.key_size + self.out_size

    @property
    def parts(self) -> tuple[int, ...]:
        """Output sizes of the fused projection: queries, keys, values, gate, and the numbers of each head."""
        return (self.key_size, self.key_size, self.out_size, self.out_size, *self.of_heads)

    @property
    def of_heads(self) -> tuple[int, ...]:
        """Sizes of the parts with a number for each head: the times, from which the decays follow."""
        return (self.num_heads,)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the fp32 vectors besides norms, by name: the taps of the convolution, the decay of each head
        (-exp(A_log)) and the bias of its time."""
        return {"taps": (self.width, self.channels), "decay": (self.num_heads,), "time_bias": (self.num_heads,)}

    @property
    def kept(self) -> int:
        """Numbers of a projected row on which later states depend: all but the gate."""
        return self.channels + sum(self.of_heads)

    @property
    def kept_parts(self) -> tuple[int, ...]:
        """The parts of which these numbers are."""
        return tuple(part for part in range(len(self.parts)) if part != _GATE)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's state, in fp32."""
        return self.num_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class DeltaRule(HeadStates):
    """The gated delta rule of one layer (Yang et al. 2024, arXiv 2412.06464). norm: of each head's output. steps: the
    largest step (beta) of an update. eps: in the division of queries and keys by their l2 norm. tiled: None, or value
    head h is served by key head (h + tiled) % num_key_heads.
    """

    norm: Norm = field(default_factory=Norm)
    steps: float = 1.0
    eps: float = 1e-6
    tiled: int | None = None
    bias: bool = False  # no projection has one
    out_bias: bool = False

    @property
    def key_heads(self) -> tuple[int, ...]:
        if self.tiled is None:
            return super().key_heads
        return tuple((head + self.tiled) % self.num_key_heads for head in range(self.num_heads))

    @property
    def of_heads(self) -> tuple[int, ...]:
        """Sizes of the parts with a number for each head: the steps, and the times, from which the decays follow."""
        return self.num_heads, self.num_heads

    @property
    def norm_size(self) -> int:
        """Numbers of the norm's weight, which all heads share."""
        return self.value_dim


@dataclass(frozen=True)
class Mamba2(HeadStates):
    """Mamba-2 of one layer (Dao and Gu 2024, arXiv 2405.21060), whose B are the keys, C the queries and x the values: a
    group has a key head. A state decays and has a token's key and value added, times its time step; the output is the
    state's for the query, plus the value times a number of its head (D). taps_bias: of the convolution. norm: of the
    output times its activated gate, by group; None: there is none."""

    norm: Norm | None = field(default_factory=Norm)
    taps_bias: bool = True
    bias: bool = False
    out_bias: bool = False

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """As `HeadStates.vectors`, with the bias of the convolution and each head's factor of its values (D)."""
        bias = {"taps_bias": (self.channels,)} if self.taps_bias else {}
        return super().vectors | bias | {"skip": (self.num_heads,)}

    @property
    def norm_size(self) -> int:
        """Numbers of the norm's weight."""
        return self.out_size


@dataclass(frozen=True)
class ShortConvolution:
    """The gated short convolution of one layer (LFM2): C * convolution(B * x), where B, C and x are projections of the
    rows: a mixer with the products B * x of the last tokens instead of keys and values. size: channels, each of which
    has a causal convolution of its own. width: taps. taps_bias: convolutions have a bias."""

    size: int
    width: int = 3
    bias: bool = False
    out_bias: bool = False
    taps_bias: bool = False

    norm = None  # of outputs: there is none
    norm_size = 0
    value_dim = 1  # of a head, which is a channel

    @property
    def num_heads(self) -> int:
        return self.size

    @property
    def channels(self) -> int:
        """Numbers of a row, which the convolution runs over."""
        return self.size

    @property
    def out_size(self) -> int:
        """Numbers of a row of the output, before the output projection."""
        return self.size

    @property
    def parts(self) -> tuple[int, ...]:
        """Output sizes of the fused projection: B, C and x."""
        return (self.size,) * 3

    @property
    def kept(self) -> int:
        """Numbers of a token on which later rows depend: the products of B and x."""
        return self.size

    @property
    def kept_parts(self) -> tuple[int, ...]:
        """The part that has a number for each of these."""
        return (0,)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's state: it has no numbers besides those that are kept of tokens."""
        return self.size, 0, 0

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its fp32 tensors, by name: the taps of the convolutions, and their biases if they have some."""
        return {"taps": (self.width, self.size)} | ({"taps_bias": (self.size,)} if self.taps_bias else {})


@dataclass(frozen=True)
class NoMixer:
    """The mixer of a layer that is a network alone."""

    parts: ClassVar[tuple[int, ...]] = (0,)
    out_size: ClassVar[int] = 0
    bias: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False


Recurrence = DeltaRule | Mamba2 | ShortConvolution  # the mixers with a recurrent state
Mixer = Attention | Recurrence | NoMixer


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network. size: of its inner rows; 0 where a layer has none. gated:
    down(activation(gate) * up), else down(activation(up))."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` feed-forward networks like `network`, of which each row runs through the `used`
    ones that its router ranks first, and of equal ones through the first. Its output is the sum of theirs, each times
    its weight.

    A row's scores are products with the router's rows, times `score_scale`; scoring: an expert's share is the softmax
    over all scores, or the sigmoid of its own. score_cap: of scores, as `Attention.cap`. Experts are ranked by shares,
    or if `ranks_scores` by scores. bias: each expert has a number that is added to its score, or to its rank alone.
    groups: of neighbouring experts, of which those with the largest sums of their `group_best` largest ranks,
    `groups_used`, have the experts in use.

    A weight is a share: divided by the sum of those in use if `renormalised`, to which `eps` is added, or which is
    `eps` or more if `floored`; multiplied by `factor`, unless that multiplies the sum over experts (`scales_sum`), and
    by the expert's own factor if `scaled`. The sum of a softmax's largest shares is never small, and has no eps.
    rounded: scores, or scores and shares, are rounded to the dtype of the rows. gates_network: a further score, whose
    sigmoid multiplies the output of the network beside the experts. averaged: of both outputs the mean is taken.

    latent: if not 0, the experts read rows of so many numbers, which a matrix of the layer makes of its rows, and
    another matrix makes the layer's rows of their sum."""

    network: FeedForward
    count: int
    used: int
    renormalised: bool = True
    scoring: Scoring = "softmax"
    score_scale: float = 1.0
    score_cap: float | None = None
    factor: float = 1.0
    scaled: bool = False
    bias: RouterBias = "none"
    gates_network: bool = False
    ranks_scores: bool = False
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    eps: float = 1e-20
    floored: bool = False
    scales_sum: bool = False
    rounded: Rounded = "none"
    averaged: bool = False
    latent: int = 0

    def row_size(self, hidden_size: int) -> int:
        """Numbers of the rows that experts read and make."""
        return self.latent or hidden_size

    @property
    def num_scores(self) -> int:
        """Rows of the router's matrix: the experts' and the gate's."""
        return self.count + self.gates_network

    @property
    def needs_softmax(self) -> bool:
        """Whether a softmax is worked out before experts are ranked. Else its exponents rank them as well."""
        return self.scoring == "softmax" and (self.bias == "ranks" or self.groups > 1 or self.rounded == "shares")

    @property
    def factors(self) -> tuple[float, float, float]:
        """The factors of weights, of their sum, and of that plus the output of the network beside the experts."""
        of_sum = (1.0, self.factor) if self.scales_sum else (self.factor, 1.0)
        return (*of_sum, 0.5 if self.averaged else 1.0)


@dataclass(frozen=True)
class Encodings:
    """The encodings of a layer's matrices in a quantised checkpoint, by name (formats/encodings.py); "" for plain
    numbers. qkv: one per part of the mixer; gate_up: of both, or of up alone. experts: of their gates, if they have
    any, ups and downs; all experts of a layer have the same. around_experts: of the matrices before and behind experts
    that read latents. inputs: of the gate of the layer's input and of the matrix behind it. latent: of the matrices of
    latent attention beside qkv and o, ordered as in `matrices.latent_shapes`. beside: of the recurrence beside
    attention, the parts of its projection and its output. () if all are plain."""

    qkv: tuple[str, ...] = ()
    o: str = ""
    gate_up: tuple[str, ...] = ()
    down: str = ""
    experts: tuple[str, ...] = ()
    around_experts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        """All of them."""
        mixer, network = (*self.qkv, self.o, *self.latent, *self.beside), (*self.gate_up, self.down, *self.experts)
        return (*mixer, *network, *self.around_experts, *self.inputs)


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
