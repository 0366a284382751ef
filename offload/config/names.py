"""The tensor names of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from offload.config.block import Block

Decays = Literal["logs", "rates", "negated"]


@dataclass(frozen=True)
class RecurrenceNames:
    """The tensor names of a recurrence within a layer. parts: of the projections, as in the `parts` of its kind; of
    one name they are rows of one tensor, and so are taps: of the first parts. order: the numbers of parts as a tensor
    has several of them, one after the other. grouped: names of tensors in which each key head has its rows of all these
    parts together. decays: how decays are stored, as A_log, -exp(A_log) or exp(A_log). gates_b, times_b: of low rank.
    skip: of Mamba-2."""

    parts: tuple[str, ...] = (
        *("linear_attn.in_proj_qkv",) * 3,
        *(f"linear_attn.in_proj_{letter}" for letter in "zba"),
    )
    taps: tuple[str, ...] = ("linear_attn.conv1d",) * 3
    out: str = "linear_attn.out_proj"
    norm: str = "linear_attn.norm"
    decay: str = "linear_attn.A_log"
    time_bias: str = "linear_attn.dt_bias"
    skip: str = ""
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    grouped: tuple[str, ...] = ()
    decays: Decays = "logs"
    gates_b: str = ""
    times_b: str = ""

    def part(self, number: int) -> str:
        """The name of a part; "" if there are fewer."""
        return self.parts[number] if number < len(self.parts) else ""


@dataclass(frozen=True)
class ExpertNames:
    """The tensor names of a mixture of experts within a layer: of the router, and of the experts' gates, ups and downs,
    "{}" for the number of an expert. Without that one tensor holds those of all experts. If gates and ups are in the
    same tensor, an expert's gate precedes its up, or their rows alternate if `alternate`. by_inputs: in plain numbers
    the tensors of all experts are [experts, inputs, outputs]. bias, scale, norm: of the router, whole names. network:
    in place of "mlp." in the names of the network beside experts. network_gate: of its gate. to_latent, from_latent: of
    the matrices before and behind the experts, if they read latents."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    bias: str = "mlp.gate.e_score_correction_bias"
    scale: str = "router.per_expert_scale"
    norm: str = "router.scale"
    network: str = "mlp."
    network_gate: str = "mlp.shared_expert_gate"
    to_latent: str = ""
    from_latent: str = ""
    alternate: bool = False
    by_inputs: bool = False

    @property
    def stacked(self) -> ExpertNames:
        """The names where one tensor holds the gates and ups of all experts, and another one their downs."""
        if "{}" not in self.gate:
            return self
        joined, down = (name.replace("{}.", "") for name in (self.gate.replace("gate_", "gate_up_"), self.down))
        return replace(self, gate=joined, up=joined, down=down)


@dataclass(frozen=True)
class StreamNames:
    """The tensor names of the means of residual streams. mixer, network: the prefixes of those within a layer; last:
    of that behind the layers, within the body. The others are names behind a prefix, of the norm, the matrices `down`
    and `up`, and the matrix of the factors with which outputs are added."""

    mixer: str = "attn_hyper_connection."
    network: str = "mlp_hyper_connection."
    last: str = "hyper_connection_mixer."
    norm: str = "hc_norm"
    down: str = "input_mix_weight_down"
    up: str = "input_mix_weight_up"
    inject: str = "block_inject_weight"


@dataclass(frozen=True)
class NGramNames:
    """The tensor names of an n-gram embedding within a layer. table: of the table, or of its parts, "{}" for the number
    of a part. hashes: of the integers that hash, in the order of `NGrams.hashes`."""

    table: str = "ple.ple_embedding.ngram_embedding.shard_{}"
    keys: str = "ple.key_proj"
    values: str = "ple.value_proj"
    key_norm: str = "ple.norm_key"
    query_norm: str = "ple.norm_query"
    norm: str = "ple.norm_conv"
    taps: str = "ple.conv1d"
    hashes: tuple[str, ...] = (
        "ple.ple_embedding.layer_multipliers", "ple.ple_embedding.ngram_heads_vocab_sizes",
        "ple.ple_embedding.ngram_heads_offsets",
    )  # fmt: skip

    def whole_table(self, module: str) -> str:
        """The module of the table that the module `module` is a part of; "" if it is part of none."""
        part, has_parts, _ = self.table.partition("{}")
        is_part = has_parts and f".{module}".rstrip("0123456789").endswith(f".{part}")
        return module.rpartition(".")[0] if is_part else ""


@dataclass(frozen=True)
class IndexNames:
    """The tensor names of an indexer within a layer. queries, key: of its projections; if they are one tensor, it has
    the queries before the key. q_norm, k_norm: of both norms."""

    queries: str = "self_attn.indexer.index_qk_proj"
    key: str = "self_attn.indexer.index_qk_proj"
    q_norm: str = "self_attn.indexer.q_layernorm"
    k_norm: str = "self_attn.indexer.k_layernorm"


