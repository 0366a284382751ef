"""A lean model of Qwen3.8-Flash-Next's form for training on a CPU; names and results match transformers' Qwen4Exp."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding

from . import indexed, settings
from .delta import EPS, Delta
from .indexed import IndexedAttention, PlusNorm
from .mixture import BALANCE, Mixture
from .model import ROPE_THETA, FeedForward, LanguageModel
from .settings import IndexedShape


def config_of(shape: IndexedShape) -> PretrainedConfig:
    """The transformers config of a shape."""
    return Qwen4ExpTextConfig(
        vocab_size=settings.VOCAB_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        layer_types=["full_attention" if shape.attends(at) else "linear_attention" for at in range(shape.layers)],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.state_dim,
        linear_value_head_dim=shape.state_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.used,
        moe_intermediate_size=shape.intermediate,
        shared_expert_intermediate_size=shape.shared,
        router_aux_loss_coef=BALANCE,
        hc_count=shape.streams,
        hc_lowrank=shape.rank,
        output_gate_type="sigmoid",
        indexer_n_heads=shape.index_heads,
        indexer_kv_heads=1,
        indexer_head_dim=shape.index_dim,
        indexer_budget=shape.budget,
        indexer_compress_ratio=shape.ratio,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=EPS,
        tie_word_embeddings=True,
        bos_token_id=settings.BOS_ID,
        eos_token_id=settings.EOS_ID,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": shape.rotated / shape.head_dim,
        },
        dtype="bfloat16",
    )


class Streams(nn.Module):
    """The input of a layer's part, a mean over the residual streams, and how much of the output each stream gets."""

    def __init__(self, shape: IndexedShape, last: bool = False) -> None:
        super().__init__()
        self.count, wide = shape.streams, shape.streams * shape.hidden
        self.hc_norm = PlusNorm(wide, shape.streams)
        self.input_mix_weight_down = nn.Linear(wide, shape.rank, bias=False)
        self.input_mix_weight_up = nn.Linear(shape.rank, wide, bias=False)
        if not last:
            self.block_inject_weight = nn.Linear(wide, shape.streams, bias=False)

    def mean(self, normed: Tensor) -> Tensor:
        """normed [batch, length, streams * hidden] -> [batch, length, hidden]."""
        low = F.silu(self.input_mix_weight_down(normed) / self.count)
        mixed = self.input_mix_weight_up(low).sigmoid() * normed
        return mixed.unflatten(-1, (self.count, -1)).mean(-2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The streams x [batch, length, streams * hidden] -> the input, and a factor of each stream."""
        normed = self.hc_norm(x)
        return self.mean(normed), 2 * (self.block_inject_weight(normed) / self.count).sigmoid()


class LastStreams(Streams):
    """The mean behind the last layer, which is its final norm."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__(shape, last=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(self.hc_norm(x))


def add(x: Tensor, out: Tensor, factors: Tensor) -> Tensor:
    """The streams with a part's output [batch, length, hidden]."""
    return x + (out[..., None, :] * factors[..., None]).flatten(-2)


class GatedNetwork(FeedForward):
    """The network beside the experts."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__(replace(shape, intermediate=shape.shared))


class SharedMixture(Mixture):
    """A mixture with a network beside it that every row runs through."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__(shape)
        self.shared_expert = GatedNetwork(shape)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.beside(x)

    def beside(self, x: Tensor) -> Tensor:
        return self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class FlashLayer(nn.Module):
    """A layer: a recurrent state or attention, then a mixture."""

    def __init__(self, shape: IndexedShape, number: int) -> None:
        super().__init__()
        self.attn_hyper_connection, self.mlp_hyper_connection = Streams(shape), Streams(shape)
        if shape.attends(number):
            self.self_attn = IndexedAttention(shape)
        else:
            self.linear_attn = Delta(shape)
        self.mlp = SharedMixture(shape)

    @property
    def mixer(self) -> nn.Module:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own, factors = self.attn_hyper_connection(x)
        x = add(x, self.mixer(own, cos, sin), factors)
        own, factors = self.mlp_hyper_connection(x)
        return add(x, self.mlp(own), factors)


class FlashBackbone(nn.Module):
    """Embedding, layers over residual streams, and their last mean."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__()
        self.streams = shape.streams
        self.embed_tokens = nn.Embedding(settings.VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(FlashLayer(shape, number) for number in range(shape.layers))
        self.hyper_connection_mixer = LastStreams(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.repeat(1, 1, self.streams)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.hyper_connection_mixer(x)


class Flash(LanguageModel):
    """A model of Qwen3.8-Flash-Next's form."""

    def __init__(self, shape: IndexedShape) -> None:
        super().__init__(shape, FlashBackbone(shape))

    def config(self) -> PretrainedConfig:
        return config_of(self.shape)

    def make_tables(self, length: int) -> tuple[Tensor, Tensor]:
        rotary = Qwen4ExpTextRotaryEmbedding(self.config())
        cos, sin = rotary(torch.zeros(1), torch.arange(length)[None, None])
        return cos[0], sin[0]


def compile_pieces() -> None:
    """Compiles the pieces around mixtures and the delta rule, once each, and the attention, shared by all layers."""
    global add
    add = torch.compile(add, dynamic=False)
    indexed.attend = torch.compile(indexed.attend, dynamic=False)
    pieces = ((Streams, "forward"), (LastStreams, "forward"), (SharedMixture, "beside"), (Delta, "before"))
    for kind, name in (*pieces, (Delta, "after"), (IndexedAttention, "before")):
        setattr(kind, name, torch.compile(getattr(kind, name), dynamic=False))
