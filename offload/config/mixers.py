"""Mixers of a layer, as they follow from a config: attention, recurrences with a state, or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from offload.config.norm import Norm
from offload.config.rope import Rope

GateFunction = Literal["sigmoid", "softplus"]
RecurrenceGate = Literal["silu", "sigmoid"]
_GATE = 3  # of `HeadStates.row_parts`
MOST_TAPS = 8  # of a convolution in the CPU's kernels, as in native/delta_rows.h and native/convolution.h
MOST_BEFORE = 16  # tokens before one that a convolution of the GPU's kernels reads, a program's rows there
LOW_RANK_PARTS = (_GATE, 5)  # of `DeltaRule.parts`: what gates and times of low rank are products with


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
class Indexer:
    """The index by which a row chooses the blocks of tokens that it attends to (Qwen3.8-Flash-Next).

    A block is `ratio` consecutive tokens, counted from the first one. Its key is the mean of its tokens' index keys,
    normed, and rotated to its first token's position. A row's score of a block is the sum over `num_heads` index
    queries, normed and rotated, of the positive parts of their products with the key. A row attends to the tokens of
    the blocks with the largest scores, of equal ones the first, up to `budget` tokens, and to those of the incomplete
    last block. head_dim: of index queries and keys, which rotate as the attention's heads do. norm: of both.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int
    norm: Norm

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def most_blocks(self) -> int:
        """Whole blocks that a row chooses at most."""
        return self.budget // self.ratio

    @property
    def most_tokens(self) -> int:
        """Tokens that a row attends to at most."""
        return self.budget + self.ratio - 1


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
    of a key and the other half in place of a value. qk_norm: of the low-rank rows. The gate is of the heads'
    output after their matrices of values. Of the other fields `bias`, `out_bias`, `rope`, `scale`, `gate_function` and
    `gates_heads` apply.

    indexer: rows attend to the tokens that it chooses. The fused projection has its queries and its key last.
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
    indexer: Indexer | None = None

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
        """Output sizes of the fused projection: q, k, v (unless values are keys), the gate if there is one, and the
        indexer's queries and key; of k and v nothing in a layer that shares those of another. Of latent attention: of
        the queries, or of the rows that they are products with, of a token's row, and of the gate."""
        gate = [self.gate_size] * self.gate
        if self.latent is not None:
            return (self.latent.query_rank or self.num_heads * self.latent.query_dim, self.head_dim, *gate)
        own = 0 if self.shares else 1 if self.values_are_keys else 2
        index = () if self.indexer is None else (self.indexer.q_size, self.indexer.head_dim)
        return (self.q_size, *[self.kv_size] * own, *gate, *index)

    @property
    def reach(self) -> int | None:
        """Tokens that a row attends to at most; None: all."""
        return self.window if self.indexer is None else self.indexer.most_tokens

    @property
    def gate_size(self) -> int:
        """Numbers of a row of the gate."""
        return self.num_heads if self.gates_heads else self.out_size

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
        """Output sizes of the fused projection, as `row_parts`."""
        return self.row_parts

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Sizes of the parts of a projected row: queries, keys, values, gates, and `rates`."""
        return (self.key_size, self.key_size, self.out_size, self.out_size, *self.rates)

    @property
    def rates(self) -> tuple[int, ...]:
        """Sizes of the parts from which steps and decays follow: the times."""
        return (self.num_heads,)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the fp32 vectors besides norms, by name: the taps of the convolution, the decay of each head
        (-exp(A_log)) and the bias of its time."""
        return {"taps": (self.width, self.channels), "decay": (self.num_heads,), "time_bias": (self.num_heads,)}

    @property
    def kept(self) -> int:
        """Numbers of a projected row on which later states depend: all but the gate."""
        return self.channels + sum(self.rates)

    @property
    def kept_parts(self) -> tuple[int, ...]:
        """The parts of which these numbers are."""
        return tuple(part for part in range(len(self.row_parts)) if part != _GATE)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's state, in fp32."""
        return self.num_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class DeltaRule(HeadStates):
    """The gated delta rule of one layer (Yang et al. 2024, arXiv 2412.06464). norm: of each head's output. steps: the
    largest step (beta) of an update. eps: in the division of queries and keys by their l2 norm. tiled: None, or value
    head h is served by key head (h + tiled) % num_key_heads. gate: the function of the gates, by which normed outputs
    are multiplied.

    by_channel: each channel of a head's key has a time and so a decay of its own (Kimi Delta Attention, arXiv
    2510.26692); a key head serves one value head. least: None, or decays are exp(least sigmoid(exp(A_log) time)) in
    place of exp(-exp(A_log) softplus(time)). low_rank: 0, or gates and times are products of matrices of their own with
    so many projected numbers each.
    """

    norm: Norm = field(default_factory=Norm)
    steps: float = 1.0
    eps: float = 1e-6
    tiled: int | None = None
    gate: RecurrenceGate = "silu"
    by_channel: bool = False
    least: float | None = None
    low_rank: int = 0
    bias: bool = False  # no projection has one
    out_bias: bool = False

    @property
    def key_heads(self) -> tuple[int, ...]:
        if self.tiled is None:
            return super().key_heads
        return tuple((head + self.tiled) % self.num_key_heads for head in range(self.num_heads))

    @property
    def parts(self) -> tuple[int, ...]:
        """Output sizes of the fused projection: as `row_parts`, or of low rank the numbers that gates and times are
        products with in place of them."""
        if not self.low_rank:
            return self.row_parts
        return (self.key_size, self.key_size, self.out_size, self.low_rank, self.num_heads, self.low_rank)

    @property
    def rates(self) -> tuple[int, ...]:
        """Sizes of the parts from which steps and decays follow: the steps of heads, and the times of heads or of their
        keys' channels."""
        return self.num_heads, self.num_times

    @property
    def num_times(self) -> int:
        """Numbers of a row from which the decays follow."""
        return self.key_size if self.by_channel else self.num_heads

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """As `HeadStates.vectors`, with a bias for each time."""
        return super().vectors | {"time_bias": (self.num_times,)}

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
class Channels:
    """The sizes of what holds inputs of the last tokens alone, instead of keys and values: a number in each of `size`
    channels, each of which has a causal convolution of its own."""

    size: int

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
        """Numbers of a row of the output, before the output projection if there is one."""
        return self.size

    @property
    def kept(self) -> int:
        """Numbers of a token on which later rows depend: the convolution's inputs."""
        return self.size

    @property
    def kept_parts(self) -> tuple[int, ...]:
        """The part of a row that has a number for each of these."""
        return (0,)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's state: it has no numbers besides those that are kept of tokens."""
        return self.size, 0, 0