@dataclass(frozen=True)
class NextTokenNames:
    """The tensor names of a next-token head. layer: the prefix of those in its layer; the others are whole names, of
    the matrix that joins an embedding and a hidden row, of the norms that both have before it, and of the norm of the
    output. join_hidden: of a matrix of hidden rows of its own; the other one is of embeddings alone then. streams: the
    prefix of the mean of streams, in place of that norm. experts: of its layer; None: as in the model's layers."""

    layer: str = "mtp.layers.0."
    join: str = "mtp.fc"
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    norm: str = "mtp.norm"
    experts: ExpertNames | None = None
    join_hidden: str = ""
    streams: str = "mtp.hyper_connection_mixer."

    @property
    def joins(self) -> tuple[str, ...]:
        """The names of the matrices that join both, of the embedding's columns first."""
        return (self.join, self.join_hidden) if self.join_hidden else (self.join,)

    @property
    def norms(self) -> tuple[str, str, str]:
        """The names of the norms of the embeddings, of the hidden rows and of the output."""
        return self.embedding_norm, self.hidden_norm, self.norm


@dataclass(frozen=True)
class TensorNames:
    """The tensor names of a checkpoint: `body` is the prefix of every name but the head's; the others are names within
    a layer. If `fused_qkv` or `fused_gate_up` is given, that tensor holds the rows of two or three matrices. gate: of
    the attention; if it is the tensor of queries, each head has the rows of its query before those of its gate. table,
    final_norm: within the body. attention: the prefix of projections of attention, out: its output behind that. q_b,
    k_b, v_b: of latent attention; in a tensor of both, each head's rows of keys precede those of its values, while in
    one of its own keys are transposed. dense: in place of "mlp." in the names of a network without experts. opening:
    the gate of that. unused: patterns of names within the body whose tensors are left alone."""

    body: str = "model."
    head: str = "lm_head.weight"
    fused_qkv: str = ""
    fused_gate_up: str = ""
    opening: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    out: str = "o_proj"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""
    before_experts: str = ""
    after_experts: str = ""
    after_network: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    input_gate: str = "per_layer_input_gate"
    input_out: str = "per_layer_projection"
    after_input: str = "post_per_layer_input_norm"
    gate: str = "self_attn.gate_proj"
    sink_logits: str = "self_attn.sinks"
    q_b: str = "self_attn.q_b_proj"
    k_b: str = "self_attn.kv_b_proj"
    v_b: str = "self_attn.kv_b_proj"
    table: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn."
    dense: str = "mlp."
    recurrence: RecurrenceNames = RecurrenceNames()
    experts: ExpertNames = ExpertNames()
    next_token: NextTokenNames = NextTokenNames()
    streams: StreamNames = StreamNames()
    index: IndexNames = IndexNames()
    ngrams: NGramNames = NGramNames()
    unused: tuple[str, ...] = ()

    @property
    def queries(self) -> str:
        """The projection of queries."""
        return f"{self.attention}q_proj"

    @property
    def low_queries(self) -> str:
        """The projection of the rows that queries of latent attention are products with."""
        return f"{self.attention}q_a_proj"

    @property
    def latent_rows(self) -> str:
        """The projection of tokens' rows of latent attention."""
        return f"{self.attention}kv_a_proj_with_mqa"

    @property
    def gate_has_queries(self) -> bool:
        """Whether the gate of an attention is in the tensor of its queries."""
        return self.gate == self.queries

    def wrapped(self, body: str, head: str) -> TensorNames:
        """The names in a wrapper's checkpoint, which has these names for body and head."""
        own = {key: name for key, name in vars(self.next_token).items() if str(name).startswith(self.body)}
        moved = {key: body + name.removeprefix(self.body) for key, name in own.items()}
        return replace(self, body=body, head=head, next_token=replace(self.next_token, **moved))

    def network(self, block: Block) -> tuple[str, str, str]:
        """The names of the feed-forward network's gate, up and down in a layer."""
        prefix = self.experts.network if block.experts is not None else self.dense
        names = (self.fused_gate_up or self.opening, self.fused_gate_up or self.up, self.down)
        gate, up, down = (name.replace("mlp.", prefix, 1) for name in names)
        return gate, up, down

    @property
    def splits_latent(self) -> bool:
        """Whether heads' keys and values have tensors of their own in latent attention."""
        return self.k_b != self.v_b

    @property
    def embeddings(self) -> str:
        return f"{self.body}{self.table}.weight"

    @property
    def layer_table(self) -> str:
        return f"{self.body}embed_tokens_per_layer.weight"

    @property
    def layer_projection(self) -> str:
        """The projection of embeddings that joins the rows of the layer table."""
        return f"{self.body}per_layer_model_projection.weight"

    @property
    def layer_norm(self) -> str:
        return f"{self.body}per_layer_projection_norm.weight"

    @property
    def norm(self) -> str:
        return f"{self.body}{self.final_norm}"
