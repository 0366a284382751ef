"""What a layer of a model is made of, and what its tensors are called: descriptions that follow from a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from offload.config.rope import Rope

FACTOR_BYTES = 64  # that the factor on a layer's rows takes
BLOCK_NORMS = ("before_attention", "after_attention", "before_feed_forward", "after_feed_forward")
Activation = Literal["silu", "gelu_tanh", "relu_squared"]  # gelu_tanh: GELU by its approximation with tanh


@dataclass(frozen=True)
class Norm:
    """Of rows. centred: LayerNorm, which takes the mean away, else RMS norm. plus_one: multiplies by 1 + its weight.
    bias: and adds one. fp32: its vectors are fp32 in any dtype of the model, so that this 1 loses no bit of them.
    weightless: a checkpoint has no weight of it, which is 1; not of a model's last norm."""

    eps: float = 1e-6
    centred: bool = False
    plus_one: bool = False
    bias: bool = False
    fp32: bool = False
    weightless: bool = False

    def itemsize(self, dtype_bytes: int) -> int:
        """Bytes of a number of its vectors in a model of `dtype_bytes` per element."""
        return 4 if self.fp32 else dtype_bytes


@dataclass(frozen=True)
class Attention:
    """Of one layer. bias, out_bias: of q, k and v, and of the output. qk_norm: of queries and keys before they are
    rotated, of each head by itself or, if `norms_whole`, of all heads together; if `weighs_heads`, each head by itself
    has a weight of its own; if `weighs_rotated`, the weight multiplies them after that.

    v_norm: of each head's values. values_are_keys: values are the keys as they are before they are normed, and have no
    product of their own. rope: None, queries and keys know no positions. scale: on products of queries and keys, None:
    head_dim^-0.5. window: tokens that a row sees, itself and the last ones before it; None: all. A layer without one is
    called growing. cap: c; c tanh(score / c) in place of a score. gate: what comes of the heads is multiplied by the
    sigmoid of another product of the rows.
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

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def has_long_weights(self) -> bool:
        """Whether norms of queries and keys have as many as all heads have numbers."""
        return self.norms_whole or self.weighs_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of the product that gives q, k, v, unless it is k, and the gate, if there is one."""
        values = [] if self.values_are_keys else [self.kv_size]
        return (self.q_size, self.kv_size, *values, *([self.q_size] if self.gate else []))

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class FeedForward:
    """size: of its inner rows. gated: down(activation(gate) * up), else down(activation(up))."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Encodings:
    """How a quantised checkpoint stores a layer's matrices, by name (`formats.layout.encoding`); "" are plain numbers.
    qkv: of queries, keys, values and gate, as `Attention.parts` has them; gate_up: of both, or of up alone. () are all
    plain."""

    qkv: tuple[str, ...] = ()
    o: str = ""
    gate_up: tuple[str, ...] = ()
    down: str = ""


@dataclass(frozen=True)
class Block:
    """One layer: x += scale * after(attention(before(x))), and the same with the feed-forward network. A norm that is
    None is not there. side_by_side: both read one norm of the same x, `before_attention`. multiplied: then x is
    multiplied by a number of the checkpoint. encodings: of its matrices."""

    attention: Attention
    feed_forward: FeedForward
    before_attention: Norm | None = field(default_factory=Norm)
    after_attention: Norm | None = None
    before_feed_forward: Norm | None = field(default_factory=Norm)
    after_feed_forward: Norm | None = None
    side_by_side: bool = False
    scale: float = 1.0
    multiplied: bool = False
    encodings: Encodings = Encodings()


@dataclass(frozen=True)
class TensorNames:
    """Of a checkpoint: `body` stands before every name but the head's; the others are parts of a layer. Where
    `fused_qkv` or `fused_gate_up` is given, that tensor holds the rows of two or three."""

    body: str = "model."
    head: str = "lm_head.weight"
    fused_qkv: str = ""
    fused_gate_up: str = ""
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"

    @property
    def embeddings(self) -> str:
        return f"{self.body}embed_tokens.weight"

    @property
    def norm(self) -> str:
        return f"{self.body}norm"