@dataclass(frozen=True)
class ShortConvolution(Channels):
    """The gated short convolution of one layer (LFM2): C * convolution(B * x), where B, C and x are projections of the
    rows. What is kept are the products B * x. width: taps. taps_bias: convolutions have a bias."""

    width: int = 3
    bias: bool = False
    out_bias: bool = False
    taps_bias: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """Output sizes of the fused projection: B, C and x."""
        return (self.size,) * 3

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Sizes of the parts of a projected row."""
        return self.parts

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its fp32 tensors, by name: the taps of the convolutions, and their biases if they have some."""
        return {"taps": (self.width, self.size)} | ({"taps_bias": (self.size,)} if self.taps_bias else {})


@dataclass(frozen=True)
class DilatedConvolution(Channels):
    """The dilated convolution of rows as they are, beside a layer's mixer: silu(convolution(rows)). taps: of it,
    `dilation` tokens apart. All ranks have all channels."""

    taps: int = 4
    dilation: int = 1

    @property
    def width(self) -> int:
        """The tokens from the first tap to the last."""
        return (self.taps - 1) * self.dilation + 1

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Sizes of the parts of a row."""
        return (self.size,)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The shape of its fp32 tensor, by name."""
        return {"taps": (self.taps, self.size)}


@dataclass(frozen=True)
class NoMixer:
    """The mixer of a layer that is a network alone."""

    parts: ClassVar[tuple[int, ...]] = (0,)
    out_size: ClassVar[int] = 0
    bias: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False


Recurrence = DeltaRule | Mamba2 | ShortConvolution  # the mixers with a recurrent state
Recurring = Recurrence | DilatedConvolution  # all that has something to hold of a sequence's tokens
Mixer = Attention | Recurrence | NoMixer
